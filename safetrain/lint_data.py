"""Rules about samplers, loaders and seeds (ST2xx)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_meaning import is_distributed, is_rank, wraps_ddp
from safetrain.lint_reading import (
    FunctionNode,
    Loop,
    Reading,
    calls_in,
    dotted,
    is_constant,
    keyword,
    names_in,
    targets_in,
    walk,
)
from safetrain.lint_rule import Place, rule

_SAMPLER, _LOADER = "DistributedSampler", "DataLoader"
_SHARED_BY_ITSELF = re.compile(
    r"sampler|split_dataset_by_node|\.shard\b|iterable|setup_dataloaders|deepspeed|webdataset", re.I
)
_SEEDS = (
    "torch.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "numpy.random.seed",
    "random.seed",
)
_PYTHONS_OWN = frozenset({"enumerate", "iter", "isinstance", "len", "next", "print", "tqdm", "tqdm.tqdm", "zip"})
_SEED_WORD = re.compile(r"seed", re.I)


@rule(
    "ST201",
    "no-set-epoch",
    why="The sampler shuffles by its seed and its epoch, and the epoch stays 0: every epoch has the same batches "
    "in the same order.",
    fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
)
def no_set_epoch(code: Reading) -> Iterator[Place]:
    samplers = [call for call in code.calls if code.name(call).endswith(_SAMPLER) and not _in_order(call)]
    if not samplers or any(isinstance(node, ast.Attribute) and node.attr == "set_epoch" for node in code.nodes):
        return
    loops = [loop for loop in code.nodes if isinstance(loop, Loop) and _over_epochs(loop)]
    loops = [loop for loop in loops if not any(isinstance(around, Loop) for around, _ in code.within_scope(loop))]
    if loops and not any(_done_elsewhere(code, loop) for loop in loops) and not _given_away(code):
        yield Place(samplers[0], f"set_epoch is never called (epochs are counted in line {loops[0].lineno})")


def _in_order(sampler: ast.Call) -> bool:
    return is_constant(keyword(sampler, "shuffle"), False) or (
        len(sampler.args) > 3 and is_constant(sampler.args[3], False)
    )


def _over_epochs(loop: Loop) -> bool:
    if isinstance(loop, ast.While):
        return any("epoch" in name.lower() for name in names_in(loop.test))
    return any("epoch" in name.lower() for name in targets_in(loop.target))


def _done_elsewhere(code: Reading, loop: Loop) -> bool:
    """Whether a function of another file gets the epoch: it may set it."""
    for call in calls_in(*loop.body):
        given = names_in(*call.args, *(one.value for one in call.keywords))
        known = code.function(call) is not None or code.name(call) in ("print", "range", "str", "int", "len")
        told = any("epoch" in name.lower() for name in given)
        if told and not known and any(re.search(r"load|sampler|data|iter", name, re.I) for name in given):
            return True
    return False


def _given_away(code: Reading) -> bool:
    """Whether a class or function of another file gets a loader: it may set the epoch."""
    loaders = {
        name
        for node in code.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and (code.last_name(node.value) == _LOADER or code.name(node.value).endswith(_SAMPLER))
        for target in node.targets
        for name in targets_in(target)
    }
    for call in code.calls:
        own = code.function(call) is not None or code.name(call) in _PYTHONS_OWN or code.last_name(call) == _LOADER
        own = (
            own
            or "." in dotted(call.func)
            or any(isinstance(node, ast.ClassDef) and node.name == dotted(call.func) for node in code.nodes)
        )
        if not own and any(dotted(one) in loaders for one in [*call.args, *(each.value for each in call.keywords)]):
            return True
    return False


@rule(
    "ST202",
    "shuffle-beside-sampler",
    why="The sampler decides the order and the rank's share, so torch refuses both together with an error.",
    fix="Leave shuffle out of the DataLoader, and give it to the sampler: DistributedSampler(dataset, shuffle=True).",
)
def shuffle_beside_sampler(code: Reading) -> Iterator[Place]:
    for call in _loaders(code):
        sampler = keyword(call, "sampler") or keyword(call, "batch_sampler")
        if is_constant(keyword(call, "shuffle"), True) and sampler is not None and not is_constant(sampler, None):
            yield Place(call, "shuffle=True beside a sampler")


@rule(
    "ST203",
    "no-distributed-sampler",
    why="Every rank goes through the whole dataset, so an epoch does its work once for each rank, and no rank has "
    "a share.",
    fix="Give the loader sampler=DistributedSampler(dataset), and leave shuffle=True out.",
)
def no_distributed_sampler(code: Reading) -> Iterator[Place]:
    if not wraps_ddp(code) or code.mentions("accelerate", "lightning", "pytorch_lightning", "deepspeed"):
        return
    if any(_SHARED_BY_ITSELF.search(line) for line in code.lines):
        return
    for call in _loaders(code):
        if is_constant(keyword(call, "shuffle"), True) and not _knows_rank(code, call):
            yield Place(
                call, "a DataLoader with shuffle=True and no DistributedSampler, in a script that wraps a model in DDP"
            )


def _loaders(code: Reading) -> Iterator[ast.Call]:
    return (call for call in code.calls if code.last_name(call) == _LOADER)


def _knows_rank(code: Reading, call: ast.Call) -> bool:
    """Whether the dataset was made with the rank, so that it may be a share already."""
    if not call.args:
        return False
    values = [call.args[0], *(one.value for one in code.assigned(call.args[0]))]
    return any(is_rank(code, node) or "world" in dotted(node).lower() for value in values for node in walk(value))


@rule(
    "ST204",
    "sampler-seed-by-rank",
    why="Ranks that shuffle by different seeds cut their shares from different orders: some samples come twice, "
    "others never.",
    fix="Give all ranks the same seed; the sampler takes each rank's share by itself.",
)
def sampler_seed_by_rank(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        seed = keyword(call, "seed")
        if seed is not None and code.name(call).endswith(_SAMPLER) and any(is_rank(code, node) for node in walk(seed)):
            yield Place(seed, "a DistributedSampler whose seed depends on the rank")


@rule(
    "ST205",
    "same-worker-seed",
    why="Worker k of every rank draws the same numbers, so all ranks augment alike.",
    fix="Add the rank: seed + rank * num_workers + worker_id.",
)
def same_worker_seed(code: Reading) -> Iterator[Place]:
    if not is_distributed(code):
        return
    named = {dotted(value) for call in _loaders(code) if (value := keyword(call, "worker_init_fn")) is not None}
    for function in code.nodes:
        if not isinstance(function, FunctionNode) or function.name not in named or not function.args.args:
            continue
        if any(is_rank(code, node) or "initial_seed" in dotted(node) for node in walk(*function.body)):
            continue
        worker = function.args.args[0].arg
        for call in calls_in(*function.body):
            if code.name(call) in _SEEDS and call.args and worker in names_in(call.args[0]):
                yield Place(call, f"{function.name} seeds by the worker's number only")
                break


@rule(
    "ST206",
    "seed-by-time",
    why="Every rank reads the clock at another moment, so splits, shuffles and what else should be equal differ; "
    "nor can it be repeated.",
    fix="Take a seed from the config, the same on all ranks, and add the rank only where ranks should differ.",
)
def seed_by_time(code: Reading) -> Iterator[Place]:
    if not is_distributed(code):
        return
    for call in code.calls:
        if (
            code.name(call) in _SEEDS
            and call.args
            and any(_of_the_moment(code, one) for one in _sources(code, call.args[0]))
        ):
            yield Place(call, f"{dotted(call.func)} from the clock or the process id")


def _sources(code: Reading, value: ast.expr) -> Iterator[ast.AST]:
    yield from walk(value)
    if isinstance(value, ast.Name):
        for one in code.assigned(value):
            yield from walk(one.value)


def _of_the_moment(code: Reading, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and code.name(node) in (
        "time.time", "time.time_ns", "os.getpid", "datetime.datetime.now", "datetime.now", "os.urandom",
    )  # fmt: skip


@rule(
    "ST207",
    "unseeded-split",
    why="Each rank draws its own split: the training sets differ between ranks, and one's training data is "
    "another's validation data.",
    fix="Give the split a generator with the same seed on all ranks: generator=torch.Generator().manual_seed(0).",
)
def unseeded_split(code: Reading) -> Iterator[Place]:
    if not is_distributed(code) or any(_SEED_WORD.search(code.last_name(call)) for call in code.calls):
        return
    for call in code.calls:
        split = (
            code.name(call) == "torch.utils.data.random_split"
            and keyword(call, "generator") is None
            and len(call.args) < 3
        )
        sklearn = (
            code.name(call) == "sklearn.model_selection.train_test_split" and keyword(call, "random_state") is None
        )
        if split or sklearn:
            yield Place(call, f"{dotted(call.func)} without a seed, in a script of several ranks")

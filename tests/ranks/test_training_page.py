"""docs/training.md: each of its blocks trains on two ranks, and comes to what the page says."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import safetrain
from safetrain.build import build_optimizers
from safetrain.comm import Comm
from safetrain.policies import Policies, SkipPartial, UnevenContinue
from safetrain.precision import FP16, FP32
from safetrain.testing import RankError, differences, run_ranks
from safetrain.worker import instantiate
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.outcome import warnings_of_safetrain
from tests.ranks.toys import assert_close, assert_same, state, train_alone

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/training.md").read_text()
State = dict[str, torch.Tensor]


def blocks(language: str) -> dict[str, list[str]]:
    """All blocks of a language, by the heading they stand under."""
    title, *rest = re.split(r"^#+ (.*)$", re.sub(r"(?s)^# [^\n]*", "# Start", PAGE), flags=re.MULTILINE)
    assert title == ""
    found = {
        name: re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
        for name, text in zip(rest[::2], rest[1::2], strict=True)
    }
    return {name: texts for name, texts in found.items() if texts}


PYTHON = blocks("python")


@dataclass
class Trained:
    """What a rank's run was."""

    result: safetrain.Result
    state: State
    batches: list[Any]  # as training_step got them
    steps: list[tuple[int, int, State]]  # epoch, step and weights at each call of training_step
    events: list[safetrain.Event]
    warnings: list[str]


@dataclass
class Recorder:
    """An observer that keeps what it is told."""

    told: list[safetrain.Event] = field(default_factory=list)

    def start(self, run: safetrain.RunInfo) -> None:
        pass

    def step(self, step: int, epoch: int) -> None:
        pass

    def event(self, event: safetrain.Event) -> None:
        self.told.append(event)

    def close(self) -> None:
        pass


def names_of(heading: str, count: int | None = None, *, replacing: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All names after the page's start and the (first ``count``) blocks below ``heading``; only in a rank's process."""
    shown = re.search(r"`spirals.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert shown is not None
    spirals = sys.modules["spirals"] = ModuleType("spirals")
    exec(compile(shown[1], "spirals.py", "exec"), spirals.__dict__)
    names: dict[str, Any] = {}
    before = ["Start", "Your own batches"] if heading == "Leaving a batch out" else ["Start"]
    for text in [*(text for each in before for text in PYTHON[each]), *PYTHON[heading][:count]]:
        for old, new in (replacing or {}).items():
            text = text.replace(old, new)
        exec(compile(text, "docs/training.md", "exec"), names)
    return names


def fit(trainer: Any) -> Trained:
    """Train what a block has made, and watch."""
    batches, steps, recorder, training_step = [], [], Recorder(), trainer.training_step

    def watched(batch: Any) -> Any:
        batches.append(batch)
        steps.append((trainer.epoch, trainer.step, state(trainer)))
        return training_step(batch)

    trainer.training_step, trainer.observers = watched, (recorder,)
    with warnings_of_safetrain() as warnings:
        result = trainer.fit()
    return Trained(result, state(trainer), batches, steps, recorder.told, warnings)


def train(heading: str, **changed: Any) -> list[Trained]:
    """Two ranks' runs of the last trainer below a heading, with other attributes where some are given."""

    def work(comm: Comm) -> Trained:
        trainer = names_of(heading)["trainer"]
        vars(trainer).update(changed)
        return fit(trainer)

    runs = run_ranks(work, 2)
    assert runs[0].result == runs[1].result
    assert_same([run.state for run in runs])
    assert any(not torch.equal(value, runs[0].state[name]) for name, value in runs[0].steps[0][2].items())
    return runs


def points_of(*batches: Any) -> list[tuple[float, ...]]:
    """The points in batches, or in a TensorDataset's tensors, sorted."""
    return sorted(tuple(point) for points, _ in batches for point in points.tolist())


def all_points(runs: list[Trained], epoch: int = 0) -> list[tuple[float, ...]]:
    used = [b for run in runs for b, (e, _, _) in zip(run.batches, run.steps, strict=True) if e == epoch]
    return points_of(*used)


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As in the README."""
    radius = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(count) % 2
    angle = 2 * math.pi * radius + math.pi * labels
    return radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1), labels


def test_every_block_is_tried_here() -> None:
    assert {name: len(texts) for name, texts in PYTHON.items()} == {
        "Start": 1, "A DataLoader": 1, "Your own batches": 1, "Leaving a batch out": 1, "Iterable datasets": 1,
        "Weights": 1, "Accumulation and clipping": 1, "bf16 and fp16": 1, "Several optimizers": 2, "Schedulers": 2,
        "Freezing": 1, "Metrics": 1, "Stopping early": 1, "Seeds": 1, "Larger models": 1,
    }  # fmt: skip
    assert {name: len(texts) for name, texts in blocks("yaml").items()} == {
        "A DataLoader": 1, "Several optimizers": 1, "Larger models": 1,
    }  # fmt: skip


def test_a_dataloader_whose_samples_are_all_used_once() -> None:
    runs = train("A DataLoader")
    assert [[len(labels) for _, labels in run.batches] for run in runs] == [[50] * 10 + [1], [50] * 10]
    assert all_points(runs) == points_of(spirals(1001, seed=1))
    assert runs[0].result.step == 11


def test_a_dataloader_by_default_and_what_it_keeps_of_its_own() -> None:
    """Of ``loader.*``, batch_size and num_workers say nothing here; without ``continue`` the epoch ends early."""
    runs = train("A DataLoader", loader=safetrain.Loader(batch_size=7, shuffle=False))
    assert [[len(labels) for _, labels in run.batches] for run in runs] == [[50] * 10] * 2
    assert all_points(runs) != points_of(spirals(1000, seed=1))  # shuffled
    assert len(set(all_points(runs))) == 1000
    assert [len(run.warnings) for run in runs] == [1, 0]
    assert runs[0].warnings[0].startswith("loader.batch_size, loader.shuffle: no effect")
    early = train("A DataLoader", policies=Policies())
    assert [len(run.batches) for run in early] == [10, 10]
    assert len(all_points(early)) == 1000


def test_the_yaml_of_a_dataloader() -> None:
    (text,) = blocks("yaml")["A DataLoader"]

    def work(comm: Comm) -> tuple[str, int, int]:
        names_of("A DataLoader")
        loader = instantiate(yaml.safe_load(text)["data"]["train"])
        points, _ = next(iter(loader))
        return type(loader).__name__, len(loader.dataset), len(points)

    assert run_ranks(work, 1) == [("DataLoader", 1001, 50)]


def test_what_a_collate_function_leaves_out_costs_no_step() -> None:
    runs = train("Your own batches")
    points, labels = spirals(1000, seed=1)
    kept = torch.arange(1000) % 100 != 7
    assert all_points(runs) == points_of((points[kept], labels[kept]))
    assert (runs[0].result.step, runs[0].result.applied_steps) == (20, 20)


@pytest.mark.parametrize("others_go_on", [True, False])
def test_a_skipped_batch(others_go_on: bool) -> None:
    runs = train("Leaving a batch out", **({} if others_go_on else {"policies": Policies()}))
    lost = 40 - sum(len(run.batches) for run in runs)  # samples 7 and 507, in one batch or in two
    told = [line for run in runs for line in run.warnings if "SkipBatch" in line]
    assert len(told) == lost in (1, 2)
    assert all(re.search(r"rank \d, step \d+: SkipBatch: sample (5?0)?7 can't be read at ", line) for line in told)
    steps_lost = len({re.search(r"step \d+", line)[0] for line in told})  # type: ignore[index]
    together = steps_lost < lost
    assert runs[0].result.step == 20
    assert runs[0].result.skipped_steps == ((1 if together else 0) if others_go_on else steps_lost)


def test_a_skip_in_a_loader_process_has_lost_its_text() -> None:
    runs = train("Leaving a batch out", loader=safetrain.Loader(batch_size=25, num_workers=1))
    told = [line for run in runs for line in run.warnings if "SkipBatch" in line]
    assert told
    assert not any("can't be read" in line for line in told)


@pytest.mark.parametrize("splits_itself", [True, False])
def test_a_stream_is_used_once(splits_itself: bool) -> None:
    shuffled = {"range(self.shard, len(points), self.shards)": "torch.randperm(len(points)).tolist()"}

    def work(comm: Comm) -> Trained:
        names = names_of("Iterable datasets", replacing={} if splits_itself else shuffled)
        if not splits_itself:
            del names["Stream"].set_shard
        return fit(names["trainer"])

    runs = run_ranks(work, 2)
    assert_same([run.state for run in runs])
    for epoch in (0, 1):
        assert all_points(runs, epoch) == points_of(spirals(1001, seed=epoch))


def test_a_generator_that_raises_is_at_its_end() -> None:
    bad = "if index == 330:\n                raise safetrain.SkipBatch('bad')\n            yield"

    def work(comm: Comm) -> Trained:
        trainer = names_of("Iterable datasets", replacing={"yield": bad, "num_workers=2": "num_workers=0"})["trainer"]
        trainer.loop, trainer.policies = safetrain.Loop(), Policies(skip=SkipPartial(), uneven=UnevenContinue())
        return fit(trainer)

    runs = run_ranks(work, 2)
    assert [len(run.batches) for run in runs] == [3, 10]  # rank 0 has 150 of its 165 samples before it, and no more
    assert [len(run.batches[-1][1]) for run in runs] == [50, 50]


def test_token_weights_are_those_of_one_process() -> None:
    def work(comm: Comm) -> tuple[State, State]:
        names = names_of("Weights")
        trained = fit(names["trainer"])
        windows = list(zip(*comm.gather(trained.batches), strict=True))
        return trained.state, train_alone(
            started(trained, names), [[real(batch) for batch in window] for window in windows], names["adam"]
        )

    def real(batch: Any) -> Any:
        points, labels = batch
        return points[labels != -100], labels[labels != -100]

    (one, expected), (other, _) = run_ranks(work, 2)
    assert_same([one, other])
    assert_close(one, expected, 1e-4)


def started(trained: Trained, names: dict[str, Any]) -> nn.Module:
    """The model as it was before its first step."""
    model = names["mlp"](width=64)
    model.load_state_dict(trained.steps[0][2])
    return model


def test_accumulation_and_clipping_are_those_of_one_process() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)

    def work(comm: Comm) -> tuple[Trained, State, State]:
        names = names_of("Accumulation and clipping")
        trained = fit(names["trainer"])
        turns = [batch for pair in zip(*comm.gather(trained.batches), strict=True) for batch in pair]
        windows = [turns[start : start + 6] for start in range(0, 20, 6)]
        clipped = train_alone(started(trained, names), windows, sgd, clip_norm=0.1)
        return trained, clipped, train_alone(started(trained, names), windows, sgd)

    (one, clipped, unclipped), (other, _, _) = run_ranks(work, 2)
    assert (one.result.step, len(one.batches)) == (4, 10)
    assert_same([one.state, other.state])
    assert_close(one.state, clipped)
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(one.state, unclipped, 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    def work(comm: Comm) -> tuple[Trained, set[torch.dtype]]:
        trainer, found = names_of("bf16 and fp16")["trainer"], set()
        if precision == "fp16":
            trainer.precision = FP16(init_scale=2.0**22)
        trainer._given_model.register_forward_hook(lambda _module, _inputs, scores: found.add(scores.dtype))
        return fit(trainer), found

    runs, found = zip(*run_ranks(work, 2), strict=True)
    assert set().union(*found) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert_same([run.state for run in runs])
    assert {value.dtype for value in runs[0].state.values()} == {torch.float32}
    assert (runs[0].result.skipped_steps > 0) == (precision == "fp16")  # the scale comes down
    assert runs[0].result.applied_steps > 0


def first_gradients(
    comm: Comm, replacing: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradient that each optimizer took in the first step, read from Adam's state; and that of its own loss."""
    trainer = names_of("Several optimizers", 1, replacing=replacing)["trainer"]
    trainer.loop = safetrain.Loop(max_steps=1)
    losses, own = trainer.losses, {}

    def noted(real: torch.Tensor) -> Any:
        found = losses(real)
        for name, loss in found.items():
            parameters = list(trainer.model.get_submodule(name).parameters())
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            own[name] = torch.cat([each.flatten() for each in gradients])
        return found

    trainer.losses = noted
    trainer.fit()
    taken = {
        name: torch.cat([kept["exp_avg"].flatten() / (1 - 0.9) for kept in optimizer.state.values()])
        for name, optimizer in trainer.optimizers.items()
    }
    return taken, {name: torch.tensor(comm.sum_vector(each.tolist())) / 2 for name, each in own.items()}


@pytest.mark.parametrize("replacing", [{}, {".detach()": ""}], ids=["as_shown", "without_detach"])
def test_a_loss_moves_its_own_optimizers_parameters_only(replacing: Mapping[str, str]) -> None:
    for found, expected in run_ranks(first_gradients, 2, replacing):
        assert list(found) == ["generator", "critic"]
        for name, gradient in found.items():
            assert gradient.abs().max() > 1e-3
            assert torch.allclose(gradient, expected[name], atol=1e-6), name


def test_optimizers_together_and_a_scheduler_of_one() -> None:
    def work(comm: Comm) -> Any:
        trainer = names_of("Several optimizers", 1)["trainer"]
        trained = fit(trainer)
        return trained, {name: optimizer.param_groups[0]["lr"] for name, optimizer in trainer.optimizers.items()}

    runs = run_ranks(work, 2)
    assert_same([trained.state for trained, _ in runs])
    for trained, rates in runs:
        assert trained.result.step == 16
        assert rates == {"generator": 0.01, "critic": pytest.approx(0.001)}  # step_size=10
        assert {"train/loss/generator", "train/loss/critic"} <= trained.events[0].metrics.keys()
        assert trained.warnings == []


def test_optimizers_in_turns() -> None:
    runs = train("Several optimizers")
    for run in runs:
        for (_, step, before), (_, _, after) in zip(run.steps, run.steps[1:], strict=False):
            moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
            assert moved == {"generator" if step % 3 == 2 else "critic"}
        assert {"train/loss/generator", "train/loss/critic"} <= run.events[0].metrics.keys()
        assert run.warnings == []


def test_one_loss_of_two_without_phases() -> None:
    def work(comm: Comm, precision: Any) -> list[str]:
        only = "return {'critic': self.losses(batch[0])['critic']}  #"
        names = names_of("Several optimizers", 1, replacing={"return self.losses(batch[0])": only})
        names["trainer"].precision = precision
        return fit(names["trainer"]).warnings

    for lines in run_ranks(work, 2, FP32()):
        assert len(lines) == 1
        assert "no gradient for generator.weight, generator.bias" in lines[0]
    with pytest.raises(RankError, match="AssertionError: No inf checks"):
        run_ranks(work, 2, FP16())


def test_the_yaml_of_several_optimizers() -> None:
    (text,) = blocks("yaml")["Several optimizers"]

    def work(comm: Comm) -> dict[str, tuple[str, float]]:
        given = {name: instantiate(node) for name, node in yaml.safe_load(text)["optimizer"].items()}
        built = build_optimizers(given, names_of("Several optimizers")["Pair"]())
        return {name: (type(one).__name__, one.defaults["lr"]) for name, one in built.items()}

    assert run_ranks(work, 1) == [{"generator": ("Adam", 0.01), "critic": ("Adam", 0.01)}]


def test_one_cycle_over_the_whole_run() -> None:
    def work(comm: Comm) -> tuple[int, int, list[float]]:
        trainer, rates = names_of("Schedulers", 1)["trainer"], []
        trainer._given_model.register_forward_hook(
            lambda *_: rates.append(trainer.optimizers["optimizer"].param_groups[0]["lr"])
        )
        trained = fit(trainer)
        return trained.result.step, trainer.total_steps, rates

    for step, total_steps, rates in run_ranks(work, 2):
        assert step == total_steps == len(rates) == 32
        assert max(rates) > 0.095
        assert rates[-1] < 1e-3


def test_with_phases_total_steps_are_those_of_all() -> None:
    def work(comm: Comm) -> tuple[int, int]:
        names = names_of("Several optimizers")
        trainer = names["trainer"]
        trainer._given_scheduler = {"generator": names["partial"](names["OneCycleLR"], max_lr=0.1)}
        trainer.fit()
        return trainer.schedulers["generator"].total_steps, trainer.schedulers["generator"].last_epoch

    assert run_ranks(work, 2) == [(16, 5)] * 2


def test_reduce_on_plateau_as_a_scheduler() -> None:
    def work(comm: Comm) -> None:
        names = names_of("Schedulers")
        names["Spirals"](
            names["mlp"](width=8),
            names["spirals"](64, 1),
            optimizer=names["adam"],
            scheduler=names["ReduceLROnPlateau"],
        ).fit()

    with pytest.raises(RankError, match=r"UsageError: scheduler: ReduceLROnPlateau is stepped with a metric"):
        run_ranks(work, 2)


def test_extra_state_goes_on() -> None:
    """Three epochs in one process, and in two."""

    def work(comm: Comm) -> tuple[Any, Any]:
        ends = []
        for epochs in ([3], [2, 3]):
            steps: dict[int, bytes] = {}
            for until in epochs:
                torch.manual_seed(0)  # the block hands over a model that is made already
                trainer = names_of("Schedulers")["trainer"]
                trainer.build_checkpoints = lambda steps=steps: MemoryCheckpoints(comm, steps)
                trainer.loop, trainer.resume = safetrain.Loop(epochs=until), "auto"
                trainer.fit()
            ends.append((state(trainer), trainer.plateau.state_dict()))
        return ends[0], ends[1]

    for straight, cut in run_ranks(work, 2):
        assert differences(straight, cut) == []
        assert straight[1]["last_epoch"] == 2
        assert straight[1]["best"] < 1.0


def test_a_frozen_layer_stands_still() -> None:
    runs = train("Freezing")
    for run in runs:
        first, second = ([s for epoch, _, s in run.steps if epoch == e] for e in (0, 1))
        assert len(first) == len(second) == 16
        for weights in (*first, second[0]):
            assert [weights[f"0.{name}"].tolist() for name in ("weight", "bias", "running_mean")] == [
                [1, 1],
                [0, 0],
                [0, 0],
            ]
        assert not torch.equal(first[0]["1.0.weight"], second[0]["1.0.weight"])
        assert not torch.equal(second[0]["0.weight"], run.state["0.weight"])
        assert run.state["0.num_batches_tracked"] == 16


def test_eval_mode_does_not_outlast_on_epoch_start() -> None:
    def work(comm: Comm) -> int:
        replacing = {"requires_grad_(self.epoch >= 1)": "eval()", "self.model[0].train(self.epoch >= 1)": "pass"}
        return int(fit(names_of("Freezing", replacing=replacing)["trainer"]).state["0.num_batches_tracked"])

    assert run_ranks(work, 2) == [32, 32]


def test_metrics_are_those_of_one_process() -> None:
    def work(comm: Comm) -> tuple[Trained, dict[str, float]]:
        names = names_of("Metrics")
        trained = fit(names["trainer"])
        points, labels = spirals(1001, seed=2)
        model = names["trainer"].model.eval()
        with torch.no_grad():
            scores = model(points)
        guessed = scores.argmax(dim=1) == 1
        right = int((guessed == (labels == 1)).sum())
        return trained, {
            "val/accuracy": right / 1001,
            "val/guessed": int(guessed.sum()),
            "val/hits": int((guessed & (labels == 1)).sum()),
            "val/precision": int((guessed & (labels == 1)).sum()) / int(guessed.sum()),
            "val/worst": pytest.approx(float(F.cross_entropy(scores, labels, reduction="none").max()), rel=1e-5),
        }

    runs = run_ranks(work, 2)
    assert_same([trained.state for trained, _ in runs])
    for trained, expected in runs:
        assert trained.result.metrics == expected
        train_events = [event for event in trained.events if event.kind == "train"]
        assert [event.step for event in train_events] == [10]
        assert 1.0 < train_events[0].metrics["train/perplexity"] < 4.0


def test_a_run_that_stops_when_nothing_is_gained() -> None:
    runs = train("Stopping early")
    losses = [event.metrics["val/loss"] for event in runs[0].events if event.kind == "validation"]
    waited = 0
    for epoch, loss in enumerate(losses[:-1]):
        waited = 0 if loss < min(losses[:epoch], default=math.inf) else waited + 1
        assert (waited == 2) == (epoch == len(losses) - 2), losses
    assert runs[0].result.step == 16 * (len(losses) - 1) + 1
    assert len(losses) < 100


def test_the_same_seed_gives_the_same_run() -> None:
    def work(comm: Comm) -> tuple[list[State], float]:
        states = []
        for seed in (1, 1, 2):
            trainer = names_of("Seeds")["trainer"]
            trainer.seed = seed
            states.append(fit(trainer).state)
        return states, float(torch.rand(()))

    (states, drawn), (_, drawn_elsewhere) = run_ranks(work, 2)
    assert differences(states[0], states[1]) == []
    assert differences(states[0], states[2]) != []
    assert drawn != drawn_elsewhere


def test_all_ranks_start_from_rank_0s_weights() -> None:
    def work(comm: Comm) -> tuple[State, State]:
        names = names_of("Seeds")
        torch.manual_seed(100 + comm.rank)
        ready = names["mlp"](width=8)
        given = {name: value.clone() for name, value in ready.state_dict().items()}
        trainer = names["Spirals"](ready, names["spirals"](64, 1), optimizer=names["adam"])
        return given, fit(trainer).steps[0][2]

    (given, start), (given_elsewhere, start_elsewhere) = run_ranks(work, 2)
    assert differences(given, given_elsewhere) != []
    assert differences(given, start) == differences(given, start_elsewhere) == []


def test_data_of_different_sizes_end_the_job() -> None:
    def work(comm: Comm) -> str:
        names = names_of("Seeds")
        trainer = names["Spirals"](names["mlp"](8), names["spirals"](64 + comm.rank, 1), optimizer=names["adam"])
        with pytest.raises(safetrain.SafetrainError) as raised:
            trainer.fit()
        return str(raised.value)

    for text in run_ranks(work, 2):
        assert "64" in text
        assert "65" in text


def test_a_sharded_model_learns_what_ddp_and_one_process_learn() -> None:
    sharded, ddp = train("Larger models"), train("Larger models", strategy=safetrain.DDPStrategy())
    assert sharded[0].result.metrics == pytest.approx(ddp[0].result.metrics, rel=1e-5)
    assert_close(sharded[1].state, ddp[1].state, 1e-5)


def test_the_yaml_of_a_sharded_model_trains() -> None:
    (text,) = blocks("yaml")["Larger models"]
    given = yaml.safe_load(text)["strategy"]
    shipped = yaml.safe_load((ROOT / "configs/strategy/fsdp.yaml").read_text())
    assert set(given) < set(shipped)
    for run in train("Larger models", strategy=instantiate(shipped | given)):
        assert all(value.dtype == torch.float32 for value in run.state.values())

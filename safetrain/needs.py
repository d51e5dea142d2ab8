"""Checks of what this job needs: a run directory that all ranks share, disk, memory, shared memory, a safe fork."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from safetrain import limits
from safetrain.finding import Finding, Job, Said, Verdict, groups, of_hosts, ranks_of, size, spread, where, who
from safetrain.pieces import bytes_here
from safetrain.words import names_in_words, ranks_in_words

_TOKEN = ".preflight"
_CHECKPOINTS = 3  # that stay by default: the one being written comes on top, the best may be one of them
_OWN_THREADS = ("safetrain-", "die_with_parent", "heed_only_parent")
_OWN_MODULES = ("tqdm", "tensorboard")
_SMALL_SHARED_MEMORY = 128 << 20  # a container has 64 MiB by default


def leave_token(run_dir: Path, token: str) -> None:
    """Rank 0 leaves a file for the others to find; what goes wrong is seen when it is looked for."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / _TOKEN).write_text(token)
    except OSError:
        return


def read_token(run_dir: Path) -> str:
    """What rank 0 left, or why it can't be read."""
    try:
        return (run_dir / _TOKEN).read_text()
    except OSError as error:
        return error.strerror or str(error)


def remove_token(run_dir: Path) -> None:
    """Rank 0 calls it when all have looked."""
    try:
        (run_dir / _TOKEN).unlink(missing_ok=True)
    except OSError:
        return


@dataclass(frozen=True)
class RunDir:
    """All ranks write into one directory, and it is the same one."""

    name: str = "run_dir"

    def look(self, here: Job) -> dict[str, Any]:
        path = "" if here.run_dir is None else str(here.run_dir)
        found = read_token(Path(path)) if path else ""
        return {"path": path, "found": found, "token": here.token, "saves": here.trainer.checkpoint.saves}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        paths = groups(said, lambda facts: facts["path"])
        if len(paths) > 1:
            value = spread(said, lambda facts: facts["path"] or "none")
            remedy = "Give all ranks the same: no time stamp that each process reads for itself."
            words = f"the ranks write to different directories: {value}."
            return [Finding(self.name, value, "refuse", (), words, remedy)]
        (path,) = paths
        if not path:
            return [Finding(self.name, "none: nothing is written")]
        token = said[0].facts["token"]
        if said[0].facts["found"] != token:
            why = said[0].facts["found"]
            words = f"rank 0 can't write to {path}: {why}."
            return [Finding(self.name, why, "warn", (0,), words, "Make room, or write elsewhere (hydra.run.dir=...).")]
        blind = [one for one in said if one.facts["found"] != token]
        if blind:
            why = blind[0].facts["found"] if " " in blind[0].facts["found"] else "another file is there"
            words = f"{path} of {who(blind, said)} is not rank 0's: what rank 0 wrote there is not to be found ({why})."
            remedy = "Choose a directory on a file system that all machines share (hydra.run.dir=...)."
            # without checkpoints there are only logs, and those can be anywhere
            verdict: Verdict = "refuse" if said[0].facts["saves"] else "warn"
            return [Finding(self.name, why, verdict, ranks_of(blind), words, remedy)]
        return [Finding(self.name, "the same for all" if len(said) > 1 else "can be written")]


@dataclass(frozen=True)
class Disk:
    """Room for the checkpoints that stay."""

    name: str = "disk"

    def look(self, here: Job) -> dict[str, int | None]:
        folder = here.run_dir
        while folder is not None and not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return {"free": None if folder is None else limits.free_bytes(folder), "checkpoint": state_bytes(here.trainer)}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        known = [one for one in said if one.facts["free"] is not None]
        if not known:
            return [Finding(self.name, "no run directory")]
        least = min(known, key=lambda one: one.facts["free"])
        free, checkpoint = least.facts["free"], least.facts["checkpoint"]
        value = f"{size(free)} free, a checkpoint takes about {size(checkpoint)}"
        if free >= _CHECKPOINTS * checkpoint:
            return [Finding(self.name, value)]
        words = f"{size(free)} are free for the run directory, and {_CHECKPOINTS} checkpoints take about "
        words += f"{size(_CHECKPOINTS * checkpoint)}."
        remedy = "Make room, write elsewhere (hydra.run.dir=...), or keep fewer (checkpoint.keep_last=1)."
        return [Finding(self.name, value, "warn", (least.rank,), words, remedy)]


@dataclass(frozen=True)
class Memory:
    """The machine's memory against the model and its optimizer, of all ranks on it."""

    name: str = "memory"

    def look(self, here: Job) -> dict[str, int]:
        model = sum(map(bytes_here, here.trainer.model.parameters()))
        on_cpu = here.comm.device.type == "cpu"
        state = state_bytes(here.trainer, bytes_here)
        # weights are there already; to come: gradients, DDP's buckets, the optimizer's state, a copy for the checkpoint
        to_come = model + state + (model if on_cpu else 0)
        return {"left": limits.memory_left(), "need": to_come if on_cpu else state}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        findings = [self._of_machine(some, said) for some in of_hosts(said)]
        return [one for one in findings if one.verdict != "ok"] or findings[:1]

    def _of_machine(self, some: Sequence[Said], said: Sequence[Said]) -> Finding:
        left, need = min(one.facts["left"] for one in some), sum(one.facts["need"] for one in some)
        value = f"{size(left)} left, {len(some)} rank{'s' * (len(some) > 1)} will take {size(need)} and activations"
        if left >= need:
            return Finding(self.name, value)
        words = f"{where(some, said)} (or its container) has {size(left)} of memory left, and its ranks need "
        words += f"{size(need)} besides activations."
        remedy = "Start fewer ranks (launch.nproc_per_node), or give the container more."
        return Finding(self.name, value, "warn", ranks_of(some), words, remedy)


@dataclass(frozen=True)
class SharedMemory:
    """/dev/shm against the batches that loader processes hold in it."""

    name: str = "shared_memory"

    def look(self, here: Job) -> dict[str, int | None]:
        item, loader = here.sample.item_bytes, here.feed.loader
        ahead = loader.num_workers * (loader.prefetch_factor or 2)
        need = None if item is None else item * (here.feed.batch_size or 1) * ahead
        return {"free": limits.free_bytes(limits.SHARED_MEMORY), "workers": loader.num_workers, "need": need}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        if not any(one.facts["workers"] for one in said):
            return [Finding(self.name, "not needed: no loader processes")]
        findings = [self._of_machine(some, said) for some in of_hosts(said)]
        return [one for one in findings if one.verdict != "ok"] or findings[:1]

    def _of_machine(self, some: Sequence[Said], said: Sequence[Said]) -> Finding:
        free = min((one.facts["free"] for one in some if one.facts["free"] is not None), default=None)
        if free is None:
            return Finding(self.name, "there is no /dev/shm")
        needs = [one.facts["need"] for one in some]
        known = [need for need in needs if need is not None]
        need = sum(known) if len(known) == len(needs) else None
        value = f"{size(free)} free" + ("" if need is None else f", batches take {size(need)}")
        if free >= (_SMALL_SHARED_MEMORY if need is None else need):
            return Finding(self.name, value)
        takes = "of batches whose size is not known" if need is None else f"that hold {size(need)} of batches"
        words = (
            f"/dev/shm of {where(some, said)} has {size(free)} free, for loader processes {takes}: they would die of "
        )
        words += "a bus error."
        remedy = (
            "Give the container more (docker run --shm-size=8g, or --ipc=host), or use fewer loader processes "
            "(loader.num_workers) or a smaller loader.prefetch_factor."
        )
        return Finding(self.name, value, "warn", ranks_of(some), words, remedy)


@dataclass(frozen=True)
class Fork:
    """Loader processes are forked: what another thread has locked at that moment stays locked in them for ever."""

    name: str = "fork"

    def look(self, here: Job) -> dict[str, Any]:
        loader = here.feed.loader
        context = loader.multiprocessing_context or multiprocessing.get_context()
        forks = loader.num_workers > 0 and context.get_start_method() == "fork"
        return {"forks": forks, "threads": foreign_threads(threading.enumerate()) if forks else []}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        risky = [one for one in said if one.facts["threads"]]
        if not risky:
            forks = any(one.facts["forks"] for one in said)
            return [Finding(self.name, "no thread of yours is running" if forks else "not needed")]
        names = names_in_words(sorted({name for one in risky for name in one.facts["threads"]}))
        words = (
            f"loader processes will be forked while threads of yours run on {ranks_in_words(ranks_of(risky))} "
            f"({names}): a lock that one of them holds then is never released in the loader process, which can stand "
            "still."
        )
        remedy = (
            "Start threads after the first batch, or hand over a DataLoader with multiprocessing_context='forkserver'."
        )
        return [Finding(self.name, names, "warn", ranks_of(risky), words, remedy)]


def foreign_threads(threads: Sequence[threading.Thread]) -> list[str]:
    """Names of those that are neither the main one nor safetrain's, its observers' included."""
    return [
        thread.name
        for thread in threads
        if thread is not threading.main_thread()
        and not thread.name.startswith(_OWN_THREADS)
        and not type(thread).__module__.startswith(_OWN_MODULES)
    ]


def _whole_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def state_bytes(trainer: Any, count: Callable[[torch.Tensor], int] = _whole_bytes) -> int:
    """What a checkpoint of this model holds, about: weights, buffers, and the optimizers' state, which does not exist
    before their first step. With ``bytes_here`` as ``count``, what this rank holds of it."""
    model = sum(map(count, [*trainer.model.parameters(), *trainer.model.buffers()]))
    state = 0
    for optimizer in trainer.optimizers.values():
        for group in optimizer.param_groups:
            trained = sum(count(p) for p in group["params"] if p.requires_grad)
            state += trained * _copies(optimizer, group)
    return model + state


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that an optimizer keeps for it."""
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group.get("momentum") else 0
    return 1 if "momentum" in group else 2

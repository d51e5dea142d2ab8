"""How a run goes on from a checkpoint: the parts of its state by name, and the order in which they are taken over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from safetrain.activity import ACTIVITY
from safetrain.audit import ReplicaAudit
from safetrain.checkpoint import Checkpoints, Saved
from safetrain.comm import Comm
from safetrain.data_state import FeedState
from safetrain.differences import differences
from safetrain.errors import CheckpointError, UsageError
from safetrain.feed import Feed
from safetrain.report import Reporter
from safetrain.seeding import RankRandom
from safetrain.state import (
    BufferState,
    Flag,
    FrozenState,
    LogState,
    ModelState,
    OptimizerState,
    OwnPart,
    PrecisionState,
    RunState,
    SchedulerState,
    SharedPart,
    Value,
)
from safetrain.window import Window

if TYPE_CHECKING:
    from safetrain.trainer import Trainer

logger = logging.getLogger("safetrain")

Place = Callable[[str, torch.Tensor], torch.Tensor]


def state_of(trainer: Trainer, window: Window, feed: Feed, val_feed: Feed | None, reporter: Reporter) -> RunState:
    """Every part of a run that a new process must take over to go on as this one would."""
    comm, model = trainer.comm, trainer.model

    def set_stopped(stopped: bool) -> None:
        trainer._stopped = stopped

    def set_stop_wanted(wanted: bool) -> None:
        trainer._stop_wanted = wanted

    shared: dict[str, SharedPart] = {
        "model": ModelState(model),
        "frozen": FrozenState(model),
        **{f"optimizer/{name}": OptimizerState(name, each, model) for name, each in trainer.optimizers.items()},
        **{f"scheduler/{name}": SchedulerState(name, each) for name, each in trainer.schedulers.items()},
        "precision": PrecisionState(trainer.precision),
        "window": window,
        "report": reporter,
        "metrics": Value(lambda: dict(trainer.metrics), trainer.metrics.update),
        "stopped": Value(lambda: trainer._stopped, set_stopped),
        "extra": Value(trainer.extra_state, trainer.load_extra_state),
    }
    own: dict[str, OwnPart] = {
        "buffers": BufferState(model, comm.rank, differ=not trainer.strategy.broadcast_buffers),
        "log": LogState(lambda: trainer._log, comm.rank),
        "stop_wanted": Flag(lambda: trainer._stop_wanted, set_stop_wanted),
        "data": FeedState(feed, comm.rank, lambda: window.inside_epoch),
        "random": RankRandom(trainer.seed, comm.rank, comm.device),
        "spare_batch": While(lambda: window.inside_epoch, window.order),
    }
    if val_feed is not None:
        own["val_data"] = FeedState(val_feed, comm.rank, lambda: False)
    return RunState(shared, own)


@dataclass(frozen=True)
class While:
    """A part that only matters at times; else nothing is saved of it."""

    matters: Callable[[], bool]
    part: OwnPart

    def state_dict(self) -> Any:
        return self.part.state_dict() if self.matters() else None

    def load_state_dicts(self, states: Sequence[Any], world_size: int) -> None:
        self.part.load_state_dicts(states, world_size)


@dataclass(frozen=True)
class Resumption:
    """A run that begins where ``saved`` was taken; ``left``: some of its tensors have not been read yet."""

    saved: Saved
    left: bool = False

    @property
    def events(self) -> int:
        """How many events the run had told."""
        return int(self.saved.shared["report"]["events"])

    def take_over(
        self, trainer: Trainer, state: RunState, replicas: ReplicaAudit, reporter: Reporter, place: Place
    ) -> None:
        """Bring every part to where it was, and say what is not as it was.

        Inside an epoch its beginning is repeated: what ``on_epoch_start`` sets up is there again, what it changes in
        the state is put right, and what it tells has been told before. The replicas are compared before buffers that
        may differ do differ. ``place``: where on this rank a tensor goes that was left to be read when the model is
        there (see ``tree.join``).

        Raises:
            CheckpointError: naming the part that does not fit.
        """
        saved, world_size = self._filled(trainer.comm, place), trainer.comm.world_size
        if trainer.comm.rank == 0:
            logger.info("goes on from %s: %d steps done, epoch %d", saved.path, saved.step, saved.epoch + 1)
            changes = [
                *ranks_changed(saved.world_size, world_size),
                *differences(saved.config_text, trainer.config_text),
            ]
            if changes:
                logger.warning("not all is as it was when %s was saved:\n  %s", saved.path.name, "\n  ".join(changes))
        if saved.shared["window"]["inside_epoch"]:
            for part in ("model", "metrics"):  # if anything, it looks at these
                state.shared[part].load_state_dict(saved.shared[part])
            with reporter.silent():
                trainer.on_epoch_start()
        state.load_shared(saved.shared)
        replicas.run(saved.step)
        state.load_own(saved.own, world_size)
        if trainer.comm.rank == 0 and (over := over_in_words(trainer)):
            logger.info("%s", over)

    def _filled(self, comm: Comm, place: Place) -> Saved:
        if not self.left:
            return self.saved
        saved, problem = self.saved, ""
        with ACTIVITY.within("load_checkpoint"):
            try:
                saved = saved.filled(place)
            except CheckpointError as error:
                problem = f"rank {comm.rank}: {error}"
            if problems := list(filter(None, comm.gather(problem))):
                raise CheckpointError("\n".join(problems))
        return saved


def find_checkpoint(
    checkpoints: Checkpoints | None, where: str | Path, run_dir: Path | None, leave: Sequence[str] = ()
) -> Resumption | None:
    """The checkpoint that the run is to go on from, the same on all ranks; None: it begins at its beginning.

    ``leave``: beginnings of the names of tensors that are to be read only when the model is there.

    Raises:
        CheckpointError: ``where`` names one that is not there, or none of those that are there is good.
        UsageError: there is no place where checkpoints could be.
    """
    if str(where) == "none":
        return None
    if checkpoints is None:
        raise UsageError(f"resume={where}: a run without a run directory has no checkpoints; give run_dir")
    saved = checkpoints.load(where, leave) if leave else checkpoints.load(where)
    if saved is None:
        logger.info("resume=%s: nothing to go on from: it begins anew", where)
        return None
    if run_dir is not None and saved.path.parent.resolve() != (run_dir / "checkpoints").resolve():
        report = {**saved.shared["report"], "events": 0}  # another run's: this one's have yet to be told
        saved = replace(saved, shared={**saved.shared, "report": report})
    return Resumption(saved, bool(leave))


def over_in_words(trainer: Trainer) -> str:
    """What makes a run train on whose checkpoint was its last; empty where it is not over."""
    loop, longer = trainer.loop, list[str]()
    if trainer.epoch >= loop.epochs:
        longer.append(f"loop.epochs={2 * trainer.epoch}")
    if loop.max_steps is not None and trainer.step >= loop.max_steps:
        longer.append(f"loop.max_steps={2 * trainer.step}")
    if not (longer or trainer._stopped):
        return ""
    more = "stop() has ended it" if trainer._stopped else f"{' '.join(longer)} trains on"
    return f"already done: {trainer.step} steps; {more}"


def ranks_changed(before: int, now: int) -> list[str]:
    """What another number of ranks means."""
    if before == now:
        return []
    return [
        f"{before} ranks then, {now} now: each sample still comes once in the epoch, in batches of other samples, and "
        f"every step sees {now / before:g} times as many; random numbers start anew. So the run is not the same to the "
        "bit, and the learning rate may need another value."
    ]

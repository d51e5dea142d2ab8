"""How a run goes on from a checkpoint: the parts of its state by name, and the order in which they are taken over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.audit import ReplicaAudit
from safetrain.checkpoint import Checkpoints, Saved
from safetrain.data_state import FeedState
from safetrain.differences import differences
from safetrain.errors import UsageError
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
from safetrain.vote_then_train import VoteThenTrain
from safetrain.window import Window

if TYPE_CHECKING:
    from safetrain.trainer import Trainer

logger = logging.getLogger("safetrain")


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
    }
    if isinstance(window.order, VoteThenTrain):
        own["spare_batch"] = While(lambda: window.inside_epoch, window.order)
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
    """A run that begins where ``saved`` was taken."""

    saved: Saved

    @property
    def events(self) -> int:
        """How many events the run had told."""
        return int(self.saved.shared["report"]["events"])

    def take_over(self, trainer: Trainer, state: RunState, replicas: ReplicaAudit, reporter: Reporter) -> None:
        """Bring every part to where it was, and say what is not as it was.

        Inside an epoch its beginning is repeated: what ``on_epoch_start`` sets up is there again, what it changes in
        the state is put right, and what it tells has been told before. The replicas are compared before buffers that
        may differ do differ.

        Raises:
            CheckpointError: naming the part that does not fit.
        """
        saved, world_size = self.saved, trainer.comm.world_size
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


def find_checkpoint(checkpoints: Checkpoints | None, where: str | Path, run_dir: Path | None) -> Resumption | None:
    """The checkpoint that the run is to go on from, the same on all ranks; None: it begins at its beginning.

    Raises:
        CheckpointError: ``where`` names one that is not there, or none of those that are there is good.
        UsageError: there is no place where checkpoints could be.
    """
    if str(where) == "none":
        return None
    if checkpoints is None:
        raise UsageError(f"resume={where}: a run without a run directory has no checkpoints; give run_dir")
    saved = checkpoints.load(where)
    if saved is None:
        return None
    if run_dir is not None and saved.path.parent.resolve() != (run_dir / "checkpoints").resolve():
        report = {**saved.shared["report"], "events": 0}  # another run's: this one's have yet to be told
        saved = replace(saved, shared={**saved.shared, "report": report})
    return Resumption(saved)


def ranks_changed(before: int, now: int) -> list[str]:
    """What another number of ranks means."""
    if before == now:
        return []
    return [
        f"{before} ranks then, {now} now: each sample still comes once in the epoch, in batches of other samples, and "
        f"every step sees {now / before:g} times as many; random numbers start anew. So the run is not the same to the "
        "bit, and the learning rate may need another value."
    ]

"""What goes on with a run that resumes, what does not, and when it saves."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import safetrain
from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm
from safetrain.policies import UnevenContinue
from safetrain.testing import differences, run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.resuming import (
    At,
    History,
    Learner,
    Noisy,
    Setting,
    assert_exact,
    final,
    learner,
    straight,
)
from tests.ranks.toys import CLASSES, FEATURES, Classifier, dataset, mlp, momentum_sgd

THREE_EPOCHS = safetrain.Loop(epochs=3, log_every_steps=4)
EVERY_SAMPLE = safetrain.Loader(batch_size=4, drop_last=False)
NEVER = safetrain.Checkpoint(every_minutes=None, every_epochs=None, at_end=False)


class Freezes(Learner):
    """The first layer trains only in the second epoch, and the loss has a factor that the epoch's beginning sets."""

    def on_epoch_start(self) -> None:
        self.model[0].requires_grad_(self.epoch == 1)
        self.factor = 1.0 + self.epoch
        with torch.no_grad():  # what it draws and changes must not happen twice
            self.model[4].bias.add_(torch.rand(CLASSES, generator=torch.Generator().manual_seed(self.epoch)))
            torch.rand(3)

    def training_step(self, batch: Any) -> Any:
        return self.factor * super().training_step(batch)


class LooksAndSavesFirst(Learner):
    """Validates before each epoch, and asks for a checkpoint in the last."""

    def on_epoch_start(self) -> None:
        assert self.validate()["val/loss"] > 0
        if self.epoch == 2:
            self.save()


class Remembers(Learner):
    """Keeps a moving average of its own."""

    average = 0.0

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        self.average = self.agree(0.9 * self.average + self.step, "max")
        return loss * (1 + 1 / (1 + self.average))

    def extra_state(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class TakesTurns(Learner):
    """Three optimizers, one window each."""

    phases = ("0", "1", "4")


class Skips(Learner):
    """Leaves batches out, one in three."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        return None if self.step % 3 == 1 else loss


class Ends(Learner):
    """Stops by itself, asked by the last rank."""

    def training_step(self, batch: Any) -> Any:
        if self.step == 10 and self.comm.rank == self.comm.world_size - 1:
            self.stop()
        return super().training_step(batch)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(kind=Freezes),
        Setting(kind=LooksAndSavesFirst),
        Setting(kind=Remembers),
        Setting(kind=TakesTurns, given={"optimizer": dict.fromkeys(("0", "1", "4"), momentum_sgd)}),
        Setting(kind=Skips),
        Setting(kind=Ends),
        Setting(given={"strategy": safetrain.DDPStrategy(broadcast_buffers=False)}),
        Setting(given={"audit": safetrain.Audit(every_steps=2)}),
        Setting(given={"strategy": safetrain.DDPStrategy(forward_communicates=True)}),
        Setting(given={"strategy": safetrain.DDPStrategy(static_graph=True)}),
        Setting(given={"optimizer": partial(torch.optim.AdamW, lr=0.01), "scheduler": None}),
    ],
    ids=[
        "freezes",
        "validates_first",
        "extra_state",
        "phases",
        "skips",
        "stops",
        "own_buffers",
        "audit",
        "votes_first",
        "static_graph",
        "adamw",
    ],
)
def test_all_that_a_run_has_goes_on(setting: Setting, world_size: int) -> None:
    assert_exact(setting, [At(4), At(9)], world_size)


class Chunks(Sampler[list[int]]):
    """23 batches, of which two ranks get 12 and 11."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, start + 4)) for start in range(0, 92, 4)])

    def __len__(self) -> int:
        return 23


@pytest.mark.parametrize("votes_first", [False, True])
def test_a_rank_that_is_out_of_data_is_still(votes_first: bool) -> None:
    class Uneven(Learner):
        def build_train_data(self) -> Any:
            return DataLoader(Noisy(92), batch_sampler=Chunks())

    given = {
        "policies": safetrain.Policies(uneven=UnevenContinue()),
        "strategy": safetrain.DDPStrategy(forward_communicates=votes_first),
        "checkpoint": safetrain.Checkpoint(every_steps=11),
    }
    assert_exact(Setting(kind=Uneven, given=given), [At(11), At(23)], 2)


@pytest.mark.parametrize(
    ("world_size", "max_steps"),
    [(1, 7), (2, 12)] + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((2, 7), (1, 23))],
)  # inside an epoch, at its end
def test_a_longer_run_goes_on_where_a_shorter_one_ended(world_size: int, max_steps: int) -> None:
    setting = Setting(given={"scheduler": None})

    def work(comm: Comm) -> None:
        expected, whole = straight(setting, comm)
        history, steps = History(), dict[int, bytes]()
        shorter = safetrain.Loop(epochs=3, log_every_steps=4, clip_norm=1.0, max_steps=max_steps)
        learner(setting, comm, history, MemoryCheckpoints(comm, steps), loop=shorter).fit()
        trainer = learner(setting, comm, history, MemoryCheckpoints(comm, steps), resume="auto")
        trainer.fit()
        assert history.seen == whole.seen
        assert history.lines() == whole.lines()
        found = final(trainer)
        for each in (found, expected):
            del each["shared"]["report"]  # counts the checkpoint with which the shorter one ended
        assert not differences(found, expected)

    run_ranks(work, world_size, timeout_s=60)


@contextmanager
def said_by_safetrain() -> Iterator[list[str]]:
    lines: list[str] = []
    logger, handler = logging.getLogger("safetrain"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("max_steps", [None, 7])
def test_a_run_that_is_over_only_ends_again(max_steps: int | None) -> None:
    setting = Setting(given={"loop": safetrain.Loop(epochs=2, log_every_steps=4, max_steps=max_steps)})

    def work(comm: Comm) -> None:
        history, steps = History(), dict[int, bytes]()
        first = learner(setting, comm, history, MemoryCheckpoints(comm, steps)).fit()
        seen, told, count = list(history.seen), history.lines(), len(steps)
        with said_by_safetrain() as lines:
            again = learner(setting, comm, history, MemoryCheckpoints(comm, steps), resume="auto").fit()
        assert again == first
        assert (history.seen, history.lines(), len(steps)) == (seen, told, count)
        longer = "loop.epochs=4 trains on" if max_steps is None else "loop.max_steps=14 trains on"
        over = f"already done: {first.step} steps; {longer}"
        assert lines.count(over) == (comm.rank == 0)

    run_ranks(work, 2, timeout_s=60)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_h88_on_other_ranks_each_sample_comes_once_in_the_epoch(before: int, now: int) -> None:
    setting = Setting(epoch_samples=96, given={"scheduler": None, "loader": EVERY_SAMPLE})

    def cut(comm: Comm) -> tuple[list[Any], dict[int, bytes]]:
        history, checkpoints = History(), MemoryCheckpoints(comm)
        loop = safetrain.Loop(epochs=3, log_every_steps=4, max_steps=5)
        learner(setting, comm, history, checkpoints, loop=loop, val_data=None).fit()
        return history.seen, checkpoints.steps

    def go_on(comm: Comm) -> tuple[list[Any], list[str], list[str]]:
        history = History()
        trainer = learner(setting, comm, history, MemoryCheckpoints(comm, steps), resume="auto", val_data=None)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("safetrain").addHandler(handler)
        trainer.fit()
        return history.seen, history.lines(), lines

    first = run_ranks(cut, before)
    steps = first[0][1]
    second = run_ranks(go_on, now)
    in_epoch = [batch for seen, _ in first for _, batch in seen]
    left = 96 - sum(map(len, in_epoch))
    steps_left = -(-left // (4 * now))
    in_epoch += [batch for seen, _, _ in second for step, batch in seen if step < 5 + steps_left]
    counts = Counter(number for batch in in_epoch for number in batch)
    assert counts == dict.fromkeys(range(96), 1)
    assert any(f"{before} ranks then, {now} now" in line for line in second[0][2])
    # the metrics of step 5, which the ranks of then had not told yet, are in the line of step 8
    line = next(line for line in second[0][1] if line.startswith("train 8 "))
    assert "nan" not in line


@pytest.mark.parametrize("world_size", [1, 2])
def test_when_it_saves(world_size: int) -> None:
    class Asks(Learner):
        def training_step(self, batch: Any) -> Any:
            if self.step == 1 and self.comm.rank == self.comm.world_size - 1:
                self.save()
            return super().training_step(batch)

    def work(comm: Comm) -> None:
        def saved(
            options: safetrain.Checkpoint, kind: type[Learner] = Learner, **given: Any
        ) -> dict[int, float | None]:
            given = {"loop": THREE_EPOCHS, "scheduler": None} | given
            setting = Setting(epoch_samples=20 * comm.world_size, kind=kind, given=given)
            checkpoints = MemoryCheckpoints(comm)
            learner(setting, comm, History(), checkpoints, checkpoint=options).fit()
            return checkpoints.metrics

        only = partial(safetrain.Checkpoint, every_minutes=None, metric="val/loss", mode="min")
        assert list(saved(NEVER)) == []
        assert list(saved(NEVER, Asks)) == [3]
        by_epoch = saved(only(every_epochs=2, at_end=False))
        assert list(by_epoch) == [10]
        assert by_epoch[10] is not None
        assert list(saved(only(every_epochs=None))) == [15]
        assert list(saved(only(every_epochs=None, every_steps=4))) == [4, 8, 12, 15]
        assert list(saved(only(every_epochs=None), loop=safetrain.Loop(epochs=3, max_steps=7))) == [7]
        clock = saved(safetrain.Checkpoint(every_minutes=1e-9, every_epochs=None, at_end=False))
        assert list(clock) == [2, 4, 5, 7, 9, 10, 12, 14, 15]  # at the end of an epoch, at once

    run_ranks(work, world_size)


def test_a_model_that_does_not_fit_is_told_on_all_ranks() -> None:
    class Wider(Learner):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model[4] = nn.Linear(16, CLASSES + 1)
            return model

    def work(comm: Comm) -> None:
        steps: dict[int, bytes] = {}
        learner(Setting(), comm, History(), MemoryCheckpoints(comm, steps)).fit()
        trainer = learner(Setting(kind=Wider), comm, History(), MemoryCheckpoints(comm, steps), resume="auto")
        with pytest.raises(safetrain.CheckpointError, match=r"4\.weight is .* in the checkpoint and .* here"):
            trainer.fit()

    run_ranks(work, 2)


def test_what_can_not_be_saved_is_told_before_the_first_step() -> None:
    class Hides(Learner):
        def extra_state(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    def work(comm: Comm) -> None:
        trainer = learner(Setting(kind=Hides), comm, History(), MemoryCheckpoints(comm))
        with pytest.raises(safetrain.UsageError, match=r"a checkpoint can't hold extra.lock: it is a _thread.lock"):
            trainer.fit()
        assert not trainer.history.seen
        learner(Setting(kind=Hides), comm, History(), MemoryCheckpoints(comm), checkpoint=NEVER).fit()

    run_ranks(work, 1)


def test_resume_needs_a_run_directory() -> None:
    def work(comm: Comm) -> None:
        class Plain(safetrain.Trainer):
            def training_step(self, batch: Any) -> Any:
                return self.model(batch[0]).sum()

        trainer = Plain(nn.Linear(FEATURES, 1), Noisy(8), optimizer=momentum_sgd, resume="auto")
        with pytest.raises(safetrain.UsageError, match="resume=auto: a run without a run directory"):
            trainer.fit()

    run_ranks(work, 1)


@pytest.mark.parametrize(("world_size", "has_one"), [(2, 0), (2, 1), (4, 3)])
def test_h11_a_run_directory_on_one_rank_only(world_size: int, has_one: int, tmp_path: Path) -> None:
    """Reported: a path that comes from a logger of rank 0 is None elsewhere, and the ranks wait for each other."""

    def work(comm: Comm) -> str:
        run_dir = tmp_path if comm.rank == has_one else None
        trainer = learner(Setting(), comm, History(), MemoryCheckpoints(comm), run_dir=run_dir)
        with pytest.raises(safetrain.UsageError) as refused:
            trainer.fit()
        return str(refused.value)

    others = {(2, 0): "rank 1", (2, 1): "rank 0", (4, 3): "ranks 0-2"}[world_size, has_one]
    said = run_ranks(work, world_size, timeout_s=20)
    assert said == [f"{others} got no run_dir, and others did: give it on all ranks"] * world_size


@pytest.mark.parametrize("asynchronous", [True, False])
def test_through_files(tmp_path: Path, asynchronous: bool) -> None:
    """The same, with checkpoints on disk; a damaged one is passed over."""

    class OnDisk(Learner):
        def build_checkpoints(self) -> Any:
            return safetrain.Trainer.build_checkpoints(self)

    options = safetrain.Checkpoint(every_steps=3, keep_last=None, asynchronous=asynchronous)
    setting = Setting(kind=OnDisk, given={"checkpoint": options})

    def work(comm: Comm) -> None:
        whole = History()
        trainer = learner(setting, comm, whole, MemoryCheckpoints(comm), run_dir=tmp_path / "whole")
        trainer.fit()
        history, run_dir = History(), tmp_path / "cut"
        cut = learner(setting, comm, history, MemoryCheckpoints(comm), run_dir=run_dir)
        cut.cut = At(8)
        with pytest.raises((safetrain.RankFailed, safetrain.PeerFailed)):
            cut.fit()
        cut._run.keeper.finish()
        comm.barrier("cut")
        if comm.rank == 0:
            (run_dir / "checkpoints" / "step_6" / "rank_1.pt").write_bytes(b"")
        comm.barrier("damaged")
        history.seen = [(step, batch) for step, batch in history.seen if step < 3]
        resumed = learner(setting, comm, history, MemoryCheckpoints(comm), run_dir=run_dir, resume="auto")
        resumed.fit()
        assert history.seen == whole.seen
        assert history.lines() == whole.lines()
        assert not differences(final(resumed), final(trainer))
        assert Checkpoints(run_dir / "checkpoints", comm, options).load("auto").step == trainer.step

    run_ranks(work, 2, timeout_s=60)


def _mistyped(comm: Comm, run_dir: Path) -> tuple[str, int, int]:
    def run(metric: str, resume: str) -> tuple[str, int]:
        trainer = Classifier(
            mlp(), dataset(64), dataset(16), optimizer=momentum_sgd, loop=safetrain.Loop(epochs=2),
            loader=safetrain.Loader(batch_size=4), run_dir=run_dir, resume=resume, device="cpu",
            checkpoint=safetrain.Checkpoint(metric=metric),
        )  # fmt: skip
        try:
            return "", trainer.fit().step
        except safetrain.UsageError as error:
            return str(error), trainer.step

    told, step = run("val/acc", "none")
    return told, step, run("val/accuracy", "auto")[1]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_metric_that_is_mistyped_does_not_cost_the_epoch(tmp_path: Path, world_size: int) -> None:
    steps = 64 // world_size // 4
    for told, step, in_all in run_ranks(_mistyped, world_size, tmp_path):
        assert told.startswith("metric=val/acc: validation did not log it. Did you mean val/accuracy?")
        assert told.endswith("The epoch is saved: correct the name, and add resume=auto.")
        assert (step, in_all) == (steps, 2 * steps)
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step_")}
    assert saved == {f"step_{steps}", f"step_{2 * steps}"}

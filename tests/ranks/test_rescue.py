"""When ranks fail together, the state of the last whole step is saved, and a new process goes on from there: as the run
that did not fail would have gone on, to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import safetrain
from safetrain.comm import Comm
from safetrain.policies import SkipAny
from safetrain.precision import FP16
from safetrain.testing import differences, run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.resuming import (
    At,
    History,
    Learner,
    Noisy,
    Setting,
    assert_exact,
    cut_and_resumed,
    final,
    learner,
    straight,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_raises_in_its_step(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(8, rank=culprit), At(13, rank=culprit)], 2)


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_one_of_four_raises(culprit: int) -> None:
    """Above two ranks a new process adds up its first gradients in another order, so the last bits may differ."""
    setting = Setting(epoch_samples=46 * 4, rescued=True)

    def work(comm: Comm) -> None:
        expected, whole = straight(setting, comm)
        found, history = cut_and_resumed(setting, comm, [At(8, rank=culprit), At(13, rank=culprit)])
        assert history.seen == whole.seen
        assert not differences(found["own"], expected["own"])
        for name, value in expected["shared"]["model"].items():
            torch.testing.assert_close(found["shared"]["model"][name], value, rtol=1e-5, atol=1e-6)

    run_ranks(work, 4, timeout_s=100)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(accumulate=3, rescued=True), marks=pytest.mark.exhaustive),
        pytest.param(Setting(workers=2, rescued=True), marks=pytest.mark.exhaustive),
        Setting(precision=FP16, rescued=True),
        pytest.param(
            Setting(given={"strategy": safetrain.DDPStrategy(broadcast_buffers=False)}, rescued=True),
            marks=pytest.mark.exhaustive,
        ),
        Setting(given={"optimizer": partial(torch.optim.AdamW, lr=0.01), "scheduler": None}, rescued=True),
    ],
    ids=["accumulation", "workers", "fp16", "own_buffers", "adamw"],
)
def test_whatever_the_run_has(setting: Setting) -> None:
    micro = setting.accumulate - 1
    assert_exact(setting, [At(1, micro, rank=1), At(2, micro, rank=0)], 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_in_the_first_window_of_a_run_and_of_an_epoch(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(0, rank=culprit), At(12, rank=culprit)], 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_in_a_validation_which_is_then_run_again(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(12, validation=True, rank=culprit)], 2)


class OnDisk(Learner):
    """Saves nothing by itself, in files; ``odd``: this rank does what it should not."""

    mended = False

    def build_checkpoints(self) -> Any:
        return safetrain.Trainer.build_checkpoints(self)

    @property
    def odd(self) -> bool:
        return not self.mended and self.comm.rank == self.comm.world_size - 1


class SkipsTooOften(OnDisk):
    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        return None if self.odd and self.step >= 5 else loss


class CallsAnother(OnDisk):
    def training_step(self, batch: Any) -> Any:
        if self.step == 5:
            value = torch.ones(2)
            dist.all_reduce(value, op=dist.ReduceOp.MAX if self.odd else dist.ReduceOp.SUM)
        return super().training_step(batch)


class FailsInASection(OnDisk):
    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        if self.step == 5 and not self.mended:
            with self.rank_zero("look") as mine:
                if mine:
                    raise ValueError("no file")
        return loss


class ValidatesInTheStep(OnDisk):
    def training_step(self, batch: Any) -> Any:
        if self.step == 5:
            self.validate()
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        if self.step == 5 and self.odd:
            raise ValueError("no label")
        super().validation_step(batch)


class ValidatesInAHook(ValidatesInTheStep):
    def build_optimizers(self) -> Any:
        optimizers = super().build_optimizers()
        optimizers["optimizer"].register_step_post_hook(lambda *_: self.step == 5 and self.validate() and None)
        return optimizers

    def training_step(self, batch: Any) -> Any:
        return OnDisk.training_step(self, batch)


class CanNotSayItsState(SkipsTooOften):
    def extra_state(self) -> Any:
        if self.step > 0 and self.comm.rank == 0:
            raise ValueError("not now")
        return {}


class Drifts(OnDisk):
    def training_step(self, batch: Any) -> Any:
        if self.step == 5 and self.odd:
            with torch.no_grad():
                self.model[0].bias += 1
        return super().training_step(batch)


class FailsBetweenEpochs(OnDisk):
    def on_epoch_start(self) -> None:
        if self.epoch == 1:
            with self.rank_zero("look") as mine:
                if mine:
                    raise ValueError("no file")


def ended(kind: type[OnDisk], comm: Comm, history: History, run_dir: Path, **given: Any) -> safetrain.SafetrainError:
    with pytest.raises(safetrain.SafetrainError) as raised:
        on_disk(kind, comm, history, run_dir, **given).fit()
    return raised.value


def on_disk(kind: type[OnDisk], comm: Comm, history: History, run_dir: Path, **given: Any) -> OnDisk:
    options = {
        "checkpoint": safetrain.Checkpoint(every_minutes=None, every_epochs=None, at_end=False),
        "policies": safetrain.Policies(skip=SkipAny(max_consecutive=1)),
        "audit": safetrain.Audit(every_steps=1),
        "run_dir": run_dir,
    }
    trainer = learner(Setting(kind=kind, rescued=True), comm, history, MemoryCheckpoints(comm), **options | given)
    assert isinstance(trainer, OnDisk)
    return trainer


@pytest.mark.parametrize(
    ("kind", "error", "step"),
    [
        (SkipsTooOften, "TrainingStopped", 6),
        (CallsAnother, "RanksDiffer", 5),
        (FailsInASection, "RankFailed", 5),
        (ValidatesInTheStep, "PeerFailed", 5),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_whatever_all_ranks_hear_of_at_the_same_point(
    tmp_path: Path, kind: type[OnDisk], error: str, step: int, world_size: int
) -> None:
    """They fail, fail in the same way when nothing was mended, and then go on as the run that never failed."""

    def work(comm: Comm) -> tuple[str, str, str, str, str]:
        given = {"train_data": Noisy(46 * world_size)}
        whole = History()
        straight = on_disk(kind, comm, whole, tmp_path / "whole", **given)
        straight.mended = True
        straight.fit()
        history = History()
        first = ended(kind, comm, history, tmp_path / "cut", **given)
        again = ended(kind, comm, History(), tmp_path / "cut", resume="auto", **given)
        assert str(again) == str(first)
        history.seen = [(done, batch) for done, batch in history.seen if done < min(step, 5)]
        mended = on_disk(kind, comm, history, tmp_path / "cut", resume="auto", **given)
        mended.mended = True
        mended.fit()
        if kind is not SkipsTooOften:  # there a window was left out meanwhile
            assert history.seen == whole.seen
            found, expected = final(mended), final(straight)
            if world_size == 2:
                assert not differences(found["own"], expected["own"])
                assert not differences(found["shared"]["model"], expected["shared"]["model"])
        return (
            type(first).__name__,
            first.kept,
            again.kept,
            *sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()),
        )  # type: ignore[return-value]

    first, *_ = run_ranks(work, world_size, timeout_s=60)
    go_on = ". As it is, it would come to this again." if error == "TrainingStopped" else ": go on with resume=auto."
    kept = f"The state at step {step} is saved in checkpoints/step_{step}{go_on}"
    assert first == (error, kept, kept, "latest", f"step_{step}")


@pytest.mark.parametrize(
    ("kind", "error", "why"),
    [
        (
            ValidatesInAHook,
            "PeerFailed",
            "rank 0 can't say what its state is: UsageError: it failed within an optimizer",
        ),
        (CanNotSayItsState, "TrainingStopped", "rank 0 can't say what its state is: ValueError: not now"),
        (Drifts, "RanksDiffer", ""),
        (FailsBetweenEpochs, "RankFailed", ""),
    ],
)
def test_what_is_not_whole_is_not_saved(tmp_path: Path, kind: type[OnDisk], error: str, why: str) -> None:
    def work(comm: Comm) -> tuple[str, str]:
        raised = ended(kind, comm, History(), tmp_path)
        return type(raised).__name__, raised.kept

    first, second = run_ranks(work, 2, timeout_s=60)
    assert first[0] == error
    assert first[1] == second[1]
    assert why in first[1] if why else first[1] == ""
    assert not list(tmp_path.glob("checkpoints/step_*"))


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        trainer = on_disk(SkipsTooOften, comm, History(), tmp_path)
        trainer.checkpoint = safetrain.Checkpoint(every_epochs=None, at_failure_s=0)
        with pytest.raises(safetrain.TrainingStopped) as raised:
            trainer.fit()
        return raised.value.kept

    assert run_ranks(work, 2) == ["", ""]
    assert not list(tmp_path.glob("checkpoints/step_*"))

"""A rank is told to leave: all save at the same step and go, and what goes on later is the run that was never told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch

import safetrain
from safetrain.comm import Comm
from safetrain.precision import FP16, FP32, Precision
from safetrain.preemption import leave_request
from safetrain.testing import RankError, differences, run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.resuming import History, Learner, Noisy, Setting, final, learner, straight


class Told(Learner):
    """Gets a signal in the middle of a step, on one rank."""

    at: int | None
    on: int
    number: signal.Signals
    batches: int

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.step == self.at and self.comm.rank == self.on:
            self.at = None
            os.kill(os.getpid(), self.number)
        return super().training_step(batch)


def told(setting: Setting, comm: Comm, history: History, checkpoints: MemoryCheckpoints, at: int | None, on: int,
         number: signal.Signals, **given: Any) -> Told:  # fmt: skip
    trainer = learner(setting, comm, history, checkpoints, **given)
    assert isinstance(trainer, Told)
    trainer.at, trainer.on, trainer.number = at, on, number
    return trainer


@pytest.mark.parametrize(("world_size", "on"), [(2, 0), (2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize(
    ("at", "accumulate", "precision", "number"),
    [(0, 1, FP32, signal.SIGTERM), (4, 3, FP16, signal.SIGUSR1)],
    ids=["in the first step", "in a window of three, fp16"],
)
def test_h81_all_save_at_the_same_step_and_the_run_goes_on_exactly(
    world_size: int, on: int, at: int, accumulate: int, precision: type[Precision], number: signal.Signals
) -> None:
    setting = Setting(accumulate=accumulate, precision=precision, kind=Told, epoch_samples=46 * world_size)

    def work(comm: Comm) -> tuple[int, dict[int, str]]:
        expected, whole = straight(Setting(accumulate, precision=precision, epoch_samples=46 * world_size), comm)
        history, steps = History(), dict[int, bytes]()
        first = told(setting, comm, history, MemoryCheckpoints(comm, steps), at, on, number)
        with pytest.raises(safetrain.Preempted) as raised:
            first.fit()
        assert raised.value.code == 75
        assert raised.value.saved
        assert raised.value.step == first.step == max(steps)
        assert signal.getsignal(number) is signal.SIG_DFL
        second = told(setting, comm, history, MemoryCheckpoints(comm, steps), None, on, number, resume="auto")
        second.fit()
        assert history.seen == whole.seen
        found = final(second)
        extra = found["shared"].pop("report")["events"] - expected["shared"].pop("report")["events"]
        assert extra in (0, 1)  # that step may be one that is saved anyway
        if world_size == 2:
            assert history.lines() == whole.lines()
            assert not differences(found, expected)
        else:  # the buckets of the first step are other ones than later: a sum over more ranks may round otherwise
            torch.testing.assert_close(found["shared"]["model"], expected["shared"]["model"], rtol=1e-5, atol=1e-6)
        return raised.value.step, raised.value.told

    values = run_ranks(work, world_size, timeout_s=100)
    assert values == [values[0]] * world_size
    step, who = values[0]
    assert step >= at + 2  # the vote of this window, or of one soon after, and one more window
    assert who == {on: number.name}


class ToldInValidation(Told):
    """Gets it at its second validation batch; the other ranks wait until the first one has gone."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return Learner.training_step(self, batch)

    def validation_step(self, batch: Any) -> None:
        self.batches += 1
        if self.step == self.at and self.batches == 2:
            if self.comm.rank == self.on:
                os.kill(os.getpid(), self.number)
                deadline = time.monotonic() + 10
                while not self._leave.wanted and time.monotonic() < deadline:
                    time.sleep(0.01)
            else:
                while self.comm.read("leave/3") is None:  # the run that is not told has three validations
                    time.sleep(0.01)
        super().validation_step(batch)


@pytest.mark.parametrize(("world_size", "on"), [(2, 0), (2, 1), (4, 3)])
def test_told_in_a_long_validation_all_leave_it_at_once_and_it_comes_again(
    world_size: int, on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safetrain.preemption._LOOK_S", 0.0)
    setting = Setting(kind=ToldInValidation, epoch_samples=46 * world_size)
    steps_an_epoch, batches = 12, 20

    def work(comm: Comm) -> int:
        given = {"val_data": Noisy(batches * 4 * comm.world_size)}
        whole = History()
        straight_run = learner(Setting(epoch_samples=46 * world_size), comm, whole, MemoryCheckpoints(comm), **given)
        straight_run.fit()
        history, steps = History(), dict[int, bytes]()
        first = told(
            setting, comm, history, MemoryCheckpoints(comm, steps), steps_an_epoch, on, signal.SIGTERM, **given
        )
        first.batches = 0
        with pytest.raises(safetrain.Preempted) as raised:
            first.fit()
        assert (raised.value.step, max(steps)) == (steps_an_epoch, steps_an_epoch)
        read = first.batches
        second = told(
            setting, comm, history, MemoryCheckpoints(comm, steps), None, on, signal.SIGTERM, resume="auto", **given
        )
        second.batches = 0
        second.fit()
        assert history.seen == whole.seen
        if world_size == 2:
            assert history.lines() == whole.lines()
            found, expected = final(second), final(straight_run)
            for each in (found, expected):
                del each["shared"]["report"]  # counts the saves
            assert not differences(found, expected)
        return read

    assert run_ranks(work, world_size, timeout_s=100) == [2] * world_size


def test_a_rank_that_is_told_because_another_one_failed_is_gone_at_once() -> None:
    def work(comm: Comm) -> None:
        with leave_request(lambda: True):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(RankError) as raised:
        run_ranks(work, 2, timeout_s=20)
    assert {text.partition(" before")[0] for text in raised.value.errors.values()} == {"died with exit code 143"}


def test_a_second_signal_ends_it_and_an_echo_of_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.preemption.ECHO_S", 0.5)

    def work(comm: Comm) -> None:
        with leave_request(lambda: False) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 5
            while not request.wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            assert request.signal_name == "SIGTERM"
            if comm.rank == 0:
                return
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(RankError) as raised:
        run_ranks(work, 2, timeout_s=20)
    assert list(raised.value.errors) == [1]
    assert raised.value.errors[1].startswith("died with exit code 143")


def test_a_process_pool_of_the_users_ends_as_ever_and_tells_its_rank_nothing() -> None:
    def work(comm: Comm) -> tuple[list[int], str]:
        with leave_request(lambda: False) as request:
            with multiprocessing.get_context("fork").Pool(2) as pool:  # ends its processes by SIGTERM
                squares = pool.map(abs, [-1, -2, -3])
            time.sleep(0.2)
        return squares, request.signal_name

    assert run_ranks(work, 2, timeout_s=20) == [([1, 2, 3], "")] * 2


def test_handlers_of_the_users_own_stay() -> None:
    def work(comm: Comm) -> list[str]:
        heard: list[str] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(signal.Signals(number).name))
        with leave_request(lambda: False) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not request.wanted
        return heard

    assert run_ranks(work, 1) == [["SIGTERM"]]

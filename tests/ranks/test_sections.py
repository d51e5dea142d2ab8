"""Sections of rank 0, and barriers with a name: who waits knows for whom, an error reaches all, nothing hangs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import safetrain
from safetrain import sections
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd

PLACES = pytest.mark.parametrize(
    ("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)], ids=lambda value: str(value)
)


def trainer_of(
    kind: type[safetrain.Trainer], world_size: int, preflight: safetrain.Preflight | None = None
) -> safetrain.Trainer:
    return kind(
        mlp(), dataset(24 * world_size), dataset(8), optimizer=momentum_sgd, loader=safetrain.Loader(batch_size=4),
        preflight=preflight,
    )  # fmt: skip


def ending(trainer: safetrain.Trainer) -> tuple[str, str]:
    try:
        trainer.fit()
    except safetrain.SafetrainError as error:
        return type(error).__name__, str(error)
    return "", ""


def line_of(text: str) -> str:
    """``file:line`` of the one line of this file that ends in ``text``."""
    (number,) = (n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(text))
    return f"{__file__}:{number}"


def test_rank_0_works_and_the_others_wait(world_size: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        with comm.rank_zero("export") as mine:
            if mine:
                (tmp_path / "export").write_text(f"rank {comm.rank}")
        return (tmp_path / "export").read_text()

    assert run_ranks(work, world_size) == ["rank 0"] * world_size


def test_the_block_of_the_page(tmp_path: Path) -> None:
    """docs/failures.md, in a Trainer's own method."""
    page = (Path(__file__).parents[2] / "docs/failures.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    def work(comm: Comm) -> tuple[bool, int]:
        class Shown(Classifier):
            def on_epoch_start(self) -> None:
                names = {"self": self, "my_best": 10 + self.comm.rank, "write_the_model": write}
                exec(block, names)
                self.best = names["best"]

        def write(model: torch.nn.Module) -> None:
            torch.save(model.state_dict(), tmp_path / f"written_by_{comm.rank}")

        trainer = trainer_of(Shown, 2)
        trainer.fit()
        return (tmp_path / "written_by_0").exists(), trainer.best  # type: ignore[attr-defined]

    assert run_ranks(work, 2) == [(True, 11)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["written_by_0"]


def test_h98_a_section_may_take_longer_than_a_collective() -> None:
    def work(comm: Comm) -> int:
        comm.leave()
        comm = Comm.join("cpu", timeout_s=2)
        with comm.rank_zero("tokenize") as mine:
            if mine:
                time.sleep(4)
        return comm.agree(comm.rank, "sum")

    assert run_ranks(work, 2) == [1, 1]


def in_training_step(trainer: safetrain.Trainer) -> bool:
    return trainer.step == 2


class Exporting(Classifier):
    """Has a section in the hook that the test names."""

    where: str
    inside: Callable[[safetrain.Trainer, bool], None]

    def section(self, where: str) -> None:
        if where == self.where:
            with self.rank_zero("export") as mine:
                self.inside(self, mine)

    def on_epoch_start(self) -> None:
        self.section("on_epoch_start")

    def training_step(self, batch: Any) -> Any:
        if self.step == 2:
            self.section("training_step")
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.section("validation_step")


def raise_on_rank_0(_trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        raise OSError("No space left on device")  # a full disk


HOOKS = pytest.mark.parametrize("where", ["on_epoch_start", "training_step", "validation_step"])


@HOOKS
def test_an_exception_inside_is_raised_on_all_ranks(world_size: int, where: str) -> None:
    def work(comm: Comm) -> Any:
        trainer = trainer_of(Exporting, world_size)
        trainer.where, trainer.inside = where, raise_on_rank_0
        return ending(trainer)

    first, *others = run_ranks(work, world_size)
    assert first[0] == "RankFailed"
    assert {kind for kind, _ in others} == {"PeerFailed"}
    for _, text in (first, *others):
        assert f"OSError: No space left on device at {line_of('# a full disk')}, in rank_zero('export') at " in text


def all_reduce(_trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        dist.all_reduce(torch.ones(1))  # inside


def agree(trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        trainer.agree(1, "max")  # inside, too


def validate(trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        trainer.validate()  # H12, H17: inside


def barrier(trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        trainer.comm.barrier("inside")  # a barrier inside


def another_section(trainer: safetrain.Trainer, mine: bool) -> None:
    if mine:
        with trainer.rank_zero("nested"):  # a section inside
            pass


@pytest.mark.parametrize(
    ("inside", "comment"),
    [
        (all_reduce, "# inside"),
        (agree, "# inside, too"),
        (validate, "# H12, H17: inside"),
        (barrier, "# a barrier inside"),
        (another_section, "# a section inside"),
    ],
)
def test_a_collective_inside_is_refused_with_its_line(
    world_size: int, inside: Callable[[safetrain.Trainer, bool], None], comment: str
) -> None:
    def work(comm: Comm) -> Any:
        trainer = trainer_of(Exporting, world_size)
        trainer.where, trainer.inside = "on_epoch_start", inside
        return ending(trainer)

    for _, text in run_ranks(work, world_size):
        assert "UsageError" in text
        assert f"at {line_of(comment)} inside rank_zero('export')" in text
        assert "Do it before or after the section, on all ranks." in text


def test_collectives_are_allowed_again_after_a_section_and_in_other_threads() -> None:
    import threading

    def work(comm: Comm) -> list[float]:
        values = []
        with comm.rank_zero("export"):
            thread = threading.Thread(target=lambda: values.append(comm.agree(comm.rank, "sum")))
            thread.start()
            thread.join()
        return [*values, comm.agree(1, "sum")]

    assert run_ranks(work, 2) == [[1, 2], [1, 2]]


def test_sections_of_different_names_are_told(world_size: int) -> None:
    def work(comm: Comm) -> str:
        try:
            with comm.rank_zero("export" if comm.rank == 0 else "upload"):
                pass
        except safetrain.RanksDiffer as error:
            return str(error)
        return ""

    first, *others = run_ranks(work, world_size)
    assert first == "", "it waits for nobody"
    for rank, text in enumerate(others, 1):
        assert text.startswith(f"step 0: rank {rank} waits for rank 0 in rank_zero('upload') at {__file__}:")
        assert "and that is in rank_zero('export')" in text


def test_a_section_that_only_rank_0_enters_is_told_by_the_next_vote(world_size: int) -> None:
    class Trainer(Classifier):
        def training_step(self, batch: Any) -> Any:
            if self.step == 2 and self.comm.rank == 0:
                with self.rank_zero("export"):  # alone
                    pass
            return super().training_step(batch)

    for kind, text in run_ranks(lambda comm: ending(trainer_of(Trainer, world_size)), world_size):
        assert kind == "RanksDiffer"
        assert f"rank 0: rank_zero('export') at {line_of('# alone')}" in text
        assert ": nothing more" in text


def test_who_waits_for_a_rank_0_that_never_comes_says_so() -> None:
    def work(comm: Comm) -> str:
        comm.leave()
        comm = Comm.join("cpu", timeout_s=1)
        try:
            if comm.rank != 0:
                with comm.rank_zero("export"):
                    pass
        except safetrain.PeerFailed as error:
            return f"{error.ranks} {error}"
        return ""

    first, second = run_ranks(work, 2)
    assert first == ""
    assert second.startswith("(0,) rank 1 waits for rank 0 in rank_zero('export') at ")
    assert second.endswith("and it did not come in 1 s")


def test_a_section_over_its_limit_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "_GRACE_S", 0.1)

    def work(comm: Comm) -> str:
        try:
            with comm.rank_zero("export", limit_s=0.2) as mine:
                if mine:
                    comm.store.wait(["told"])
        except safetrain.PeerFailed as error:
            comm.store.set("told", "")
            return str(error)
        return ""

    first, second = run_ranks(work, 2)
    assert first == ""
    assert second.endswith("and it takes longer than limit_s=0.2: raise that if it may")


def test_a_world_of_one_waits_for_nobody() -> None:
    def work(comm: Comm) -> bool:
        comm.barrier("alone")
        with comm.rank_zero("export") as mine:
            return mine

    assert run_ranks(work, 1) == [True]


@PLACES
def test_h21_barriers_of_different_names_are_told_on_all_ranks(world_size: int, culprit: int) -> None:
    def work(comm: Comm) -> str:
        comm.barrier("start")
        with pytest.raises(safetrain.RanksDiffer) as caught:
            comm.barrier(f"shared memory {7 if comm.rank == culprit else 3}")  # drawn by each rank
        return str(caught.value)

    texts = set(run_ranks(work, world_size))
    assert len(texts) == 1
    text = texts.pop()
    assert f"  rank {culprit}: barrier('shared memory 7') at {line_of('# drawn by each rank')}" in text
    assert f"barrier('shared memory 3') at {line_of('# drawn by each rank')}" in text


@PLACES
def test_who_does_not_come_to_a_barrier_is_told(world_size: int, culprit: int) -> None:
    def work(comm: Comm) -> Any:
        if comm.rank == culprit:
            return None
        with pytest.raises(safetrain.PeerFailed) as caught:
            comm.barrier("ready", limit_s=0.5)
        return caught.value.ranks, str(caught.value)

    for rank, said in enumerate(run_ranks(work, world_size)):
        if rank != culprit:
            assert said[0] == (culprit,)
            assert said[1].startswith(f"rank {culprit} did not come to barrier('ready') at {__file__}:")


@PLACES
def test_h13_a_barrier_carries_no_value_and_agree_does(world_size: int, culprit: int) -> None:
    class Trainer(Classifier):
        wanted = False

        def training_step(self, batch: Any) -> Any:
            self.wanted = self.wanted or (self.step == 2 and self.comm.rank == culprit)
            self.comm.barrier("stop")
            if self.agree(self.wanted, "any"):
                self.stop()
            return super().training_step(batch)

    def work(comm: Comm) -> tuple[int, bool]:
        trainer = trainer_of(Trainer, world_size)
        return trainer.fit().step, trainer.wanted

    results = run_ranks(work, world_size)
    assert [step for step, _ in results] == [3] * world_size
    assert [wanted for _, wanted in results] == [rank == culprit for rank in range(world_size)]


@PLACES
def test_h13_a_local_flag_after_the_barrier_is_told(world_size: int, culprit: int) -> None:
    """The stop is known to one rank only, which goes on to something else."""

    class Trainer(Classifier):
        def training_step(self, batch: Any) -> Any:
            self.comm.barrier("stop")
            stops = self.step == 2 and self.comm.rank == culprit
            self.comm.barrier("stopping" if stops else "going on")
            return super().training_step(batch)

    for kind, text in run_ranks(lambda comm: ending(trainer_of(Trainer, world_size)), world_size):
        assert kind == "RanksDiffer"
        assert f"rank {culprit}: barrier('stopping')" in text


def test_h19_what_a_rank_finds_in_a_folder_does_not_decide_who_waits(world_size: int, tmp_path: Path) -> None:
    """The cache that rank 0 has just written: others find it, or not yet, and all are right."""
    cache = tmp_path / "cache"

    def work(comm: Comm) -> str:
        time.sleep(0.1 * comm.rank)
        with comm.rank_zero("cache") as mine:
            if mine and not cache.exists():
                cache.write_text("made once")
        return cache.read_text()

    assert run_ranks(work, world_size) == ["made once"] * world_size


def test_h15_lists_of_different_length_are_gathered_whole(world_size: int) -> None:
    def work(comm: Comm) -> list[list[int]]:
        return comm.gather(list(range(comm.rank)))

    assert run_ranks(work, world_size) == [[list(range(rank)) for rank in range(world_size)]] * world_size


def test_h25_ranks_that_train_different_parameters_are_told_before_the_first_step(world_size: int) -> None:
    class Trainer(Classifier):
        def build_model(self) -> torch.nn.Module:
            model = mlp()
            model[0].bias.requires_grad_(self.comm.rank == 0)
            return model

    for kind, text in run_ranks(lambda comm: ending(trainer_of(Trainer, world_size)), world_size):
        assert kind == "PreflightError"
        assert text.startswith(
            "parameters: 0.bias is not the same on all ranks: (16,) float32 trained on rank 0, (16,) "
        )
    off = safetrain.Preflight(enabled=False)
    for kind, text in run_ranks(lambda comm: ending(trainer_of(Trainer, world_size, preflight=off)), world_size):
        assert kind == "UsageError"
        assert "would train different parameters" in text
        assert "0.bias" in text

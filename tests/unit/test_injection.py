"""A fault strikes once, on the culprit only, at the first line of the user's code; wrong arguments are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from safetrain import chaos, data, injection
from safetrain.config import Loader
from safetrain.faults import FAULTS
from safetrain.injection import PLACES, Fault, inject
from safetrain.verdict import Verdict


class Recipe(SimpleNamespace):
    """As much of a Trainer as an injected fault needs."""

    def training_step(self, batch: int) -> int:
        doubled = 2 * batch  # the first line: it must not run
        self.lines.append(doubled)
        return doubled

    def build_model(self) -> str:
        return "model"


def recipe(folder: Path, rank: int = 1, **fault: Any) -> tuple[Recipe, Path]:
    trainer, note = Recipe(step=0, run_dir=folder, lines=[]), folder / "note"
    chosen = {"what": "raise", "at": "training_step", "rank": 1, "step": 2} | fault
    inject(Fault(note=str(note), **chosen), trainer, rank, 2)  # type: ignore[arg-type]
    return trainer, note


def test_it_strikes_once_at_its_step_and_at_the_users_line(tmp_path: Path) -> None:
    trainer, note = recipe(tmp_path)
    assert [trainer.training_step(3), trainer.training_step(4)] == [6, 8]
    trainer.step = 2
    with pytest.raises(RuntimeError, match="injected"):
        trainer.training_step(5)
    assert trainer.lines == [6, 8]
    place = json.loads(note.read_text())["place"]
    file, _, line = place.rpartition(":")
    assert file == __file__
    assert "doubled = 2 * batch" in Path(file).read_text().splitlines()[int(line) - 1]
    assert trainer.training_step(6) == 12  # once


def test_another_rank_is_left_alone(tmp_path: Path) -> None:
    trainer, note = recipe(tmp_path, rank=0, step=0)
    assert trainer.training_step(1) == 2
    assert not note.exists()


def test_what_builds_is_struck_before_any_step(tmp_path: Path) -> None:
    trainer, _ = recipe(tmp_path, at="build_model", step=7)
    with pytest.raises(RuntimeError, match="injected"):
        trainer.build_model()


def test_one_process_of_a_rank_strikes(tmp_path: Path) -> None:
    trainer, note = recipe(tmp_path, step=0)
    note.write_text("another loader process was first")
    assert trainer.training_step(1) == 2


def test_a_fault_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fault.from_environment() is None
    fault = Fault("gil", "dataset", -1, 3, "note")
    for name, value in fault.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Fault.from_environment() == fault


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=mine"], "fault is missing."),
        (["fault=sigkil"], "fault=sigkil: no such choice. Did you mean sigkill?"),
        (["fault=raise", "at=datset"], "at=datset: no such choice. Did you mean dataset?"),
        (["fault=stuck", "at=launcher"], "at=launcher takes a signal"),
        (["fault=raise", "launcher=torchrum"], "launcher=torchrum: no such choice. Did you mean torchrun?"),
        (["fault=raise", "launch.nproc_per_node=4"], "launch.nproc_per_node=4: here it is ranks=4"),
        (["fault=raise", "rank=2"], "rank=2: there are 2 ranks. Allowed: -2 to 1."),
        (["fault=raise", "-m", "optimizer.lr=1,2"], "a trial is of one job: leave out -m"),
        (["fault=raise", "step=two"], "step=two: must be a whole number"),
    ],
)
def test_a_wrong_argument(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_trial_writes_where_no_run_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported by a new user: a later resume=auto of that name went on from the trial's checkpoint."""
    job = ["recipe=mine", "name=x", "resume=auto"]
    assert chaos._apart(job) == [*job, 'hydra.run.dir="${run_dir:outputs/chaos/${name}}"']
    assert chaos._apart([*job, "hydra.run.dir=here"]) == [*job, "hydra.run.dir=here"]
    verdict = Verdict("Training failed on rank 1.", kept="The last checkpoint is step_2: go on with resume=auto.")
    assert "trial" not in verdict.text(None)
    monkeypatch.setenv(injection.ENVIRONMENT, "{}")
    assert verdict.text(None).endswith(f"resume=auto.\n\n{injection._TRIAL}\n")
    assert injection.marked_as_trial(verdict.text(None)) == verdict.text(None)
    assert "trial" not in Verdict("Training failed on rank 1.").text(None)


def test_without_arguments_the_faults_and_the_places_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main([]) == 0
    listed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in listed if line.startswith("fault=")] == [f"fault={name}" for name in FAULTS]
    assert [line for line in listed if line.startswith("at=")] == [f"at={place}" for place in PLACES]


@pytest.mark.parametrize(
    ("story", "named"),
    [
        ("Training failed: rank 1 (process 7) was killed by SIGKILL.\n\nmore\n", True),
        ("Training failed: rank 0 (process 7): closed by peer.\n\nRank 1 did not fail.\n", False),
        ("Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9\n", True),
        ("Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9\n", False),
        ("", False),
    ],
)
def test_only_the_first_sentence_can_name_the_culprit(story: str, named: bool) -> None:
    assert chaos._names(story, Fault("sigkill", "training_step", 1, 2), 1, "mine.py:4") is named


@pytest.mark.parametrize(("line", "named"), [("mine.py:4", True), ("mine.py:5", False)])
def test_a_fault_in_user_code_is_named_by_its_line(line: str, named: bool) -> None:
    story = f"Training failed on rank 1.\n\n  {line}\n"
    assert chaos._names(story, Fault("raise", "training_step", 1, 2), 1, "mine.py:4") is named


class _Counting:
    """A trigger that only counts."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, function: Any, *args: Any) -> Any:
        self.calls += 1
        return function(*args)


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)


@pytest.mark.parametrize("dataset", [_Numbers(), list(range(6))], ids=["stream", "map"])
def test_every_batch_is_read_under_the_triggers_eyes(dataset: Any) -> None:
    """Reported by a first user: at=dataset never struck in an iterable dataset, whose class has a __getitem__, too."""
    trigger, options = _Counting(), Loader(batch_size=2, shuffle=False)
    place = {"rank": 0, "world_size": 1, "seed": 0, "train": True}
    loader = injection._build_loader(data.build_loader, trigger, "dataset", dataset, options, **place)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert trigger.calls in (3, 4)  # of a stream, its end as well

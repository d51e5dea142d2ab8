"""The preflight on real ranks: what it refuses it refuses on all of them, and what it looks at it leaves as it was."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import safetrain
from safetrain import Comm, DataError, Loader, Loop, Preflight, PreflightError, checkup, links
from safetrain.preflight_config import CHECK_NAMES
from safetrain.testing import run_ranks
from tests.ranks.toys import CLASSES, FEATURES, Classifier, assert_same, dataset, momentum_sgd, samples, state


def dropout_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES)
    )


def trainer(**parts: Any) -> Classifier:
    parts = {"optimizer": momentum_sgd, "loader": Loader(batch_size=4), **parts}
    return Classifier(parts.pop("model", dropout_net()), parts.pop("data", dataset(24)), **parts)


def refusal(comm: Comm, **parts: Any) -> str:
    """What ``fit`` is refused with."""
    with pytest.raises(PreflightError) as caught:
        trainer(**parts).fit()
    return str(caught.value)


def _train(comm: Comm, preflight: Preflight, workers: int) -> dict[str, torch.Tensor]:
    loader = Loader(batch_size=4, shuffle=True, num_workers=workers)
    run = trainer(preflight=preflight, loader=loader, loop=Loop(epochs=2), seed=3)
    run.fit()
    return state(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_the_same_to_the_bit_with_and_without(workers: int) -> None:
    without = run_ranks(_train, 2, Preflight(enabled=False), workers)
    for preflight in (Preflight(), Preflight(deep=True)):
        assert_same([*without, *run_ranks(_train, 2, preflight, workers)])


def _look(comm: Comm) -> list[tuple[str, str]]:
    with checkup.collecting():
        trainer(preflight=Preflight(deep=True)).fit()
    return [(one.check, one.verdict) for one in checkup.FOUND]


def test_every_check_looks_and_finds_nothing_on_healthy_ranks() -> None:
    first, second = run_ranks(_look, 2)
    assert first == second, "all ranks judge alike"
    assert list(dict.fromkeys(name for name, _ in first)) == list(CHECK_NAMES)
    strange = {name for name, verdict in first if verdict != "ok"} - {"links", "memory", "disk", "name_lookup"}
    assert not strange, "the machine may be small, or busy"


def _data_of_two_lengths(comm: Comm) -> list[str]:
    data = dataset(24 + comm.rank)
    told = [refusal(comm, data=data)]
    with pytest.raises(DataError) as caught:
        trainer(data=data, preflight=Preflight(enabled=False)).fit()
    return [*told, str(caught.value)]


def test_data_of_another_length_is_refused_on_all_ranks() -> None:  # H01
    first, second = run_ranks(_data_of_two_lengths, 2)
    assert first == second
    assert first[0].startswith(
        "dataset: the training data is not the same on all ranks: TensorDataset of 24 samples on rank 0, "
        "TensorDataset of 25 samples on rank 1."
    )
    assert first[0].endswith("To train in spite of it: preflight.checks.dataset=warn")
    assert first[1].startswith("epoch 0: the training dataset has different numbers of samples")


def _differences(comm: Comm, folder: Path) -> dict[str, str]:
    odd = comm.rank == 1
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Linear(2, 5 if odd else 4))
    frozen[1].requires_grad_(False)
    cases: dict[str, dict[str, Any]] = {
        "seed": {"seed": comm.rank},
        "parameters": {"model": frozen},
        "run_dir": {"run_dir": folder / f"12-00-0{comm.rank}", "preflight": Preflight(checks={"config": "off"})},
        "options": {"preflight": Preflight(enabled=not odd)},
    }
    told = {}
    for name, parts in cases.items():
        comm.examined = False
        told[name] = refusal(comm, **parts)
    return told


def test_what_each_rank_draws_for_itself_is_refused(tmp_path: Path) -> None:  # H21, H25, H65, H102, H105
    first, second = run_ranks(_differences, 2, tmp_path)
    assert first == second
    assert first["seed"].startswith("config: seed is not the same on all ranks: 0 on rank 0, 1 on rank 1.")
    assert first["parameters"].startswith("parameters: 1.weight is not the same on all ranks: (4, 2) float32 frozen on")
    assert f"the ranks write to different directories: {tmp_path}/12-00-00 on rank 0" in first["run_dir"]
    assert first["options"].startswith("config: the preflight itself is not the same on all ranks")
    assert not list(tmp_path.rglob(".preflight")), "no token is left"


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _other_items(comm: Comm) -> tuple[list[str], str]:
    logger, kept = logging.getLogger("safetrain"), _Kept()
    logger.addHandler(kept)
    data = TensorDataset(*samples(24, seed=comm.rank))
    trainer(data=data).fit()
    return kept.said, refusal(comm, data=data, preflight=Preflight(checks={"dataset": "refuse"}))


def test_a_warning_comes_once_and_can_be_made_a_refusal() -> None:  # H65
    (said, first), (nothing, second) = run_ranks(_other_items, 2)
    assert nothing == []
    assert len(said) == 1
    assert said[0].startswith("preflight: dataset: item 0 of the training data is not the same on all ranks (digests ")
    assert first == second
    assert first.startswith("dataset: item 0 of the training data")


class _Reseeds(Classifier):
    def on_epoch_start(self) -> None:
        torch.manual_seed(7)


def _reseeded(comm: Comm) -> list[str]:
    with checkup.collecting():
        _Reseeds(dropout_net(), dataset(24), optimizer=momentum_sgd).fit()
    return [one.words for one in checkup.FOUND if one.check == "random"]


def test_a_seed_that_makes_ranks_draw_the_same_is_told() -> None:  # H69
    told = "all ranks would draw the same random numbers from torch."
    assert run_ranks(_reseeded, 2) == [[told], [told]]


def _no_sum(comm: Comm, wrong: bool) -> str:
    right = links.sum_of_ranks
    if comm.rank == 1:
        links.sum_of_ranks = lambda _: right(comm) + "7 came out, and 3 is right" if wrong else str(time.sleep(60))
    return refusal(comm, preflight=Preflight(all_reduce_s=0.3))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(True, "failed: 7 came out, and 3 is right (rank 1)"), (False, "failed: no answer for 0.3 s (ranks 0 and 1)")],
)
def test_a_first_sum_that_is_wrong_or_never_comes(wrong: bool, told: str) -> None:  # H73, H80
    first, second = run_ranks(_no_sum, 2, wrong)
    assert first == second
    assert told in first
    assert "GLOO_SOCKET_IFNAME" in first


class _WithUnused(Classifier):
    def training_step(self, batch: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        x, y = batch
        self.log("mean", float(x.mean()))
        if self.run_as == "fails" and self.comm.rank == 1:
            raise ValueError("no such label")
        return super().training_step((x, y))


def _first_steps(comm: Comm, run_as: str) -> Any:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    model.idle = nn.Linear(2, 2)  # type: ignore[assignment]
    model.forward = model[0].forward  # type: ignore[method-assign]
    run = _WithUnused(model, dataset(16), optimizer=momentum_sgd, loop=Loop(max_steps=1), loader=Loader(batch_size=4),
                      preflight=Preflight(deep=True))  # fmt: skip
    run.run_as = run_as  # type: ignore[attr-defined]
    with checkup.collecting():
        if run_as == "fails":
            with pytest.raises(safetrain.SafetrainError):
                run.fit()
        else:
            run.fit()
        step = [one for one in checkup.FOUND if one.check == "first_step"]
    return [(one.verdict, one.words) for one in step], getattr(run, "steps", 0)


def test_the_first_step_alone() -> None:  # S24
    (found, steps), _ = run_ranks(_first_steps, 2, "well")
    assert found == [("warn", "no gradient for idle.weight, idle.bias on all ranks.")]
    assert steps == 1, "the one that was tried is not counted"
    (found, _), _ = run_ranks(_first_steps, 2, "fails")
    assert found[0][0] == "refuse"
    assert found[0][1].startswith("the first step of rank 1, alone, failed: ValueError: no such label at ")

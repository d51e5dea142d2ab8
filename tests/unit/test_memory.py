"""Memory: what rises steadily and when it is full, who holds what; exact values."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from safetrain import limits
from safetrain.activity import Activity
from safetrain.contain import Share, run_training_step
from safetrain.memory import MemoryMeter, MemoryTable, Reading, peak_bytes, resident_bytes
from safetrain.memory_growth import Growth, GrowthWatch, rise_per_step
from safetrain.out_of_memory import Census, owners, table

MIB, GIB = 1 << 20, 1 << 30


def points(*mib: float, every: int = 10) -> list[tuple[int, float]]:
    return [(every * index, value * MIB) for index, value in enumerate(mib)]


@pytest.mark.parametrize(
    ("seen", "expected_mib"),
    [
        (points(100, 220, 340, 460, 580), 12.0),
        (points(100, 220, 310, 430, 550), 11.25),  # one rise is smaller, and still three quarters of the largest
        (points(100, 500, 700, 800, 850), 0.0),  # warming up: ever slower
        (points(100, 220, 340, 340, 460), 0.0),  # once it did not rise
        (points(100, 220, 340, 460), 0.0),  # too few
        (points(100.0, 100.1, 100.2, 100.3, 100.4), 0.0),  # 10 KiB a step: the allocator's grain
    ],
)
def test_what_counts_as_a_steady_rise(seen: list[tuple[int, float]], expected_mib: float) -> None:
    assert rise_per_step(seen) == pytest.approx(expected_mib * MIB)


def judged(leaks_mib: list[float], left: float, total_steps: int | None, sharers: int = 2) -> list[Growth]:
    watch = GrowthWatch("host", sharers)
    said = []
    for step in range(10, 110, 10):
        used = [GIB + leak * MIB * step for leak in leaks_mib]
        if found := watch.judge(step, used, [left] * len(leaks_mib), total_steps):
            said.append(found)
    return said


def test_a_leak_is_told_once_with_the_rank_the_rate_and_the_steps_that_are_left() -> None:
    (found,) = judged([0, 12], left=3600 * MIB, total_steps=100_000)
    assert found == Growth("host", (1,), 12 * MIB, 3600 * MIB, 300)
    assert str(found).startswith(
        "memory will run out: rank 1's host memory grows by 12 MiB a step; the 3.52 GiB left on its machine are full "
        "in about 300 steps. Something is kept at every step"
    )


def test_ranks_of_one_machine_fill_one_memory() -> None:
    (found,) = judged([12, 12, 0, 0], left=3600 * MIB, total_steps=None)
    assert (found.ranks, found.steps) == ((0, 1), 150)
    assert "the host memory of ranks 0 and 1 grows, by up to 12 MiB a step" in str(found)
    (apart,) = judged([12, 12], left=3600 * MIB, total_steps=None, sharers=1)
    assert apart.steps == 300


def test_what_lasts_to_the_end_of_the_run_is_not_told() -> None:
    assert judged([0, 12], left=3600 * MIB, total_steps=310) == []
    assert judged([0, 12], left=12 * 4001 * MIB, total_steps=None) == [], "more than 100 times as far as was looked"
    assert [one.steps for one in judged([0, 12], left=12 * 3999 * MIB, total_steps=None)] == [3999]


def test_it_is_told_again_when_half_the_time_is_over() -> None:
    watch = GrowthWatch("device", 1)
    told = []
    for step in range(10, 310, 10):
        left = 3600 * MIB - 12 * MIB * (step - 50)
        if found := watch.judge(step, [12 * MIB * step], [left], None):
            told.append((step, found.steps))
    assert told == [(50, 300), (200, 150), (280, 70)]


def test_a_table_of_all_ranks_is_summed_up_with_the_rank() -> None:
    tables = [MemoryTable(rank, 2, sharers=2) for rank in range(2)]
    rows = []
    for rank, one in enumerate(tables):
        meter = MemoryMeter(Activity(), torch.device("cpu"))
        meter.by_phase["forward"] = (rank + 1) * 10.0 * MIB
        meter.by_phase["data"] = 8.0 * MIB
        meter.read = lambda rank=rank: Reading((rank + 1) * GIB, (rank + 2) * GIB, 6 * GIB - rank * GIB, 16 * GIB)  # type: ignore[method-assign,misc]
        rows.append(one.row(meter))
    summed = [a + b for a, b in zip(*rows, strict=True)]
    for one in tables:
        one.add(summed)
        assert one.metrics() == {
            "memory/host_peak_mib": 3 * 1024, "memory/host_peak_rank": 1.0, "memory/host_left_mib": 5 * 1024,
            "memory/data_mib": 8.0, "memory/forward_mib": 20.0,
        }  # fmt: skip
        assert (
            one.summary() == "memory at its peak: 3 GiB of 16 GiB on the host (rank 1); most of it in forward, 20 MiB."
        )
        assert one.warnings(10, None) == []


def test_a_machine_that_is_nearly_full_is_told_once_and_not_at_the_first_sight() -> None:
    one = MemoryTable(0, 1, sharers=1)
    said = []
    for step, left in enumerate([GIB / 2, 9 * GIB, GIB / 2, GIB / 4, GIB / 8]):
        one.add([*Reading(GIB, GIB, left, 16 * GIB), *[0.0] * 7])
        said += [(step, text) for text in one.warnings(step, None)]
    ((step, text),) = said
    assert step == 3
    assert text.startswith("memory is nearly full: 256 MiB of 16 GiB are left on the machine of rank 0")


def test_the_meter_reads_this_process_and_its_phases() -> None:
    activity = Activity()
    meter = MemoryMeter(activity, torch.device("cpu"))
    assert meter.read().host_used == pytest.approx(resident_bytes(), rel=0.1)
    meter.look_at_next_step()
    kept = []
    for phase in ("data", "training_step", "backward", "log"):
        activity.enter(phase)
        if phase == "training_step":
            kept.append(torch.ones(64 * MIB // 4))
    reading = meter.read()
    assert not activity.listeners, "it listens in one step only"
    grown = meter.by_phase["forward"] - meter.by_phase["data"]
    assert grown == pytest.approx(64 * MIB, rel=0.1)
    assert meter.by_phase["optimizer"] == 0.0
    assert peak_bytes() >= reading.host_used > 0
    assert 0 < reading.host_left < reading.host_limit


def test_a_containers_limit_is_the_limit(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text("max\n")
    assert limits.memory_limit(tmp_path, tmp_path) == 1000 * 1024
    (tmp_path / "job" / "memory.max").write_text("4096\n")
    assert limits.memory_limit(tmp_path, tmp_path) == 4096


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 100))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_every_tensor_has_its_owner() -> None:
    model, optimizer = small()
    found = {(one.kind, one.name): (one.bytes, one.what) for one in owners(model, {"optimizer": optimizer})}
    assert found["parameter", "2.weight"] == (3200, "100x8 float32")
    assert found["gradient", "2.weight"] == (3200, "100x8 float32")
    assert found["optimizer", "2.weight.exp_avg"] == (3200, "100x8 float32")
    assert found["buffer", "1.num_batches_tracked"] == (8, "scalar int64")
    lines = table(owners(model, {"optimizer": optimizer}), 3, "no more").splitlines()
    assert lines[0].startswith("rank 3 was out of memory in ")
    assert lines[0].endswith(": no more")
    assert lines[2].split() == ["optimizer", "7.49", "KiB"]
    assert lines[lines.index("The largest:") + 1].split() == [
        "3.12",
        "KiB",
        "parameter",
        "2.weight",
        "100x8",
        "float32",
    ]


def test_what_the_code_was_at_is_told_and_let_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = small()
    share = Share(census=Census(model, {"optimizer": optimizer}, tmp_path, rank=1).tell)
    held: list[weakref.ref[torch.Tensor]] = []

    def step(_batch: object, _samples: int | None) -> None:
        scores = torch.ones(3000, 100)
        held.append(weakref.ref(scores))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with caplog.at_level(logging.WARNING):
        assert run_training_step(step, None, 1, share) is None
    gc.collect()
    assert held[0]() is None, "the activation is free again"
    assert "the largest tensor is scores at test_memory.py:" in share.reason
    assert share.reason.endswith("(variable), 1.14 MiB; all of them: memory/out_of_memory_rank_1.txt")
    text = (tmp_path / "memory" / "out_of_memory_rank_1.txt").read_text()
    assert "3000x100 float32" in text
    assert "2.weight  100x8 float32" in text


def test_an_error_that_no_window_caught_is_told_on_the_way_out() -> None:
    model, optimizer = small()
    census = Census(model, {"optimizer": optimizer}, None, rank=0)
    with pytest.raises(MemoryError) as raised, census.on_the_way_out():
        raise MemoryError("in the optimizer's first step")
    assert raised.value.__notes__ == ["Out of memory; the largest tensor is 2.weight (parameter), 3.12 KiB"]
    with pytest.raises(ValueError, match="other") as other, census.on_the_way_out():
        raise ValueError("other")
    assert not hasattr(other.value, "__notes__")


def test_torch_has_the_private_names_that_are_used() -> None:
    """Seen on torch 2.13."""
    assert callable(torch.cuda.memory._snapshot)
    for name in ("prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"):
        assert callable(getattr(torch.profiler.profile, name))

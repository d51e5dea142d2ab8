"""events.jsonl and TensorBoard: what is told can be read back, on rank 0 only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from safetrain.telemetry import Event, EventLog, Observer, ProgressBar, RunInfo, TensorBoard


def run_info(directory: Path | None, **changes: Any) -> RunInfo:
    facts: dict[str, Any] = {
        "rank": 0, "world_size": 2, "run_dir": directory, "name": "demo", "epochs": 3, "steps_per_epoch": 4,
        "max_steps": None, "start_step": 0, "config_text": "lr: 0.1\n", "device": "cpu", "parameters": 1234,
    }  # fmt: skip
    return RunInfo(**facts | changes)


TOLD = [
    Event("train", 10, 0, {"train/loss": 0.5, "train/lr": 0.1, "train/skipped_steps": 0.0}),
    Event("validation", 12, 0, {"val/loss": 0.25, "val/accuracy": 0.75}),
    Event("skip", 13, 1, text="a NaN batch on rank 1"),
    Event("train", 20, 1, {"train/loss": 0.125, "train/lr": 0.05, "train/skipped_steps": 1.0}),
    Event("end", 24, 1),
]


def tell_all(observer: Observer, run: RunInfo) -> None:
    observer.start(run)
    for event in TOLD:
        observer.step(event.step, event.epoch)
        observer.event(event)
    observer.close()


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 12),
        ({"max_steps": 5}, 5),
        ({"max_steps": 100}, 12),
        ({"steps_per_epoch": None}, None),
        ({"steps_per_epoch": None, "max_steps": 7}, 7),
    ],
)
def test_total_steps(changes: dict[str, Any], total: int | None) -> None:
    assert run_info(None, **changes).total_steps == total


def test_event_log_is_one_object_a_line(tmp_path: Path) -> None:
    tell_all(EventLog(), run_info(tmp_path / "run"))
    start, *events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert (start["kind"], start["world_size"], start["parameters"]) == ("start", 2, 1234)
    assert [(event["kind"], event["step"], event["epoch"]) for event in events] == [
        (event.kind, event.step, event.epoch) for event in TOLD
    ]
    assert events[1]["metrics"] == {"val/loss": 0.25, "val/accuracy": 0.75}
    assert events[2]["text"] == "a NaN batch on rank 1"


def test_event_log_is_on_disk_before_it_is_closed_and_is_strict_json(tmp_path: Path) -> None:
    log = EventLog()
    log.start(run_info(tmp_path))
    log.event(Event("train", 1, 0, {"train/loss": math.nan, "train/grad_norm": math.inf}))

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    last = (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=refuse)["metrics"] == {"train/loss": "nan", "train/grad_norm": "inf"}
    log.close()


def read_curves(run_dir: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    curves = {tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return curves, texts


def test_tensorboard_has_every_metric_and_the_config(tmp_path: Path) -> None:
    tell_all(TensorBoard(), run_info(tmp_path))
    curves, texts = read_curves(tmp_path)
    assert curves == {
        "train/loss": [(10, 0.5), (20, 0.125)],
        "train/lr": [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))],
        "train/skipped_steps": [(10, 0.0), (20, 1.0)],
        "val/loss": [(12, 0.25)],
        "val/accuracy": [(12, 0.75)],
    }
    assert texts == {"config/text_summary": "```yaml\nlr: 0.1\n\n```"}


def test_tensorboard_of_a_resumed_run_drops_what_the_earlier_process_drew_later(tmp_path: Path) -> None:
    first, second = TensorBoard(), TensorBoard()
    first.start(run_info(tmp_path))
    for step in (1, 2, 3):
        first.event(Event("train", step, 0, {"train/loss": float(step)}))
    first.close()
    second.start(run_info(tmp_path, start_step=1))
    second.event(Event("train", 2, 0, {"train/loss": 20.0}))
    second.close()
    assert read_curves(tmp_path)[0]["train/loss"] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("observer", [EventLog, TensorBoard, ProgressBar])
@pytest.mark.parametrize("who", [{"rank": 1}, {"run_dir": None}], ids=["rank 1", "no run directory"])
def test_nothing_is_written_elsewhere(observer: type[Observer], who: dict[str, Any], tmp_path: Path) -> None:
    tell_all(observer(), run_info(tmp_path, **who))
    assert list(tmp_path.iterdir()) == []


def told_in(directory: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [(line["kind"], line.get("step", line.get("start_step"))) for line in lines]


def test_events_of_a_resumed_run_have_no_gap_and_no_duplicate(tmp_path: Path) -> None:
    cut = EventLog()
    cut.start(run_info(tmp_path))
    timing = Event("timing", 10, 0, text="a step took 3 ms")  # another process may have none, or others: not counted
    memory = Event("memory", 10, 0, text="memory will run out: ...")
    for event in (TOLD[0], timing, memory, *TOLD[1:4], timing):
        cut.event(event)
    cut.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "kind": "tra')  # killed while it wrote
    resumed = EventLog()
    resumed.start(run_info(tmp_path, start_step=12, start_events=2))
    for event in TOLD[2:]:
        resumed.event(event)
    resumed.close()
    kept = [("start", 0), ("train", 10), ("timing", 10), ("memory", 10), ("validation", 12)]
    assert told_in(tmp_path) == [*kept, ("start", 12)] + [(event.kind, event.step) for event in TOLD[2:]]


def test_a_run_that_begins_anew_in_its_directory_tells_everything_again(tmp_path: Path) -> None:
    for _ in range(2):
        tell_all(EventLog(), run_info(tmp_path))
    assert told_in(tmp_path) == [("start", 0), ("start", 0), *((event.kind, event.step) for event in TOLD)]


def test_curves_of_a_resumed_run_have_no_gap_and_no_duplicate(tmp_path: Path) -> None:
    cut = TensorBoard(flush_s=1000)
    cut.start(run_info(tmp_path))
    cut.event(TOLD[0])
    cut.event(Event("checkpoint", 10, 0))
    assert read_curves(tmp_path)[0]["train/loss"] == [(10, 0.5)]  # it may be killed now
    cut.event(Event("train", 20, 0, {"train/loss": 99.0}))
    cut.close()
    resumed = TensorBoard()
    resumed.start(run_info(tmp_path, start_step=10, start_events=1))
    resumed.event(TOLD[3])
    resumed.close()
    assert read_curves(tmp_path)[0]["train/loss"] == [(10, 0.5), (20, 0.125)]

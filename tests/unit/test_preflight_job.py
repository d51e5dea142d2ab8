"""What a job needs: its data the same on all ranks, a run directory, disk, memory, shared memory, a safe fork."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from safetrain.config import Loader
from safetrain.data import build_loader
from safetrain.feed import Feed
from safetrain.needs import (
    Disk,
    Fork,
    Memory,
    RunDir,
    SharedMemory,
    foreign_threads,
    leave_token,
    read_token,
    remove_token,
    state_bytes,
)
from safetrain.sample import Batches, Sample, TrainingData, own_generators, read_items, take_sample, untouched
from safetrain.seeding import generator_states
from tests.unit.fake_ranks import only, said

MIB, GIB = 1 << 20, 1 << 30


def feed(data: Any, workers: int = 0) -> Feed:
    loader = build_loader(data, Loader(batch_size=2, num_workers=workers), rank=0, world_size=2, seed=0, train=True)
    return Feed(loader, torch.device("cpu"))


def numbers(count: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(count * 4).reshape(count, 4).float())


# --- a sample of the data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_few_items_and_their_size(workers: int) -> None:
    sample = take_sample(feed(numbers(), workers), 5)
    assert (sample.kind, sample.length, sample.item_bytes, sample.note) == ("TensorDataset", 10, 16, "")
    assert list(sample.digests) == ["0", "5", "9"]
    assert sample == take_sample(feed(numbers(), 0), 5)


class _Draws(Dataset[Any]):
    """Every way to be random, and a count of readings."""

    def __init__(self) -> None:
        self.inside = {"own": [np.random.default_rng(1), random.Random(2), torch.Generator(), np.random.RandomState(3)]}
        self.read = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        torch.rand(1), np.random.rand(), random.random()
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_no_trace(workers: int) -> None:
    data = _Draws()
    before = generator_states()
    take_sample(feed(Subset(data, [0, 1, 2]), workers), 5)
    after = generator_states()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert before["random"] == after["random"]
    assert (data.read > 0) == (workers == 0), "with loader processes the data set is read in another process"


def test_generators_of_the_data_set_are_put_back() -> None:
    data = _Draws()
    numpy_own, python_own, torch_own, legacy_own = data.inside["own"]
    assert isinstance(numpy_own, np.random.Generator)
    assert {id(one) for one in own_generators(Subset(data, [0]))} == {id(one) for one in data.inside["own"]}

    def draws() -> list[float]:
        drawn = torch.rand(1, generator=torch_own)  # type: ignore[arg-type]
        return [numpy_own.random(), python_own.random(), float(drawn), legacy_own.rand()]  # type: ignore[union-attr]

    with untouched(data):
        first = draws()
    assert draws() == first


def test_the_search_for_generators_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 0
    for _ in range(30):
        deep = [deep] * 64
    begin = time.process_time()
    assert own_generators(SimpleNamespace(loop=loop, deep=deep)) == []
    assert time.process_time() - begin < 1


def test_items_that_can_not_be_compared() -> None:
    counter = iter(range(100))
    assert read_items(_By(lambda _: next(counter)), [0, 1], 5)[0::2] == (
        {},
        "items are not the same when they are read again",
    )
    digests, _, note = read_items(_By(lambda index: 1 // (1 - index)), [0, 1], 5)
    assert (digests, note.partition(":")[0]) == ({}, "item 1 can't be read")
    digests, _, note = read_items(_By(lambda index: index), [0, 1, 2], 0)
    assert (list(digests), note) == (["0"], "reading is slow: 1 of 3 items compared")


class _By(Dataset[Any]):
    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def test_a_data_set_that_hangs_or_crashes_in_its_own_process() -> None:
    never = threading.Event()
    begin = time.monotonic()
    sample = take_sample(feed(_By(lambda _: never.wait(60)), 1), 0.1)
    assert sample.note == "an item takes longer than 0.1 s"
    assert time.monotonic() - begin < 30
    assert take_sample(feed(_By(lambda _: os.abort()), 1), 5).note == "an item ended the process that read it"


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a stream must not be read before its time")


def test_streams_and_foreign_samplers_are_left_alone() -> None:
    assert take_sample(feed(_Stream()), 5) == Sample("_Stream", None, {}, None, "a stream can't be read twice")
    own = DataLoader(numbers(), sampler=torch.utils.data.SequentialSampler(numbers()))
    assert take_sample(feed(own), 5).length == 10
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 10, 10)
    assert take_sample(feed(DataLoader(numbers(), sampler=weighted)), 5).note == "your own sampler knows its keys"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        ({"x": np.ones(2), "y": "a"}, {"x": np.ones(2), "y": "a"}, True),
        ({"x": np.ones(2), "y": "a"}, {"x": np.ones(2), "y": "b"}, False),
        ((1, b"z", None, True), (1, b"z", None, True), True),
        (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16), True),
        (
            SimpleNamespace(a=1),
            SimpleNamespace(a=2),
            True,
        ),  # its text may be an address
    ],
)
def test_digests(one: Any, other: Any, same: bool) -> None:
    first, second = (read_items(_By(lambda _, item=item: item), [0], 5)[0]["0"] for item in (one, other))  # type: ignore[misc]
    assert (first == second) is same


# --- what is judged of it ---------------------------------------------------------------------------------------------


def sample(length: int | None = 10, digest: str = "aa", note: str = "") -> dict[str, Any]:
    return Sample("Mine", length, {"0": "00", "9": digest}, 16, note)._asdict()


def test_the_same_data() -> None:
    assert only(TrainingData().judge(said(sample(), sample()))).value == "Mine of 10 samples, items 0, 9 the same"
    slow = sample(note="reading is slow")
    assert only(TrainingData().judge(said(sample(), slow))).value.endswith("the same, reading is slow")


def test_another_length() -> None:  # H01
    found = only(TrainingData().judge(said(sample(), sample(12))))
    assert found.verdict == "refuse"
    assert found.value == "Mine of 10 samples on rank 0, Mine of 12 samples on rank 1"


def test_another_item() -> None:  # H65: a list shuffled by each rank for itself; files that differ between machines
    found = only(TrainingData().judge(said(sample(), sample(), sample(digest="bb"))))
    assert (found.verdict, found.ranks) == ("warn", (2,))
    assert found.words == (
        "item 9 of the training data is not the same on all ranks (digests aa on ranks 0 and 1, bb on rank 2)."
    )


def batches(count: int | None, uneven: str = "UnevenStop") -> dict[str, Any]:
    return {"batches": count, "uneven": uneven}


def test_batches() -> None:
    assert only(Batches().judge(said(batches(5), batches(5)))).value == "5 a rank"
    assert only(Batches().judge(said(batches(5), batches(None)))).value == "not known before they are read"
    assert only(Batches().judge(said(batches(5), batches(6)))).verdict == "ok"
    assert only(Batches().judge(said(*[batches(n, "UnevenContinue") for n in (5, 50)]))).verdict == "ok"
    found = only(Batches().judge(said(batches(50), batches(5))))
    assert (found.verdict, found.ranks) == ("warn", (1,))
    assert found.words == "an epoch ends for all ranks after the 5 batches of rank 1; others have up to 50."


# --- the run directory ------------------------------------------------------------------------------------------------


def run_dir(path: str = "/run", found: str = "t", token: str = "t", *, saves: bool = True) -> dict[str, Any]:
    return {"path": path, "found": found, "token": token, "saves": saves}


def test_a_token_is_left_found_and_removed(tmp_path: Path) -> None:
    leave_token(tmp_path / "run", "word")
    assert read_token(tmp_path / "run") == "word"
    remove_token(tmp_path / "run")
    assert read_token(tmp_path / "run") == "No such file or directory"
    (tmp_path / "file").touch()
    leave_token(tmp_path / "file" / "run", "word")
    assert read_token(tmp_path / "file" / "run") == "Not a directory"


def test_one_run_directory() -> None:
    assert only(RunDir().judge(said(run_dir(), run_dir(token="")))).value == "the same for all"
    assert only(RunDir().judge(said(run_dir("", "", ""), run_dir("", "", "")))).value == "none: nothing is written"


def test_a_run_directory_each() -> None:  # H21, H102
    found = only(RunDir().judge(said(run_dir("/run/12-00-01"), run_dir("/run/12-00-02", token=""))))
    assert (found.verdict, found.value) == ("refuse", "/run/12-00-01 on rank 0, /run/12-00-02 on rank 1")


def test_a_path_that_means_another_disk_on_another_machine() -> None:
    blind = run_dir(found="No such file or directory", token="")
    found = only(RunDir().judge(said(run_dir(), blind, hosts=["a", "b"])))
    assert (found.verdict, found.ranks) == ("refuse", (1,))
    assert found.words.startswith("/run of rank 1 (b) is not rank 0's: ")
    only_logs = [run_dir(saves=False), {**blind, "saves": False}]
    assert only(RunDir().judge(said(*only_logs, hosts=["a", "b"]))).verdict == "warn"


def test_a_run_directory_that_takes_no_file() -> None:
    found = only(RunDir().judge(said(run_dir(found="Read-only file system"), run_dir(found="x", token=""))))
    assert (found.verdict, found.words) == ("warn", "rank 0 can't write to /run: Read-only file system.")


# --- what there has to be of it ---------------------------------------------------------------------------------------


def test_disk() -> None:
    assert only(Disk().judge(said({"free": None, "checkpoint": 5}))).value == "no run directory"
    assert only(Disk().judge(said({"free": 3 * GIB, "checkpoint": GIB}))).verdict == "ok"
    found = only(Disk().judge(said({"free": 3 * GIB, "checkpoint": GIB}, {"free": 2 * GIB, "checkpoint": GIB})))
    assert (found.verdict, found.ranks) == ("warn", (1,))
    assert found.words == "2 GiB are free for the run directory, and 3 checkpoints take about 3 GiB."


def test_memory() -> None:
    roomy, tight = {"left": 8 * GIB, "need": GIB}, {"left": 3 * GIB, "need": 2 * GIB}
    assert only(Memory().judge(said(roomy, roomy))).verdict == "ok"
    found = only(Memory().judge(said(roomy, tight, tight, hosts=["a", "b", "b"])))
    assert (found.verdict, found.ranks) == ("warn", (1, 2))
    assert found.words.startswith("b (or its container) has 3 GiB of memory left, and its ranks need 4 GiB")


def shm(free: int | None, need: int | None, workers: int = 2) -> dict[str, Any]:
    return {"free": free, "workers": workers, "need": need}


def test_shared_memory() -> None:  # H71
    assert only(SharedMemory().judge(said(shm(MIB, None, workers=0)))).value == "not needed: no loader processes"
    assert only(SharedMemory().judge(said(shm(64 * MIB, MIB)))).verdict == "ok"
    assert only(SharedMemory().judge(said(shm(None, MIB)))).value == "there is no /dev/shm"
    found = only(SharedMemory().judge(said(*[shm(64 * MIB, 40 * MIB)] * 2)))
    assert found.verdict == "warn"
    assert "has 64 MiB free, for loader processes that hold 80 MiB of batches" in found.words
    assert "--shm-size" in found.remedy
    assert "whose size is not known" in only(SharedMemory().judge(said(shm(64 * MIB, None)))).words
    assert only(SharedMemory().judge(said(shm(GIB, None)))).verdict == "ok"


def test_what_a_checkpoint_takes() -> None:
    model = nn.Linear(10, 10, bias=False)  # 400 bytes
    for optimizer, state in (
        (torch.optim.SGD(model.parameters(), lr=1), 0),
        (torch.optim.SGD(model.parameters(), lr=1, momentum=0.9), 1),
        (torch.optim.AdamW(model.parameters()), 2),
        (torch.optim.Adam(model.parameters(), amsgrad=True), 3),
    ):
        trainer = SimpleNamespace(model=model, optimizers={"optimizer": optimizer})
        assert state_bytes(trainer) == 400 * (1 + state)


def test_threads_at_a_fork() -> None:  # H70
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="prefetcher")
    ours = threading.Thread(target=release.wait, name="safetrain-watch")
    thread.start()
    ours.start()
    try:
        assert "prefetcher" in foreign_threads(threading.enumerate())
        assert not {"safetrain-watch", "MainThread"} & set(foreign_threads(threading.enumerate()))
    finally:
        release.set()
        thread.join()
        ours.join()
    found = only(Fork().judge(said({"forks": True, "threads": []}, {"forks": True, "threads": ["prefetcher"]})))
    assert (found.verdict, found.ranks, found.value) == ("warn", (1,), "prefetcher")
    assert only(Fork().judge(said({"forks": True, "threads": []}))).value == "no thread of yours is running"
    assert only(Fork().judge(said({"forks": False, "threads": []}))).value == "not needed"

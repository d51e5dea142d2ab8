"""Links, clocks and transports, judged from what ranks say that they measured; and the first batch and step."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from safetrain import transports
from safetrain.first_step import FirstBatch, FirstStep, RandomNumbers
from safetrain.links import AllReduce, Clock, Links, within
from safetrain.transports import SETTINGS, find_setting, in_words, try_out
from tests.unit.fake_ranks import only, said


def link(small_ms: float = 0.3, large_ms: float = 2.0) -> dict[str, Any]:
    return {"small": small_ms / 1000, "large": large_ms / 1000, "bytes": 1 << 20}


def test_links_of_one_speed() -> None:
    found = only(Links().judge(said(*[link()] * 4)))
    assert (found.verdict, found.value) == ("ok", "0.3 ms, 500 MiB/s at least")
    assert only(Links().judge(said(link()))).value == "none: one rank"


def test_noise_of_a_busy_machine_is_no_slow_link() -> None:
    assert only(Links().judge(said(link(), link(small_ms=4, large_ms=15), link(), link()))).verdict == "ok"


def test_a_slow_link_is_named() -> None:
    found = only(Links().judge(said(link(), link(), link(large_ms=200), link(), hosts=["a", "a", "b", "b"])))
    assert (found.verdict, found.ranks) == ("warn", (2,))
    assert found.words == (
        "the link from rank 1 (a) to rank 2 (b) takes 0.3 ms, and 200 ms for 1 MiB, where others take 2 ms."
    )


def test_a_link_is_compared_with_those_of_its_kind() -> None:
    across = link(small_ms=20, large_ms=80)  # between machines all are as slow
    assert only(Links().judge(said(across, link(), across, link(), hosts=["a", "a", "b", "b"]))).verdict == "ok"


def test_of_two_machines_a_slow_cable_is_named_by_what_any_cable_carries() -> None:
    across = link(small_ms=20, large_ms=4000)
    found = only(Links().judge(said(across, link(), across, link(), hosts=["a", "a", "b", "b"])))
    assert (found.verdict, found.ranks) == ("warn", (0, 2))
    assert found.words == (
        "2 links are slow; the slowest, that from rank 3 (b) to rank 0 (a) takes 20 ms, and 4,000 ms for 1 MiB, "
        "which is 256 KiB/s, less than 100 Mbit/s."
    )


def test_a_slow_machine_is_named() -> None:
    times = [link(), link(large_ms=300), link(large_ms=310), link(), link()]
    found = only(Links().judge(said(*times, hosts=["a", "b", "c", "d", "e"])))
    assert found.ranks == (1, 2)
    assert found.words.startswith("all links of b are slow; the slowest takes")


def clock(*times: float, limit: float = 2) -> dict[str, Any]:
    return {"clocks": times, "limit": limit}


def test_clocks() -> None:
    assert only(Clock().judge(said(clock(100, 101, 102), clock(100.9, 101.0, 102.5)))).value == "within 0.001 s"
    found = only(Clock().judge(said(clock(100, 101), clock(130, 131.2), hosts=["a", "b"])))
    assert (found.verdict, found.ranks, found.value) == ("warn", (1,), "+30.0 s")
    assert found.words == "the clock of b is 30.0 s ahead of rank 0's."
    behind = only(Clock().judge(said(clock(100), clock(95), hosts=["a", "b"])))
    assert "5.0 s behind" in behind.words


def test_the_first_sum() -> None:
    assert only(AllReduce().judge(said(0.001, 0.25))).value == "right, in 250 ms"


def test_a_sum_that_fails_or_never_ends() -> None:
    never = threading.Event()

    def fails() -> str:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer\nmore")

    assert within(5, lambda: "") == ""
    assert within(5, fails) == "[gloo/transport/tcp/pair.cc:1] Connection closed by peer"
    assert within(0.05, lambda: str(never.wait(30))) == "no answer for 0.05 s"
    never.set()


# --- transports -------------------------------------------------------------------------------------------------------


def test_the_first_setting_that_works_is_told() -> None:  # S09
    tried: list[Mapping[str, str]] = []

    def attempt(number: int, setting: Mapping[str, str]) -> bool:
        assert number == len(tried)
        tried.append(setting)
        return "NCCL_SHM_DISABLE" in setting

    found = find_setting(attempt)
    assert tried == [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}]
    assert in_words(found) == (
        "Tried again, it works without shared memory: add ++env.NCCL_SHM_DISABLE=1 to the command line (slower, and "
        "sound)."
    )


def test_all_three_together_and_none() -> None:
    found = find_setting(lambda _, setting: len(setting) == 3)
    assert "++env.NCCL_P2P_DISABLE=1 ++env.NCCL_SHM_DISABLE=1 ++env.NCCL_IB_DISABLE=1" in in_words(found)
    assert "NCCL_DEBUG=INFO" in in_words(find_setting(lambda *_: False))
    assert in_words(SETTINGS[0]).startswith("Tried again in new processes, it works")


def test_a_try_is_a_process_with_the_setting_and_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transports, "_START_S", 0.0)
    code = (
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "if os.environ.get('OK') != '1': time.sleep(600)"
    )
    program = (sys.executable, "-S", "-c", code)
    assert try_out({"OK": "1"}, 1, 30, program)
    assert not try_out({}, 2, 1.0, program)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists(), "what is thrown away is gone"
    assert "OK" not in os.environ


# --- the first batch and step -----------------------------------------------------------------------------------------


def batch(seconds: float = 0.1, samples: int | None = 32, **others: Any) -> dict[str, Any]:
    return {"seconds": seconds, "samples": samples, "empty": False, "error": "", "only_checks": False, **others}


def test_first_batches() -> None:  # S16
    assert only(FirstBatch().judge(said(batch(), batch(0.2)))).value == "32 samples, in 0.2 s"
    assert "32 on rank 0, 16 on rank 1 samples" in only(FirstBatch().judge(said(batch(), batch(samples=16)))).value
    slow = only(FirstBatch().judge(said(batch(), batch(40.0), batch())))
    assert (slow.verdict, slow.ranks) == ("warn", (1,))
    assert slow.words == "the first batch of rank 1 took 40.0 s, that of others 0.1 s."
    none = only(FirstBatch().judge(said(batch(), batch(empty=True))))
    assert (none.verdict, none.words) == ("warn", "rank 1 has no batch at all.")


def test_a_first_batch_that_fails_is_left_to_the_loop() -> None:
    failed = batch(error="ValueError: bad at mine.py:3")
    assert only(FirstBatch().judge(said(batch(), failed))).verdict == "ok"
    found = only(FirstBatch().judge(said(batch(only_checks=True), {**failed, "only_checks": True})))
    assert (found.verdict, found.words) == (
        "refuse",
        "the first batch of rank 1 can't be had: ValueError: bad at mine.py:3.",
    )


def test_the_same_random_numbers_on_two_ranks() -> None:  # H69
    one, other = {"torch": "a", "numpy": "b"}, {"torch": "c", "numpy": "d"}
    assert only(RandomNumbers().judge(said(one, other))).value == "its own on each rank"
    assert only(RandomNumbers().judge(said(one))).value == "one rank"
    found = only(RandomNumbers().judge(said(one, {"torch": "c", "numpy": "b"}, {"torch": "e", "numpy": "f"})))
    assert (found.verdict, found.ranks) == ("warn", (0, 1))
    assert found.words == "ranks 0 and 1 would draw the same random numbers from numpy."


def step(error: str = "", unused: tuple[str, ...] = (), **others: Any) -> dict[str, Any]:
    sizes = {"state": 2048, "gradients": 1024, "peak": 0}
    return {"error": error, "unused": list(unused), "finite": True, **sizes, **others}


def test_first_steps() -> None:  # S24
    assert "preflight=deep" in only(FirstStep().judge(said(None, None))).value
    assert only(FirstStep().judge(said(step(), step()))).value == "well; weights and optimizer 2 KiB, gradients 1 KiB"
    failed = only(FirstStep().judge(said(step(), step("ValueError: no at mine.py:7"))))
    assert (failed.verdict, failed.ranks) == ("refuse", (1,))
    assert failed.words == "the first step of rank 1, alone, failed: ValueError: no at mine.py:7."
    unused = only(FirstStep().judge(said(*[step(unused=("head.weight", "head.bias"))] * 2)))
    assert (unused.verdict, unused.words) == ("warn", "no gradient for head.weight, head.bias on all ranks.")
    assert only(FirstStep().judge(said(step(), step(finite=False)))).value == "loss not finite"

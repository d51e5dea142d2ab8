"""Verdicts on failures of jobs that nobody ran, made of what their ranks would have said: for tests of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetrain
from safetrain.failed import verdict_on
from safetrain.failure import Exit, Failure
from safetrain.flight_recorder import Collective
from safetrain.stacks import Frame
from safetrain.stalled import judge
from safetrain.testimony import State, Testimony
from safetrain.verdict import Verdict

NOW_NS = 1_796_027_576_000_000_000  # 2026-11-30 08:32:56 UTC
USER = Frame("/mine/train.py", 41, "training_step")
_FIT = Frame(str(Path(safetrain.__file__).parent / "trainer.py"), 200, "fit")
_ABOUT = {"0": "default_pg", "1": "safetrain_ddp", "2": "safetrain_control"}
_MS = 1_000_000


def collectives(*pending: Collective, rank: int = 0, steps: int = 2) -> tuple[Collective, ...]:
    """What a rank has done until 61 s ago, and what it waits in."""
    begin = NOW_NS - 61_000 * _MS - rank * 40_000
    done = [("2", 4, "all_gather", (17,), 0)]
    done += [("1", 3 * n + i, "all_reduce", (1_000 * i,), 12 * n + i) for n in range(1, steps + 1) for i in (1, 2, 3)]
    past = [call(g, n, op, shape, begin + at * _MS, done=True) for g, n, op, shape, at in done]
    return (*past, *pending)


def call(
    group: str,
    number: int,
    op: str,
    shape: tuple[int, ...],
    issued_ns: int | None,
    *,
    done: bool = False,
) -> Collective:
    return Collective(group, _ABOUT[group], (), number, op, (shape,), "Float", done, issued_ns)


def said(
    rank: int, state: State, calls: Sequence[Collective], phase: str, stack: tuple[Frame, ...], host: str = "node1"
) -> Testimony:
    return Testimony(
        rank=rank, host=host, pid=100 + rank, step=5, epoch=0, phase=phase, seconds=61.0, limit_s=60.0, count=9,
        state=state, stack=stack, collectives=tuple(calls), time_ns=NOW_NS + rank, since_ns=NOW_NS - 60_990 * _MS,
    )  # fmt: skip


def stuck(world_size: int = 2, culprit: int = 1, ranks_a_host: int = 1 << 20) -> Verdict:
    """One rank does not return from training_step; the others wait in the gradients."""
    ranks = []
    for rank in range(world_size):
        pending = call("1", 10, "all_reduce", (59,), NOW_NS - 60_960 * _MS + rank)
        host = f"node{rank // ranks_a_host}"
        if rank == culprit:
            ranks.append(said(rank, "stuck", collectives(rank=rank), "training_step", (_FIT, USER), host))
        else:
            ranks.append(said(rank, "waiting", collectives(pending, rank=rank), "vote", (_FIT,), host))
    return _judged(ranks)


def different_calls(world_size: int = 4) -> Verdict:
    """Rank 0 reduces where the others broadcast."""
    ranks = []
    for rank in range(world_size):
        op, shape = ("all_reduce", (5,)) if rank == 0 else ("broadcast", (3, 2))
        pending = call("0", 7, op, shape, NOW_NS - 60_970 * _MS + rank)
        stack = (_FIT, replace(USER, line=USER.line + (rank > 0)))
        ranks.append(said(rank, "waiting", collectives(pending, rank=rank), "training_step", stack))
    return _judged(ranks)


def raised(
    run_dir: Path, message: str = "bad label 12", file: str = "/mine/train.py", *, known: bool = True
) -> Verdict:
    """Rank 1 of two fails. ``known``: which collectives they were in."""
    traceback = f'Traceback (most recent call last):\n  File "{file}", line 41, in training_step\nValueError: {message}'
    culprit = Failure(
        1, "node1", 101, 5, "training_step", f"{file}:41", "ValueError", message, traceback, NOW_NS, victim=False
    )
    victim = replace(
        culprit, rank=0, phase="", error="PeerFailed", message="rank 1 failed", victim=True, time_ns=NOW_NS + 5 * _MS
    )
    for one in (culprit, victim):
        calls = [asdict(each) for each in collectives(rank=one.rank)] if known else []
        replace(one, collectives=calls).write(run_dir)
    return verdict_on(run_dir, 2)


def killed(run_dir: Path, world_size: int = 4) -> Verdict:
    """Rank 1 ends without a word; rank 0 has lost it, of the others nothing is known."""
    lost = Failure(0, "node1", 100, 5, "", "", "RuntimeError", "Connection closed by peer", "", NOW_NS, victim=True)
    replace(lost, collectives=[asdict(one) for one in collectives()]).write(run_dir)
    return verdict_on(run_dir, world_size, [Exit(1, 101, -9, "in training_step at step 5")])


def facts(verdict: Verdict, run_dir: Path) -> Any:
    """What ``failure.json`` holds."""
    return json.loads(verdict.to_json(run_dir))


def _judged(ranks: Sequence[Testimony]) -> Verdict:
    found = judge(ranks)
    assert found is not None
    return found

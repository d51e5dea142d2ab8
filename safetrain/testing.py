"""Run a function on several ranks, in this process' children, with a time limit: for safetrain's tests and for yours.

    def work(comm):
        return comm.agree(comm.rank, "sum")

    assert run_ranks(work, 4) == [6, 6, 6, 6]

Ranks are forked (60 ms for two, where spawning takes 4 s), so the parent must not have run a backward pass.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from safetrain.comm import Comm, serve_store


class RankError(Exception):
    """A rank raised, died or ran out of time. ``errors`` maps a rank to what it said."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """Call ``fn(comm, *args)`` on ``world_size`` forked ranks; the value of each, in rank order.

    Raises:
        RankError: naming every rank that raised, died or was still running after ``timeout_s``.
    """
    context = multiprocessing.get_context("fork")
    store, port = serve_store(timedelta(seconds=timeout_s))
    pipes, processes = {}, {}
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(sender, rank, world_size, port, timeout_s, fn, args))
        process.start()
        sender.close()
        pipes[rank], processes[rank] = receiver, process
    try:
        values, errors = _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes.values():
            process.join(0.5)
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        del store
    for rank, text in errors.items():
        if text == "died":
            errors[rank] = f"died with exit code {processes[rank].exitcode} before it returned a value"
    if errors:
        raise RankError(errors)
    return [values[rank] for rank in range(world_size)]


def _collect(pipes: dict[int, Connection], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Read one message a rank until all spoke or time is up."""
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in pipes.items()}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            errors.update(dict.fromkeys(waiting.values(), "still running at the time limit"))
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                errors[rank] = "died"
                continue
            if ok:
                values[rank] = value
            else:
                errors[rank] = value
    return values, errors


def _rank_main(
    sender: Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        comm = Comm.join(device="cpu", timeout_s=timeout_s)
        message = pickle.dumps((True, fn(comm, *args)))
    except BaseException:  # noqa: BLE001  # whatever it is, the parent raises it
        message = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(message)
    sender.close()
    # No clean-up that could wait for a peer. Output first: os._exit does not flush.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)

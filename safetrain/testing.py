"""Run a function on several ranks, in this process' children, with a time limit: for safetrain's tests and for yours.

    def work(comm):
        return comm.agree(comm.rank, "sum")

    assert run_ranks(work, 4) == [6, 6, 6, 6]

Ranks are forked (60 ms for two, where spawning takes 4 s), so the parent must not have run a backward pass.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch

from safetrain.comm import Comm, serve_store

_DIED, _RUNNING = "died", "still running at the time limit"


class RankError(Exception):
    """A rank raised, died or ran out of time. ``errors`` maps a rank to what it said."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


def differences(one: Any, other: Any, where: str = "state") -> list[str]:
    """The places in two nested states (dicts, lists and tuples of tensors and plain values) at which they are not the
    same, bit for bit: empty where they are. NaN is equal to NaN; dicts have the same order of keys."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{where}: keys {list(one)} and {list(other)}"]
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        pairs = [(f"{where}.{index}", *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    else:
        return [] if one == other or one != one else [f"{where}: {one!r} and {other!r}"]
    return [found for place, mine, theirs in pairs for found in differences(mine, theirs, place)]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """Call ``fn(comm, *args)`` on ``world_size`` forked ranks; the value of each, in rank order.

    Raises:
        RankError: naming every rank that raised, died or was still running after ``timeout_s``.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, {}
    with contextlib.ExitStack() as files:
        port = files.enter_context(_store_process(timeout_s))
        stacks = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            pipes[rank] = files.enter_context(receiver)
            with sender:
                job = (sender, stacks[rank], rank, world_size, port, timeout_s, fn, args)
                processes[rank] = context.Process(target=_rank_main, args=job)
                processes[rank].start()
        try:
            values, errors = _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes.values():
                process.join(0.5)
                process.kill()
                process.join()
        for rank, text in errors.items():
            if text == _DIED:
                errors[rank] = f"died with exit code {processes[rank].exitcode} before it returned a value"
            elif text == _RUNNING:
                stacks[rank].seek(0)
                errors[rank] = f"{text}:\n{stacks[rank].read()}"
            processes[rank].close()
    if errors:
        raise RankError(errors)
    return [values[rank] for rank in range(world_size)]


@contextlib.contextmanager
def _store_process(timeout_s: float) -> Iterator[int]:
    """The port of a store in a process of its own: its server is a thread, and a process with threads must not fork
    ranks."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def serve() -> None:
        store, port = serve_store(timedelta(seconds=timeout_s))
        sender.send(port)
        threading.Event().wait()  # until killed
        del store

    process = context.Process(target=serve, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise RankError({-1: "the store did not start"})
        yield receiver.recv()
    finally:
        receiver.close()
        process.kill()
        process.join()
        process.close()


def _collect(pipes: dict[int, Connection], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Read one message a rank until all spoke or time is up."""
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in pipes.items()}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            errors.update(dict.fromkeys(waiting.values(), _RUNNING))
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                errors[rank] = _DIED
                continue
            if ok:
                values[rank] = value
            else:
                errors[rank] = value
    return values, errors


def _rank_main(
    sender: Connection,
    stacks: IO[str],
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
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=stacks)  # a C thread: it writes even where the GIL is held
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

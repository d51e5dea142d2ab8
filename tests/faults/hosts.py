"""Two hosts on one machine: network namespaces with an address, a name and an /etc/hosts of their own, and a cable.

They share the file system and the process ids, as far as this kernel goes; each has its own network and its own name.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch.project import in_a_session

LIMIT_S = 90.0  # for a whole command; six processes import torch on a loaded machine
PORT = 29_555
_NETNS = Path("/etc/netns")
_IN_HOST = 'hostname "$0" && exec "$@"'


@functools.cache
def obstacle() -> str:
    """Why no hosts can be made here; empty where they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    name = f"safetrain-{secrets.token_hex(3)}"
    if _ip("netns", "add", name).returncode != 0:
        return "needs the right to make network namespaces (root)"
    made = _ip("netns", "exec", name, "unshare", "--uts", "hostname", "a")
    _ip("netns", "del", name)
    return f"needs a mount and a UTS namespace: {made.stderr.strip()}" if made.returncode else ""


@dataclass
class Said:
    """What a command on a host has said, all of it in order, and how it ended."""

    code: int
    text: str
    seconds: float


@dataclass
class Host:
    """``name`` is what it calls itself, ``space`` the namespace."""

    name: str
    space: str
    address: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own."""
        inside = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", _IN_HOST, self.name, *command]
        process = in_a_session(inside, folder, environment, stderr=subprocess.STDOUT)
        self.started.append(process)
        return process

    def launch(self, folder: Path, number: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start this host's launcher of a job on both."""
        return self.start(
            folder, sys.executable, "-m", "safetrain", "recipe=mine", "launch=cluster", "launch.nnodes=2",
            f"launch.node_rank={number}", *arguments, **environment,
        )  # fmt: skip

    def processes(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.space).stdout.split()]

    def cut(self) -> None:
        """Pull the cable out of this host."""
        _must("-n", self.space, "link", "set", "cable", "down")

    def refuse(self, kind: str, other: Host) -> None:
        """Send nothing to another host: ``blackhole`` without a word, ``prohibit`` as a firewall that says so."""
        _must("-n", self.space, "route", "add", kind, f"{other.address}/32")

    def slow_down(self, rate: str) -> None:
        """Let no more than ``rate`` out of this host."""
        shape = ["tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "4kb", "latency", "1s"]
        done = subprocess.run(["ip", "netns", "exec", self.space, *shape], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"this kernel has no token bucket filter: {done.stderr.strip()}")


@dataclass
class Hosts:
    """``a`` and ``b``; the endpoint of jobs is on ``a``."""

    a: Host
    b: Host

    @property
    def endpoint(self) -> str:
        return f"launch.rdzv_endpoint={self.a.name}:{PORT}"

    def names(self, host: Host, *, own: bool = True, other: bool = True) -> None:
        """What ``host`` knows: its own name, and the other's."""
        peer = self.b if host is self.a else self.a
        lines = ["127.0.0.1 localhost"]
        lines += [f"{host.address} {host.name}"] if own else []
        lines += [f"{peer.address} {peer.name}"] if other else []
        (_NETNS / host.space / "hosts").write_text("\n".join(lines) + "\n")

    def finish(self, process: subprocess.Popen[str]) -> Said:
        """Wait for a command; the time is counted from here."""
        begin = time.monotonic()
        text, _ = process.communicate(timeout=LIMIT_S)
        return Said(process.returncode, text, time.monotonic() - begin)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            for process in (*self.a.started, *self.b.started):
                assert process.poll() is None, f"ended before {what}:\n{process.communicate()[0]}"
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.02)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Hosts that see each other and nobody else; whatever runs there is ended with the block.

    Raises:
        AssertionError: a process was left running on one of them.
    """
    mark = secrets.token_hex(3)
    hosts = Hosts(Host("hosta", f"st{mark}a", "10.77.0.1"), Host("hostb", f"st{mark}b", "10.77.0.2"))
    try:
        for host in (hosts.a, hosts.b):
            _must("netns", "add", host.space)
            (_NETNS / host.space).mkdir(parents=True)
            # there is no name server: to ask one takes torch's store 5 s for each client
            (_NETNS / host.space / "nsswitch.conf").write_text("hosts: files\n")
            hosts.names(host)
        ends = ["netns", hosts.a.space, "type", "veth", "peer", "name", "cable", "netns", hosts.b.space]
        _must("link", "add", "cable", *ends)
        for host in (hosts.a, hosts.b):
            _must("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "cable")
            _must("-n", host.space, "link", "set", "cable", "up")
            _must("-n", host.space, "link", "set", "lo", "up")
        yield hosts
    finally:
        left = _end(hosts.a) + _end(hosts.b)
    assert not left, f"left running: {left}"


def _end(host: Host) -> list[str]:
    """Take a host away; what was still running there."""
    for process in host.started:
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    deadline = time.monotonic() + 5.0  # what is promised: no process is left after that
    while (left := host.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    _ip("netns", "del", host.space)
    shutil.rmtree(_NETNS / host.space, ignore_errors=True)
    return commands


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

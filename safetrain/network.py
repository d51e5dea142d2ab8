"""What this machine's network says before anybody connects: names, ports and who holds them, interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from safetrain import machine
from safetrain.errors import UsageError

_LISTENING = "0A"  # in /proc/net/tcp
_RETRY_S = 0.2
_SIOCGIFADDR, _NAME_BYTES = 0x8915, 15  # Linux: the address of an interface; the longest name of one


def resolve(variable: str, host: str) -> list[str]:
    """The addresses of ``host``.

    Raises:
        UsageError: it has none; the message names the environment ``variable`` it comes from.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        blank = " It begins or ends with a blank." if host != host.strip() else ""
        raise UsageError(
            f"{variable}={host!r}: {machine.host()} knows no machine of that name ({error}).{blank} Give the "
            f"name "
            "or address of rank 0's machine, as `getent hosts NAME` knows it."
        ) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def reach(host: str, port: int, limit_s: float) -> str:
    """Try to connect until somebody listens, at most ``limit_s``: the last error in words, empty when it went well."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())):
                return ""
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                return str(error)
        time.sleep(_RETRY_S)


def is_own_address(host: str) -> bool:
    """Whether ``host`` is this machine, so that a server here is found under that name."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(address)  # sends nothing; a machine talks to its own address from that address
            if probe.getsockname()[0] == address[0]:
                return True
    return False


def port_holder(port: int) -> str:
    """Which other process of this machine listens on ``port``, in words; empty where there is none."""
    sockets = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port
    }
    links = {f"socket:[{number}]" for number in sockets}
    ours = False
    for process in Path("/proc").glob("[0-9]*"):
        if links & _links_of(process):
            if process.name == str(os.getpid()):  # it may have it from the one that listens
                ours = True
                continue
            with suppress(OSError):  # it ended just now
                command = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {process.name} ({command.strip()[:200]})"
    return "another user's process" if sockets and not ours else ""


def _links_of(process: Path) -> set[str]:
    """What the open files of a process are; those that it closes meanwhile are left out."""
    links = set()
    with suppress(OSError):  # another user's, or gone
        for file in process.joinpath("fd").iterdir():
            with suppress(OSError):
                links.add(os.readlink(file))  # noqa: PTH115  it names no file
    return links


def check_gloo_interfaces() -> None:
    """``GLOO_SOCKET_IFNAME``, where it is set, must name interfaces of this machine.

    Raises:
        UsageError: it holds something else, such as an address, or NCCL's way to exclude an interface.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, wanted.split(",")):
        if name not in there:
            why = (
                "that is NCCL_SOCKET_IFNAME's syntax; Gloo takes plain names"
                if name[0] in "^="
                else "no such interface"
            )
            raise UsageError(
                f"GLOO_SOCKET_IFNAME={wanted}: {why}. {machine.host()} has {', '.join(there)} (`ip addr`)."
            )


def gloo_address() -> str:
    """The address under which Gloo will offer this machine to the others; empty where an interface is chosen by name.

    Gloo looks up the machine's own name, which /etc/hosts often maps to 127.0.1.1: nobody else can reach that.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return str(socket.getaddrinfo(machine.host(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"  # Gloo's own way out


def interface_of(address: str) -> str:
    """The interface of this machine that has ``address`` (IPv4); empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:_NAME_BYTES])
                if socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""


def is_loopback(address: str) -> bool:
    """Whether an address only means the machine itself."""
    return address.startswith("127.") or address == "::1"

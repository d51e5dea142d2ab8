"""Connections between the launchers of a job: messages, a beat, and who has been silent for how long.

A thread of its own reads, writes and beats, so a launcher that is busy ending its ranks is not taken for dead. Nothing
here waits without a limit, which torch's store can't promise: it waits for ever for a machine whose cable was pulled.
A message is a JSON object in a line. The beat is an empty line.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

BEAT_S = 0.5
_STOPPED_S = 2.0  # the thread looks twice a second
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 26  # whatever sends more in one line is no launcher


class Wire:
    """One connection. Its methods are called by the link's thread, but for ``send``."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.heard_at = time.monotonic()
        self.end = ""  # why there is no more to come, in words
        self._unread, self._unsent, self._writing = bytearray(), bytearray(), threading.Lock()

    def send(self, message: Message | None) -> None:
        """Hand over a message, or with None a beat; waits for nobody."""
        text = "" if message is None else json.dumps(message)
        with self._writing:
            if message is None and self._unsent:
                return  # what waits to be sent says as much
            self._unsent += f"{text}\n".encode()
        self.flush()

    def flush(self) -> bool:
        """Send what the network takes; whether that is all there was."""
        with self._writing, suppress(BlockingIOError):
            try:
                while self._unsent and not self.end:
                    del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                raise
            except OSError as error:
                self.end = self.end or _in_words(error)
        return not self._unsent

    def read(self) -> list[Message]:
        """The messages that have come; sets ``end`` when the connection has one."""
        try:
            received = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            self.end = self.end or _in_words(error)
            return []
        if not received:
            self.end = self.end or "its connection was closed"
            return []
        self.heard_at = time.monotonic()
        self._unread += received
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        try:
            messages = [json.loads(line) for line in lines if line]
        except ValueError:
            messages = [None]
        if len(rest) > _LONGEST_LINE or not all(isinstance(message, dict) for message in messages):
            self.end = "it is no launcher of safetrain"
            return []
        return messages

    def close(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Link:
    """All connections of this launcher. What comes is noted in ``arrived`` until ``take`` is called."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
        self._wires: list[Wire] = []
        self._arrived: deque[tuple[Wire, Message]] = deque()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._looked_at = time.monotonic()
        self._beats = True
        self._thread = threading.Thread(target=self._carry, name="safetrain-link", daemon=True)
        self._thread.start()

    def add(self, connection: socket.socket) -> Wire:
        wire = Wire(connection)
        with self._changed:
            self._wires.append(wire)
            self._selector.register(connection, selectors.EVENT_READ, wire)
        return wire

    def take(self) -> list[tuple[Wire, Message]]:
        """What has come since the last call, in order; waits for nothing."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
        return arrived

    def wait(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Wait until the condition holds, which is looked at whenever something came; whether it does."""
        deadline = time.monotonic() + limit_s
        while not until():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            with self._changed:
                if not self._arrived:
                    self._changed.wait(min(left_s, BEAT_S))
        return True

    def silence_s(self, wire: Wire) -> float:
        """How long nothing has come, while this process was able to look."""
        return max(0.0, self._looked_at - wire.heard_at)

    def close(self, limit_s: float = 2.0) -> None:
        """Send what is left to be sent, at most for ``limit_s``, and hang up."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not all(wire.end or wire.flush() for wire in self._wires):
            time.sleep(0.01)
        self._stopped.set()
        self._thread.join(2 * BEAT_S)
        for wire in self._wires:
            wire.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        beat_at = 0.0
        while not self._stopped.is_set():
            for key, _ in self._selector.select(BEAT_S / 2):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if (
                now - self._looked_at > _STOPPED_S
            ):  # this process was stopped; what has come meanwhile is still to be read
                for wire in list(self._wires):
                    wire.heard_at = now
            self._looked_at = now
            if self._beats and time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                for wire in list(self._wires):
                    if not wire.end:
                        wire.send(None)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self.add(connection)

    def _read(self, wire: Wire) -> None:
        messages = wire.read()
        with self._changed:
            self._arrived.extend((wire, message) for message in messages)
            if wire.end:
                self._selector.unregister(wire.connection)
            if messages or wire.end:
                self._changed.notify_all()


def _in_words(error: OSError) -> str:
    return f"its connection broke ({error.strerror or error})"

"""The crew of a job on one machine: a launcher that has no others, and goes the same way (see crew.py)."""

from __future__ import annotations

import signal
from dataclasses import replace

from safetrain.nodes import Node
from safetrain.orders import Outcome, Report, Share


class Alone:
    """See crew.py; which host a signal has come to need not be said."""

    """The crew of a job on one machine."""

    def __init__(self, ranks: int) -> None:
        self.signalled: tuple[signal.Signals, str] | None = None
        self.shares = [Share(0, ranks, ranks)]
        self.nodes: list[Node] = []
        self.lost: dict[int, str] = {}

    def end_wanted(self) -> bool:
        return False

    def ending(self, number: signal.Signals | None) -> None:
        if number is not None and self.signalled is None:
            self.signalled = (number, "")

    def start(self, _config: str, port: int) -> Share:
        self.signalled = None
        return replace(self.shares[0], port=port)

    def gather(self, *, ok: bool) -> list[Report]:
        del ok
        return []

    def tell(self, outcome: Outcome) -> None:
        pass

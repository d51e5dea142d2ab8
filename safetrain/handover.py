"""Where torchrun or another launcher has started the ranks: rank 0 composes, and its config goes to the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from safetrain.comm import launcher_place
from safetrain.errors import UsageError
from safetrain.joining import JOIN_TIMEOUT_S, join_limit_s, known_places, meet

_HANDOVER_LIMIT = timedelta(minutes=5)
_END_LIMIT = timedelta(seconds=5)
_END = "end "
_LIMIT_KEY = "launch.join_timeout_s="


class Handover:
    """Carries rank 0's text to the ranks that another launcher started.

    Raises:
        UsageError: the ranks do not find each other (see joining.py).
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.rank, world_size, *_ = launcher_place()
        self._others = range(1, world_size)
        self._store = PrefixStore("handover", meet(self.rank, world_size, _limit_s(arguments)).store)
        self._store.set_timeout(_HANDOVER_LIMIT)

    def give(self, text: str) -> None:
        """Rank 0 calls it, once, or ``end``."""
        self._store.set("text", text)

    def end(self, exit_code: int, text: str = "") -> None:
        """Rank 0 calls it before it leaves: there is nothing to do for any rank. ``text`` says why, where that is not
        meant; it is shown once on each other machine."""
        self._store.set("text", f"{_END}{json.dumps([exit_code, text])}")
        with suppress(dist.DistError):  # the store may be rank 0's own: stay until they have read it, if they are there
            self._store.wait([f"taken_{rank}" for rank in self._others], _END_LIMIT)

    def take(self) -> str:
        """What rank 0 gave; the other ranks call it.

        Raises:
            SystemExit: rank 0 called ``end``.
            UsageError: rank 0 is gone, or gave nothing in time.
        """
        try:
            text = self._store.get("text").decode()
            self._store.set(f"taken_{self.rank}", "")
        except dist.DistError as error:
            raise UsageError(f"rank 0 gave no config: it is gone, or took over {_HANDOVER_LIMIT}. {error}") from error
        if text.startswith(_END):
            code, why = json.loads(text.removeprefix(_END))
            if why and self._speaks_here():
                raise UsageError(why)
            raise SystemExit(code)
        return text

    def _speaks_here(self) -> bool:
        """Whether this is the first rank of a machine on which rank 0 is not."""
        here = [place.rank for place in known_places() if place.is_here]
        return 0 not in here and self.rank == min(here)


def _limit_s(arguments: Sequence[str]) -> float:
    """``launch.join_timeout_s`` as the command line says it: no config is composed yet."""
    asked = [argument.removeprefix(_LIMIT_KEY) for argument in arguments if argument.startswith(_LIMIT_KEY)]
    try:
        return join_limit_s(float(asked[-1]) if asked else JOIN_TIMEOUT_S)
    except ValueError:  # told when rank 0 composes
        return join_limit_s(JOIN_TIMEOUT_S)

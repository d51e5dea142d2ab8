"""What collectives the user's code issues on this rank, noted so that the vote can tell whether all ranks do the same.

Two calls in swapped order, SUM against MAX, float32 against int32 are paired without a word and give wrong numbers. The
note is taken where every public function of torch.distributed ends, in the methods of ``ProcessGroup``: it sees a
function imported by name, too, and a library's calls. DDP's own collectives, and those compiled into a graph, are
issued in C++ and not seen; safetrain's own groups are noted only where user code calls in (``agree``).

A note costs 11 µs a collective (reading the reduce op alone 3 µs), where Gloo takes 200-500 µs, and a step without
any 0.4 µs.
"""

from __future__ import annotations

import logging
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from safetrain.call_site import call_key, call_site, describe, place_here
from safetrain.errors import UsageError
from safetrain.pairing import Call, Comparison, compare

logger = logging.getLogger("safetrain")

_MASK = (1 << 32) - 1
_NOT_NOTED = Call("", "", "", (), ()), 0
_KNOWN_LIMIT = 10_000  # shapes may be new at every call
_OP, _ROOT = "reduceOp", "rootRank"
_METHODS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "allreduce": (0, (_OP,)), "allreduce_coalesced": (0, (_OP,)), "broadcast": (0, (_ROOT,)),
    "reduce": (0, (_OP, _ROOT)), "gather": (1, (_ROOT,)), "scatter": (0, (_ROOT,)), "allgather": (1, ()),
    "allgather_coalesced": (1, ()), "allgather_into_tensor_coalesced": (1, ()), "_allgather_base": (1, ()),
    "all_gather_single": (1, ()), "all_gather_single_coalesced": (1, ()), "reduce_scatter": (0, (_OP,)),
    "_reduce_scatter_base": (0, (_OP,)), "reduce_scatter_single": (0, (_OP,)),
    "reduce_scatter_single_coalesced": (0, (_OP,)), "reduce_scatter_tensor_coalesced": (0, (_OP,)),
    "alltoall": (1, ()), "alltoall_base": (1, ()), "all_to_all_single": (1, ()), "barrier": (None, ()),
    "monitored_barrier": (None, ()),
}  # fmt: skip
"""Methods of ProcessGroup in torch 2.11 to 2.13: the argument, and the options, that must be alike on all ranks."""
_SHAPES_MAY_DIFFER = ("alltoall", "alltoall_base", "all_to_all_single")


class CollectiveLog:
    """This rank's collectives since the last vote."""

    def __init__(self) -> None:
        self.compares = True  # off: only ``refusing`` is left
        self._own: set[dist.ProcessGroup] = set()
        self._known: dict[tuple[Any, ...], tuple[Call, int]] = {}  # calls, and their fingerprints
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}  # call site -> the one that stands for it
        self._issued: list[Call] = []
        self._voted: list[Call] = []
        self._hashes: dict[dist.ProcessGroup, int] = {}
        self._refused_in: tuple[int, str] | None = None
        self._originals: dict[str, Any] = {}
        self._meeting_group: dist.ProcessGroup | None = None

    def install(self, own_groups: Sequence[dist.ProcessGroup]) -> None:
        """Take notes from now on; ``own_groups`` are safetrain's."""
        self._own, self._meeting_group = set(own_groups), own_groups[-1]
        for method in _METHODS:
            if method in dist.ProcessGroup.__dict__:
                self._originals[method] = dist.ProcessGroup.__dict__[method]
                setattr(dist.ProcessGroup, method, self._noting(method))

    def own(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """These are safetrain's, too."""
        self._own.update(groups)

    def remove(self) -> None:
        """Leave ``ProcessGroup`` as it was, and hold no group any more."""
        for method, original in self._originals.items():
            setattr(dist.ProcessGroup, method, original)
        for held in (self._originals, self._own, self._known, self._hashes):
            held.clear()
        self._meeting_group = None

    @contextmanager
    def refusing(self, where: str) -> Iterator[None]:
        """Any collective that this thread issues in here raises UsageError."""
        self.refuse_in_section("another section")
        self._refused_in = threading.get_ident(), where
        try:
            yield
        finally:
            self._refused_in = None

    def refuse_in_section(self, what: str) -> None:
        """Raises UsageError where this thread is in a section: the other ranks are not there."""
        if self._refused_in is not None and self._refused_in[0] == threading.get_ident():
            raise UsageError(
                f"{what} at {place_here()} inside {self._refused_in[1]}: the other ranks are not in there, and would "
                "never answer. Do it before or after the section, on all ranks."
            )

    # --- the vote ---------------------------------------------------------------------------------------------------

    def close(self) -> int:
        """End the notes for this vote. Returns this rank's share of a number that is 0, summed over ranks modulo any
        power of two up to 2**32, when the ranks of each group issued the same.

        Within a group all members but the last add their fingerprint, and the last takes it off as many times.
        """
        self._voted = self._issued
        if not self._issued:
            return 0
        share = 0
        for group, rolling in self._hashes.items():
            members, mixed = group.size(), zlib.crc32(rolling.to_bytes(4, "little"))
            share += mixed if group.rank() < members - 1 else -(members - 1) * mixed
        self._issued, self._hashes = [], {}
        return share & _MASK

    def voted(self) -> list[Call]:
        """What was issued before the last ``close``."""
        return self._voted

    def recent(self, count: int = 8) -> list[str]:
        """The last calls since the vote, in words: for a watchdog, from any thread."""
        return [str(call) for call in self._issued[-count:]]

    def judge(self, calls_by_rank: Sequence[Sequence[Call]]) -> str:
        """Why the ranks' calls do not belong together; empty where they only took two branches to the same one.

        Every rank calls it with the same lists. Two such branches count as one place from then on.
        """
        found: Comparison = compare(calls_by_rank)
        for a, b in found.alike:
            first, second = self._alike.get(a, a), self._alike.get(b, b)
            for site in {a, b, *(s for s, stands_for in self._alike.items() if stands_for == second)}:
                self._alike[site] = first
        if found.alike:
            self._known.clear()
        for a, b in found.doubtful:
            logger.warning(
                "the ranks issue one collective from different places: %s and %s. If these are two different ones, "
                "they are paired with each other and give wrong numbers.",
                a[0] if a else "a library", b[0] if b else "a library",
            )  # fmt: skip
        return found.difference

    # --- one collective ---------------------------------------------------------------------------------------------

    def _noting(self, method: str) -> Callable[..., Any]:
        original, (operand, details) = self._originals[method], _METHODS[method]

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._refused_in is not None:
                self.refuse_in_section(call_site(sys._getframe(1))[0] or method)
            if self.compares:
                frame = sys._getframe(1)
                given = args[operand] if operand is not None and len(args) > operand else ()
                options = kwargs.get("opts", args[-1] if args else None)
                key = (
                    method,
                    group,
                    call_key(frame),
                    _uneven(method, args),
                    _kinds_of(given),
                    *[_plain(getattr(options, detail, None)) for detail in details],
                )
                known = self._known.get(key)
                if known is None:
                    known = self._learn(key, frame, _tensors(given), options)
                if known is not _NOT_NOTED:
                    self._add(group, *known)
            return original(group, *args, **kwargs)

        call.__name__ = method
        return call

    def _learn(
        self, key: tuple[Any, ...], frame: FrameType, tensors: Sequence[torch.Tensor], options: Any
    ) -> tuple[Call, int]:
        """Describe a call that was not seen before."""
        method, group, _, uneven, *_ = key
        api, site = call_site(frame)
        if len(self._known) > _KNOWN_LIMIT:
            self._known.clear()
        if not site and group in self._own:
            known = _NOT_NOTED
        else:
            members, places = tuple(dist.get_process_group_ranks(group)), describe(site)
            shown = [_detail(getattr(options, detail, None), members) for detail in _METHODS[method][1]]
            call = Call(
                op=(api or method) + (f"({', '.join(shown)})" if shown else ""),
                operand=", ".join(_kind(tensor, with_shape=not uneven) for tensor in tensors),
                group=group.group_name,
                members=members,
                site=self._alike.get(places, places),
            )
            known = call, _fingerprint(call)
        self._known[key] = known
        return known

    def note_meeting(self, what: str, place: str) -> None:
        """Note a point of all ranks that is none of torch's collectives."""
        if self.compares and self._meeting_group is not None:
            group = self._meeting_group
            members = tuple(dist.get_process_group_ranks(group))
            call = Call(op=what, operand="", group=group.group_name, members=members, site=(place,))
            self._add(group, call, _fingerprint(call))

    def _add(self, group: dist.ProcessGroup, call: Call, fingerprint: int) -> None:
        self._hashes[group] = (self._hashes.get(group, 0) * 1000003 + fingerprint) & _MASK
        self._issued.append(call)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _kinds_of(value: Any) -> Any:
    """dtype and shape of the tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    return tuple([_kinds_of(item) for item in value])


def _plain(detail: Any) -> Any:
    """A reduce op as something that can be a key; a root as it is."""
    return detail.op if isinstance(detail, dist.ReduceOp) else detail  # type: ignore[attr-defined]


def _detail(detail: Any, members: Sequence[int]) -> str:
    if isinstance(detail, dist.ReduceOp):
        return str(detail.op.name)  # type: ignore[attr-defined]
    return f"root {members[detail]}" if isinstance(detail, int) else str(detail)


def _uneven(method: str, args: tuple[Any, ...]) -> bool:
    """Whether the ranks may give different shapes: always in an all-to-all, and where an all-gather's outputs differ,
    which NCCL allows."""
    if method in _SHAPES_MAY_DIFFER:
        return True
    if method == "allgather" and args[0] and args[0][0] and args[0][0][0].is_cuda:
        return len({output.shape for output in args[0][0]}) > 1
    return False


def _kind(tensor: torch.Tensor, *, with_shape: bool) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}" if with_shape else dtype


def _fingerprint(call: Call) -> int:
    """A number for a call, without the folders of its files: the same code may lie elsewhere on another machine."""
    site = [place.rpartition("/")[2] for place in call.site]
    return zlib.crc32(repr((call.op, call.operand, call.group, call.members, site)).encode())

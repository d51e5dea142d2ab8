"""Words that messages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_NAMED = 8
_GROUPS = {
    "default_pg": "the default group",
    "safetrain_ddp": "the gradients",
    "safetrain_shard": "the gradients",
    "safetrain_replicate": "the gradients",
    "safetrain_control": "safetrain's own agreement",
}
_OF_SHARDS = ("safetrain_ddp", "safetrain_shard")
_NUMBERS = {"Float": "floats", "Double": "doubles", "Long": "int64 numbers", "Half": "fp16 numbers"}


class Call(Protocol):
    """A collective, as the flight recorder has it."""

    @property
    def group(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtype(self) -> str: ...


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0-3``; of many, in ranges: ``ranks 0, 2-1023``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"ranks {names_in_words(_ranges(ranks))}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def names_in_words(names: Sequence[str]) -> str:
    """The first eight, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def group_in_words(call: Call) -> str:
    """``the gradients``, ``group mine``."""
    if call.about in _OF_SHARDS and call.op.startswith("all_gather"):  # gradients are never gathered
        return "the model's shards"
    return _GROUPS.get(call.about, f"group {call.about if call.about not in ('', 'undefined') else call.group}")


def call_in_words(call: Call) -> str:
    """``all_reduce of 72 floats (the gradients)``."""
    about = group_in_words(call)
    kind = _NUMBERS.get(call.dtype, f"{call.dtype.lower()} numbers")
    sizes = ["x".join(map(str, shape)) or "1" for shape in call.shapes]
    if not sizes or call.op == "barrier":
        return f"{call.op} ({about})"
    amount = sizes[0] if len(sizes) == 1 else f"{len(sizes)} tensors of {' and '.join(sizes[:3])}"
    return f"{call.op} of {amount} {kind} ({about})"


def _ranges(numbers: Sequence[int]) -> list[str]:
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ends]

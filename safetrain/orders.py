"""What the launchers of a job tell each other: who runs which ranks, how they ended, what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

from safetrain.errors import ConfigError, SafetrainError, UsageError
from safetrain.failure import Exit, Failure
from safetrain.link import Message
from safetrain.words import ranks_in_words


@dataclass(frozen=True)
class Share:
    """Which ranks one machine runs, and where all ranks meet."""

    first_rank: int
    ranks: int
    world_size: int
    node: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"
    """Of the store at which all ranks meet, which node 0's launcher serves."""
    port: int = 0

    def in_words(self) -> str:
        """``ranks 2 and 3``."""
        return ranks_in_words(self.numbers)

    @property
    def numbers(self) -> list[int]:
        """The ranks."""
        return list(range(self.first_rank, self.first_rank + self.ranks))


class Published(NamedTuple):
    """A verdict that some process of the job has written."""

    text: str
    exit_code: int


@dataclass(frozen=True)
class Report:
    """How the ranks of one machine ended, and what is known there."""

    ok: bool
    exits: Sequence[Exit] = ()
    failures: Sequence[Failure] = ()
    told: Published | None = None

    def to_message(self) -> Message:
        return {"kind": "report", **asdict(self)}

    @classmethod
    def of_message(cls, message: Message) -> Self:
        return cls(
            message["ok"],
            [Exit(**each) for each in message["exits"]],
            [Failure(**each) for each in message["failures"]],
            None if message["told"] is None else Published(*message["told"]),
        )


@dataclass(frozen=True)
class Outcome:
    """What node 0 tells all launchers at the end of an attempt. ``again``: another one follows."""

    text: str = ""
    exit_code: int = 0
    metric: float | None = None
    again: bool = False


OK, FAILED, WRONG = 0, 1, 2
"""Exit codes: all went well, training failed, the config or the use is wrong."""


class TrainingFailed(SafetrainError):
    """Ranks failed; the message is the whole story."""


class JobEnded(Exception):
    """A signal ended the job, and with it the command; no rank is left."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def exit_code_of(error: SafetrainError) -> int:
    """With which the command ends."""
    return WRONG if isinstance(error, (ConfigError, UsageError)) else FAILED

"""Every exception that safetrain raises.

SafetrainError
├── ConfigError            a key, a type or a value of the config; found before a process starts
├── UsageError             the API used in a way that cannot train right; says what to do instead
├── PreflightError         a check before the first step refuses the job; raised on all ranks
├── DataError              the data set or the loader cannot give what training needs
├── CheckpointError        a checkpoint can't be written, or is not what was written
├── CommunicationError     a collective failed: a peer is gone, or the ballot came back damaged
├── RankFailed             this rank's user code failed; raised ``from`` the user's own exception
├── PeerFailed             another rank failed; this rank stopped at the same step
├── RanksDiffer            the ranks did different things, or their replicas are not the same any more
└── TrainingStopped        a policy's limit was reached; raised on all ranks at the same step

SkipBatch                  raised by users: "leave this micro-batch out"
Preempted                  a SystemExit: the run was told to leave, and is saved
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

from safetrain.work import Work

E = TypeVar("E", bound="SafetrainError")


class SafetrainError(Exception):
    """The root of all errors that safetrain raises.

    Attributes:
        together: every rank raises it, or its counterpart, at the same point of the same step, outside of any optimizer
            step: the state of the last whole step can be saved.
        kept: what became of that state, in words.
        remedy: what has to change before a run can go on from that state; empty where that is said elsewhere.
    """

    together = False
    kept = ""
    remedy = ""


class ConfigError(SafetrainError, ValueError):
    """A config value is wrong. The message names the key, the value and what is allowed."""


class UsageError(SafetrainError):
    """The API is used in a way that cannot train right."""


class PreflightError(SafetrainError):
    """What ranks, machines or the job are cannot train right, or not together; found before the first step."""


class DataError(SafetrainError):
    """A data set or a loader cannot give what training needs."""


class CheckpointError(SafetrainError):
    """A checkpoint can't be written, or can't be read as what was written."""


class CommunicationError(SafetrainError):
    """A collective failed. As a rule its cause is on another rank: this rank is a victim."""


class RankFailed(SafetrainError):
    """User code failed on this rank; ``__cause__`` is the user's exception, ``work`` the batch that was at hand."""

    def __init__(self, message: str, *, step: int, phase: str, work: Work | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.phase = phase
        self.work = work

    @classmethod
    def at(cls, step: int, rank: int, reason: str, phase: str, work: Work | None = None) -> Self:
        """The error of this rank, in the words that the other ranks use, too."""
        return cls(_failed(rank, step, reason), step=step, phase=phase, work=work)


class PeerFailed(SafetrainError):
    """User code failed on other ranks; this rank stopped at the same step."""

    def __init__(self, message: str, *, ranks: Sequence[int], step: int) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.step = step

    @classmethod
    def at(cls, step: int, reasons: Mapping[int, str]) -> Self:
        """The error of a rank that stops because of others; ``reasons`` by rank."""
        text = "; ".join(_failed(rank, step, reason) for rank, reason in reasons.items())
        return cls(text, ranks=list(reasons), step=step)


class RanksDiffer(SafetrainError):
    """The ranks issued different collectives, came to different points, or hold different values. As a rule it is
    raised on all of them; ``ranks`` are the odd ones out, where that can be told."""

    def __init__(self, message: str, *, step: int, ranks: Sequence[int] = ()) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step
        self.ranks = tuple(ranks)


class TrainingStopped(SafetrainError):
    """A policy ended the job, on all ranks at the same step."""

    def __init__(self, message: str, *, step: int, remedy: str = "") -> None:
        super().__init__(message)
        self.step, self.remedy = step, remedy
        if remedy:
            self.add_note(f"What to do: {remedy}")


class SkipBatch(Exception):
    """Raise it in a dataset, a collate function or ``training_step``: this micro-batch is to be left out."""


class Preempted(SystemExit):
    """The run was told to leave by a signal. Raised on all ranks after the same step, when its state is saved; not
    caught, it ends the process with exit code 75: run it again."""

    EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h

    def __init__(self, step: int, *, saved: bool) -> None:
        super().__init__(self.EXIT_CODE)
        self.step, self.saved = step, saved
        self.told: dict[int, str] = {}  # rank -> the signal it got


def together(error: E) -> E:
    """``error``, which all ranks raise at this point of this step."""
    error.together = True
    return error


def _failed(rank: int, step: int, reason: str) -> str:
    return f"rank {rank} failed at step {step}: {reason}"

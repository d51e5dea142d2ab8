"""How long a phase may go without progress before somebody asks."""

from __future__ import annotations

from safetrain.activity import Activity
from safetrain.config import Watchdog

_TIMES_THE_LONGEST = 10
_FIRST_STEP_ENDS = "optimizer"  # the phase after which a first step is done


class Patience:
    """Looks at an ``Activity`` again and again.

    Attributes:
        activity: what it looks at.
        seconds: time since progress. A look counts for little more than ``poll_s``, however late it comes: a process
            that was stopped (Ctrl-Z, a suspended machine) does not come back late.
    """

    def __init__(self, options: Watchdog, activity: Activity) -> None:
        self._options, self.activity = options, activity
        self._longest_look_s = max(2 * options.poll_s, min(1.0, options.stall_s / 4))
        self._longest: dict[str, float] = {}
        self._count, self._phase = activity.count, activity.phase
        self._counts = False
        self._looked_at: float | None = None
        self.seconds = 0.0

    def look(self, now: float) -> None:
        """``now``: of a monotonic clock, in seconds."""
        elapsed = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        activity = self.activity
        if activity.count == self._count:
            self.seconds += elapsed
            # a first time says nothing about the next ones; nor does one that was too long, and excused by others
            self._counts = self._is_known and self.seconds <= self.limit_s
            return
        if self._counts:
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self.seconds)
        self._count, self._phase, self.seconds, self._counts = activity.count, activity.phase, 0.0, False

    @property
    def limit_s(self) -> float:
        """For the phase that the process is in."""
        if self.activity.limit_s is not None:
            return self.activity.limit_s
        return self._usual_s if self._is_known else max(self._usual_s, self.compile_limit_s)

    @property
    def wait_limit_s(self) -> float:
        """The same, where the process waits for other ranks: to wait is never the longer for being done first."""
        first_step_done = _FIRST_STEP_ENDS in self.activity.finished
        return self._usual_s if first_step_done and self.activity.limit_s is None else self.limit_s

    @property
    def compile_limit_s(self) -> float:
        """The same, where the process compiles."""
        return self._options.first_step_stall_s

    @property
    def _usual_s(self) -> float:
        return max(self._options.stall_s, _TIMES_THE_LONGEST * self._longest.get(self.activity.phase, 0.0))

    @property
    def _is_known(self) -> bool:
        finished = self.activity.finished
        return self.activity.phase in finished and _FIRST_STEP_ENDS in finished

    @property
    def exhausted(self) -> bool:
        """Whether it is time to look closer."""
        return self.seconds > min(self.limit_s, self.wait_limit_s)

"""Which of NCCL's ways to move data is the broken one: tried again in processes to throw away, with one switched off.

All ranks try the same at the same time: each starts a process that joins the others' and sums once, within a time
limit. The first setting under which all of them get the right sum is the answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safetrain.comm import Comm

Setting = Mapping[str, str]
_P2P, _SHM, _IB = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_IB_DISABLE": "1"}
SETTINGS: Sequence[tuple[str, Setting]] = (
    ("as it is", {}),
    ("without peer-to-peer between GPUs", _P2P),
    ("without shared memory", _SHM),
    ("without InfiniBand", _IB),
    ("with plain sockets only", {**_P2P, **_SHM, **_IB}),
)
_START_S = 60.0  # a process imports torch first; one that waits for others does nothing else


def find_setting(
    attempt: Callable[[int, Setting], bool], settings: Sequence[tuple[str, Setting]] = SETTINGS
) -> tuple[str, Setting] | None:
    """The first of ``settings`` with which ``attempt(number, setting)`` is true; None: with none of them."""
    return next((named for number, named in enumerate(settings) if attempt(number, named[1])), None)


def suggestion(comm: Comm, limit_s: float) -> str:
    """What to put on the command line so that the ranks' sums work; all ranks call it.

    The answers go over the control group, which is Gloo's and works.
    """
    return in_words(find_setting(lambda number, setting: comm.agree(try_out(setting, number, limit_s), "all")))


def in_words(found: tuple[str, Setting] | None) -> str:
    if found is None:
        return (
            "Tried again without peer-to-peer, shared memory and InfiniBand, it does not work either: run with "
            "++env.NCCL_DEBUG=INFO, and look for the first WARN of each rank."
        )
    name, setting = found
    if not setting:
        return (
            "Tried again in new processes, it works: run the job again; if it fails again, with ++env.NCCL_DEBUG=INFO."
        )
    overrides = " ".join(f"++env.{key}={value}" for key, value in setting.items())
    return f"Tried again, it works {name}: add {overrides} to the command line (slower, and sound)."


def try_out(
    setting: Setting, number: int, limit_s: float, program: Sequence[str] = (sys.executable, "-m", __name__)
) -> bool:
    """Whether a new process in this rank's place, with ``setting`` in its environment, ends well within the time."""
    place = {
        # they join like ranks of a restart that an agent serves the store of: as clients, and under keys of their own
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": f"try_{number}",
        "SAFETRAIN_TRY_LIMIT_S": str(limit_s),
    }
    with subprocess.Popen(
        program,
        env={**os.environ, **place, **setting},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(limit_s + _START_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """The process to throw away: join, sum, and be gone without a clean-up that could hang."""
    from safetrain.comm import Comm
    from safetrain.lifetime import die_with_parent
    from safetrain.links import sum_of_ranks, within

    die_with_parent()
    limit_s = float(os.environ["SAFETRAIN_TRY_LIMIT_S"])
    comm = Comm.join(os.environ.get("SAFETRAIN_TRY_DEVICE", "auto"), join_timeout_s=_START_S)
    os._exit(1 if within(limit_s, lambda: sum_of_ranks(comm)) else 0)


if __name__ == "__main__":
    main()

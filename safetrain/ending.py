"""How a command of ours ends, also a rank: as Python ends a process, but for the teardown of the interpreter.

A thread of Gloo's that is about to let go of the last collective's tensors needs the interpreter for that. Where it
comes late, the interpreter is gone, and the thread aborts the process ("terminate called without an active exception";
seen with torch 2.13 in 1 of 24 short runs on a loaded machine).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_end(work: Callable[[], int]) -> NoReturn:
    """Do ``work``, and end this process with the exit code that it returns, or raises as a SystemExit.

    Threads are waited for, exit functions called and streams flushed first.
    """
    try:
        code = work()
    except SystemExit as leave:
        code = _code_of(leave)
    except BaseException as error:  # noqa: BLE001  as the interpreter would
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    # private, in Python 3.11 to 3.14; multiprocessing ends its children by the first one
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _code_of(leave: SystemExit) -> int:
    if leave.code is None or isinstance(leave.code, int):
        return leave.code or 0
    print(leave.code, file=sys.stderr)
    return 1

"""A signal that comes to a forked child before it has reset its handlers ends it all the same."""

from __future__ import annotations

import signal
import subprocess
import sys

_SCRIPT = """
import os, signal, time
from safetrain.forking import own_signals_in_children

def in_child():
    os.kill(os.getpid(), signal.SIGTERM)  # as early as that: the parent's handler is still there
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

signal.signal(signal.SIGTERM, lambda *_: print("handled by the parent's", flush=True))
own_signals_in_children(lambda: (signal.SIGTERM,), in_child)
if (child := os.fork()) == 0:
    print("still there", flush=True)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_what_comes_before_the_reset_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"-{int(signal.SIGTERM)} set()", "handled by the parent's"], done.stderr

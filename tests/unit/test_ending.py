"""A command ends as Python would end it: threads, exit functions, output and exit code; without the last teardown."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import atexit, concurrent.futures, sys, threading, time
from safetrain.ending import run_and_end

class Torn:
    def __del__(self):
        print("the interpreter was torn down", file=sys.stderr, flush=True)

def late():
    time.sleep(0.2)
    print("thread")

def work():
    atexit.register(print, "exit function")
    sys.stdout.write("work, ")
    threading.Thread(target=late).start()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(len, "idle workers are let go").result()
    sys.torn = Torn()
    {end}

run_and_end(work)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("return 0", 0, ""),
        ("return 75", 75, ""),
        ("raise SystemExit(75)", 75, ""),
        ("raise SystemExit()", 0, ""),
        ("raise SystemExit('in words')", 1, "in words\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("raise ValueError('bad label')", 1, "ValueError: bad label\n"),
    ],
)
def test_it_ends_as_python_would(end: str, code: int, error: str) -> None:
    program = [sys.executable, "-c", textwrap.dedent(SCRIPT.format(end=end))]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, "work, thread\nexit function\n")
    assert ended.stderr.endswith(error)
    assert bool(ended.stderr) is bool(error)

"""What an exit code, a signal or a library's error usually means, and what to do about it, in words to act on.

128 + n     the shell's way to say that signal n ended a program
-n          signal n ended the process itself, as Python and the launcher see it
other       the number that the program chose
"""

from __future__ import annotations

import re
import signal

_FEWER_WORKERS = "Use fewer loader processes (loader.num_workers), or a smaller loader.prefetch_factor"
_SHARED_MEMORY = (
    "/dev/shm, through which loader processes hand over their batches, is full (`df -h /dev/shm`). Give the container "
    "more (docker run --shm-size=8g, or --ipc=host), or use fewer loader processes (loader.num_workers) or smaller "
    "batches (loader.batch_size)."
)
_OPEN_FILES = (
    "the process may open no more files (`ulimit -n`); each batch of a loader process holds some. Raise the limit "
    "(ulimit -n 65536), or call torch.multiprocessing.set_sharing_strategy('file_system'), or use fewer loader "
    "processes (loader.num_workers)."
)
_NATIVE = "the fault is in native code; the log holds the Python stack that led to it"

_SIGNALS = {
    "SIGKILL": "As a rule the machine or the container ran out of memory (`dmesg | grep -i kill` tells); else a person "
    "or a scheduler ended it",
    "SIGSEGV": f"It touched memory that is not its own: {_NATIVE}",
    "SIGABRT": f"C++ code gave up (a failed assertion, an exception that nobody caught): {_NATIVE}. In a Gloo "
    "collective it means that another rank sent a tensor of another size",
    "SIGBUS": f"A page of memory could not be had; as a rule {_SHARED_MEMORY.removesuffix('.')}",
    "SIGFPE": f"An integer was divided by zero: {_NATIVE}. Gloo does so when it gathers tensors without elements",
    "SIGILL": "An instruction that this CPU does not know: a library was built for another CPU",
    "SIGTERM": "A person or a scheduler told it to go (a time limit, a preemption)",
    "SIGINT": "Ctrl-C, sent to this rank alone",
    "SIGHUP": "Its terminal is gone; start it with nohup, or in tmux",
    "SIGPIPE": "It wrote to a program that is gone",
    "SIGXCPU": "Its CPU time is used up (`ulimit -t`)",
    "SIGXFSZ": "A file grew over the limit (`ulimit -f`)",
    "SIGSYS": "A system call that the container's seccomp profile forbids",
}
_CODES = {
    0: "before the others were done: look for os._exit(0) in your code",
    1: "and without a record: an error before training began, or a disk that takes no record; its log tells",
    2: "the shell's code for wrong use of a command",
    126: "the command could not be run: no permission",
    127: "the command was not found",
}

OTHER_SIZE = "ranks gave tensors of different size to one collective"

_ERRORS = {
    r"DataLoader worker.*killed by signal: Bus error|shared memory\(shm\)|</torch_\d+|/dev/shm": _SHARED_MEMORY,
    r"DataLoader worker.*killed by signal: Killed": "a loader process was killed, as a rule because memory ran out "
    f"(`dmesg | grep -i kill` tells). {_FEWER_WORKERS}.",
    r"DataLoader worker.*killed by signal: (Segmentation fault|Aborted|Floating|Illegal)": "native code that the data "
    "set uses (a decoder, a reader) crashed in a loader process. loader.num_workers=0 runs it in the rank itself, "
    "whose log then holds the stack.",
    r"DataLoader worker.*(killed by signal|exited unexpectedly)": "a loader process ended: ended from outside, or "
    "by os._exit in the data set. loader.num_workers=0 runs the data set in the rank itself.",
    r"DataLoader timed out": "a loader process gave no batch within loader.timeout_s: a slow or stuck read in the data "
    "set. Raise loader.timeout_s, or run with loader.num_workers=0 to see where.",
    r"Too many open files|received 0 items of ancdata|Errno 24\b": _OPEN_FILES,
    r"No space left on device|Errno 28\b|Disk quota exceeded|Errno 122\b": "the disk, or your share of it, is full "
    "(`df -h`, `quota`): make room, or write elsewhere (hydra.run.dir=...).",
    r"Read-only file system|Errno 30\b": "that file system can only be read: write elsewhere (hydra.run.dir=...).",
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError": "the GPU's memory is too small: a smaller "
    "loader.batch_size with a larger loop.accumulate trains the same; precision=bf16 halves activations.",
    r"DefaultCPUAllocator|can't allocate memory|MemoryError|Cannot allocate memory|Errno 12\b": "the machine's memory "
    "ran out: a smaller loader.batch_size with a larger loop.accumulate trains the same; fewer loader processes "
    "(loader.num_workers) help, too.",
    r"op\.preamble\.length <= op\.nbytes": f"{OTHER_SIZE}.",
}

_CRASH = re.compile(
    r"^(?P<why>Fatal Python error: .+)\n(?:.*\n)*?Current thread .*\n(?P<stack>(?: +File .*\n)+)", re.MULTILINE
)
_ABORTED = re.compile(r"^Fatal Python error: .+$", re.MULTILINE)
_THREAD = re.compile(r"^Thread .*\(most recent call first\):\n((?: +File .*\n)+)", re.MULTILINE)
_SHOWN_FRAMES = 8


def of_exit(code: int | None) -> str:
    """How a process ended and what that usually means: ``was killed by SIGKILL. As a rule ...``"""
    if code is None:
        return "is gone without a word: killed, crashed or left by os._exit. The launcher's report tells its exit code."
    number = -code if code < 0 else code - 128
    name = _signal_name(number) if code < 0 or code > 128 else None
    if name is not None:
        verb = "was killed by" if name == "SIGKILL" else "was ended by"
        how = f"{verb} {name}" if code < 0 else f"left with exit code {code}, a shell's way to say {name}"
        return f"{how}. {_SIGNALS.get(name, 'A signal from outside')}."
    if code < 0:
        return f"was ended by signal {number}."
    usual = _CODES.get(code, f"and without an exception: look for os._exit({code}) in your code, or for a library that "
                       "ends the process")  # fmt: skip
    return f"left with exit code {code}{' ' if usual.startswith(('and', 'before')) else ', '}{usual}."


def crash_in(log: str) -> list[str]:
    """The Python stack of a crash in native code, as ``faulthandler`` wrote it into a log: why, and innermost first."""
    found = _CRASH.search(log)
    if found is not None:
        return [found["why"], *found["stack"].splitlines()[:_SHOWN_FRAMES]]
    why, threads = _ABORTED.search(log), _THREAD.findall(log)
    if why is None or not threads:
        return []
    return [why[0], *threads[-1].splitlines()[:_SHOWN_FRAMES]]  # a thread of C++ gave up: where Python's main one was


def of_error(error: str, message: str) -> str:
    """What stands behind an exception of type ``error``, and what to do; empty where its message says enough."""
    text = f"{error}: {message}"
    return next((words for pattern, words in _ERRORS.items() if re.search(pattern, text)), "")


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None

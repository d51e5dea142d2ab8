"""Exit codes, signals and errors of libraries are told in words to act on."""

from __future__ import annotations

import signal

import pytest

from safetrain import causes


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, ["was killed by SIGKILL. As a rule the machine or the container ran out of memory", "dmesg"]),
        (-signal.SIGSEGV, ["was ended by SIGSEGV", "native code", "the log holds the Python stack"]),
        (-signal.SIGABRT, ["was ended by SIGABRT", "another rank sent a tensor of another size"]),
        (-signal.SIGBUS, ["was ended by SIGBUS", "/dev/shm", "--shm-size"]),
        (-signal.SIGFPE, ["was ended by SIGFPE", "tensors without elements"]),  # H24
        (-signal.SIGTERM, ["was ended by SIGTERM", "scheduler"]),
        (-signal.SIGUSR2, ["was ended by SIGUSR2. A signal from outside."]),
        (-(signal.SIGRTMIN + 3), ["was ended by signal"]),
        (137, ["left with exit code 137, a shell's way to say SIGKILL", "ran out of memory"]),
        (139, ["SIGSEGV"]),
        (0, ["left with exit code 0 before the others were done: look for os._exit(0)"]),
        (1, ["left with exit code 1 and without a record", "its log tells"]),
        (3, ["left with exit code 3 and without an exception: look for os._exit(3)"]),
        (127, ["the command was not found"]),
        (255, ["left with exit code 255 and without an exception"]),
    ],
)
def test_the_end_of_a_process(code: int, words: list[str]) -> None:
    text = causes.of_exit(code)
    for word in words:
        assert word in text
    assert text.endswith(".")
    assert ".." not in text


@pytest.mark.parametrize(
    ("error", "message", "words"),
    [
        # H71: what torch says when a container's shared memory is full, in three places
        (
            "RuntimeError",
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit.",
            ["/dev/shm", "--shm-size", "loader.num_workers"],
        ),
        ("RuntimeError", "unable to write to file </torch_17_1>: No space left on device (28)", ["/dev/shm"]),
        (
            "RuntimeError",
            "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
            ["/dev/shm"],
        ),
        ("RuntimeError", "unable to mmap 4096 bytes from file </torch_9>: Cannot allocate memory (12)", ["/dev/shm"]),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ", ["memory ran out", "dmesg"]),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", ["native code"]),
        ("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly", ["loader.num_workers=0"]),
        ("RuntimeError", "DataLoader timed out after 5 seconds", ["loader.timeout_s"]),
        ("OSError", "[Errno 24] Too many open files: 'a.png'", ["ulimit -n", "file_system"]),
        ("RuntimeError", "received 0 items of ancdata", ["ulimit -n"]),
        ("OSError", "[Errno 28] No space left on device", ["df -h", "hydra.run.dir"]),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", ["loop.accumulate"]),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", ["loader.batch_size"]),
    ],
)
def test_an_error_whose_message_does_not_say_what_to_do(error: str, message: str, words: list[str]) -> None:
    text = causes.of_error(error, message)
    for word in words:
        assert word in text


def test_an_ordinary_error_speaks_for_itself() -> None:
    assert causes.of_error("ValueError", "bad label 12") == ""


def test_a_crash_is_shown_by_its_python_stack() -> None:
    log = (
        "step 3\nFatal Python error: Segmentation fault\n\n"
        'Thread 0x2 (most recent call first):\n  File "threading.py", line 1 in wait\n\n'
        "Current thread 0x1 (most recent call first):\n"
        '  File "decoder.py", line 7 in decode\n  File "mine.py", line 16 in training_step\n\n'
        "Extension modules: torch._C\n"
    )
    assert causes.crash_in(log) == [
        "Fatal Python error: Segmentation fault",
        '  File "decoder.py", line 7 in decode',
        '  File "mine.py", line 16 in training_step',
    ]
    assert causes.crash_in("step 3\n") == []

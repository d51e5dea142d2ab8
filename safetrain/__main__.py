"""``python -m safetrain``.

The imports take seconds, and Ctrl-C must end them without a traceback: until ranks run there is nothing to clean up.
"""

from __future__ import annotations

import os
import sys

from safetrain.user_path import search_user_code_last


def be_ready() -> None:
    """For Ctrl-C, and for names of the user's files; the first thing that a command does."""
    search_user_code_last()
    import signal

    if "RANK" in os.environ:  # a rank of torchrun: it ends at once when told to, also inside a collective
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a shell script's background jobs
        signal.signal(signal.SIGINT, _leave)


def main() -> int:
    """Import, and work."""
    from safetrain import cli

    return cli.main(sys.argv[1:])


def _leave(number: int, _frame: object) -> None:
    os.write(2, b"\nInterrupted; no training was running.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    be_ready()
    from safetrain.ending import run_and_end

    run_and_end(main)

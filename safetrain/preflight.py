"""``python -m safetrain.preflight``: the checks before the first step, and nothing after them.

    python -m safetrain.preflight                              the machine, and the ranks' ways to each other
    python -m safetrain.preflight recipe=NAME [key=value ...]  the same, and all that the job would need
    torchrun ... -m safetrain.preflight [recipe=NAME ...]      with ranks that torchrun starts

Arguments are those of a job, ``launch.*`` among them. Nothing is left behind. Exit codes: 0 nothing is refused, 1
something is, or a rank failed, 2 wrong use.

The checks are listed in checkup.py.
"""

from __future__ import annotations

import sys

from safetrain.__main__ import be_ready


def main() -> int:
    """Import, and work."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    from safetrain import preflight_command

    return preflight_command.main(sys.argv[1:])


if __name__ == "__main__":
    be_ready()
    from safetrain.ending import run_and_end

    run_and_end(main)

"""``python -m safetrain.tune``: which way to reduce gradients is fastest, tried on the job itself.

    python -m safetrain.tune recipe=NAME [key=value ...]         all that strategy=ddp can do differently
    python -m safetrain.tune recipe=NAME tune.rounds=12          for longer: smaller differences show
    torchrun ... -m safetrain.tune recipe=NAME                   with ranks that torchrun starts

Arguments are those of a job, and ``tune.steps`` (measured, a turn; 30), ``tune.warmup_steps`` (before them; 5) and
``tune.rounds`` (turns of each way; 6). Nothing is saved and nothing is left behind. Exit codes: 0 all was tried, 1 a
rank failed, 2 wrong use.

What is tried, and how it is compared, stands in tuning.py.
"""

from __future__ import annotations

import sys

from safetrain.__main__ import be_ready


def main() -> int:
    """Import, and work."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    from safetrain import tune_command

    return tune_command.main(sys.argv[1:])


if __name__ == "__main__":
    be_ready()
    from safetrain.ending import run_and_end

    run_and_end(main)

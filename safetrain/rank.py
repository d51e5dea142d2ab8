"""``python -m safetrain.rank CONFIG``: how the launcher starts a rank.

The imports take seconds. Before the first of them, the rank is made to end with its launcher, and at once when told to.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from safetrain.user_path import search_user_code_last

PARENT_PID = "SAFETRAIN_PARENT_PID"
"""The environment variable by which a rank knows the launcher that started it."""


def main(config_file: str) -> None:
    """Be sure to end; then import and work."""
    search_user_code_last()
    import signal

    from safetrain.lifetime import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != int(os.environ[PARENT_PID]):  # it died before the call
        os._exit(1)

    from safetrain import worker
    from safetrain.ending import run_and_end

    run_and_end(partial(worker.main, config_file))


if __name__ == "__main__":
    main(sys.argv[1])

"""A job that leaves nothing behind, for the commands that only look, or only try.

It is started like any other, by whatever starts jobs here (our launcher, torchrun, a scheduler), in a run directory to
throw away.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from safetrain import cli
from safetrain.environ import environment

_RUN_DIR = "hydra.run.dir="
_NOTHING_KEPT = ("hydra.output_subdir=null", "launch.max_restarts=0", "metric=null")


def run_throwaway(
    folder: str, arguments: Sequence[str], overrides: Sequence[str], variables: Mapping[str, str]
) -> tuple[int, Path]:
    """Run the job of ``arguments`` with ``overrides``, its ranks told what to do by ``variables``.

    Returns the exit code, and the run directory (below ``outputs/<folder>``, or where the arguments say), which is for
    the caller to ``remove``.
    """
    asked = [argument.removeprefix(_RUN_DIR) for argument in arguments if argument.startswith(_RUN_DIR)]
    # made by the process that composes: our launcher, or rank 0 of another one
    run_dir = Path(asked[-1] if asked else f"outputs/{folder}", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}")
    kept = [argument for argument in arguments if not argument.startswith(_RUN_DIR)]
    job = [*kept, f"{_RUN_DIR}{run_dir}", *_NOTHING_KEPT, *overrides]
    sys.argv = [sys.argv[0], *job]
    with environment(variables):
        return cli.main(job), run_dir


def remove(run_dir: Path) -> None:
    """The run directory, and the folders above it that hold nothing else."""
    shutil.rmtree(run_dir, ignore_errors=True)
    here = Path.cwd()
    with suppress(OSError):  # something else is in it
        for folder in run_dir.absolute().parents:
            if here not in folder.parents:
                return
            folder.rmdir()

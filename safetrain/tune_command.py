"""Tuning as a command: a job to throw away, whose ranks try ways to reduce gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from safetrain.errors import ConfigError
from safetrain.orders import FAILED, WRONG
from safetrain.rank_log import complain
from safetrain.throwaway import remove, run_throwaway
from safetrain.tune_config import TUNE, Tune


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    if {"-m", "--multirun"} & set(arguments):
        print("tuning is of one job: leave out -m, and give each value of a sweep by itself", file=sys.stderr)
        return WRONG
    if not any(argument.startswith("recipe=") for argument in arguments):
        print("which job? python -m safetrain.tune recipe=NAME [key=value ...]", file=sys.stderr)
        return WRONG
    try:
        options, of_job = Tune.said(arguments)
    except ConfigError as error:
        complain(error)
        return WRONG
    code, run_dir = run_throwaway("tune", of_job, ["resume=none"], {TUNE: options.as_text})
    if code != FAILED:  # else a rank failed, and its log tells more
        remove(run_dir)
    return code

"""The command line of ``python -m safetrain.guard``: its own options, then the script and what is the script's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.checks import nearest
from safetrain.config import Watchdog
from safetrain.errors import UsageError

RUNS = "guard_runs"
_USAGE = "python -m safetrain.guard [options] train.py [its arguments]"
_EXAMPLES = """\
Every rank of a script runs under it, as it is:
  torchrun --nproc-per-node 2 -m safetrain.guard train.py --epochs 3
  torchrun --nproc-per-node 2 -m safetrain.guard -m mypackage.train --epochs 3
  srun python -m safetrain.guard train.py         (Slurm, mpirun, or RANK and WORLD_SIZE set by hand)
Its options stand before the script; what follows the script is the script's. All ranks need the same options.
"""


@dataclass(frozen=True)
class GuardOptions:
    """What the command line says.

    Attributes:
        script: a file, or a module's name where ``is_module``; ``arguments`` are its own.
        stall_s: how long no collective may be issued while ranks wait or stand; ``first_stall_s``: the same until the
            script is under way; ``busy_s``: while the rank that is waited for is at work.
        join_s: how long to wait for all ranks at the start.
        run_dir: empty: a new one in ``guard_runs``.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    stall_s: float = 300.0
    first_stall_s: float = 900.0
    busy_s: float = 1800.0
    join_s: float = 120.0
    run_dir: str = ""
    preflight: bool = True

    def watchdog(self) -> Watchdog:
        """The same for watchdog.py."""
        return Watchdog(stall_s=self.stall_s, first_step_stall_s=self.first_stall_s)


def parse(arguments: Sequence[str]) -> GuardOptions:
    """What was asked for on the command line.

    Raises:
        UsageError: an unknown option, a wrong value, no script, or one that is not there.
        SystemExit: help was asked for.
    """
    head, is_module, rest = _split(arguments)
    asked = _parser().parse_args(head)
    if not rest:
        raise UsageError(f"no script is named: {_USAGE}")
    script = rest[0]
    if not is_module and not Path(script).exists():
        folder = Path(script).parent
        there = [str(path) for path in folder.glob("*.py")] if folder.is_dir() else []
        raise UsageError(f"{script}: no such file.{nearest(script, there)}")
    return GuardOptions(script, tuple(rest[1:]), is_module, **vars(asked))


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """The guard's own part, whether a module follows, and what follows: the first word that is neither an option nor
    an option's value begins it."""
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "-m":
            return list(arguments[:index]), True, list(arguments[index + 1 :])
        if not word.startswith("-"):
            return list(arguments[:index]), False, list(arguments[index:])
        index += 1 if "=" in word or word in _WITHOUT_VALUE else 2
    return list(arguments), False, []


_WITHOUT_VALUE = ("-h", "--help", "--no-preflight")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """As one line; an unknown option with the nearest one there is."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            name = unknown[0].partition("=")[0]
            message = f"{name}: no such option.{nearest(name, self._option_string_actions)} --help lists them."
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m safetrain.guard",
        usage=_USAGE,
        description="Run a torch.distributed script, unchanged, so that it never hangs or dies without saying\nwhy: "
        "which rank, at which line of your code, what the others wait in, what to do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = GuardOptions("")
    for name, words in (
        ("--stall-s", "end the job when no collective is issued for so long while ranks wait, and the rank that they "
         "wait for stands still"),
        ("--first-stall-s", "the same for the script's start, and where a rank compiles"),
        ("--busy-s", "the same where that rank is at work (a long validation); after --stall-s there is a warning"),
        ("--join-s", "wait so long for all ranks to start"),
    ):  # fmt: skip
        default = getattr(defaults, name.strip("-").replace("-", "_"))
        parser.add_argument(
            name, type=_seconds, default=default, metavar="SECONDS", help=f"{words} (default: {default:g})"
        )
    parser.add_argument(
        "--run-dir", default="", metavar="FOLDER",
        help=f"where logs and the verdict go, the same for all ranks (default: {RUNS}/<date>_<time>)",
    )  # fmt: skip
    parser.add_argument(
        "--no-preflight", dest="preflight", action="store_false",
        help="do not compare versions, environment, arguments and devices of the ranks",
    )  # fmt: skip
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")
    return value

"""The preflight as a command: a job to throw away, whose ranks only look."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from safetrain.finding import Finding
from safetrain.orders import FAILED, OK, WRONG
from safetrain.preflight_config import ONLY_CHECKS
from safetrain.throwaway import remove, run_throwaway

_REFUSED = 1
_FOUND = "preflight.json"
_NO_RECIPE = ("trainer={_target_: safetrain.Trainer}", "name=preflight")
_WIDTH = 110


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    if {"-m", "--multirun"} & set(arguments):
        print("a preflight is of one job: leave out -m, and give each value of a sweep by itself", file=sys.stderr)
        return WRONG
    has_recipe = any(argument.startswith("recipe=") for argument in arguments)
    code, run_dir = run_throwaway(
        "preflight", arguments, () if has_recipe else _NO_RECIPE, {ONLY_CHECKS: "job" if has_recipe else "machine"}
    )
    found = found_here() or read_findings(run_dir)
    if code != FAILED:  # else a rank failed, and its log tells more
        remove(run_dir)
    return code or (_REFUSED if any(one.verdict == "refuse" for one in found) else OK)


def found_here() -> list[Finding]:
    """What this process found as a rank; empty in a launcher."""
    checkup = sys.modules.get("safetrain.checkup")
    return [] if checkup is None else checkup.FOUND


def write_findings(run_dir: Path, found: Sequence[Finding]) -> None:
    """For the launcher, whose exit code tells of them."""
    (run_dir / _FOUND).write_text(json.dumps([asdict(one) for one in found]))


def read_findings(run_dir: Path) -> list[Finding]:
    """What rank 0 wrote; empty where it did not come so far."""
    with suppress(FileNotFoundError):
        return [Finding(**one) for one in json.loads((run_dir / _FOUND).read_text())]
    return []


def table(found: Sequence[Finding]) -> str:
    """A line for each finding; under it, where something is wrong, what it is and what to do."""
    width = max(len(one.check) for one in found)
    indent = " " * (width + 11)
    lines = [f"{'check':<{width}}  verdict  found"]
    for one in found:
        lines.append(f"{one.check:<{width}}  {one.verdict:<7}  {one.value}")
        for text in filter(None, (one.words, one.remedy)):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    ok, strange, refused = (sum(one.verdict == verdict for one in found) for verdict in ("ok", "warn", "refuse"))
    return "\n".join([*lines, "", f"{ok} ok, {strange} to look at, {refused} refused"])

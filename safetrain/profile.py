"""``python -m safetrain.profile <run directory>``: make one trace of the parts that a run has left, and say what it
shows. A run does so itself at its end; this is for one that was ended before, or whose machines share no disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetrain.finding import size
from safetrain.run_dir import shown
from safetrain.trace_merge import Merged, merge, missing_in_words, unmerged

TRACES = "traces"
_USAGE = "usage: python -m safetrain.profile <run directory>"


def told(merged: Merged) -> str:
    """Where a trace is, how to open it, and what it shows."""
    number = f"step {merged.first}" if merged.first == merged.last else f"steps {merged.first}-{merged.last}"
    ranks = f"{len(merged.ranks)} rank{'s' * (len(merged.ranks) != 1)}"
    lines = [f"profile: {number} of {ranks} in {shown(merged.path)} ({size(merged.path.stat().st_size)})"]
    lines.append("  open it at https://ui.perfetto.dev or chrome://tracing; nothing is uploaded")
    if merged.missing:
        lines.append(f"  {missing_in_words(merged.missing)}; python -m safetrain.profile merges again what is there")
    return "\n".join([*lines, *(f"  {text}" for text in merged.words)])


def main(arguments: Sequence[str]) -> int:
    """Merge what ``arguments`` name; the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 2
    traces = Path(arguments[0], TRACES)
    found = unmerged(traces)
    if not found:
        whole = sorted(path.name for path in traces.glob("*.json.gz"))
        there = f"; merged already: {', '.join(whole)}" if whole else ": run it with profile=steps"
        print(f"{traces} holds no parts of a trace{there}", file=sys.stderr)
        return 1
    for name, parts in found.items():
        print(told(merge(traces, name, parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

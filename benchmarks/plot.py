"""The picture in the README: what a step costs under each trainer, from the newest table of benchmarks.peers.

python -m benchmarks.plot
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "step_cost.svg"
COLORS = {
    "safetrain": "#d1495b", "Lightning": "#30638e", "Fabric": "#7fb069", "Accelerate": "#edae49",
    "Hugging Face": "#6c757d",
}  # fmt: skip

Ratios = dict[str, dict[str, tuple[float, float, float]]]


def ratios(table: str) -> Ratios:
    """By workload and trainer: CPU time a step over the bare loop's, and the interval of that median."""
    found: Ratios = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 7 and (ratio := re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", cells[4])):
            work = f"{cells[0]}, {cells[1]} micro-batches a step" if cells[1] != "1" else cells[0]
            low, high = float(ratio[2]), float(ratio[3])
            found.setdefault(work, {})[cells[2]] = (float(ratio[1]), low, high)
    return found


def draw(found: Ratios, path: Path) -> None:
    """A row a workload, a dot a trainer, a line its 95 % interval."""
    figure, axes = plt.subplots(figsize=(8, 0.5 + 0.62 * len(found)))
    for row, (work, trainers) in enumerate(found.items()):
        for place, (trainer, color) in enumerate(COLORS.items()):
            _dot(axes, row + 0.13 * (place - 2), trainers, trainer, color, labelled=row == 0)
        axes.axhline(row + 0.5, color="#eeeeee", linewidth=1)
        axes.text(1.005, row, work, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("CPU time of a step, over that of a hand-written DDP loop (1 = the same)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _dot(
    axes: plt.Axes, height: float, trainers: Mapping[str, Sequence[float]], trainer: str, color: str, *, labelled: bool
) -> None:
    if trainer not in trainers:
        return
    middle, low, high = trainers[trainer]
    axes.plot([low, high], [height, height], color=color, linewidth=2, solid_capstyle="round", alpha=0.5)
    axes.plot([middle], [height], "o", color=color, markersize=5, label=trainer if labelled else None)


def main() -> None:
    newest = max((HERE / "results").glob("peers_*.md"))
    matplotlib.rcParams["svg.hashsalt"] = "safetrain"  # the same file from the same numbers
    draw(ratios(newest.read_text(encoding="utf-8")), PICTURE)
    print(f"{newest.name} -> {PICTURE.name}")


if __name__ == "__main__":
    main()

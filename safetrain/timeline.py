"""The time line of the failure page, as SVG: a lane for each rank, or for many ranks that do the same.

A mark is a collective, a bar what a rank is in at its end, a circle with a question mark a collective that it should
have come to, a cross its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from safetrain.mismatch import Mismatch
from safetrain.page_facts import Call, Rank, in_words
from safetrain.timeline_places import Clock, Lane, Mark, Row, is_clocked, rows, shown, stands

_WIDTH, _LEFT, _RIGHT, _TOP, _LANE = 1120, 140, 26, 40, 62
_MARK, _BAR, _CHARACTER = 8, 18, 6.4  # px: of a mark's width, a bar's height, a letter's width
_LABELLED_PX = 46


def draw(lanes: Sequence[Lane], found: Sequence[Mismatch], end_ns: int | None) -> str:
    """``end_ns``: when the verdict was written; for ranks that say no time of their own."""
    lanes = [lane for lane in lanes if lane]
    placed = rows(lanes, end_ns)
    times = [time for row in placed for time in (row.since_ns, row.until_ns)]
    times += [time for row in placed for mark in row.marks.values() for time in _times(mark)]
    standing = any(stands(rank) for lane in lanes for rank in lane)
    clock = Clock(times, _LEFT + 12, _WIDTH - _RIGHT - 12, ends_wide=standing)
    height = _TOP + _LANE * len(lanes) + 8
    hosts = {rank.host for lane in lanes for rank in lane if rank.host}
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="time line of the ranks">',
        '<defs><pattern id="open" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="3" height="7" class="hatch"/></pattern></defs>',
        *(_backdrop(lane, number, len(hosts) > 1) for number, lane in enumerate(lanes)),
        *(_gaps(clock) if is_clocked(lanes) else ()),
        *_threads(placed, clock),
        *_differences(placed, found, clock, height),
    ]
    for number, row in enumerate(placed):
        parts += [*_lane(row, _y(number), clock), *_absences(row, _y(number), placed, found, clock)]
    return "\n".join([*parts, "</svg>"])


def caption(lanes: Sequence[Lane], hosts: int) -> list[str]:
    """What the reader has to know about the clock."""
    if not any(shown(rank) for lane in lanes for rank in lane):
        return ["No rank left word of its collectives."]
    if not is_clocked(lanes):
        return ["The times are not known for all ranks: collectives stand in the order of their numbers, not to scale."]
    notes = [
        "One clock for all lanes, left to right; long gaps are drawn shortened. A mark is a collective where it was "
        "issued, a hatched bar one that has not ended."
    ]
    if hosts > 1:
        notes.append(
            f"The {hosts} machines' clocks are taken as they are: between machines, marks may be shifted by as much as "
            "the clocks differ."
        )
    return notes


# --- a lane -----------------------------------------------------------------------------------------------------------


def _y(number: int) -> float:
    """The middle of a lane's marks."""
    return _TOP + number * _LANE + 40


def _backdrop(lane: Lane, number: int, tells_host: bool) -> str:
    top, one, y = _TOP + number * _LANE, lane[0], _y(number)
    name, which = f"rank {one.number}", one.host if tells_host else ""
    if len(lane) > 1:
        name, which = f"{len(lane):,} ranks", in_words([rank.number for rank in lane])
        which = which.partition("(")[2].rstrip(")") or which.removeprefix("ranks ")
    below = " · ".join(text for text in ("culprit" if one.is_culprit else "", which) if text)
    return (
        f'<g class="lane{" culprit" if one.is_culprit else ""}">'
        f'<rect x="0" y="{top + 3}" width="{_WIDTH}" height="{_LANE - 6}" rx="7"/>'
        f'<text class="name" x="14" y="{top + 28}">{escape(name)}</text>'
        f'<text class="below" x="14" y="{top + 45}">{escape(_cut(below, _LEFT - 16))}</text>'
        f'<line class="rail" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/></g>'
    )


def _lane(row: Row, y: float, clock: Clock) -> list[str]:
    one, since, end = row.lane[0], clock.x(row.since_ns), clock.x(row.until_ns)
    tone = "bad" if one.is_culprit else "calm"
    parts = [f'<text class="doing {tone}" x="{_LEFT + 6}" y="{y - 17}">{escape(_cut(_doing(one), 900))}</text>']
    pending = one.pending if one.state == "waiting" else None
    if pending is not None and pending.key in row.marks:
        since, kind, label = clock.x(row.marks[pending.key].first_ns), f"wait {_colour(pending)}", str(pending)
    else:
        kind, label = f"in {one.state}", "no answer" if one.state == "silent" else one.phase or one.state
    if stands(one):
        parts.append(_bar(since, end, y, kind, label, one.doing, clock.quiet))
    parts += [_mark(mark, y, clock) for key, mark in row.marks.items() if pending is None or key != pending.key]
    if one.state == "ended":  # nobody knows when
        end = _WIDTH - _RIGHT - 12
        parts.append(f'<line class="unknown" x1="{_LEFT + 12}" x2="{end}" y1="{y}" y2="{y}"/>')
    if one.state in ("failed", "ended"):
        parts.append(
            f'<g class="death"><title>{escape(one.doing)}</title><circle cx="{end:.1f}" cy="{y}" r="9"/>'
            f'<path d="M{end - 4:.1f} {y - 4}l8 8m0 -8l-8 8"/></g>'
        )
    elif one.state == "victim":
        title = "<title>ended</title>"
        parts.append(f'<rect class="end" x="{end - 2:.1f}" y="{y - 9}" width="4" height="18">{title}</rect>')
    return parts


def _bar(x: float, end: float, y: float, kind: str, label: str, title: str, quiet: float) -> str:
    x = min(x, end - _MARK)
    text = max(x, min(quiet, end)) + 14  # right of all marks
    box = f'x="{x:.1f}" y="{y - _BAR / 2}" width="{end - x:.1f}" height="{_BAR}" rx="4"'
    hatch = f'<rect class="hatched" {box}/>' if kind.startswith("wait") else ""
    return (
        f'<g class="bar {kind}"><title>{escape(title)}</title><rect {box}/>{hatch}'
        f'<text x="{text:.1f}" y="{y + 4}">{escape(_cut(label, end - text - 4))}</text></g>'
    )


def _mark(mark: Mark, y: float, clock: Clock) -> str:
    x, call = clock.x(mark.first_ns), mark.call
    width = max(_MARK, clock.x(max(mark.last_ns, mark.ended_ns or 0)) - x)
    many = f", on {mark.ranks:,} ranks" if mark.ranks > 1 else ""
    title = f"{call}, call {call.number}: {'ended' if call.done else 'not ended'}{many}"
    return (
        f'<rect class="mark {_colour(call)}{"" if call.done else " pending"}" x="{x - _MARK / 2:.1f}" y="{y - 7}" '
        f'width="{width:.1f}" height="14" rx="3"><title>{escape(title)}</title></rect>'
    )


def _absences(row: Row, y: float, placed: Sequence[Row], found: Sequence[Mismatch], clock: Clock) -> Iterable[str]:
    """Where a lane should be, and is not."""
    for one in found:
        places = _places(one, placed, clock)
        missing = [rank.number for rank in row.lane if rank.number in one.absent]
        if missing and places:
            title = escape(f"{in_words(missing)} did not come to {one.call}, call {one.call.number}")
            yield (
                f'<g class="absent"><title>{title}</title><circle cx="{min(places):.1f}" cy="{y}" r="8"/>'
                f'<text x="{min(places):.1f}" y="{y + 4}" text-anchor="middle">?</text></g>'
            )


# --- over all lanes ---------------------------------------------------------------------------------------------------


def _threads(placed: Sequence[Row], clock: Clock) -> Iterable[str]:
    """The same call on all lanes, joined."""
    for key in dict.fromkeys(key for row in placed for key in row.marks):
        points = [(clock.x(row.marks[key].first_ns), _y(n)) for n, row in enumerate(placed) if key in row.marks]
        if len(points) > 1:
            yield f'<polyline class="thread" points="{" ".join(f"{x:.1f},{y}" for x, y in points)}"/>'


def _differences(placed: Sequence[Row], found: Sequence[Mismatch], clock: Clock, height: int) -> Iterable[str]:
    """Calls that are not the same on all ranks."""
    for one in found:
        places = _places(one, placed, clock)
        if one.differs and places:
            x = sum(places) / len(places)
            yield (
                f'<g class="differs"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 2}" y2="{height - 8}"/>'
                f'<text x="{x + 5:.1f}" y="{_TOP + 5}">call {one.call.number} differs</text></g>'
            )


def _gaps(clock: Clock) -> Iterable[str]:
    """How long the widest gaps are."""
    y, ends = 20, list(zip(clock.times, clock.places, strict=True))
    for (before, left), (after, right) in pairwise(ends):
        if right - left >= _LABELLED_PX:
            yield (
                f'<g class="gap"><path d="M{left + 3:.1f} {y}H{right - 3:.1f}M{left + 3:.1f} {y - 4}v8'
                f'M{right - 3:.1f} {y - 4}v8"/><text x="{(left + right) / 2:.1f}" y="{y - 6}" text-anchor="middle">'
                f"{_duration((after - before) / 1e9)}</text></g>"
            )


def _places(one: Mismatch, placed: Sequence[Row], clock: Clock) -> list[float]:
    return [clock.x(row.marks[one.call.key].first_ns) for row in placed if one.call.key in row.marks]


def _times(mark: Mark) -> tuple[int, ...]:
    return mark.first_ns, mark.last_ns, mark.ended_ns or mark.last_ns


# --- words ------------------------------------------------------------------------------------------------------------


def _doing(one: Rank) -> str:
    """Shorter than ``Rank.doing``: the bar says the rest."""
    if not stands(one):
        return one.doing + (f"; when last seen {one.last_seen}" if one.last_seen else "")
    step = "" if one.step is None else f"step {one.step}"
    long = f"{one.seconds:,.0f} s" if one.seconds else ""
    return " · ".join(text for text in (one.state, one.phase, step, long) if text)


def _colour(call: Call) -> str:
    if call.about in ("safetrain_ddp", "safetrain_shard", "safetrain_replicate"):
        return "gradients"
    return "control" if call.about == "safetrain_control" else "yours"


def _duration(seconds: float) -> str:
    sizes: Mapping[str, float] = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
    for unit, size in sizes.items():
        if seconds >= size * (2 if size > 1 else 1):
            number = seconds / size
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _cut(text: str, width: float) -> str:
    most = max(int(width / _CHARACTER), 0)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…" if most > 2 else ""

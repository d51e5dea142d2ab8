"""The ranks on the failure page: what each one did, its stack, its last collectives and its log, one click away."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

from safetrain.failure import is_user_file
from safetrain.page_facts import Call, Facts, Frame, Rank, in_words
from safetrain.words import group_in_words

_EACH_SHOWN = 16  # ranks; of more, those that do the same stand together
_GROUPS, _STACKS, _LOGS = 24, 8, 8  # at most that many are shown
_TRACEBACK_FILE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)|^\s*(?P<place>\S+:\d+) in ')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<")
_PLURAL = {"waits": "wait", "is": "are", "does": "do", "has": "have", "was": "were"}


def groups_of(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Each rank by itself; of many, those that do the same together, the odd ones first."""
    if len(ranks) <= _EACH_SHOWN:
        return [[rank] for rank in ranks]
    finer_to_coarser: tuple[Callable[[Rank], object], ...] = (
        lambda one: one.situation,
        lambda one: (one.is_culprit, one.state, one.phase),
        lambda one: (one.is_culprit, one.state),
    )
    groups: dict[object, list[Rank]] = {}
    for same in finer_to_coarser:
        groups = {}
        for rank in ranks:
            groups.setdefault(same(rank), []).append(rank)
        if len(groups) <= _GROUPS:
            break
    return sorted(groups.values(), key=lambda group: (not group[0].is_culprit, len(group)))


def draw(groups: Sequence[Sequence[Rank]], known: Facts, near: Collection[str]) -> str:
    """A box for each group, the culprits' first."""
    culprits_first = sorted(groups, key=lambda group: not group[0].is_culprit)
    boxes = [_box(group, known, near) for group in culprits_first]
    return "\n".join(["<section>\n<h2>Ranks</h2>", *boxes, "</section>"]) if boxes else ""


def marked(lines: Iterable[str], place: str) -> str:
    """The lines of a traceback or a stack, as HTML, the user's marked."""
    out, mine = [], False
    for line in lines:
        if found := _TRACEBACK_FILE.match(line):
            at = found["place"] or f"{found['file']}:{found['line']}"
            file = at.rpartition(":")[0]
            mine = place.startswith(at) or (not _LIBRARY.search(file) and is_user_file(file))
        elif not line.startswith(" "):
            mine = False
        text = line.lstrip()
        out.append(f'{line[: len(line) - len(text)]}<span class="user">{escape(text)}</span>' if mine else escape(line))
    return "\n".join(out)


def alone(call: Call) -> str:
    """A call without its group."""
    return str(call).removesuffix(f" ({group_in_words(call)})")


def _box(group: Sequence[Rank], known: Facts, near: Collection[str]) -> str:
    one, numbers = group[0], [rank.number for rank in group]
    who = in_words(numbers, known.world_size)
    tag = '<span class="tag">culprit</span>' if one.is_culprit else ""
    at = [one.host, "" if one.pid is None else f"process {one.pid}"] if len(group) == 1 else []
    doing = one.doing if len(group) == 1 else _plural(one.doing)
    parts = [
        f'<div class="box{" bad" if one.is_culprit else ""}">',
        f"<h3><b>{escape(who[0].upper() + who[1:])}</b> {escape(doing)}{tag}"
        f'<span class="at">{escape(", ".join(text for text in at if text))}</span></h3>',
        f'<p class="note">When last seen, it was {escape(one.last_seen)}.</p>' if one.last_seen else "",
        _place(one.place),
        _logs(numbers, near),
        *_stacks(group),
        _fold("Traceback", f"<pre>{marked(one.traceback.split(chr(10)), known.place)}</pre>") if one.traceback else "",
        _issued(one),
        _calls(one),
        "</div>",
    ]
    return "\n".join(part for part in parts if part)


def _place(frame: Frame | None) -> str:
    if frame is None:
        return ""
    source = f"<br>{escape(frame.source)}" if frame.source else ""
    return f'<p><code><span class="user">{escape(_at(frame))}</span>{source}</code></p>'


def _logs(numbers: Sequence[int], near: Collection[str]) -> str:
    links = [link(name) for name in (f"logs/rank_{number}.log" for number in numbers) if name in near]
    more = f" and {len(links) - _LOGS:,} more" if len(links) > _LOGS else ""
    return f'<p class="note">{", ".join(links[:_LOGS])}{more}</p>' if links else ""


def link(name: str) -> str:
    """To a file beside the page."""
    return f'<a href="{escape(name)}">{escape(name)}</a>'


def _stacks(group: Sequence[Rank]) -> Iterable[str]:
    """Each stack once, with the ranks that are in it."""
    by_stack: dict[tuple[Frame, ...], list[int]] = {}
    for rank in group:
        if rank.stack:
            by_stack.setdefault(rank.stack, []).append(rank.number)
    for stack, numbers in list(by_stack.items())[:_STACKS]:
        whose = f" of {in_words(numbers)}" if len(group) > 1 else ""
        yield _fold(f"Stack{whose} ({len(stack)}, innermost last)", _frames(stack))
    if len(by_stack) > _STACKS:
        yield f'<p class="note">{len(by_stack) - _STACKS:,} more stacks are in failure.json.</p>'
    for process, stack in group[0].workers:
        if stack:
            whose = f"loader process {process} of rank {group[0].number}"
            yield _fold(f"Stack of {whose} ({len(stack)}, innermost last)", _frames(stack))


def _frames(stack: Sequence[Frame]) -> str:
    rows = []
    for frame in stack:
        source = f'<span class="source">{escape(frame.source)}</span>' if frame.source else ""
        kind = ' class="mine"' if frame.is_users else ""
        rows.append(f"<li{kind}>{escape(_at(frame))}{source}</li>")
    return f'<ol class="stack">{"".join(rows)}</ol>'


def _issued(one: Rank) -> str:
    if not one.issued:
        return ""
    title = f"Collectives that your code issued since the last vote ({len(one.issued)})"
    return _fold(title, f"<pre>{escape(chr(10).join(one.issued))}</pre>")


def _calls(one: Rank) -> str:
    if not one.calls:
        return ""
    last = max(call.issued_ns or 0 for call in one.calls)
    rows = ['<tr><th>group</th><th class="number">call</th><th>what</th><th class="number">issued</th><th></th></tr>']
    for call in one.calls:
        ago = "" if call.issued_ns is None else f"{(call.issued_ns - last) / 1e6:,.1f} ms"
        rows.append(
            f'<tr><td>{escape(group_in_words(call))}</td><td class="number">{call.number}</td>'
            f'<td>{escape(alone(call))}</td><td class="number">{ago}</td>'
            f"<td>{'' if call.done else 'not ended'}</td></tr>"
        )
    return _fold(f"Last collectives of rank {one.number} ({len(one.calls)})", f"<table>{''.join(rows)}</table>")


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _at(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"


def _plural(doing: str) -> str:
    first, space, rest = doing.partition(" ")
    return f"{_PLURAL.get(first, first)}{space}{rest}"

"""The failure page: ``failure.html``, which tells all that ``failure.json`` holds to people who look rather than read.

It is one file that needs no network, no server and no script. ``python -m safetrain.page <run_dir>`` draws it again.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from safetrain import page_ranks, timeline
from safetrain.mismatch import Mismatch, mismatches
from safetrain.page_facts import Facts, Rank, in_words, read
from safetrain.page_style import CSS
from safetrain.words import group_in_words

NAME = "failure.html"

_USAGE = "Usage: python -m safetrain.page <run_dir>   draws failure.html again from failure.json"
_LONG = 150  # characters of a headline
_DIFFERENCES = 6  # at most that many are shown
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # what no HTML may hold
_NEXT_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z])")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # whatever a message holds, nothing of it runs
_FILES = (
    "failure.txt", "failure.json", "config.yaml", "environment.yaml", "events.jsonl", "logs", "tensorboard",
    "checkpoints",
)  # fmt: skip


def write(run_dir: Path, facts: object) -> Path:
    """Draw ``facts``, of ``failure.json``, into ``run_dir``.

    Raises:
        OSError: the directory takes no file.
    """
    near = {name for name in _FILES if (run_dir / name).exists()}
    if "logs" in near:
        near |= {f"logs/{path.name}" for path in (run_dir / "logs").iterdir()}
    path = run_dir / NAME
    path.write_text(draw(facts, near), encoding="utf-8")
    return path


def draw(facts: object, near: Collection[str] = ()) -> str:
    """The page, of anything that JSON can hold. ``near``: the files beside it that it can point to."""
    known = read(facts)
    groups, found = page_ranks.groups_of(known.ranks), mismatches(known.ranks)
    sections = [
        _head(known),
        _evidence(known),
        _time_line(known, groups, found),
        _parting(known, found),
        page_ranks.draw(groups, known, near),
        _foot(known, near),
    ]
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(known.sentence.partition(chr(10))[0][:120])}</title>\n<style>\n{CSS}\n</style>\n</head>\n"
        "<body>\n" + "\n".join(section for section in sections if section) + "\n</body>\n</html>\n"
    )
    return _ODD.sub("\ufffd", page)


def main(arguments: Sequence[str]) -> int:
    """``python -m safetrain.page <run_dir>``"""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if len(arguments) != 1:
        print(_USAGE, file=sys.stderr)
        return 2
    source = Path(arguments[0], "failure.json")
    if not source.exists() and source.with_name("result.json").exists():
        print(f"{source.parent}: this run did not fail; its result is in result.json.", file=sys.stderr)
        return 1
    try:
        print(write(source.parent, json.loads(source.read_text(encoding="utf-8"))))
    except OSError as error:
        print(f"{error}: give the directory of a run that failed, one that can be written to.", file=sys.stderr)
        return 1
    except (ValueError, RecursionError) as error:
        print(f"{source} is no JSON ({error}): it may have been cut off; read failure.txt.", file=sys.stderr)
        return 1
    return 0


# --- the parts, from top to bottom ------------------------------------------------------------------------------------


def _head(known: Facts) -> str:
    count, machines = known.world_size, len(known.hosts)
    facts = [
        f"{count:,} rank{'s' if count != 1 else ''}" if count else "",
        f"{machines} machines" if machines > 1 else "",
        _moment(known.time_ns),
    ]
    first, _, rest = known.sentence.partition("\n")
    story, *more = _NEXT_SENTENCE.split(first, maxsplit=1)
    return "\n".join(
        [
            f'<header>\n<p class="kicker"><b>safetrain</b>{"".join(f" · {fact}" for fact in facts if fact)}</p>',
            f'<h1 class="{"long" if len(story) > _LONG else ""}">{escape(story)}</h1>',
            *(f'<p class="lead">{_with_code(text)}</p>' for text in more),
            *([f'<pre class="box more">{escape(rest)}</pre>'] if rest else []),
            *_place(known),
            *_advice(known),
            *_others(known),
            "</header>",
        ]
    )


def _place(known: Facts) -> list[str]:
    place = f'<code class="where">{escape(known.place)}</code>' if known.place else ""
    detail = f'<code class="what">{escape(known.detail)}</code>' if known.detail else ""
    return [f'<div class="place">{place}{detail}</div>'] if place or detail else []


def _advice(known: Facts) -> list[str]:
    given = {"Likely cause": known.cause, "What to do": known.remedy}
    cards = [
        f"<div><h3>{title}</h3><p>{_with_code(_sentence(text))}</p></div>" for title, text in given.items() if text
    ]
    return [f'<div class="advice">{"".join(cards)}</div>'] if cards else []


def _others(known: Facts) -> list[str]:
    told = [text for text in (_sentence(known.batch), *known.others, known.kept) if text]
    return [f'<ul class="others">{"".join(f"<li>{_with_code(text)}</li>" for text in told)}</ul>'] if told else []


def _evidence(known: Facts) -> str:
    """A traceback, a stack, the end of a log: what follows a line that ends with a colon."""
    parts: list[str] = []
    body: list[str] = []
    for text in [*known.evidence, ":"]:
        if not text.endswith(":") or "\n" in text or text.startswith(" "):
            body.append(text)
            continue
        if body:
            lines = [line for item in body for line in item.split("\n")]
            is_prose = not parts and len(lines) == 1
            parts.append(
                f"<p>{escape(lines[0])}</p>"
                if is_prose
                else f'<pre class="box">{page_ranks.marked(lines, known.place)}</pre>'
            )
            body = []
        if text != ":":
            parts.append(f"<h2>{escape(text[:-1])}</h2>")
    return "\n".join(["<section>", *parts, "</section>"]) if parts else ""


def _time_line(known: Facts, groups: Sequence[Sequence[Rank]], found: Sequence[Mismatch]) -> str:
    if not groups:
        return ""
    notes = timeline.caption(groups, len(known.hosts))
    if ended := [one.number for one in known.ranks if one.state == "ended"]:
        notes.append(f"When {in_words(ended)} ended is not known exactly: the cross stands at the right edge.")
    if known.unheard:
        notes.append(f"Nothing is known of {in_words(known.unheard)}: ended with the job.")
    legend = {"g": "the gradients", "y": "your collectives", "c": "safetrain's own"}
    if any(one.absent for one in found):
        legend["q"] = "should have come here, and did not"
    explained = "".join(f'<li><i class="{key}"></i>{text}</li>' for key, text in legend.items())
    return (
        f'<section>\n<h2>Time line</h2>\n<div class="scroll">{timeline.draw(groups, found, known.time_ns)}</div>\n'
        f'<ul class="legend">{explained}</ul>\n<p class="note">{escape(" ".join(notes))}</p>\n</section>'
    )


def _parting(known: Facts, found: Sequence[Mismatch]) -> str:
    rows = []
    for one in found[:_DIFFERENCES]:
        sides = [(in_words(ranks, known.world_size), escape(page_ranks.alone(call))) for call, ranks in one.sides]
        if one.absent:
            sides.append((in_words(one.absent, known.world_size), '<b class="bad">did not come to it</b>'))
        head = f"call {one.call.number} of {group_in_words(one.call)}"
        for index, (who, what) in enumerate(sides):
            rows.append(f"<tr><td>{escape('' if index else head)}</td><td>{escape(who)}</td><td>{what}</td></tr>")
    if not rows:
        return ""
    return (
        "<section>\n<h2>Where the ranks part<small>a call meets the one of the same number in its group</small></h2>\n"
        f'<div class="box"><table class="parting">{"".join(rows)}</table></div>\n</section>'
    )


def _foot(known: Facts, near: Collection[str]) -> str:
    links = ", ".join(page_ranks.link(name) for name in _FILES if name in near)
    versions = ", ".join(f"{name} {version}" for name, version in known.versions if version)
    return f"<footer>\n<p>{links}</p>\n<p>{escape(versions)}</p>\n</footer>"


# --- words ------------------------------------------------------------------------------------------------------------


def _with_code(text: str) -> str:
    """What stands in backticks, as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _sentence(text: str) -> str:
    """With a capital letter, and an end."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""


def _moment(time_ns: int | None) -> str:
    if time_ns is None:
        return ""
    with suppress(ValueError, OverflowError, OSError):  # a year that no calendar has
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns // 10**9))
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

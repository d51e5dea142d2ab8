"""Find, by reading the code, what makes distributed training hang or go wrong. Nothing is imported or run.

python -m safetrain.lint train.py [more files and folders]
python -m safetrain.lint --explain ST101
"""

from __future__ import annotations

import argparse
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetrain import lint_data, lint_loop, lint_model, lint_precision, lint_processes, lint_together
from safetrain.checks import nearest
from safetrain.lint_output import FORMATS, Finding
from safetrain.lint_reading import Reading
from safetrain.lint_rule import RULES, Place, Rule

TOPICS = (lint_together, lint_loop, lint_data, lint_precision, lint_model, lint_processes)
"""The files of rules; importing one enters its rules in ``RULES``."""

_RULES = sorted(RULES.items())
RULES.clear()
RULES.update(_RULES)

_CLEAN, _FOUND, _WRONG = 0, 1, 2
_NOT_OF_THE_PROJECT = frozenset({"__pycache__", "node_modules", "site-packages"})
_NOQA = re.compile(r"#\s*noqa\b(?P<ids>\s*:\s*[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*)?", re.I)


class WrongUse(Exception):
    """The command line asks for something that is not there."""


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        if asked.explain is not None:
            print("\n".join(_explained(rule) for rule in _chosen(asked.explain)), end="")
            return _CLEAN
        if not asked.paths:
            raise WrongUse("no file or folder to read: python -m safetrain.lint train.py")
        rules = _rules(asked.select, asked.ignore)
        files = list(_files(asked.paths))
    except WrongUse as wrong:
        print(f"safetrain.lint: {wrong}", file=sys.stderr)
        return _WRONG
    findings: list[Finding] = []
    unread: list[str] = []
    for path in files:
        try:
            findings += check(path, read(path), rules)
        except (SyntaxError, ValueError, OSError, RecursionError) as error:
            unread.append(_unread(path, error))
    print(FORMATS[asked.format](sorted(findings)), end="")
    for message in unread:
        print(message, file=sys.stderr)
    if asked.format == "text":
        print(_summary(findings, len(files) - len(unread)))
    return _WRONG if unread else _FOUND if findings else _CLEAN


def check(path: str, source: str, rules: Iterable[Rule] | None = None) -> list[Finding]:
    """What the rules (all of them, if none are given) find in a file's text.

    Raises:
        SyntaxError: the text is not Python of today.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the code's own strings look like is not the matter here
        code = Reading(path, source)
    findings = {
        _finding(code, rule, place)
        for rule in (RULES.values() if rules is None else rules)
        for place in rule.find(code)
        if not _is_excused(code, rule, place)
    }
    return sorted(findings)


def read(path: str) -> str:
    """A file's text, in the encoding that it names."""
    with tokenize.open(path) as file:
        return file.read()


def _finding(code: Reading, rule: Rule, place: Place) -> Finding:
    line, column = getattr(place.node, "lineno", 1), getattr(place.node, "col_offset", 0)
    return Finding(code.path, line, column + 1, rule.id, place.what)


def _is_excused(code: Reading, rule: Rule, place: Place) -> bool:
    """``# noqa`` or ``# noqa: ST101`` on the finding's first line, or on its last."""
    first = getattr(place.node, "lineno", 1)
    simple = not isinstance(getattr(place.node, "body", None), list)
    last = (getattr(place.node, "end_lineno", None) or first) if simple else first
    for line in {first, last}:
        if (noqa := _NOQA.search(code.lines[line - 1])) is not None:
            ids = re.findall(r"[A-Z]+\d+", (noqa["ids"] or "").upper())
            if not ids or rule.id in ids:
                return True
    return False


def _rules(select: str | None, ignore: str | None) -> list[Rule]:
    selected = list(RULES.values()) if select is None else _chosen(select)
    ignored = [] if ignore is None else _chosen(ignore)
    return [rule for rule in selected if rule not in ignored]


def _chosen(text: str) -> list[Rule]:
    """The rules of ``ST101,ST2``: ids, beginnings of ids, or names."""
    chosen: list[Rule] = []
    for word in filter(None, re.split(r"[,\s]+", text)):
        found = [rule for rule in RULES.values() if rule.id.startswith(word.upper()) or rule.name == word.lower()]
        if not found:
            names = [*RULES, *(rule.name for rule in RULES.values())]
            raise WrongUse(
                f"{word}: no such rule.{nearest(word, names) or nearest(word.upper(), names)} All: {', '.join(RULES)}."
            )
        chosen += found
    if not chosen:
        raise WrongUse(f"no rule is named. All: {', '.join(RULES)}.")
    return sorted(set(chosen), key=lambda rule: rule.id)


def _explained(rule: Rule) -> str:
    return f"{rule.id} {rule.name}\n    {rule.why}\n    help: {rule.fix}\n    examples: docs/lint.md\n"


def _files(paths: Iterable[str]) -> Iterator[str]:
    for given in paths:
        path = Path(given)
        if path.is_dir():
            yield from (str(file) for file in sorted(path.rglob("*.py")) if _is_of_project(file.relative_to(path)))
        elif path.exists():
            yield str(path)
        else:
            raise WrongUse(f"{given}: no such file or folder")


def _is_of_project(path: Path) -> bool:
    return not any(part in _NOT_OF_THE_PROJECT or part.startswith(".") for part in path.parts)


def _unread(path: str, error: Exception) -> str:
    line = error.lineno if isinstance(error, SyntaxError) and error.lineno else 1
    reason = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    return f"{path}:{line}: not read: {reason}. The other files were."


def _summary(findings: Sequence[Finding], files: int) -> str:
    read_files = f"{files} {'file' if files == 1 else 'files'}"
    return f"Found {len(findings)} in {read_files}." if findings else f"Nothing found in {read_files}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m safetrain.lint",
        description="Find, by reading the code, what makes distributed training hang or go wrong. "
        "Exit codes: 0 nothing found, 1 something found, 2 wrong use or a file that is not Python.",
    )
    parser.add_argument("paths", nargs="*", metavar="path", help="files, and folders with *.py in them")
    parser.add_argument("--select", metavar="IDS", help="only these rules: ST101, ST1 (all that begin so), or names")
    parser.add_argument("--ignore", metavar="IDS", help="not these rules")
    parser.add_argument("--format", choices=sorted(FORMATS), default="text", help="how findings are written (text)")
    parser.add_argument("--explain", metavar="IDS", help="what a rule is about, and what to do")
    return parser

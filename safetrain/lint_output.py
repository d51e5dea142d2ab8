"""How the linter's findings are written: for a person, for GitHub's checks, as SARIF 2.1.0, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from safetrain.lint_rule import RULES

_PAGE = "docs/lint.md"
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, order=True)
class Finding:
    """What a rule found in a file; ``line`` and ``column`` count from 1."""

    path: str
    line: int
    column: int
    id: str
    what: str


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each, and one that says what to do."""
    return "".join(
        f"{one.path}:{one.line}:{one.column}: {one.id} {one.what}\n"
        f"    {RULES[one.id].why}\n"
        f"    help: {RULES[one.id].fix}\n"
        for one in findings
    )


def as_github(findings: Sequence[Finding]) -> str:
    """Commands that GitHub's runner turns into notes beside the code."""
    lines = []
    for one in findings:
        place = f"file={_property(one.path)},line={one.line},col={one.column}"
        message = f"{one.what}. {RULES[one.id].why} {RULES[one.id].fix}"
        lines.append(f"::error {place},title={_property(f'{one.id} {RULES[one.id].name}')}::{_escaped(message)}\n")
    return "".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects."""
    return json.dumps([
        {
            "path": one.path, "line": one.line, "column": one.column, "id": one.id, "name": RULES[one.id].name,
            "what": one.what, "why": RULES[one.id].why, "fix": RULES[one.id].fix,
        }
        for one in findings
    ], indent=2) + "\n"  # fmt: skip


def as_sarif(findings: Sequence[Finding]) -> str:
    """The format that code scanners exchange."""
    rules = [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.name.replace("-", " ")},
            "fullDescription": {"text": rule.why},
            "help": {"text": f"{rule.fix} See {_PAGE}."},
            "defaultConfiguration": {"level": "error"},
        }
        for rule in RULES.values()
    ]
    numbers = {id: number for number, id in enumerate(RULES)}
    results = [
        {
            "ruleId": one.id,
            "ruleIndex": numbers[one.id],
            "level": "error",
            "message": {"text": f"{one.what}. {RULES[one.id].why} {RULES[one.id].fix}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": PurePath(one.path).as_posix()},
                        "region": {"startLine": one.line, "startColumn": one.column},
                    }
                }
            ],
        }
        for one in findings
    ]
    tool = {"driver": {"name": "safetrain.lint", "rules": rules}}
    return (
        json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": tool, "results": results}]}, indent=2)
        + "\n"
    )


FORMATS = {"text": as_text, "github": as_github, "sarif": as_sarif, "json": as_json}


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")

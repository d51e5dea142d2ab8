"""The linter's page, docs/lint.md: each rule has a section, whose bad example is found and whose good one is clean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safetrain.lint_command import RULES, check

PAGE = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
_, *_PARTS = re.split(r"^### (ST\d+) (\S+)$", PAGE, flags=re.MULTILINE)
SECTIONS = {id: (name, text) for id, name, text in zip(_PARTS[::3], _PARTS[1::3], _PARTS[2::3], strict=True)}


def examples(id: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", SECTIONS[id][1], flags=re.DOTALL)


def test_every_rule_has_its_section_in_order() -> None:
    assert list(SECTIONS) == list(RULES) == sorted(RULES)
    assert {id: name for id, (name, _) in SECTIONS.items()} == {id: rule.name for id, rule in RULES.items()}
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("id", RULES)
def test_the_page_says_what_the_program_says(id: str) -> None:
    assert RULES[id].why in SECTIONS[id][1]
    assert RULES[id].fix in SECTIONS[id][1]
    assert RULES[id].why.endswith(".")
    assert RULES[id].fix.endswith(".")


@pytest.mark.parametrize("id", RULES)
def test_the_bad_example_is_found_once_and_by_this_rule_only(id: str) -> None:
    bad, _ = examples(id)
    assert [finding.id for finding in check("bad.py", bad)] == [id]


@pytest.mark.parametrize("id", RULES)
def test_the_good_example_is_clean(id: str) -> None:
    _, good = examples(id)
    assert check("good.py", good) == []

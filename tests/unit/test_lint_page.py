"""The linter's page, docs/lint.md: each rule has a section, whose bad example is found and whose good one is clean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safetrain.lint_command import RULES, check, main

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


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a script with a fault of another topic in it, and one of ST1 in a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/one.py").write_text(examples("ST101")[0])
    (tmp_path / "train.py").write_text(examples("ST301")[0])
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    ended = []
    for line in block.splitlines():
        python, m, module, *arguments = line.partition(" #")[0].split()
        assert (python, m, module) == ("python", "-m", "safetrain.lint")
        ended.append((main(arguments), capsys.readouterr().out))
    (in_script, in_folder, explained, for_github) = ended
    assert [code for code, _ in ended] == [1, 1, 0, 1]
    assert "ST301" in in_script[1]
    assert "ST101" in in_folder[1]
    assert RULES["ST104"].why in explained[1].replace("\n", " ")
    assert "::" in for_github[1]
    assert "file=src/one.py" in for_github[1].replace("\\", "/")

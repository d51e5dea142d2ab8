"""The failure page, from what failure.json holds to HTML: pure functions, and the command that draws it again."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain import page
from safetrain.errors import Preempted
from safetrain.failed import preempted, verdict_on
from safetrain.failure import Exit
from safetrain.verdict import Verdict, put_away
from tests import failing

_VOID = {"meta", "br"}
_TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "section", "footer", "div", "p", "h1", "h2", "h3", "b",
    "i", "small", "span", "code", "pre", "ul", "ol", "li", "table", "tr", "th", "td", "a", "br", "details", "summary",
    "svg", "defs", "pattern", "rect", "g", "text", "line", "polyline", "path", "circle",
}  # fmt: skip


class Seen(HTMLParser):
    """What a browser makes of a page: its tags, which must be closed in order, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def classes(self, tag: str) -> list[str]:
        return [attributes.get("class") or "" for name, attributes in self.tags if name == tag]


def drawn(verdict: Verdict, run_dir: Path, near: tuple[str, ...] = ()) -> Seen:
    return Seen(page.draw(failing.facts(verdict, run_dir), near))


def test_a_stall_the_verdict_its_line_and_a_lane_for_each_rank(tmp_path: Path) -> None:
    verdict = failing.stuck()
    seen = drawn(verdict, tmp_path)
    assert seen.texts["h1"] == [verdict.sentence]
    assert seen.texts["h3"][:2] == ["Likely cause", "What to do"]
    assert "/mine/train.py:41 in training_step" in seen.texts["code"][0]
    assert seen.classes("g").count("lane") == seen.classes("g").count("lane culprit") == 1
    svg = seen.texts["svg"][0]
    assert "all_reduce of 59 floats (the gradients)" in svg
    assert "rank 1 did not come to all_reduce of 59 floats (the gradients), call 10" in svg
    assert "stuck · training_step · step 5 · 61 s" in svg
    assert {"bar in stuck", "bar wait gradients", "absent"} <= set(seen.classes("g"))
    assert "differs" not in seen.classes("g")
    assert seen.texts["tr"][:2] == ["call 10 of the gradientsrank 0all_reduce of 59 floats", "rank 1did not come to it"]
    boxes = seen.texts["h3"][2:]
    assert boxes[0].startswith("Rank 1 is stuck in training_step at step 5, for 61 s"), "the culprit's is the first"
    assert boxes[1].startswith("Rank 0 waits in all_reduce of 59 floats (the gradients), in vote at step 5, for 61 s")


def test_a_call_that_differs_is_marked_with_both_sides(tmp_path: Path) -> None:
    seen = drawn(failing.different_calls(), tmp_path)
    assert "call 7 differs" in seen.texts["svg"][0]
    assert seen.texts["tr"][:2] == [
        "call 7 of the default groupranks 1-3broadcast of 3x2 floats",
        "rank 0all_reduce of 5 floats",
    ]
    assert seen.classes("g").count("lane culprit") == 1
    assert seen.classes("g").count("lane") == 3


def test_sizes_count_only_where_all_ranks_must_give_the_same(tmp_path: Path) -> None:
    facts = failing.facts(failing.stuck(), tmp_path)
    for op, differs in (("all_gather", False), ("broadcast", True)):
        for rank, size in zip(facts["ranks"], (3, 4), strict=True):
            rank["collectives"][2].update(op=op, shapes=[[size]])
        svg = Seen(page.draw(facts)).texts["svg"][0]
        assert ("call 5 differs" in svg) is differs


def test_words_of_several_lines_keep_them(tmp_path: Path) -> None:
    first = failing.raised(tmp_path).ranks[1]
    replace(first, error="RanksDiffer", message="step 5: the ranks differ:\n  rank 0: a\n  rank 1: b").write(tmp_path)
    seen = drawn(verdict_on(tmp_path, 2), tmp_path)
    assert seen.texts["h1"] == ["Training ended at step 5: the ranks differ:"]
    assert seen.texts["pre"][0] == "  rank 0: a\n  rank 1: b"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("one <b>\ntwo\n")
    (tmp_path / "failures" / "rank_1.json").unlink()
    seen = drawn(verdict_on(tmp_path, 2, [Exit(1, 7, 3, "in data at step 4")]), tmp_path)
    assert "When last seen, up to 0.3 s before, it was in data at step 4." in seen.texts["p"]
    assert "The last lines of rank 1's log" in seen.texts["h2"]
    assert seen.texts["pre"][0] == "  one <b>\n  two"


def test_a_failure_its_traceback_and_the_cross_where_it_ended(tmp_path: Path) -> None:
    seen = drawn(failing.raised(tmp_path), tmp_path)
    assert seen.texts["h1"] == ["Training failed on rank 1 at step 5 in training_step (node1, process 101)."]
    assert 'File "/mine/train.py", line 41, in training_step' in seen.texts["span"][0]
    assert seen.classes("g").count("death") == 1
    assert seen.classes("rect").count("end") == 1, "where the victim ended"
    assert len([name for name in seen.classes("rect") if name.startswith("mark")]) == 14
    assert seen.texts["h3"][0].startswith("Rank 1 failed in training_step at step 5: ValueError: bad label 12")


def test_a_kill_says_what_is_not_known(tmp_path: Path) -> None:
    seen = drawn(failing.killed(tmp_path), tmp_path)
    assert seen.texts["h1"] == ["Training failed: rank 1 (process 101) was killed by SIGKILL."]
    assert "dmesg | grep -i kill" in seen.texts["code"]
    notes = " ".join(seen.texts["p"])
    assert "When rank 1 ended is not known exactly" in notes
    assert "Nothing is known of ranks 2 and 3: ended with the job." in notes
    assert "was killed by SIGKILL; when last seen in training_step at step 5" in seen.texts["svg"][0]


def test_of_1024_ranks_the_odd_one_and_the_crowd(tmp_path: Path) -> None:
    html = page.draw(failing.facts(failing.stuck(1024, culprit=700, ranks_a_host=8), tmp_path))
    seen = Seen(html)
    assert len(html) < 40_000
    assert seen.classes("g").count("lane") == seen.classes("g").count("lane culprit") == 1
    assert "1,023 ranks" in seen.texts["svg"][0]
    assert "all_reduce of 1000 floats (the gradients), call 4: ended, on 1,023 ranks" in seen.texts["svg"][0]
    assert seen.texts["h3"][3].startswith("1,023 ranks (0-699, 701-1023) wait in all_reduce of 59 floats")
    assert "The 128 machines' clocks are taken as they are" in " ".join(seen.texts["p"])


def test_ranks_that_all_do_something_else_are_still_a_page_that_can_be_read(tmp_path: Path) -> None:
    facts = failing.facts(failing.stuck(300, culprit=0), tmp_path)
    for number, rank in enumerate(facts["ranks"]):
        rank["stack"][-1].update(line=number, user=True)
    seen = Seen(page.draw(facts))
    assert seen.classes("g").count("lane") == 1
    assert "291 more stacks are in failure.json." in seen.texts["p"]


def test_without_times_the_order_is_shown_and_said(tmp_path: Path) -> None:
    facts = failing.facts(failing.stuck(), tmp_path)
    del facts["ranks"][0]["collectives"][2]["issued_ns"]
    seen = Seen(page.draw(facts))
    assert "in the order of their numbers, not to scale" in " ".join(seen.texts["p"])
    assert "gap" not in seen.classes("g")
    marks = [attributes for tag, attributes in seen.tags if tag == "rect" and "mark" in (attributes.get("class") or "")]
    places = [float(mark["x"] or 0) for mark in marks]
    assert places[:7] == places[7:] == sorted(set(places)), "the same call at the same place, in order"


def test_an_end_that_nccl_told_makes_a_mark_as_long_as_the_call(tmp_path: Path) -> None:
    facts = failing.facts(failing.stuck(), tmp_path)
    first = facts["ranks"][0]["collectives"][1]
    first["ended_ns"] = first["issued_ns"] + 5_000_000
    seen = Seen(page.draw(facts))
    widths = [float(a["width"] or 0) for tag, a in seen.tags if tag == "rect" and "mark" in (a.get("class") or "")]
    assert widths[1] > 3 * widths[0] == 24


def test_stacks_are_folded_and_the_users_frames_marked_with_their_lines(tmp_path: Path) -> None:
    mine = tmp_path / "train.py"
    mine.write_text("a = 1\nb = wait(a)\n")
    verdict = failing.stuck()
    frame = {"file": str(mine), "line": 2, "function": "training_step", "user": True, "source": "b = wait(a)"}
    facts = failing.facts(verdict, tmp_path)
    facts["ranks"][1]["stack"] = [{"file": "/lib/x.py", "line": 1, "function": "f"}, frame]
    seen = Seen(page.draw(facts))
    assert seen.texts["summary"][:2] == ["Stack (2, innermost last)", "Last collectives of rank 1 (7)"]
    assert [attributes.get("class") for tag, attributes in seen.tags if tag == "li"][-3:-1] == [None, "mine"]
    assert f"{mine}:2 in training_stepb = wait(a)" in seen.texts["li"]
    assert not [attributes for tag, attributes in seen.tags if tag == "details" and "open" in attributes]


def test_only_files_that_are_there_are_linked_and_relatively(tmp_path: Path) -> None:
    near = ("logs/rank_1.log", "config.yaml", "failure.json")
    links = [attributes["href"] for tag, attributes in drawn(failing.stuck(), tmp_path, near).tags if tag == "a"]
    assert links == ["logs/rank_1.log", "failure.json", "config.yaml"]


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing(tmp_path: Path) -> None:
    html = page.draw(failing.facts(failing.stuck(), tmp_path))
    assert """content="default-src 'none'; style-src 'unsafe-inline'\"""" in html
    assert not re.search(r"https?:|url\((?!#)|@import|\bon\w+=", html)


def test_nothing_that_a_user_writes_is_taken_for_html(tmp_path: Path) -> None:
    evil = "</title></style><script>alert(1)</script><img src=x onerror='a'>\"&\x1b[31m\x00\ud800"
    seen = drawn(failing.raised(tmp_path, message=evil, file=f"/mine/{evil}.py"), tmp_path)
    assert "<script>alert(1)</script>" in seen.texts["code"][1]
    facts = failing.facts(failing.different_calls(), tmp_path)
    for rank in facts["ranks"]:
        rank.update(host=evil, phase=evil, calls=[evil], last_seen=evil)
        rank["stack"] = [{"file": evil, "line": 1, "function": evil, "user": True, "source": evil}]
        for one in rank["collectives"]:
            one.update(about=evil, op=evil, dtype=evil, group=evil)
    facts.update(dict.fromkeys(("sentence", "place", "detail", "cause", "remedy", "batch", "kept"), evil))
    facts.update(others=[evil], evidence=[f"{evil}:", f'  File "{evil}", line 3, in {evil}'], versions={evil: evil})
    html = page.draw(facts)
    assert "<script>alert" in Seen(html).texts["h1"][0]
    html.encode()  # lone surrogates are gone
    assert not re.search("[\x00\x1b]", html)


def _values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("waiting")
    return st.recursive(
        scalars,
        lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=8), some, max_size=4),
        max_leaves=8,
    )


@given(_values())
@settings(max_examples=60, deadline=None)
def test_a_page_can_be_drawn_of_anything(value: Any) -> None:
    Seen(page.draw(value))


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_a_page_can_be_drawn_of_a_failure_of_which_parts_are_missing_or_odd(data: st.DataObject) -> None:
    facts = copy.deepcopy(data.draw(st.sampled_from(_real())))
    for _ in range(data.draw(st.integers(1, 6))):
        owner = facts
        while True:
            keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(owner[key], (dict, list)) and data.draw(st.integers(0, 3)):
                owner = owner[key]
                continue
            if data.draw(st.booleans()):
                owner[key] = data.draw(_values())
            elif isinstance(owner, dict):
                del owner[key]
            break
    Seen(page.draw(facts))


def _real() -> list[Any]:
    nowhere = Path("/nowhere")
    verdicts = [failing.stuck(3), failing.different_calls(), failing.stuck(20, culprit=3, ranks_a_host=4)]
    return [failing.facts(verdict, nowhere) for verdict in verdicts]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_failed_run_leaves_the_page_and_the_command_draws_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = failing.stuck().publish(tmp_path)
    assert text is not None
    assert text.endswith(f"All that is known of every rank: {tmp_path}/failure.html (for programs: failure.json)\n")
    first = (tmp_path / "failure.html").read_text()
    assert failing.stuck().sentence in first
    assert page.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/failure.html\n"
    assert (tmp_path / "failure.html").read_text() == first
    put_away(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failure_1.html", "failure_1.json", "failure_1.txt"]
    assert (tmp_path / "failure_1.txt").read_text().endswith("/failure_1.html (for programs: failure_1.json)\n")


def test_what_was_said_of_a_preemption_makes_way(tmp_path: Path) -> None:
    assert Verdict("Preempted: rank 0 got SIGTERM.", exit_code=75).publish(tmp_path)
    put_away(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "failure.html").mkdir()
    text = failing.stuck().publish(tmp_path)
    assert text == (tmp_path / "failure.txt").read_text() == json.loads((tmp_path / "failure.json").read_text())["text"]


def test_a_run_that_was_told_to_leave_did_not_fail(tmp_path: Path) -> None:
    left = Preempted(3, saved=True)
    left.told = {0: "SIGTERM"}
    assert preempted(left, tmp_path).publish(tmp_path)
    assert (tmp_path / "failure.json").exists()
    assert not (tmp_path / "failure.html").exists()


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ('{"sen', "is no JSON"), ("[" * 100_000, "is no JSON")]
)
def test_what_cannot_be_drawn_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "failure.json").write_text(text)
    assert page.main([str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert page.main([]) == 2


def test_of_a_run_that_did_not_fail_this_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert page.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: this run did not fail; its result is in result.json.\n"


def test_the_usage_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: python -m safetrain.page <run_dir>")


def test_no_value_of_the_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-7391")
    assert os.environ["MY_TOKEN"] not in json.dumps(failing.facts(failing.stuck(), tmp_path))

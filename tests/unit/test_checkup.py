"""The list of checks, and what the config may say about each."""

from __future__ import annotations

import pytest

from safetrain import checkup
from safetrain.checkup import OF_FIRST_BATCH, OF_JOB, OF_LINKS, OF_MACHINE, OF_MODEL, hosts_of, under_policy
from safetrain.config import Preflight
from safetrain.errors import ConfigError, PreflightError
from safetrain.finding import Finding, size, who
from safetrain.preflight_command import table
from safetrain.preflight_config import CHECK_NAMES
from tests.unit.fake_ranks import said

STRANGE = Finding("links", "200 ms", "warn", (1,), "the link is slow.", "Look at the cable.")
WRONG = Finding("config", "seed differs", "refuse", (1,), "seed differs.", "Give all the same.")


def test_the_names_are_those_of_the_one_list() -> None:
    listed = [check.name for stage in (OF_MACHINE, OF_LINKS, OF_MODEL, OF_JOB, OF_FIRST_BATCH) for check in stage]  # type: ignore[attr-defined]
    assert listed == list(CHECK_NAMES)


def test_a_choice_holds_for_what_is_found_wrong() -> None:
    assert under_policy(WRONG, None) is WRONG
    assert under_policy(WRONG, "warn").verdict == "warn"
    assert under_policy(STRANGE, "refuse").verdict == "refuse"
    assert under_policy(Finding("links", "fast"), "refuse").verdict == "ok"


def test_choices_are_checked_before_a_process_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"preflight\.checks\.version: no such key\. Did you mean versions\? Allowed: all"
    ):
        Preflight(checks={"version": "off"})
    with pytest.raises(ConfigError, match=r"preflight\.checks\.links=stop: must be one of refuse, warn, off"):
        Preflight(checks={"links": "stop"})
    with pytest.raises(ConfigError, match=r"preflight\.links_s=0: must be more than 0"):
        Preflight(links_s=0)
    choices = Preflight(checks={"links": False, "clock": "warn", "disk": None})
    assert [choices.choice(name) for name in ("links", "clock", "disk", "code")] == ["off", "warn", None, None]


def test_all_that_is_refused_is_in_one_error_with_the_way_out() -> None:
    with pytest.raises(PreflightError) as caught:
        checkup._act([WRONG, STRANGE, WRONG], rank=1)
    assert str(caught.value) == (
        "config: seed differs. Give all the same.\n"
        "config: seed differs. Give all the same.\n"
        "To train in spite of it: preflight.checks.config=warn"
    )


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_warns(rank: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    checkup._act([STRANGE], rank)
    assert caplog.messages == ["preflight: links: the link is slow. Look at the cable."] * lines


def test_while_collecting_nothing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with checkup.collecting():
        checkup._act([WRONG, STRANGE], 0)
        assert [WRONG, STRANGE] == checkup.FOUND
    assert not caplog.messages
    with checkup.collecting():
        assert checkup.FOUND == []


def test_machines_of_one_name_are_told_apart() -> None:
    assert hosts_of([("a", "0"), ("a", "0"), ("b", "1")]) == ["a", "a", "b"]
    assert hosts_of([("vm", "0 net:[7]"), ("vm", "0 net:[8]"), ("vm", "0 net:[7]")]) == ["vm#0", "vm#1", "vm#0"]


def test_the_table() -> None:
    text = table([Finding("versions", "torch 2.13.0"), STRANGE, WRONG])
    assert text.splitlines() == [
        "check     verdict  found",
        "versions  ok       torch 2.13.0",
        "links     warn     200 ms",
        "                   the link is slow.",
        "                   Look at the cable.",
        "config    refuse   seed differs",
        "                   seed differs.",
        "                   Give all the same.",
        "",
        "1 ok, 1 to look at, 1 refused",
    ]


def test_words() -> None:
    everyone = said(1, 2, 3, hosts=["a", "a", "b"])
    assert who(everyone, everyone) == "all ranks"
    assert who(everyone[1:], everyone) == "ranks 1 and 2 (a, b)"
    assert who(said(1), said(1)) == "the only rank"
    assert [size(count) for count in (5, 2048, 1.5 * 2**30, 3 * 2**40)] == ["5 bytes", "2 KiB", "1.5 GiB", "3 TiB"]

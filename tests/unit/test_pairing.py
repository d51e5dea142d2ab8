"""When two call sites are two ways to the same collective, and what is said when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetrain.pairing import Call, are_alternatives, compare

SOURCE = """\
def step(rank, data):
    if rank == 0:
        a()
    elif rank == 1:
        b()
    else:
        c()
    d()
    if rank:
        for _ in data:
            e()
            return
    f()
    try:
        g()
    except ValueError:
        h()
    match rank:
        case 0:
            i()
        case _:
            j()
    for _ in data:
        if rank:
            k()
            continue
        l()
    for _ in data:
        if rank:
            m()
        n()
    def inner():
        o()
    p()
"""


def line_of(call: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if line.strip() == f"{call}()")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a", "b", True),
        ("a", "c", True),
        ("b", "c", True),
        ("g", "h", True),
        ("i", "j", True),
        ("k", "l", True),
        ("a", "d", False),
        ("d", "f", False),
        ("m", "n", False),
        ("o", "p", None),  # another function: nothing says from where it is called
    ],
)
def test_alternatives(tmp_path: Path, one: str, other: str, expected: bool | None) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    for first, second in ((one, other), (other, one)):
        a, b = f"{file}:{line_of(first)}", f"{file}:{line_of(second)}"
        assert are_alternatives([a, f"{file}:2"], [b, f"{file}:2"]) is expected


def test_what_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    assert are_alternatives([f"{tmp_path}/gone.py:1"], [f"{tmp_path}/gone.py:2"]) is None
    assert are_alternatives(["a.py:1"], ["b.py:1"]) is None
    assert are_alternatives([], ["b.py:1"]) is None


def call(op: str = "all_reduce(SUM)", line: int = 1, operand: str = "float32[1]", members: int = 2) -> Call:
    return Call(op, operand, "0", tuple(range(members)), (f"/nowhere/train.py:{line}",))


def test_no_calls_and_equal_calls_belong_together() -> None:
    assert compare([[], []]).difference == ""
    assert compare([[call()], [call()]]).difference == ""


def test_the_one_that_was_left_out_is_named() -> None:
    text = compare([[call(line=1), call(line=2)], [call(line=2)]]).difference
    assert "different numbers of collectives (2 on rank 0, 1 on rank 1)" in text
    assert "all_reduce(SUM) of float32[1] at /nowhere/train.py:1 was left out on rank 1" in text


def test_groups_are_compared_by_their_members_alone() -> None:
    pair = Call("barrier", "", "1", (0, 1), ())
    assert compare([[pair], [pair], []]).difference == ""
    assert "rank 1: nothing more" in compare([[pair], [], []]).difference


def test_a_library_without_a_line_is_said_to_be_one() -> None:
    text = compare([[Call("barrier", "", "0", (0, 1), ())], []]).difference
    assert "rank 0: barrier, called by a library" in text

"""The guard's command line, how it runs a script, and how it judges what ranks say."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from safetrain.activity import Activity
from safetrain.config import Watchdog
from safetrain.errors import UsageError, together
from safetrain.flight_recorder import Collective, issued_count
from safetrain.guard import main
from safetrain.guard_options import GuardOptions, parse
from safetrain.guard_preflight import facts as seen_here
from safetrain.guard_preflight import findings
from safetrain.guarded import before, judge, warnings
from safetrain.patience import Patience
from safetrain.run_script import run_script, without_our_frames
from safetrain.stacks import Frame, user_frame
from safetrain.stillness import Stillness
from safetrain.testimony import State
from safetrain.testimony import Testimony as Said

# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return "train.py"


def test_what_follows_the_script_is_the_scripts(script: str) -> None:
    assert parse([script, "--stall-s", "5", "-m", "x"]) == GuardOptions(script, ("--stall-s", "5", "-m", "x"))


def test_options_stand_before_it(script: str) -> None:
    asked = parse(["--stall-s=5", "--no-preflight", "--busy-s", "7", "--run-dir", "here", script, "a"])
    assert asked == GuardOptions(script, ("a",), stall_s=5, busy_s=7, run_dir="here", preflight=False)


def test_a_module_in_place_of_a_file() -> None:
    assert parse(["--stall-s", "5", "-m", "pkg.train", "--lr", "3"]) == GuardOptions(
        "pkg.train", ("--lr", "3"), is_module=True, stall_s=5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain.py"], "tain.py: no such file. Did you mean train.py?"),
        (["elsewhere/train.py"], "elsewhere/train.py: no such file."),
        (["--stal-s", "5", "train.py"], "--stal-s: no such option. Did you mean --stall-s? --help lists them."),
        (["--stall-s", "0", "train.py"], "argument --stall-s: '0': must be a number of seconds above 0"),
        (["--stall-s", "soon", "train.py"], "argument --stall-s: 'soon': must be a number of seconds above 0"),
        (["--stall-s", "5"], "no script is named: python -m safetrain.guard [options] train.py [its arguments]"),
        ([], "no script is named: python -m safetrain.guard [options] train.py [its arguments]"),
    ],
)
@pytest.mark.usefixtures("script")
def test_what_cannot_be_right(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as raised:
        parse(arguments)
    assert str(raised.value) == message
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"safetrain.guard: {message}\n"
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 2
    assert capsys.readouterr().err == ""


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"),
                        ("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("safetrain.flight_recorder.switch_on", lambda: None)


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("rank 1 found nobody"), "safetrain.guard: rank 1 found nobody\n"),
        (together(UsageError("rank 3 is missing")), ""),  # rank 0 says it
    ],
)
def test_a_rank_that_met_nobody_says_so_itself(
    script: str, error: UsageError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def meet(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("safetrain.joining.meet", meet)
    assert main([script]) == 2
    assert capsys.readouterr().err == said


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "torchrun --nproc-per-node 2 -m safetrain.guard train.py" in text
    for option in ("--stall-s", "--first-stall-s", "--busy-s", "--join-s", "--run-dir", "--no-preflight"):
        assert option in text
    assert "(default: 300)" in text


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_interpreter() -> Iterator[None]:
    """What a script changes in it for good is put back."""
    before_argv, before_path, before_main = sys.argv, list(sys.path), sys.modules["__main__"]
    yield
    sys.argv, sys.path[:], sys.modules["__main__"] = before_argv, before_path, before_main
    sys.modules.pop("beside_the_script", None)


@pytest.mark.usefixtures("own_interpreter")
def test_a_script_is_main(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")
    path = tmp_path / "train.py"
    path.write_text(
        "import pickle, sys\nimport beside_the_script\n"
        "class Kept:\n    value = beside_the_script.VALUE\n"
        "text = pickle.dumps(Kept())\nseen = (__name__, __file__, sys.argv, sys.path[0])\n"
    )
    run_script(str(path), ["--lr", "3"], is_module=False)
    ran = sys.modules["__main__"]
    assert ran.seen == ("__main__", str(path), [str(path), "--lr", "3"], str(tmp_path))
    assert pickle.loads(ran.text).value == 7  # also after its end


@pytest.mark.usefixtures("own_interpreter")
def test_a_module_is_main(tmp_path: Path) -> None:
    (tmp_path / "module_to_run.py").write_text("import sys\nsys.seen_by_test = (__name__, sys.argv[1:])\n")
    sys.path.insert(0, str(tmp_path))
    run_script("module_to_run", ["3"], is_module=True)
    assert vars(sys).pop("seen_by_test") == ("__main__", ["3"])


@pytest.mark.usefixtures("own_interpreter")
def test_a_traceback_has_the_scripts_frames_only(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def train():\n    raise ValueError('bad')\n\ntrain()\n")
    with pytest.raises(ValueError, match="bad") as raised:
        run_script(str(path), [], is_module=False)
    without_our_frames(raised.value)
    lines, link = [], raised.value.__traceback__
    while link is not None:
        lines.append((Path(link.tb_frame.f_code.co_filename).name, link.tb_lineno))
        link = link.tb_next
    assert lines[-2:] == [("train.py", 4), ("train.py", 2)]
    assert "run_script.py" not in dict(lines)


# --- stands, or is at work --------------------------------------------------------------------------------------------


def still(count: int, cpu_a_look_s: float, places: int) -> Stillness:
    found = Stillness()
    for n in range(count):
        found.look(float(n), n * cpu_a_look_s, n % places)
    return found


@pytest.mark.parametrize(
    ("found", "busy"),
    [
        (still(100, 0.0, 1), False),  # sleeps
        (still(100, 0.9, 1), True),  # computes in one line
        (still(100, 0.01, 50), True),  # reads file after file
        (still(100, 0.04, 1), False),  # polls
        (still(4, 0.9, 1), True),
        (still(4, 0.0, 4), False),  # too early to say by the places
        (still(2, 0.0, 1), True),  # nothing can be told yet
    ],
)
def test_who_is_at_work(found: Stillness, busy: bool) -> None:
    assert found.is_busy is busy


def test_work_of_long_ago_does_not_count() -> None:
    found = Stillness()
    for n in range(100):
        found.look(float(n), min(n, 20), 0)
    assert not found.is_busy


def test_progress_begins_anew() -> None:
    found = still(100, 0.9, 1)
    found.forget()
    for n in range(100, 104):
        found.look(float(n), 90.0, 0)
    assert not found.is_busy


@pytest.fixture
def uncounted_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("uncounted_group")
def test_a_group_whose_backend_does_not_count_shows_no_progress() -> None:
    """It must not end the watchdog's threads."""
    assert issued_count() == 0


_IMPORT = Frame("<frozen importlib._bootstrap>", 1, "_find_and_load")
_IN_TORCH = Frame(str(Path(dist.__file__).parent / "distributed_c10d.py"), 1, "all_reduce")


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        ((_IMPORT, Frame(__file__, 1, "<module>"), _IN_TORCH), True),  # a script that trains while it is imported
        ((Frame(__file__, 1, "train"), _IN_TORCH, _IMPORT, _IN_TORCH), False),  # a late import of torch's own
    ],
)
def test_who_imports_does_not_wait(stack: tuple[Frame, ...], waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.testimony.stack_of", lambda _: stack)
    patience = Patience(Watchdog(stall_s=1.0, first_step_stall_s=1.0), Activity())
    patience.seconds = 2.0
    assert Said.full(0, patience, 0, ()).state == ("waiting" if waits else "stuck")


# --- the verdict ------------------------------------------------------------------------------------------------------

_HERE = Frame(__file__, 1, "train")
_THERE = Frame(__file__, 9, "validate")


def call(number: int = 41, op: str = "all_reduce") -> Collective:
    return Collective("0", "default_pg", (), number, op, ((5,),), "Float", done=False)


def rank(number: int, state: State, frame: Frame = _HERE, seconds: float = 301.0, number_of: int = 41) -> Said:
    pending = (call(number_of),) if state == "waiting" else (replace(call(number_of - 1), done=True),)
    return Said(
        rank=number, host="node7", pid=100 + number, step=0, epoch=0, phase="script", seconds=seconds, limit_s=300.0,
        count=80, state=state, stack=(frame,), collectives=pending,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("last", [False, True])
def test_who_stands_is_named_and_where_the_others_wait(ranks: int, last: bool) -> None:
    culprit = ranks - 1 if last else 0
    heard = [rank(n, "stuck" if n == culprit else "waiting", _THERE if n == culprit else _HERE) for n in range(ranks)]
    verdict = judge(heard, 1800)
    assert verdict is not None
    assert verdict.culprits == (culprit,)
    assert verdict.sentence == (
        f"Training stalled: rank {culprit} is stuck (node7, process {100 + culprit}), without progress for 301 s."
    )
    assert verdict.place == f"{__file__}:9 in validate"
    (others,) = verdict.others
    assert others.endswith(f"in all_reduce of 5 floats (the default group) (called at {__file__}:1 in train).")
    assert "raise --stall-s (the limit was 300 s)" in verdict.remedy
    assert "self." not in verdict.text(None)
    assert "watchdog." not in verdict.text(None)


def test_who_is_at_work_is_warned_of_first() -> None:
    heard = [rank(0, "busy", _THERE), rank(1, "waiting")]
    assert judge(heard, 1800) is None
    assert warnings(heard, 1800) == [
        f"Rank 0 has been at {__file__}:9 in validate for 301 s, at work. Rank 1 waits in all_reduce of 5 floats (the "
        f"default group) (called at {__file__}:1 in train). The job goes on; it is ended after 1800 s (--busy-s)."
    ]
    verdict = judge([rank(0, "busy", _THERE, seconds=1801), rank(1, "waiting", seconds=1801)], 1800)
    assert verdict is not None
    assert verdict.culprits == (0,)
    assert "raise --busy-s (the limit was 1.8e+03 s)" in verdict.remedy


def test_a_group_that_is_about_to_give_up_is_the_last_chance() -> None:
    verdict = judge([rank(0, "busy", _THERE), replace(rank(1, "waiting"), last_chance=True)], 1800)
    assert verdict is not None
    assert verdict.culprits == (0,)


@pytest.mark.parametrize(("at_work", "words"), [(False, "is stuck"), (True, "is at work outside any collective")])
def test_its_own_limit_does_not_save_who_holds_them_up(at_work: bool, words: str) -> None:
    waits = replace(rank(1, "waiting", seconds=55), limit_s=54, last_chance=True)
    culprit = replace(rank(0, "moving", _THERE, seconds=55), at_work=at_work)
    verdict = judge([culprit, waits], 1800)
    assert verdict is not None
    assert verdict.culprits == (0,)
    assert words in verdict.sentence
    assert "init_process_group(timeout=...)" in verdict.remedy
    assert judge([replace(culprit, seconds=3), waits], 1800) is None  # it has only just moved


@pytest.mark.parametrize(
    "heard",
    [
        [rank(0, "busy"), rank(1, "busy")],  # nobody is held up
        [rank(0, "moving"), rank(1, "waiting")],
        [rank(0, "stuck"), rank(1, "moving")],
        [rank(0, "stuck"), rank(1, "busy")],
        [replace(rank(0, "stuck"), collectives=()), replace(rank(1, "stuck"), collectives=())],  # they never spoke
        [rank(0, "paused"), rank(1, "waiting")],
        [rank(0, "left"), rank(1, "left")],
    ],
)
def test_nobody_is_condemned(heard: list[Said]) -> None:
    assert judge(heard, 1800) is None
    assert warnings(heard, 1800) == []


def test_all_stand_outside_after_they_spoke() -> None:
    verdict = judge([rank(0, "stuck"), rank(1, "stuck")], 1800)
    assert verdict is not None
    assert verdict.culprits == (0, 1)


def test_who_left_is_named_with_how() -> None:
    verdict = judge([replace(rank(0, "left"), note="ended its script"), rank(1, "waiting")], 1800)
    assert verdict is not None
    assert verdict.culprits == (0,)
    assert verdict.sentence == (
        "Training stalled: rank 0 ended its script while rank 1 waits in all_reduce of 5 floats (the default group) "
        f"(called at {__file__}:1 in train)."
    )


def test_different_calls_at_one_point() -> None:
    other = replace(rank(1, "waiting", _THERE), collectives=(call(op="broadcast"),))
    verdict = judge([rank(0, "waiting"), other], 1800)
    assert verdict is not None
    assert verdict.culprits == (0, 1)
    assert f"(called at {__file__}:9 in validate), for 301 s." in verdict.sentence


@pytest.mark.parametrize(("timeout_s", "asked_s"), [(1800, 1790), (60, 54), (10, 7.5), (3, 1.5)])
def test_the_ranks_are_asked_before_the_group_gives_up(timeout_s: float, asked_s: float) -> None:
    assert before(timeout_s) == asked_s


def test_another_librarys_trainer_is_no_end_of_the_users_frames() -> None:
    theirs = Frame(str(Path(sys.prefix, "lib", "lightning", "trainer.py")), 3, "fit")
    assert user_frame([_HERE, replace(theirs, file="/opt/lightning/trainer/trainer.py")]) is not None


# --- the ranks, compared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["--local-rank={}", "--local_rank {}", "--rank {}", "--node_rank={} --lr 3"])
def test_a_script_that_is_told_its_rank_is_alike_on_all(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for number in range(2):
        monkeypatch.setattr(sys, "argv", ["train.py", *told.format(number).split(), "--ranking", "7"])
        said.append(seen_here(None, "gloo")["script"])
    assert said[0] == said[1]
    assert "--ranking 7" in said[0]["arguments"]


def facts(**changes: object) -> dict[str, object]:
    same = {"host": "node7", "versions": {"torch": "2.13.0"}, "environment": {}, "gpu": "",
            "script": {"the script": "ab12", "arguments": "--lr 3"},
            "device": {"backend": "gloo", "GPUs": "0"}}  # fmt: skip
    return {**same, **changes}


def test_ranks_that_are_alike_are_no_finding() -> None:
    assert findings([facts(), facts()]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch is not the same on all ranks: 2.13.0 on rank 0, 2.12.0 on rank 1."),
        ({"environment": {"NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG is not the same on all ranks"),
        ({"script": {"the script": "cd34", "arguments": "--lr 3"}}, "the script is not the same on all ranks"),
        ({"device": {"backend": "nccl", "GPUs": "0"}}, "backend is not the same on all ranks"),
    ],
)
def test_what_differs_is_told(changes: dict[str, object], words: str) -> None:
    (found,) = findings([facts(), facts(**changes)])
    assert words in str(found)


def test_two_ranks_on_one_gpu() -> None:
    (found,) = findings([facts(gpu="node7 GPU-1"), facts(gpu="node7 GPU-2"), facts(gpu="node7 GPU-1")])
    assert "rank 0, rank 2 compute on one GPU." in str(found)

"""Scripts that know nothing of safetrain, guarded: forked ranks (torch is imported already), with RANK and WORLD_SIZE
as set by hand. tests/faults/test_guard.py does the same under torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain import guard
from safetrain.guard_options import parse
from tests.launch.test_torchrun import free_port

DDP = Path(__file__).parents[1] / "faults" / "scripts" / "ddp.py"
PAGE = (Path(__file__).parents[2] / "docs" / "guard.md").read_text()
STALL_S = 1.5
LIMIT_S = 40.0
RANKS = pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 3)])


@dataclass(frozen=True)
class Guarded:
    """How a job ended: exit codes and terminals by rank, and what is in its run directory."""

    codes: list[int | None]
    terminals: list[str]
    run_dir: Path
    seconds: float

    @property
    def verdict(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.run_dir / "failure.json").read_text())
        assert (self.run_dir / "failure.txt").read_text() == facts["text"]
        assert "".join(self.terminals).count(facts["sentence"]) == 1, "told once"
        assert (self.run_dir / "failure.html").exists()
        return facts

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank_{rank}.log").read_text()


def run(
    folder: Path,
    world_size: int,
    *arguments: str,
    script: Path = DDP,
    stall_s: float = STALL_S,
    srun: bool = False,
    **options: float,
) -> Guarded:
    """Run a script on so many ranks, with the guard's options and the script's arguments."""
    port, run_dir = str(free_port()), folder / "run"
    given = {"stall_s": stall_s, "first_stall_s": 10 * stall_s, **options}
    guards = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [*guards, f"--run-dir={run_dir}", str(script), *arguments]

    def be_rank(rank: int) -> None:
        file = os.open(folder / f"terminal_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
        by_hand = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        by_hand |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        by_srun = {"SLURM_JOB_ID": port, "SLURM_STEP_NUM_TASKS": world_size, "SLURM_NODEID": 0,
                   "SLURM_STEP_TASKS_PER_NODE": world_size, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}  # fmt: skip
        os.environ.update({name: str(value) for name, value in (by_srun if srun else by_hand).items()})
        torch.set_num_threads(1)  # a pool of OpenMP threads that pytest has used does not survive the fork
        raise SystemExit(guard.main(command))

    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=be_rank, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    while not all(map(has_ended, processes)) and time.monotonic() - began < LIMIT_S:
        time.sleep(0.02)
    codes = [process.exitcode if has_ended(process) else None for process in processes]
    for process in processes:
        process.kill()
        process.join()
    terminals = [(folder / f"terminal_{rank}").read_text() for rank in range(world_size)]
    found = Guarded(codes, terminals, run_dir, time.monotonic() - began)
    print(found.codes, *found.terminals, sep="\n")
    return found


def has_ended(process: BaseProcess) -> bool:
    """Looks without reaping it: a launcher that has read an exit code keeps it to itself."""
    assert process.pid is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def line_of(mark: str) -> str:
    """``file:line`` of the line of ddp.py with a mark."""
    lines = DDP.read_text().splitlines()
    return f"{DDP}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# line: {mark}'))}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_healthy_script_runs_as_ever(tmp_path: Path, world_size: int) -> None:
    done = run(tmp_path, world_size)
    assert done.codes == [0] * world_size
    for rank in range(world_size):
        said = f"rank {rank} of {world_size} done: {48 // world_size} steps, __main__, {DDP}\n"
        assert said in done.log(rank)
        assert (said in done.terminals[rank]) is (rank == 0)
    assert f"safetrain.guard: {world_size} ranks, " in done.terminals[0]
    assert not (done.run_dir / "failure.json").exists()


def test_tasks_of_srun_are_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, 2, srun=True)
    assert done.codes == [0, 0]
    assert [f"rank {rank} of 2 done: 24 steps" in done.log(rank) for rank in (0, 1)] == [True, True]


@RANKS
def test_an_exception(tmp_path: Path, world_size: int, culprit: int) -> None:
    done = run(tmp_path, world_size, "--fault", "raise", "--culprit", str(culprit))
    assert set(done.codes) == {1}
    verdict = done.verdict
    assert verdict["culprits"] == [culprit]
    assert verdict["sentence"].startswith(f"Training failed on rank {culprit} (")
    assert verdict["place"] == line_of("raise")
    assert verdict["detail"] == "ValueError: bad label 12"
    assert "safetrain/" not in "".join(verdict["evidence"]), "the guard's frames"
    assert "Traceback" not in "".join(done.terminals[:culprit] + done.terminals[culprit + 1 :])
    assert done.log(culprit).rstrip().endswith("ValueError: bad label 12")


@RANKS
def test_a_killed_rank_is_named_by_the_survivors(tmp_path: Path, world_size: int, culprit: int) -> None:
    done = run(tmp_path, world_size, "--fault", "kill", "--culprit", str(culprit))
    assert done.codes == [-9 if rank == culprit else 1 for rank in range(world_size)]
    assert done.verdict["culprits"] == [culprit]
    assert f"Training failed: rank {culprit} (process " in done.verdict["sentence"]
    assert "was killed by SIGKILL" in done.verdict["sentence"]


@RANKS
def test_a_rank_that_leaves_by_os_exit(tmp_path: Path, world_size: int, culprit: int) -> None:
    done = run(tmp_path, world_size, "--fault", "exit", "--culprit", str(culprit))
    assert done.codes == [3 if rank == culprit else 1 for rank in range(world_size)]
    assert done.verdict["culprits"] == [culprit]
    assert done.verdict["place"] == line_of("exit")


@RANKS
@pytest.mark.parametrize(("fault", "mark"), [("sleep", "sleep"), ("loader", "loader")])
def test_a_rank_that_stands(tmp_path: Path, world_size: int, culprit: int, fault: str, mark: str) -> None:
    done = run(tmp_path, world_size, "--fault", fault, "--culprit", str(culprit), first_stall_s=STALL_S)
    assert set(done.codes) == {1}
    assert done.verdict["culprits"] == [culprit]
    assert done.verdict["place"].startswith(f"{line_of(mark)} in ")
    assert f"called at {line_of('backward')} in train" in done.verdict["others"][0]
    assert "raise --stall-s" in done.verdict["remedy"]


@RANKS
@pytest.mark.parametrize(
    ("fault", "call", "mark"),
    [("alone", "barrier", "alone"), ("early", "barrier", "end"), ("swapped", "broadcast of 3 floats", "broadcast")],
)
def test_calls_that_do_not_belong_together(
    tmp_path: Path, world_size: int, culprit: int, fault: str, call: str, mark: str
) -> None:
    done = run(tmp_path, world_size, "--fault", fault, "--culprit", str(culprit), first_stall_s=STALL_S)
    assert all(code not in (0, None) for code in done.codes)
    text = done.verdict["text"]
    assert f"{call} (the default group) (called at {line_of(mark)} in " in text or line_of(mark) in text
    assert f"rank {culprit}" in text.lower()
    assert "all_reduce a flag" in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_skipped_batch_ends_with_both_lines(tmp_path: Path, culprit: int) -> None:
    done = run(tmp_path, 2, "--fault", "skip", "--culprit", str(culprit), first_stall_s=STALL_S)
    assert all(code not in (0, None) for code in done.codes)
    text = done.verdict["text"]
    assert line_of("backward") in text
    assert line_of("all_reduce first") in text
    assert "equally many batches" in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_work_without_collectives_is_a_warning(tmp_path: Path, culprit: int) -> None:
    done = run(tmp_path, 2, "--fault", "validate", "--culprit", str(culprit), first_stall_s=STALL_S)
    assert done.codes == [0, 0]
    said = "".join(done.terminals)
    assert said.count("has been at") >= 1
    assert f"Rank {culprit} has been at {line_of('validate').rpartition(':')[0]}:" in said
    assert " in validate for " in said
    assert "waits in all_reduce of 5 floats" in said


def test_work_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "--fault", "validate", first_stall_s=STALL_S, busy_s=3)
    assert set(done.codes) == {1}
    assert done.verdict["culprits"] == [1]
    assert "is at work outside any collective" in done.verdict["sentence"]
    assert "raise --busy-s (the limit was 3 s)" in done.verdict["remedy"]


def test_the_verdict_comes_before_the_groups_own_timeout(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "--fault", "sleep", "--timeout", "6", stall_s=300)
    assert set(done.codes) == {1}
    assert done.verdict["culprits"] == [1]
    assert done.verdict["place"].startswith(line_of("sleep"))
    assert "init_process_group(timeout=...)" in done.verdict["remedy"]


def test_the_pages_example_ends_as_shown(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (shown,) = re.findall(r"```\n(Training stalled.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, 2, script=tmp_path / "train.py", first_stall_s=5, stall_s=5)
    assert done.verdict["sentence"].replace(f"{tmp_path}/", "") == " ".join(shown.split())


def test_the_pages_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    given = [shlex.split(line.partition("-m safetrain.guard")[2]) for line in lines]
    asked = [parse(arguments) for arguments in given if arguments != ["--help"]]
    assert [(one.script, one.is_module) for one in asked] == [
        ("train.py", False), ("mypackage.train", True), ("train.py", False), ("train.py", False),
    ]  # fmt: skip
    assert (asked[-1].stall_s, asked[-1].first_stall_s) == (5, 5)
    defaults = asked[0]
    assert f"`--stall-s` ({defaults.stall_s:g} s; `--first-stall-s`, {defaults.first_stall_s:g} s" in PAGE
    assert f"`--busy-s` ({defaults.busy_s:,.0f} s)" in PAGE

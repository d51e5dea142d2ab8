"""What README.md shows is what runs: its files in a folder, its commands in it, its choices and links."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safetrain.preflight_config import CHECK_NAMES

ROOT = Path(__file__).parents[2]
README = "".join(
    (ROOT / page).read_text() for page in ("README.md", "docs/first_step.md", "docs/failures.md", "docs/checkpoints.md")
)
"""With the pages that go on from it."""
LIMIT_S = 280.0  # a sweep of two jobs on a loaded machine

pytestmark = pytest.mark.timeout(300)


def shown_files() -> dict[str, str]:
    """Every file that is shown whole: the block after a line that names it."""
    return dict(re.findall(r"`([\w/]+\.(?:py|yaml))`[^`\n]*:\n\n```(?:python|yaml)\n(.*?)```", README, flags=re.DOTALL))


def shown_commands() -> list[str]:
    """Every command that starts a training, without its comment, and without the installation before it."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    commands = [line.rpartition("&& ")[2].strip() for line in lines]
    return [command for command in commands if command.startswith(("python", "torchrun"))]


def command(start: str) -> str:
    """The one shown command that starts so."""
    (found,) = [shown for shown in shown_commands() if re.fullmatch(start, shown)]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_shown_files(tmp_path)


def with_shown_files(folder: Path) -> Path:
    """The folder, with README's files in it."""
    for name, text in shown_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(shown: str, folder: Path) -> str:
    """What the command prints; it must end well."""
    program, *arguments = shlex.split(shown)
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    done = subprocess.run(
        [*programs[program], *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def check_run_directory(run_dir: Path, *, ranks: int, accuracy: float) -> None:
    for name in ("config.yaml", "events.jsonl", "tensorboard"):
        assert (run_dir / name).exists(), name
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == [f"rank_{n}.log" for n in range(ranks)]
    assert json.loads((run_dir / "result.json").read_text())["metrics"]["val/accuracy"] >= accuracy


def run_directories(folder: Path) -> Iterator[Path]:
    return (path.parent for path in (folder / "outputs").rglob("config.yaml") if path.parent.name != ".hydra")


def test_every_command_and_file_is_tried_here() -> None:
    assert sorted(shown_files()) == ["recipe/spirals.yaml", "script.py", "spirals.py"]
    assert len(shown_commands()) == 21


@pytest.mark.slow
def test_the_first_command_learns_the_digits(tmp_path: Path) -> None:
    shown = run(command(r"python -m safetrain recipe=resnet_ddp"), tmp_path)
    (run_dir,) = run_directories(tmp_path)
    check_run_directory(run_dir, ranks=2, accuracy=0.98)
    assert re.search(r"epoch 1/\d+ .* val/accuracy", shown)
    assert f"run directory  {run_dir.relative_to(tmp_path)}" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        (r"python -m safetrain recipe=spirals", 2),
        (r"python -m safetrain recipe=spirals preset=debug", 1),
        (r"torchrun --nproc-per-node 2 -m safetrain recipe=spirals", 2),
    ],
)
def test_your_own_project(folder: Path, start: str, ranks: int) -> None:
    run(command(start), folder)
    (run_dir,) = run_directories(folder)
    assert run_dir.parent == folder / "outputs/spirals"
    check_run_directory(run_dir, ranks=ranks, accuracy=0.9)


@pytest.mark.slow
def test_the_preflight_of_your_own_project(folder: Path) -> None:
    printed = run(command(r"python -m safetrain\.preflight recipe=spirals preflight=deep"), folder)
    pattern = r"^(\w+) +(?:ok|warn) +\S"  # on a small or busy machine some warn
    shown = re.search(r"```\n(check +verdict +found\n.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    names = re.findall(pattern, shown[1], flags=re.MULTILINE)
    assert names == list(CHECK_NAMES)[: len(names)]
    assert list(dict.fromkeys(re.findall(pattern, printed, flags=re.MULTILINE))) == list(CHECK_NAMES)
    assert "first_step     ok       well; weights and optimizer" in printed
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_your_own_project_in_a_sweep(folder: Path) -> None:
    shown = run(command(r"python -m safetrain -m recipe=spirals optimizer\.lr=.*"), folder)
    jobs = sorted(run_directories(folder))
    assert [job.name for job in jobs] == ["0", "1"]
    assert {job.parent.parent for job in jobs} == {folder / "outputs/multirun"}
    for job, rate in zip(jobs, ("0.01", "0.001"), strict=True):
        check_run_directory(job, ranks=2, accuracy=0.7)
        assert f"lr: {rate}" in (job / "config.yaml").read_text()
    assert len(re.findall(r"^recipe=spirals optimizer.lr=0\.\d+ +0\.\d+ ", shown, flags=re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_several_machines(folder: Path) -> None:
    """Both commands on this one; tests/faults/test_hosts.py has two hosts."""
    shown = [command(rf"python -m safetrain .* launch\.node_rank={number} .*") for number in (0, 1)]
    here = [each.replace("node0:29500", "localhost:29543") + " launch.nproc_per_node=1" for each in shown]
    with ThreadPoolExecutor() as machines:
        said = list(machines.map(lambda each: run(each, folder), here))
    (run_dir,) = run_directories(folder)
    check_run_directory(run_dir, ranks=2, accuracy=0.9)
    assert "2 ranks on 2 machines" in said[0]
    assert "runs rank 1 of 2" in said[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_several_machines_by_torchrun(folder: Path) -> None:
    """The one command for both, twice on this one."""
    shown = command(r"torchrun --nnodes 2 .*").replace("node0:29500", "localhost:29547")
    here = shown.replace("--nproc-per-node 4", "--nproc-per-node 1")
    with ThreadPoolExecutor() as machines:
        list(machines.map(lambda each: run(each, folder), [here, here]))
    (run_dir,) = run_directories(folder)
    check_run_directory(run_dir, ranks=2, accuracy=0.9)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_preflight_of_the_machine(tmp_path: Path) -> None:
    """Its table is the README's, but for what this machine has."""
    printed = run(command(r"python -m safetrain\.preflight launch\.nproc_per_node=3"), tmp_path)
    shown = re.search(r"```\n(check +verdict +found\n.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    checks = r"^(\w+) +(?:ok|warn|verdict) +\S"
    assert re.findall(checks, printed, flags=re.MULTILINE) == re.findall(checks, shown[1], flags=re.MULTILINE)
    assert "3 ranks on 1 machine" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "lines"),
    [("launcher=joblib", 2), ("launcher=submitit_local", 2), ("sweeper=optuna", 3)],  # 3: and the best
)
def test_a_sweep_on_another_engine(folder: Path, engine: str, lines: int) -> None:
    shorter = " loop.max_steps=3" + (" hydra.sweeper.n_trials=2" if "optuna" in engine else "")
    shown = run(command(rf"python -m safetrain -m .*hydra/{engine}.*") + shorter, folder)
    assert len(list(run_directories(folder))) == 2
    rows = [
        line for line in shown.splitlines() if re.match(r"best: 0\.\d+ |.*recipe=spirals.*  0\.\d+ +outputs/", line)
    ]
    assert len(rows) == lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "ranks"), [(r"python script\.py", 1), (r"torchrun --nproc-per-node 2 script\.py", 2)]
)
def test_without_hydra(folder: Path, start: str, ranks: int) -> None:
    shown = run(command(start), folder)
    accuracies = [float(value) for value in re.findall(r"'val/accuracy': ([\d.]+)", shown)]
    assert len(accuracies) == ranks
    assert min(accuracies) == max(accuracies) > 0.9
    assert list(folder.glob("outputs")) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_that_is_cut(folder: Path) -> None:
    """Each of the four commands, with a run and a step that are there."""
    shorter = command(r"python -m safetrain recipe=spirals")
    run(f"{shorter} loop.epochs=1 loop.max_steps=50 checkpoint.every_steps=40", folder)
    (run_dir,) = run_directories(folder)
    assert (run_dir / "checkpoints" / "step_40").is_dir()
    run(command(r".* resume=<run>/.*").replace("<run>", f"outputs/spirals/{run_dir.name}"), folder)
    (other,) = set(run_directories(folder)) - {run_dir}
    check_run_directory(other, ranks=2, accuracy=0.9)
    for start in (r".* resume=outputs/spirals/<run>", r".* resume=auto"):
        run(command(start).replace("<run>", run_dir.name), folder)
        check_run_directory(run_dir, ranks=2, accuracy=0.9)
    run(command(r"python -m safetrain\.export .*").replace("<run>", run_dir.name), folder)
    assert (folder / "model.safetensors").stat().st_size > 4 * (2 * 64 + 64 * 64 + 64 * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "told"),
    [
        (r"python -m safetrain\.chaos .*fault=sigkill.*", "rank 1 (process "),
        (r"python -m safetrain\.chaos .*fault=stuck.*", "rank 1 is stuck waiting for a loader process"),
    ],
)
def test_a_fault_on_purpose(folder: Path, start: str, told: str) -> None:
    outcome = run(command(start), folder).splitlines()[-1]
    assert re.search(r": ended after [\d.]+ s, exit code 1, named$", outcome)
    (run_dir,) = run_directories(folder)
    assert run_dir.parent == folder / "outputs/chaos/spirals"
    assert told in (run_dir / "failure.txt").read_text().splitlines()[0]


def test_every_policy_is_in_the_table_with_its_default_first() -> None:
    table: dict[str, list[str]] = {}
    for policy, choice in re.findall(r"\| `(\w+)=(\w+)` \|", README):
        table.setdefault(policy, []).append(choice)
    there_are = {path.name: {file.stem for file in path.iterdir()} for path in (ROOT / "configs/policy").iterdir()}
    assert {policy: set(choices) for policy, choices in table.items()} == there_are
    defaults = dict(re.findall(r"policy/(\w+): (\w+)", (ROOT / "configs/train.yaml").read_text()))
    assert {policy: choices[0] for policy, choices in table.items()} == defaults


def test_the_limits_in_the_table_are_the_configured_ones() -> None:
    limits = re.findall(r"\| `(\w+)=(\w+)` \|[^|]*\(limit (\d+)", README)
    assert len(limits) == 3
    for policy, choice, limit in limits:
        config = (ROOT / f"configs/policy/{policy}/{choice}.yaml").read_text()
        assert f"max_consecutive: {limit}\n" in config


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []

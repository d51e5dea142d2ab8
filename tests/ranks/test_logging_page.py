"""docs/logging.md: its loggers write what the run told, from rank 0 only; its torchmetrics are those of one process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import safetrain
from safetrain import cli
from safetrain.comm import Comm
from safetrain.testing import RankError, run_ranks
from tests.ranks.toys import assert_same, state

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/logging.md").read_text()
README = (ROOT / "README.md").read_text()
SHOWN = dict(
    re.findall(r"`([\w/]+\.(?:py|yaml))`[^`\n]*(?:`[^\n]*)?:\n\n```(?:python|yaml)\n(.*?)```", README + PAGE, re.DOTALL)
)
(METRICS,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "torchmetrics" in text)


def module(name: str) -> Any:
    """A shown file, imported; only in a process that is about to end, or by a test that forgets it."""
    loaded = sys.modules[name] = ModuleType(name)
    exec(compile(SHOWN[f"{name}.py"], f"{name}.py", "exec"), loaded.__dict__)
    return loaded


class Recorder:
    """Keeps the metrics that it is told, by name and step."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, float]]] = {}
        self.ends: list[str] = []

    def start(self, run: safetrain.RunInfo) -> None:
        pass

    def step(self, step: int, epoch: int) -> None:
        pass

    def event(self, event: safetrain.Event) -> None:
        if event.kind in ("train", "validation"):
            for name, value in event.metrics.items():
                self.told.setdefault(name, []).append((event.step, value))
        if event.kind in ("end", "failed", "preempted"):
            self.ends.append(f"{event.kind} at {event.step} {event.text}".strip())

    def close(self) -> None:
        self.ends.append("closed")


def test_every_block_is_tried_here() -> None:
    assert sorted(SHOWN) == [
        "mlflow_log.py", "observers/mlflow.yaml", "recipe/spirals.yaml", "script.py", "spirals.py", "wandb_log.py",
    ]  # fmt: skip
    assert len(re.findall(r"```\w+\n", PAGE)) == 5


# --- how a run ended --------------------------------------------------------------------------------------------------


def run_until(comm: Comm, end: str, make: Any, run_dir: Path | None = None) -> tuple[Any, dict[str, Any], list[str]]:
    """Two epochs of 16 steps; ``end``: what happens on rank 1 at step 12. What ``make()`` and a recorder were told."""
    spirals = module("spirals")

    class Ends(spirals.Spirals):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any) -> Any:
            if self.step == 12 and self.comm.rank == 1:
                if end == "failed":
                    raise ValueError("bad label 12")
                if end == "preempted":
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not self._leave.wanted:
                        time.sleep(0.001)
            return super().training_step(batch)

    torch.manual_seed(0)
    observer, recorder = make(), Recorder()
    trainer = Ends(
        spirals.mlp(width=16),
        spirals.spirals(1024, seed=1),
        spirals.spirals(201, seed=2),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        loop=safetrain.Loop(epochs=2),
        observers=[observer, recorder],
        run_dir=run_dir,
        resume="auto" if run_dir else "none",
        config_text="lr: 0.01\n",
    )
    try:
        trainer.fit()
    except (safetrain.SafetrainError, safetrain.Preempted):
        if end == "end":
            raise
    return observer, recorder.told, recorder.ends


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("end", "end at 32"),
        ("failed", "failed at 12 rank 1 failed at step 12: ValueError: bad label 12 in training_step at "),
        ("preempted", "preempted at 14 saved"),
    ],
)
def test_observers_hear_how_a_run_ended(end: str, told: str, tmp_path: Path) -> None:
    def work(comm: Comm) -> list[str]:
        return run_until(comm, end, Recorder, tmp_path)[2]

    for ends in run_ranks(work, 2):
        assert len(ends) == 2
        assert ends[0].startswith(told)
        assert ends[1] == "closed"


def test_an_observer_that_fails_at_the_end_does_not_hide_why() -> None:
    class Broken(Recorder):
        def event(self, event: safetrain.Event) -> None:
            if event.kind == "failed":
                raise OSError("no route to the logger")

    def work(comm: Comm) -> None:
        module("spirals")
        from spirals import Spirals, mlp, spirals  # type: ignore[import-not-found]

        class Fails(Spirals):  # type: ignore[misc]
            def training_step(self, batch: Any) -> Any:
                raise ValueError("bad label 12")

        Fails(mlp(width=4), spirals(64, seed=1), optimizer=partial(torch.optim.SGD, lr=0.1), observers=[Broken()]).fit()

    with pytest.raises(
        RankError, match=r"(?s)RankFailed: .*bad label 12.*Then an observer failed as well: OSError: no"
    ):
        run_ranks(work, 2)


# --- MLflow -----------------------------------------------------------------------------------------------------------


def mlflow_runs(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return [
        (
            run.info.status,
            {
                name: sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
                for name in run.data.metrics
            },
            Path(run.info.artifact_uri.removeprefix("file://"), "config.yaml").read_text(),
        )
        for run in found
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "end", "status"), [(1, "end", "FINISHED"), (2, "end", "FINISHED"), (2, "failed", "FAILED")]
)
def test_mlflow_has_what_rank_0_was_told(
    ranks: int, end: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlruns"

    def work(comm: Comm) -> tuple[dict[str, Any], list[str]]:
        make = partial(module("mlflow_log").MLflow, uri, "spirals")
        return run_until(comm, end, make)[1:]

    told, _ = run_ranks(work, ranks)[0]
    ((found, metrics, config),) = run_ranks(lambda _: mlflow_runs(uri), 1)[0]
    assert found == status
    assert metrics == told
    steps = 16 if ranks == 2 else 32
    trained = [step for step in range(10, 2 * steps + 1, 10) if end == "end" or step <= 12]
    assert [step for step, _ in metrics["train/loss"]] == trained
    assert [step for step, _ in metrics.get("val/accuracy", [])] == ([steps, 2 * steps] if end == "end" else [])
    assert config == "lr: 0.01\n"


def test_a_run_that_was_preempted_goes_on_in_the_same_run_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlruns"

    def work(comm: Comm, end: str) -> list[str]:
        return run_until(comm, end, partial(module("mlflow_log").MLflow, uri), tmp_path / "run")[2]

    assert run_ranks(work, 2, "preempted")[0] == ["preempted at 14 saved", "closed"]
    ((found, _, _),) = run_ranks(lambda _: mlflow_runs(uri), 1)[0]
    assert found == "KILLED"
    assert run_ranks(work, 2, "end")[0] == ["end at 32", "closed"]
    ((found, metrics, _),) = run_ranks(lambda _: mlflow_runs(uri), 1)[0]
    assert found == "FINISHED"
    assert [step for step, _ in metrics["train/loss"]] == [10, 20, 30]
    assert [step for step, _ in metrics["val/accuracy"]] == [16, 32]


def project(folder: Path) -> None:
    for name, text in SHOWN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_the_yaml_of_mlflow_adds_to_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    arguments = ["recipe=spirals", "observers=mlflow", "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", ["safetrain", *arguments])
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for name in ("ProgressBar", "TensorBoard", "EventLog"):
        assert f"_target_: safetrain.telemetry.{name}" in shown
    assert "_target_: mlflow_log.MLflow\n    uri: ${oc.env:MLFLOW_TRACKING_URI}\n    experiment: spirals\n" in shown


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_of_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    project(tmp_path)
    (line,) = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)
    setting, python, *arguments = shlex.split(line)
    assert (setting.partition("=")[0], python) == ("MLFLOW_TRACKING_URI", "python")
    uri = f"file:{tmp_path}/mlruns"
    environment = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=os.environ | environment, timeout=100, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("outputs/spirals/*/result.json")
    code = (
        f"import json\nfrom tests.ranks.test_logging_page import mlflow_runs\nprint(json.dumps(mlflow_runs({uri!r})))"
    )
    read = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, timeout=60, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    ((status, metrics, config),) = json.loads(read.stdout)
    assert status == "FINISHED"
    last_step, accuracy = metrics["val/accuracy"][-1]
    written = json.loads(result.read_text())
    assert (last_step, accuracy) == (written["step"], pytest.approx(written["metrics"]["val/accuracy"]))
    assert "lr: 0.01" in config


# --- Weights & Biases -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_has_what_it_was_told_offline(tmp_path: Path) -> None:
    """In a process of its own: W&B starts another one beside it."""
    pytest.importorskip("wandb")
    (tmp_path / "wandb_log.py").write_text(SHOWN["wandb_log.py"])
    (tmp_path / "told.py").write_text(
        "from pathlib import Path\nfrom safetrain import Event, RunInfo\nfrom wandb_log import WandB\n"
        "for rank in (0, 1):\n"
        "    info = RunInfo(rank, 2, Path('run'), 'spirals', 1, 20, None, 0, 'lr: 0.01', 'cpu', 3)\n"
        "    info.run_dir.mkdir(exist_ok=True)\n"
        "    observer = WandB()\n"
        "    observer.start(info)\n"
        "    observer.event(Event('train', 10, 0, {'train/loss': 0.5}))\n"
        "    observer.event(Event('validation', 20, 0, {'val/loss': 0.25}))\n"
        "    observer.event(Event('failed', 25, 0, text='rank 1'))\n"
        "    observer.close()\n"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "told.py"], cwd=tmp_path, env=environment, timeout=100, check=False)
    assert done.returncode == 0
    (written,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    rows, exits = records(written.read_bytes())
    assert [(row["step"], row.get("train/loss"), row.get("val/loss")) for row in rows] == [
        ("10", "0.5", None),
        ("20", None, "0.25"),
    ]
    assert exits == [1]


def records(data: bytes) -> tuple[list[dict[str, str]], list[int]]:
    """The rows and exit codes of a .wandb file: a log of LevelDB's form, here one block, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    rows, exits, at = [], [], 7
    while at + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind == 1, "a record in more than one piece"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.HasField("history"):
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
        if record.HasField("exit"):
            exits.append(record.exit.exit_code)
    return rows, exits


# --- torchmetrics -----------------------------------------------------------------------------------------------------


def measured(
    comm: Comm, val_samples: int, epochs: int = 1, replacing: Mapping[str, str] | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor], float, float]:
    """The page's trainer on that many validation samples: its metrics, its weights, and AUROC and F1 in one process."""
    from torchmetrics.functional.classification import binary_auroc, binary_f1_score

    spirals = module("spirals")
    names: dict[str, Any] = {}
    text = METRICS
    for old, new in (replacing or {}).items():
        text = text.replace(old, new)
    exec(compile(text, "docs/logging.md", "exec"), names)
    trainer = names["trainer"]
    trainer._given_val_data = spirals.spirals(val_samples, seed=2)
    trainer.loop = safetrain.Loop(epochs=epochs)
    result = trainer.fit()
    points, labels = trainer._given_val_data.tensors
    with torch.no_grad():
        scores = trainer.model(points).softmax(dim=1)[:, 1]
    return result.metrics, state(trainer), float(binary_auroc(scores, labels)), float(binary_f1_score(scores, labels))


@pytest.mark.parametrize(("ranks", "val_samples"), [(2, 201), (4, 201), (4, 3)])
def test_torchmetrics_over_ranks_are_those_of_one_process(ranks: int, val_samples: int) -> None:
    """Also where a rank has no sample."""
    pytest.importorskip("torchmetrics")
    runs = run_ranks(measured, ranks, val_samples)
    assert_same([weights for _, weights, _, _ in runs])
    for metrics, _, auroc, f1 in runs:
        assert metrics["val/auroc"] == pytest.approx(auroc, abs=1e-6)
        assert metrics["val/f1"] == pytest.approx(f1, abs=1e-6)
    if val_samples == 201:
        assert 0.5 < runs[0][0]["val/auroc"] < 1.0


def test_torchmetrics_own_synchronising_is_right_where_all_ranks_have_samples() -> None:
    pytest.importorskip("torchmetrics")
    by_itself = {"sync_on_compute=False": "", "over_ranks(self.comm, self.auroc)": "self.auroc.compute()"}
    for metrics, _, auroc, _ in run_ranks(measured, 2, 201, 1, by_itself):
        assert metrics["val/auroc"] == pytest.approx(auroc, abs=1e-6)


def test_metrics_of_an_epoch_do_not_count_the_one_before() -> None:
    pytest.importorskip("torchmetrics")
    for metrics, _, auroc, f1 in run_ranks(measured, 2, 201, 2):
        assert (metrics["val/auroc"], metrics["val/f1"]) == (pytest.approx(auroc), pytest.approx(f1))

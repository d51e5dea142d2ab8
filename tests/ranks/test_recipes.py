"""The shipped recipes, composed from their YAML and trained for a few steps on 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import io
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.utils.data import Subset

import safetrain
from safetrain.comm import Comm
from safetrain.config import Config
from safetrain.testing import differences, run_ranks
from safetrain.worker import build
from tests.ranks.toys import assert_close, assert_same, state

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

State = dict[str, torch.Tensor]


@dataclass
class Seen:
    """What a rank's run was: its result, its weights before each step and at the end, its batches, what was told."""

    result: safetrain.Result
    end: State
    steps: list[tuple[int, int, State]]  # epoch, step and weights at each call of training_step
    batches: list[Any]
    told: list[safetrain.Event]
    printed: str


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[safetrain.Event] = []

    def start(self, run: safetrain.RunInfo) -> None: ...
    def step(self, step: int, epoch: int) -> None: ...
    def event(self, event: safetrain.Event) -> None:
        self.told.append(event)

    def close(self) -> None: ...


def config_of(recipe: str, run_dir: Path, *overrides: str) -> Config:
    """The recipe as the command line composes it, for CPUs."""
    OmegaConf.register_new_resolver("run_dir", lambda parent: f"{parent}/run", replace=True)
    given = [f"+hydra.runtime.output_dir={run_dir}", f"recipe={recipe}", "device=cpu", "observers=none", *overrides]
    with initialize_config_module("safetrain.configs", version_base="1.3"):
        composed = compose("train", overrides=given, return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        return Config.parse(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]


def fit(trainer: safetrain.Trainer) -> Seen:
    """Train, and watch."""
    recorder, steps, batches, training_step = Recorder(), [], [], trainer.training_step

    def watched(batch: Any) -> Any:
        steps.append((trainer.epoch, trainer.step, state(trainer)))
        batches.append(batch)
        return training_step(batch)

    trainer.training_step, trainer.observers = watched, (recorder,)  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = trainer.fit()
    return Seen(result, state(trainer), steps, batches, recorder.told, printed.getvalue())


def train(config: Config, world_size: int, work: Any = None) -> list[Seen]:
    """Every rank's run; all end with the same weights and the same result."""
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    runs = run_ranks(work or (lambda comm: fit(build(config))), world_size, timeout_s=60)
    assert_same([run.end for run in runs])
    assert all(run.result == runs[0].result for run in runs)
    return runs


def gpt(run_dir: Path, *overrides: str) -> Config:
    small = ["vars.context=32", "model.width=32", "+model.layers=1", "trainer.sample_bytes=20", "loader.batch_size=8"]
    return config_of("gpt_ddp", run_dir, *small, "loop.nominal_weight=256", "scheduler.warmup_steps=5", *overrides)


def write_python(config: Config) -> Seen:
    trainer = build(config)
    whole = trainer.build_val_data()
    trainer.build_val_data = lambda: Subset(whole, range(0, 2000, 40))  # type: ignore[method-assign, arg-type]
    return fit(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt_learns_and_rank_0_writes_a_sample(world_size: int, tmp_path: Path, precision: str) -> None:
    config = gpt(tmp_path, "loop.max_steps=40", f"precision={precision}")
    runs = train(config, world_size, lambda comm: write_python(config))
    for run in runs:
        metrics = run.result.metrics
        assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))
        assert metrics["val/perplexity"] < 45  # 256 at the start
    assert "head.weight" not in runs[0].end  # tied weights are there once
    assert runs[0].printed.strip().startswith("def ")
    assert len(runs[0].printed.strip("\n")) >= 20
    assert [run.printed for run in runs[1:]] == [""] * (world_size - 1)


def test_gpt_weighs_by_real_bytes(tmp_path: Path) -> None:
    """One step of SGD on two ranks, with padded blocks among them, is that of one process on all bytes together."""
    larger = ("loader.batch_size=64", "loop.nominal_weight=2048")  # among so many some are padded
    config = gpt(tmp_path, "loop.max_steps=1", "loop.clip_norm=null", "scheduler=null", *larger)
    config = replace(config, optimizer={"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1.0})

    def work(comm: Comm) -> tuple[Seen, State]:
        run = write_python(config)
        gathered = comm.gather(run.batches[0])
        seen, following = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        model = build(config).build_model()
        model.load_state_dict(run.steps[0][2])
        torch.nn.functional.cross_entropy(model(seen).flatten(0, 1), following.flatten()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
        return run, {"padded": (following == -100).sum(), **model.state_dict()}

    for run, expected in run_ranks(work, 2, timeout_s=60):
        assert expected.pop("padded") > 0
        for name, value in expected.items():
            assert torch.allclose(run.end[name], value, atol=2e-6), name


def digits_in(folder: Path) -> Counter[tuple[int, ...]]:
    lines = [line for path in folder.glob("train_*.txt") for line in path.read_text().splitlines()]
    return Counter(tuple(map(int, line.split())) for line in lines)


def digits_of(runs: list[Seen], epoch: int) -> list[list[tuple[int, ...]]]:
    """By rank, in the order in which they were trained on: label and pixels."""
    return [
        [
            (int(label), *(16 * row).int().tolist())
            for (at, _, _), (pixels, labels) in zip(run.steps, run.batches, strict=True)
            if at == epoch
            for row, label in zip(pixels, labels, strict=True)
        ]
        for run in runs
    ]


def test_a_stream_of_uneven_files_is_used_once(world_size: int, tmp_path: Path) -> None:
    runs = train(config_of("stream_ddp", tmp_path, "loop.epochs=2"), world_size)
    written = digits_in(tmp_path / "digits")
    assert written.total() == 1437
    epochs = [digits_of(runs, epoch) for epoch in (0, 1)]
    for by_rank in epochs:
        assert Counter(digit for digits in by_rank for digit in digits) == written
        assert len({len(digits) for digits in by_rank}) == world_size  # no two ranks have equally many
    assert epochs[0] != epochs[1]
    for epoch in (0, 1):
        told = [e.metrics["train/samples"] for e in runs[-1].told if (e.kind, e.epoch) == ("train", epoch)]
        assert sum(told) == 1437
    assert runs[0].result.metrics["val/samples"] == 360
    assert runs[0].result.metrics["val/accuracy"] > 0.6
    assert runs[0].result.skipped_steps == 0


@pytest.mark.exhaustive
def test_a_stream_that_is_cut_in_an_epoch_goes_on_where_it_was(world_size: int, tmp_path: Path) -> None:
    straight = train(config_of("stream_ddp", tmp_path / "straight", "loop.epochs=2"), world_size)
    asked = ("loop.epochs=2", "checkpoint.at_end=true")
    train(config_of("stream_ddp", tmp_path / "cut", *asked, "loop.max_steps=5"), world_size)
    resumed = train(config_of("stream_ddp", tmp_path / "cut", *asked, "resume=auto"), world_size)
    for one, other in zip(straight, resumed, strict=True):
        assert differences(one.batches[-len(other.batches) :], other.batches) == []
        assert other.steps[0][1] == 5
        assert_close(other.end, one.end, 0.0 if world_size == 2 else 1e-5)  # see docs/checkpoints.md


def test_a_gan_takes_turns(world_size: int, tmp_path: Path) -> None:
    config = config_of("gan_ddp", tmp_path, "loop.max_steps=40", "loop.log_every_steps=20")
    runs = train(config, world_size)
    for run in runs:
        states = [weights for _, _, weights in run.steps] + [run.end]
        for step, (before, after) in enumerate(pairwise(states)):
            moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
            assert moved == {"generator" if step % 2 else "critic"}
        first, last = (event.metrics["train/loss/critic"] for event in run.told if event.kind == "train")
        assert 0.5 < first < last < 2 * math.log(2)  # the critic learns first, and is then fooled more and more
        assert set(run.result.metrics) == {"val/as_asked", "val/spread"}


def test_fine_tuning_leaves_the_backbone_alone_until_epoch_2(world_size: int, tmp_path: Path) -> None:
    config = config_of("finetune_ddp", tmp_path, "loop.epochs=3", "checkpoint.every_epochs=null")

    def work(comm: Comm) -> tuple[Seen, list[tuple[int, float]]]:
        trainer = build(config)
        run = fit(trainer)
        groups = trainer.optimizers["optimizer"].param_groups
        return run, [(len(group["params"]), group["lr"]) for group in groups]

    runs, groups = zip(*run_ranks(work, world_size, timeout_s=60), strict=True)
    assert_same([run.end for run in runs])
    for run, rates in zip(runs, groups, strict=True):
        assert rates == [(2, 0.01), (6, 0.001)]
        start = run.steps[0][2]
        assert differences(start, runs[0].steps[0][2]) == []  # what rank 0 has pretrained
        backbone = [name for name in start if name.startswith("backbone.")]
        for epoch, _, weights in run.steps[1:]:
            same = [name for name in backbone if torch.equal(weights[name], start[name])]
            assert same == backbone or epoch == 2
            assert not torch.equal(weights["head.weight"], start["head.weight"])
        assert not any(torch.equal(run.end[name], start[name]) for name in backbone)
        assert run.result.metrics["val/accuracy"] > 0.85

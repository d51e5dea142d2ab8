"""Trainer: the loop, and the methods a user overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from safetrain.activity import ACTIVITY
from safetrain.assembly import Run, assemble
from safetrain.batches import count_samples
from safetrain.build import build_optimizers, build_schedulers, needed
from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm, How
from safetrain.config import Audit, Checkpoint, Loader, Loop, Preflight, Watchdog
from safetrain.contain import Loss
from safetrain.errors import DataError, Preempted
from safetrain.evaluation import validate
from safetrain.given import as_path, check_given, observers_of
from safetrain.metrics import MetricLog
from safetrain.observer import Observer
from safetrain.peers import someone_failed
from safetrain.policies import Policies
from safetrain.precision import FP32, Precision
from safetrain.preemption import LeaveRequest, SharedRequest, leave_request
from safetrain.report import Result
from safetrain.strategy import DDPStrategy, Strategy
from safetrain.verdict import put_away
from safetrain.watchdog import watch

T = TypeVar("T")


class Trainer:
    """Trains a model on all ranks. Subclass it and write ``training_step``; that is all a run needs.

    Args:
        model: a bare module; safetrain moves it, wraps it, and makes it the same on all ranks.
        train_data, val_data: a dataset, or a DataLoader; each rank gets its share.
        optimizer: called with the parameters, returns an Optimizer (``functools.partial(torch.optim.SGD, lr=0.1)``);
            or a mapping from the name of a submodule to such a callable: several optimizers.
        scheduler: called with an optimizer; or a mapping by optimizer name. Stepped once per real optimizer step.
        loop, loader, precision, strategy, policies, watchdog, audit, preflight: how to train; the defaults are safe.
        checkpoint: when the run's state is saved in ``run_dir``, and what is kept; without ``run_dir`` it is not.
        resume: go on from a checkpoint: ``auto``, the newest in ``run_dir`` if there is one; a path; or ``none``.
        observers: are told what happens (progress bar, TensorBoard, ...).
    """

    phases: Sequence[str] = ()
    """Names of optimizers that take turns, one window each (``self.phase``). Empty: all at once."""

    # filled in by fit()
    comm: Comm
    model: nn.Module
    _run: Run
    _leave: LeaveRequest
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, LRScheduler]
    total_steps: int | None  # optimizer steps of the whole run; None where the data has no length
    phase: str | None = None
    step: int = 0
    epoch: int = 0

    def __init__(
        self,
        model: nn.Module | None = None,
        train_data: Dataset[Any] | DataLoader[Any] | None = None,
        val_data: Dataset[Any] | DataLoader[Any] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loop: Loop | None = None,
        loader: Loader | None = None,
        precision: Precision | None = None,
        strategy: Strategy | None = None,
        policies: Policies | None = None,
        watchdog: Watchdog | None = None,
        audit: Audit | None = None,
        preflight: Preflight | None = None,
        checkpoint: Checkpoint | None = None,
        resume: str | Path = "none",
        observers: Sequence[Observer] = (),
        seed: int = 0,
        device: str = "auto",
        run_dir: str | Path | None = None,
        name: str = "",
        config_text: str = "",
    ) -> None:
        self._given_model, self._given_train_data, self._given_val_data = model, train_data, val_data
        self._given_optimizer, self._given_scheduler = optimizer, scheduler
        self.loop, self.loader = loop or Loop(), loader or Loader()
        self.precision, self.strategy = precision or FP32(), strategy or DDPStrategy()
        self.policies, self.observers = policies or Policies(), observers_of(observers)
        self.watchdog, self.audit = watchdog or Watchdog(), audit or Audit()
        self.checkpoint, self.resume, self.preflight = checkpoint or Checkpoint(), resume, preflight or Preflight()
        self.seed, self.device, self.run_dir, self.name = seed, device, as_path(run_dir), name or type(self).__name__
        self.metrics: dict[str, float] = {}
        self.config_text, self._log = config_text, MetricLog()
        self._stopped = self._stop_wanted = False
        check_given(self, unwritten=Trainer.training_step)

    # --- what a user overrides --------------------------------------------------------------------------------------

    def training_step(self, batch: Any) -> torch.Tensor | Loss | Mapping[str, torch.Tensor] | None:
        """The mean loss of a micro-batch, a scalar; or None, a ``Loss``, ``{optimizer: loss}``, ``raise SkipBatch``."""
        raise NotImplementedError

    def validation_step(self, batch: Any) -> None:
        """Log metrics of one batch; every sample comes exactly once. Under ``no_grad``, the model in eval mode."""
        raise NotImplementedError

    def on_validation_end(self) -> None:
        """Called on every rank when all are through their batches; log what needs all ranks, by collectives as well."""

    def on_epoch_start(self) -> None:
        """Called on every rank before an epoch's first batch; the place to freeze or unfreeze parameters."""

    def on_train_end(self) -> None:
        """Called on every rank when all is trained, validated and saved; the model is in eval mode."""

    def derived_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """More metrics of a validation, from those over all ranks by the names they were logged by: a perplexity, F1.
        Called on every rank."""
        return {}

    def accept_batch(self, batch: Any) -> bool:
        """Where forward communicates, a batch can only be left out before it: return False here."""
        return True

    def batch_weight(self, batch: Any) -> int | None:
        """Where forward communicates, the weight of a batch (else ``training_step`` says it, or it is the samples)."""
        return count_samples(batch)

    def build_model(self) -> nn.Module:
        return needed(self, "model", self._given_model, "build_model")

    def build_train_data(self) -> Dataset[Any] | DataLoader[Any]:
        return needed(self, "train_data", self._given_train_data, "build_train_data")

    def build_val_data(self) -> Dataset[Any] | DataLoader[Any] | None:
        return self._given_val_data

    def parameter_groups(self) -> Iterable[Any]:
        """What the only optimizer is made with: parameters, or dicts of ``params`` with an ``lr`` of their own."""
        return self.model.parameters()  # frozen ones too: nothing moves them, and they may be unfrozen later

    def build_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers by name; ``self.model`` is on its device."""
        given = needed(self, "optimizer", self._given_optimizer, "build_optimizers")
        return build_optimizers(given, self.model, self.parameter_groups)

    def build_schedulers(self) -> dict[str, LRScheduler]:
        """Schedulers by the name of their optimizer."""
        return build_schedulers(self._given_scheduler, self.optimizers, self.total_steps)

    def extra_state(self) -> dict[str, Any]:
        """State of your own to save with the run's: plain values and tensors, the same on every rank."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what ``extra_state`` returned when the run was saved."""

    def build_checkpoints(self) -> Checkpoints | None:
        """Where the state of the run goes; None: nowhere."""
        return None if self.run_dir is None else Checkpoints(self.run_dir / "checkpoints", self.comm, self.checkpoint)

    # --- what a user calls ------------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, weight: int | None = None, how: str = "mean") -> None:
        """A metric of this rank's batch: a number, or one per sample. Means are weighted over all ranks, exactly."""
        self._log.add(name, value, weight, how)  # type: ignore[arg-type]

    def agree(self, value: T, how: How) -> T:
        """The same value on every rank (see ``Comm.agree``). Every rank must call it."""
        return self.comm.agree(value, how)

    def rank_zero(self, name: str, limit_s: float = 600.0) -> contextlib.AbstractContextManager[bool]:
        """A section for rank 0 alone, while the others wait (see ``Comm.rank_zero``). Every rank must enter it."""
        return self.comm.rank_zero(name, limit_s)

    def stop(self) -> None:
        """Ask all ranks to stop; any rank may call it, at any time: they stop together after the same step."""
        self._stop_wanted = True

    def save(self) -> None:
        """Ask all ranks for a checkpoint; any rank may call it, at any time: they save together, within two steps."""
        self._run.keeper.ask()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to the end of ``loop``. Every rank calls it.

        Raises:
            RankFailed, PeerFailed: user code failed on this rank, on another; all stopped at the same step.
            RanksDiffer: the ranks issued different collectives, or their replicas drifted apart.
            TrainingStopped: a policy's limit was reached.
            CheckpointError: there is none to go on from, or it does not fit; a save failed, and is to stop the run.
            UsageError, DataError: found before the first step.
            Preempted: the run was told to leave by SIGTERM or SIGUSR1, and is saved.
        """
        with self._ranks():
            self._stopped, self._stop_wanted, self.metrics, self._log = False, False, {}, MetricLog()
            run = assemble(self)
            with run.guarded(lambda: (self.step, self.epoch)):
                while self.epoch < self.loop.epochs and (run.window.inside_epoch or not self._finished()):
                    if not run.window.inside_epoch:  # else the run goes on from a checkpoint inside it
                        ACTIVITY.enter("epoch_start")
                        self.on_epoch_start()
                    epoch_ended = self._train_epoch(run)
                    validation = self._validate_epoch(run)
                    self.metrics |= validation
                    self.epoch += 1
                    run.window.end_epoch()
                    if epoch_ended:
                        last = self.epoch == self.loop.epochs or self._finished()
                        run.keeper.epoch_done(self.step, self.epoch, validation, last=last)
                run.window.finish(self.step)
                run.replicas.run(self.step)
                run.reduction.share_buffers()
                result = Result(self.step, self.epoch, run.window.applied_steps, dict(self.metrics))
                run.reporter.end(self.step, self.epoch, result.metrics)
                run.keeper.finish()
            ACTIVITY.enter("train_end")
            self.model.eval()
            self.on_train_end()
        return result

    def _train_epoch(self, run: Run) -> bool:
        """Train to the end of the epoch, or of the run; whether it was the epoch's."""
        window, reporter = run.window, run.reporter
        window.begin_epoch(self.epoch, self.step)
        self.model.train()
        reporter.restart_clock()
        epoch_ends = window.epoch_over  # a run can go on from its validation
        while not epoch_ends and not self._finished():
            if self.phases:
                self.phase = self.phases[self.step % len(self.phases)]
            run.keeper.window_opens(self.step)
            result = window.run(self.step, self.phase)
            epoch_ends, self._stopped = result.epoch_ends, result.stop
            if result.applied or result.dropped:
                self.step += 1
                run.replicas.window(self.step)
                reporter.window(self.step, self.epoch, result, self._log)
                run.keeper.window_done(self.step, self.epoch, result)
        if dropped_late := window.settle():
            reporter.skipped(self.step - 1, self.epoch, dropped_late)
        if self.step == 0:
            raise DataError("the training data gave no batch on any rank: the dataset is empty")
        return epoch_ends

    def _validate_epoch(self, run: Run) -> dict[str, float]:
        last = self.epoch + 1 == self.loop.epochs or self._finished()
        if run.val_feed is None or ((self.epoch + 1) % self.loop.validate_every_epochs and not last):
            return {}
        run.window.opening.note()
        metrics = validate(self, SharedRequest(self._leave, self.comm))
        if metrics is None:
            run.keeper.leave_validation(self.step, self.epoch)
        run.window.opening.forget()
        return metrics

    def _finished(self) -> bool:
        return self._stopped or (self.loop.max_steps is not None and self.step >= self.loop.max_steps)

    def validate(self) -> dict[str, float]:
        """Metrics over all validation samples of all ranks, each counted once. Every rank calls it."""
        return validate(self, lambda: False) or {}

    # --- the parts --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ranks(self) -> Iterator[None]:
        """Join the ranks if nobody has; leave only then, and only on the clean path."""
        joined_here = Comm.live() is None
        self.comm = Comm.join(self.device)
        if joined_here and self.run_dir is not None and self.comm.rank == 0:
            put_away(self.run_dir)  # the verdict on an earlier job that used the directory
        failed = partial(someone_failed, self.run_dir)
        with watch(self.comm, self.watchdog, self.run_dir), leave_request(failed) as self._leave:
            try:
                yield
            except Preempted as left:  # all ranks are here
                left.told = {rank: name for rank, name in enumerate(self.comm.gather(self._leave.signal_name)) if name}
                if joined_here:
                    self.comm.leave()
                raise
        if joined_here:
            self.comm.leave()

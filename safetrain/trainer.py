"""Trainer: the loop, and the methods a user overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from safetrain.activity import ACTIVITY
from safetrain.audit import ReplicaAudit
from safetrain.batches import count_samples
from safetrain.build import build_optimizers, build_schedulers, check_optimizers
from safetrain.comm import Comm, How
from safetrain.config import Audit, Loader, Loop, Watchdog
from safetrain.contain import Loss
from safetrain.data import Feed, build_loader
from safetrain.errors import DataError, UsageError
from safetrain.evaluation import evaluate
from safetrain.metrics import MetricLog
from safetrain.observer import Observer
from safetrain.parts import Parts, UserCode
from safetrain.policies import Policies
from safetrain.precision import FP32, Clip, Precision
from safetrain.reduction import Reduction
from safetrain.report import Reporter, Result, describe_run
from safetrain.seeding import seed_process
from safetrain.strategy import DDPStrategy
from safetrain.watchdog import watch
from safetrain.window import Window

T = TypeVar("T")


class Trainer:
    """Trains a model on all ranks. Subclass it and write ``training_step``; that is all a run needs.

    Args:
        model: a bare module; safetrain moves it, wraps it, and makes it the same on all ranks.
        train_data, val_data: a dataset, or a DataLoader; each rank gets its share.
        optimizer: called with the parameters, returns an Optimizer (``functools.partial(torch.optim.SGD, lr=0.1)``);
            or a mapping from the name of a submodule to such a callable: several optimizers.
        scheduler: called with an optimizer; or a mapping by optimizer name. Stepped once per real optimizer step.
        loop, loader, precision, strategy, policies, watchdog, audit: how to train; the defaults are safe.
        observers: are told what happens (progress bar, TensorBoard, ...).
    """

    phases: Sequence[str] = ()
    """Names of optimizers that take turns, one window each; ``self.phase`` says whose turn it is. Empty: all at
    once."""

    # filled in by fit()
    comm: Comm
    model: nn.Module
    _reduction: Reduction
    _reporter: Reporter
    _replicas: ReplicaAudit
    _val_feed: Feed | None
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
        strategy: DDPStrategy | None = None,
        policies: Policies | None = None,
        watchdog: Watchdog | None = None,
        audit: Audit | None = None,
        observers: Sequence[Observer] = (),
        seed: int = 0,
        device: str = "auto",
        run_dir: Path | None = None,
        name: str = "",
        config_text: str = "",
    ) -> None:
        if type(self).training_step is Trainer.training_step:
            raise UsageError(
                f"{type(self).__name__} has no training_step(self, batch): write one that returns the loss"
            )
        self._given_model, self._given_train_data, self._given_val_data = model, train_data, val_data
        self._given_optimizer, self._given_scheduler = optimizer, scheduler
        self.loop, self.loader = loop or Loop(), loader or Loader()
        self.precision, self.strategy = precision or FP32(), strategy or DDPStrategy()
        self.policies, self.observers = policies or Policies(), tuple(observers)
        self.watchdog, self.audit = watchdog or Watchdog(), audit or Audit()
        self.seed, self.device, self.run_dir, self.name = seed, device, run_dir, name or type(self).__name__
        self.config_text = config_text
        self.metrics: dict[str, float] = {}
        self._log = MetricLog()
        self._stop_wanted = False

    # --- what a user overrides --------------------------------------------------------------------------------------

    def training_step(self, batch: Any) -> torch.Tensor | Loss | Mapping[str, torch.Tensor] | None:
        """The mean loss of a micro-batch (scalar); or None, ``raise SkipBatch``, a ``Loss``, or ``{optimizer name:
        loss}``."""
        raise NotImplementedError

    def validation_step(self, batch: Any) -> None:
        """Log metrics of one batch; every sample comes exactly once. Under ``no_grad``, the model in eval mode."""
        raise NotImplementedError

    def on_epoch_start(self) -> None:
        """Called on every rank before an epoch's first batch; the place to freeze or unfreeze parameters."""

    def accept_batch(self, batch: Any) -> bool:
        """Where forward communicates, a batch can only be left out before it: return False here."""
        return True

    def batch_weight(self, batch: Any) -> int | None:
        """Where forward communicates, the weight of a batch (else ``training_step`` says it, or it is the samples)."""
        return count_samples(batch)

    def build_model(self) -> nn.Module:
        return self._need("model", self._given_model)

    def build_train_data(self) -> Dataset[Any] | DataLoader[Any]:
        return self._need("train_data", self._given_train_data)

    def build_val_data(self) -> Dataset[Any] | DataLoader[Any] | None:
        return self._given_val_data

    def build_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers by name; ``self.model`` is on its device."""
        return build_optimizers(self._need("optimizer", self._given_optimizer), self.model)

    def build_schedulers(self) -> dict[str, LRScheduler]:
        """Schedulers by the name of their optimizer."""
        return build_schedulers(self._given_scheduler, self.optimizers, self.total_steps)

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

    # --- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to the end of ``loop``. Every rank calls it.

        Raises:
            RankFailed, PeerFailed: user code failed on this rank, on another; all stopped at the same step.
            RanksDiffer: the ranks issued different collectives, or their replicas drifted apart.
            TrainingStopped: a policy's limit was reached.
            UsageError, DataError: found before the first step.
        """
        with self._ranks():
            window = self._build()
            with contextlib.closing(self._reporter):
                while self.epoch < self.loop.epochs and not self._finished():
                    ACTIVITY.enter("epoch_start")
                    self.on_epoch_start()
                    self._train_epoch(window)
                    if self._val_feed is not None and (self.epoch + 1) % self.loop.validate_every_epochs == 0:
                        self.metrics |= self.validate()
                    self.epoch += 1
                window.finish(self.step)
                self._replicas.run(self.step)
                self._reduction.share_buffers()
                result = Result(self.step, self.epoch, window.applied_steps, dict(self.metrics))
                self._reporter.end(self.step, self.epoch, result.metrics)
        return result

    def _train_epoch(self, window: Window) -> None:
        window.begin_epoch(self.epoch, self.step)
        self.model.train()
        self._reporter.restart_clock()
        epoch_ends = False
        while not epoch_ends and not self._finished():
            if self.phases:
                self.phase = self.phases[self.step % len(self.phases)]
            result = window.run(self.step, self.phase)
            epoch_ends, self._stopped = result.epoch_ends, result.stop
            if result.applied or result.dropped:
                self.step += 1
                self._replicas.window(self.step)
                self._reporter.window(self.step, self.epoch, result, self._log)
        if dropped_late := window.settle():
            self._reporter.skipped(self.step - 1, self.epoch, dropped_late)
        if self.step == 0:
            raise DataError("the training data gave no batch on any rank: the dataset is empty")

    def _finished(self) -> bool:
        return self._stopped or (self.loop.max_steps is not None and self.step >= self.loop.max_steps)

    def validate(self) -> dict[str, float]:
        """Metrics over all validation samples of all ranks, each counted once. Every rank calls it."""
        if self._val_feed is None:
            raise UsageError("validate() needs validation data: give val_data, or override build_val_data")
        ACTIVITY.enter("validation_start")
        self._reduction.share_buffers()
        train_log, self._log = self._log, MetricLog()
        try:
            metrics = evaluate(
                self.model, self._val_feed, self.validation_step, self._log, self.precision, self.comm,
                step=self.step, forward_communicates=self.strategy.forward_communicates,
            )  # fmt: skip
        finally:
            self._log = train_log
        self._reporter.validation(self.step, self.epoch, metrics)
        return metrics

    # --- the parts --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ranks(self) -> Iterator[None]:
        """Join the ranks if nobody has; leave only then, and only on the clean path."""
        joined_here = Comm.live() is None
        self.comm = Comm.join(self.device)
        with watch(self.comm, self.watchdog, self.run_dir):
            yield
        if joined_here:
            self.comm.leave()

    def _build(self) -> Window:
        """Everything a run is made of, in the order in which one needs the other."""
        ACTIVITY.restart("build")
        comm, options = self.comm, self.loader
        comm.collectives.compares = self.audit.collectives
        self.step, self.epoch, self._stopped, self._stop_wanted = 0, 0, False, False
        self.metrics, self._log = {}, MetricLog()
        torch.manual_seed(self.seed)  # the same initial weights on every rank
        self.model = self.strategy.prepare(self.build_model(), comm)
        self._reduction = Reduction(self.model, comm, self.strategy)
        self.optimizers = self.build_optimizers()
        check_optimizers(self.optimizers, self.model)
        self.precision.prepare(comm.device)
        place: dict[str, Any] = {"rank": comm.rank, "world_size": comm.world_size, "seed": self.seed}
        feed = Feed(build_loader(self.build_train_data(), options, train=True, **place), comm.device)
        val_data = self.build_val_data()
        self._val_feed = (
            None if val_data is None else Feed(build_loader(val_data, options, train=False, **place), comm.device)
        )
        self._reporter = Reporter(self.observers, comm, self.optimizers, self.loop.log_every_steps)
        run = describe_run(self, feed)
        self._reporter.start(run)
        self.total_steps = comm.agree(run.total_steps or 0, "max") or None
        self.schedulers = self.build_schedulers()
        seed_process(self.seed, comm.rank)
        self._replicas = ReplicaAudit(self.model, self.optimizers, self.precision, comm, self.audit.every_steps)
        self._replicas.run(self.step)
        parts = Parts(
            comm=comm,
            reduction=self._reduction,
            feed=feed,
            user=UserCode(
                training_step=self.training_step,
                accept_batch=self.accept_batch,
                batch_weight=self.batch_weight,
                stop_wanted=lambda: self._stop_wanted,
                log=lambda: self._log,
            ),
            optimizers=self.optimizers,
            precision=self.precision,
            policies=self.policies,
            accumulate=self.loop.accumulate,
            nominal_weight=self.loop.nominal_weight or feed.batch_size or 1,
        )
        return Window(parts, self.schedulers, Clip(self.loop.clip_norm, self.loop.clip_value))

    def _need(self, what: str, given: Any) -> Any:
        if given is None:
            raise UsageError(f"{type(self).__name__} has no {what}: give {what}=..., or override build_{what}")
        return given

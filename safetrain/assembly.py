"""A run, put together: every part once, finished, in the order in which one needs the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from safetrain import checkup
from safetrain.activity import ACTIVITY
from safetrain.audit import ReplicaAudit
from safetrain.build import check_optimizers
from safetrain.data import build_feed
from safetrain.errors import UsageError
from safetrain.feed import Feed
from safetrain.keeping import Keeper
from safetrain.limits import cores
from safetrain.out_of_memory import Census
from safetrain.parts import Parts, UserCode
from safetrain.precision import Clip
from safetrain.reducing import Reduction
from safetrain.report import Reporter, describe_run
from safetrain.resume import find_checkpoint, state_of
from safetrain.seeding import seed_process
from safetrain.timing import Machine
from safetrain.window import Window
from safetrain.words import ranks_in_words

if TYPE_CHECKING:
    from safetrain.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """What ``fit`` works with."""

    window: Window
    reduction: Reduction
    val_feed: Feed | None
    replicas: ReplicaAudit
    reporter: Reporter
    keeper: Keeper
    census: Census

    @contextmanager
    def guarded(self, where: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Round the loop: whatever ends it, what is whole is saved, what held the memory is told, observers hear how it
        ended. ``where``: step and epoch."""
        with self.reporter.running(where), self.census.on_the_way_out(), self.keeper.rescuing(where):
            yield


def assemble(trainer: Trainer) -> Run:
    """Build what ``trainer`` describes, and bring it to where its checkpoint was taken, if it goes on from one.

    Fills in the trainer's public attributes: step and epoch, model, optimizers, schedulers.
    """
    with ExitStack() as if_it_fails:
        run = _assemble(trainer, if_it_fails)
        if_it_fails.pop_all()
    return run


def _assemble(trainer: Trainer, if_it_fails: ExitStack) -> Run:
    ACTIVITY.restart("build")
    comm, options, seed = trainer.comm, trainer.loader, trainer.seed
    comm.collectives.compares = trainer.audit.collectives
    without = [rank for rank, has_one in enumerate(comm.gather(trainer.run_dir is not None)) if not has_one]
    if 0 < len(without) < comm.world_size:
        raise UsageError(f"{ranks_in_words(without)} got no run_dir, and others did: give it on all ranks")
    trainer.strategy.check_ranks(comm.world_size)
    token = checkup.begin(trainer)
    checkpoints = trainer.build_checkpoints()
    resumption = find_checkpoint(checkpoints, trainer.resume, trainer.run_dir, trainer.strategy.read_later)
    trainer.step, trainer.epoch = (resumption.saved.step, resumption.saved.epoch) if resumption else (0, 0)

    torch.manual_seed(seed)  # the same initial weights on every rank
    trainer.model = model = trainer.strategy.prepare(trainer.build_model(), comm)
    checkup.check_model(trainer)
    reduction = trainer.strategy.reduce(model, comm)
    trainer.optimizers = trainer.build_optimizers()
    check_optimizers(trainer.optimizers, model)
    trainer.precision.prepare(comm.device)
    train_data = trainer.build_train_data()
    feed = build_feed(train_data, options, comm, seed=seed, train=True)
    val_data = trainer.build_val_data()
    val_feed = None if val_data is None else build_feed(val_data, options, comm, seed=seed, train=False)

    key = "num_workers of your DataLoader" if isinstance(train_data, DataLoader) else "loader.num_workers"
    machine = Machine(feed.loader_processes, max(1, int(cores() // comm.local_world_size)), comm.world_size, key)
    reporter = Reporter(trainer.observers, comm, trainer.optimizers, trainer.loop.log_every_steps, machine)
    if_it_fails.callback(reporter.close)
    info = describe_run(trainer, feed, start_events=resumption.events if resumption else 0)
    reporter.start(info)
    trainer.total_steps = comm.agree(info.total_steps or 0, "max") or None
    trainer.schedulers = trainer.build_schedulers()
    checkup.check_job(trainer, feed, token)
    seed_process(seed, comm.rank)
    replicas = ReplicaAudit(model, trainer.optimizers, trainer.precision, comm, trainer.audit.every_steps)

    census = Census(model, trainer.optimizers, trainer.run_dir, comm.rank)
    parts = Parts(
        comm=comm,
        reduction=reduction,
        feed=feed,
        user=UserCode.of(trainer),
        optimizers=trainer.optimizers,
        precision=trainer.precision,
        policies=trainer.policies,
        census=census,
        accumulate=trainer.loop.accumulate,
        nominal_weight=trainer.loop.nominal_weight or feed.batch_size or 1,
    )
    window = Window(parts, trainer.schedulers, Clip(trainer.loop.clip_norm, trainer.loop.clip_value))
    state = state_of(trainer, window, feed, val_feed, reporter)
    keeper = Keeper(
        state, window, feed, reporter, checkpoints, trainer.checkpoint,
        max_steps=trainer.loop.max_steps, rank=comm.rank, config_text=trainer.config_text,
    )  # fmt: skip
    # user code may validate from here on
    trainer._run = Run(window, reduction, val_feed, replicas, reporter, keeper, census)
    if resumption is not None:
        resumption.take_over(trainer, state, replicas, reporter, reduction.place)
    replicas.run(trainer.step)
    keeper.try_out()
    window.on_first_batch = partial(checkup.check_begun, trainer, parts)
    return trainer._run

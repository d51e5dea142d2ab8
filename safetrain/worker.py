"""One rank's life: join the others, build, train, leave.

A rank that fails writes its record and leaves by ``os._exit``: no barrier, no ``destroy_process_group``, which can hang
when the peers are somewhere else. What SIGTERM does is said in preemption.py.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import hydra.utils
from hydra.errors import InstantiationException

from safetrain import checkup
from safetrain.activity import ACTIVITY
from safetrain.assembly import assemble
from safetrain.comm import Comm, is_communication_error, launcher_place
from safetrain.config import Config
from safetrain.departure import within
from safetrain.elastic_report import note_for_torchrun
from safetrain.errors import PeerFailed, Preempted
from safetrain.failed import preempted, verdict_on
from safetrain.failure import Failure, await_records
from safetrain.flight_recorder import last_collectives
from safetrain.injection import Fault, inject
from safetrain.peers import gone_ranks
from safetrain.preflight_command import table, write_findings
from safetrain.preflight_config import ONLY_CHECKS
from safetrain.profile_config import Profile
from safetrain.rank_log import RankLog, fresh_line, redirect_output
from safetrain.report import Result
from safetrain.retelling import retold, spread
from safetrain.seeding import seed_generators
from safetrain.trainer import Trainer
from safetrain.tune_config import TUNE, Tune
from safetrain.tuning import report, tune
from safetrain.watchdog import watch

_VERDICT_LIMIT_S = 4.0  # a victim's longest wait for what another machine tells
_RECORD_LIMIT_S = 3.0  # a victim's longest wait for the culprit's record: writing one takes milliseconds

_RECORDER_LIMIT_S = 0.5  # for what is good to have: a dump takes 0.2 ms, but a lock of NCCL's may be held for ever


def main(config_file: str) -> int:
    """The life of a rank that our launcher started; the launcher tells the story of a failure."""
    run(Config.from_yaml(Path(config_file).read_text()), tells=False)
    return 0


def run(config: Config, *, tells: bool) -> None:
    """Train, or only look, or only try; returns when this rank has left the others. On a failure the process ends here.

    ``tells``: nobody else will print the summary of a failure.
    """
    rank, world_size, *_ = launcher_place()
    log = redirect_output(Path(config.run_dir), rank)
    faulthandler.enable()
    try:
        comm = Comm.join(config.device, config.launch.timeout_s, config.launch.join_timeout_s)
        ACTIVITY.restart("build")
        with watch(comm, config.watchdog, Path(config.run_dir), tells=tells):
            if scope := os.environ.get(ONLY_CHECKS):  # python -m safetrain.preflight
                result = _look(replace(config, observers={}, profile=Profile()), comm, whole_job=scope == "job")
            elif options := os.environ.get(TUNE):  # python -m safetrain.tune
                result = _try_out(replace(config, observers={}, profile=Profile()), comm, Tune.from_text(options))
            else:
                result = _train(config, comm)
        if comm.rank == 0:
            _write_result(config, result)
        comm.leave()
    except Preempted as left:
        _leave_saved(left, config, log, tells)
    except BaseException as error:  # noqa: BLE001  whatever it is, this rank must say so and go
        _fail(error, Path(config.run_dir), rank, world_size, log, tells)
    log.flush()


def _train(config: Config, comm: Comm) -> Result:
    checkup.check_machine(checkup.here_of_config(config, comm))
    trainer = build(config)
    if (fault := Fault.from_environment()) is not None:  # python -m safetrain.chaos
        inject(fault, trainer, comm.rank, comm.world_size)
    return trainer.fit()


def _look(config: Config, comm: Comm, *, whole_job: bool) -> Result:
    """All that comes before the first step, as far as nothing is refused; rank 0 prints what was found."""
    try:
        with checkup.collecting():
            checkup.check_machine(checkup.here_of_config(config, comm))
            if whole_job and all(one.verdict != "refuse" for one in checkup.FOUND):
                trainer = build(config)
                with trainer._ranks():
                    run = assemble(trainer)
                    run.window.begin_epoch(trainer.epoch, trainer.step)
    finally:  # what was found before a rank failed is told, too
        if comm.rank == 0 and checkup.FOUND:
            write_findings(Path(config.run_dir), checkup.FOUND)
            print(table(checkup.FOUND))
    return Result(step=0, epoch=0, applied_steps=0)


def _try_out(config: Config, comm: Comm, options: Tune) -> Result:
    """Ways to reduce gradients; rank 0 prints the table."""
    checkup.check_machine(checkup.here_of_config(config, comm))
    found = tune(build(config), options)
    if comm.rank == 0:
        print(report(found))
    return Result(step=0, epoch=0, applied_steps=0)


def blueprint(config: Config) -> dict[str, Any]:
    """The one node that ``build`` instantiates: the trainer, with everything it is made of."""
    return {
        **config.trainer,
        "model": config.model,
        "train_data": config.data.get("train"),
        "val_data": config.data.get("val"),
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "loop": {"_target_": "safetrain.config.Loop", **asdict(config.loop)},
        "loader": {"_target_": "safetrain.config.Loader", **asdict(config.loader)},
        "precision": config.precision,
        "strategy": config.strategy,
        "audit": {"_target_": "safetrain.config.Audit", **asdict(config.audit)},
        "preflight": {"_target_": "safetrain.config.Preflight", **asdict(config.preflight)},
        "policies": {"_target_": "safetrain.policies.Policies", **asdict(config.policy)},
        "watchdog": {"_target_": "safetrain.config.Watchdog", **asdict(config.watchdog)},
        # what a sweeper is told is what tells the best checkpoint, unless the config says otherwise
        "checkpoint": {
            "_target_": "safetrain.config.Checkpoint",
            **asdict(config.checkpoint),
            "metric": config.checkpoint.metric or config.metric,
        },
        "resume": config.resume,
        "observers": [*filter(None, config.observers.values()), *config.profile.observers()],
        "seed": config.seed,
        "device": config.device,
        "run_dir": {"_target_": "pathlib.Path", "_args_": [config.run_dir]},
        "name": config.name,
    }


def build(config: Config) -> Trainer:
    """The trainer that ``config`` describes; the same on every rank.

    Raises:
        Exception: whatever a target raised.
    """
    seed_generators(config.seed)
    trainer: Trainer = instantiate(blueprint(config))
    trainer.config_text = config.to_yaml()  # not an argument: Hydra would resolve what looks like ${...} in it
    return trainer


def instantiate(node: Mapping[str, Any]) -> Any:
    """Build what ``node`` describes; an exception of a target is raised as it was, not wrapped in Hydra's."""
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:
            raise
        if where := re.search(r"full_key: (\S+)", str(error)):
            cause.add_note(f"(while building {where[1]})")
        raise cause from None


def _write_result(config: Config, result: Result) -> None:
    metric = None if config.metric is None else result.metrics.get(config.metric)
    facts = {"metric": metric, "metrics": dict(result.metrics), "step": result.step, "epoch": result.epoch}
    path = Path(config.run_dir, "result.json")
    path.write_text(json.dumps({**facts, "skipped_steps": result.skipped_steps}, indent=1))


def _leave_saved(left: Preempted, config: Config, log: RankLog, tells: bool) -> NoReturn:
    """The run was told to leave, and is saved: all ranks are here. Rank 0 says so, for all, before anybody goes."""
    comm, run_dir = Comm.join(), Path(config.run_dir)
    text: str | None = ""
    if comm.rank == 0:
        text = preempted(left, run_dir).publish(run_dir)
        spread(text or "")
    comm.barrier("preempted")
    if tells and (text or (text := retold(run_dir, _VERDICT_LIMIT_S))):
        log.terminal.write(fresh_line(log.terminal) + text)
        log.terminal.flush()
    comm.leave()
    log.flush()
    raise left


def _fail(error: BaseException, run_dir: Path, rank: int, world_size: int, log: RankLog, tells: bool) -> NoReturn:
    try:
        _tell(error, run_dir, rank, world_size, log, tells)
    except OSError as obstacle:  # no disk space, no more files: what can be said without them
        os.write(2, f"rank {rank} could not write its record ({obstacle}): {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def _tell(error: BaseException, run_dir: Path, rank: int, world_size: int, log: RankLog, tells: bool) -> None:
    cause = error.__cause__ or error
    failure = Failure.of(error, rank, victim=is_communication_error(error) or is_communication_error(cause))
    if tells:
        note_for_torchrun(failure)
    failure.write(run_dir)
    within(_RECORDER_LIMIT_S, lambda: _with_collectives(failure).write(run_dir))
    if isinstance(error, PeerFailed):
        await_records(run_dir, error.ranks, _RECORD_LIMIT_S)
    log.flush()
    with log.path.open("a") as file:
        file.write(f"{failure.traceback}\n")
    if tells:
        text = _story(failure, run_dir, world_size)
        log.terminal.write(fresh_line(log.terminal) + text)
        log.terminal.flush()


def _with_collectives(failure: Failure) -> Failure:
    return replace(failure, collectives=[asdict(one) for one in last_collectives()])


def _story(failure: Failure, run_dir: Path, world_size: int) -> str:
    """What a rank prints that no launcher of ours speaks for: the whole story once, one line on the other ranks."""
    ended = [] if not failure.victim or failure.culprits else gone_ranks()
    if (not failure.victim or ended) and (text := verdict_on(run_dir, world_size, ended).publish(run_dir)):
        spread(text)
        return text
    if failure.victim and (text := retold(run_dir, _VERDICT_LIMIT_S)):
        return text
    return f"[rank {failure.rank}] ended: {failure.message.partition(chr(10))[0]}\n"

"""The checks before the first step: which there are, when each looks, and what becomes of what is found.

    machine   when the ranks have met, and before anything of the user's is built
    links     then, all ranks together
    model     when it is built, and before DDP sees it
    job       when everything is built
    begun     when the first batch is here

A stage costs one gather, in which all checks' facts go to all ranks; every rank judges the same. What is refused is
raised on all of them as one error; of what is only strange rank 0 warns.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.activity import ACTIVITY
from safetrain.alike import CODE, CONFIG, ENVIRONMENT, PARAMETERS, VERSIONS, settings_of
from safetrain.capacity import Cores, Gpus, OpenFiles
from safetrain.comm import Comm
from safetrain.config import Config
from safetrain.differences import flat
from safetrain.errors import PreflightError
from safetrain.finding import Begun, Check, Finding, Here, Job, Linked, Modelled, Said
from safetrain.first_step import FirstBatch, FirstStep, RandomNumbers, try_step
from safetrain.links import AllReduce, Clock, Links, measure
from safetrain.needs import Disk, Fork, Memory, RunDir, SharedMemory, leave_token, remove_token
from safetrain.places import NameLookup, Ranks
from safetrain.sample import NO_SAMPLE, Batches, TrainingData, take_sample
from safetrain.seeding import generator_states
from safetrain.settings import Settings

if TYPE_CHECKING:
    from safetrain.feed import Feed
    from safetrain.parts import Parts
    from safetrain.trainer import Trainer

logger = logging.getLogger("safetrain")

OF_MACHINE: Sequence[Check[Here]] = (
    VERSIONS, ENVIRONMENT, CONFIG, Ranks(), Settings(), Cores(), OpenFiles(), Gpus(), NameLookup(),
)  # fmt: skip
OF_LINKS: Sequence[Check[Linked]] = (AllReduce(), Links(), Clock())
OF_MODEL: Sequence[Check[Modelled]] = (PARAMETERS,)
OF_JOB: Sequence[Check[Job]] = (
    CODE, TrainingData(), Batches(), RunDir(), Disk(), Memory(), SharedMemory(), Fork(),
)  # fmt: skip
OF_FIRST_BATCH: Sequence[Check[Begun]] = (FirstBatch(), RandomNumbers(), FirstStep())

FOUND: list[Finding] = []
"""What was found while ``collecting``."""
_collects = False


@contextmanager
def collecting() -> Iterator[None]:
    """Until the block ends, what is found goes into ``FOUND``, and is neither raised nor logged."""
    global _collects
    _collects = True
    FOUND.clear()
    try:
        yield
    finally:
        _collects = False


def here_of_config(config: Config, comm: Comm) -> Here:
    """A rank that has a config, and nothing else yet."""
    return Here(comm, config.preflight, flat(config.to_yaml()), config.loader, Path(config.run_dir))


def here_of_trainer(trainer: Trainer) -> Here:
    """A rank that has its trainer; a config it may have was compared before that was built."""
    settings = {} if trainer.comm.examined else settings_of(trainer)
    return Here(trainer.comm, trainer.preflight, settings, trainer.loader, trainer.run_dir)


def check_machine(here: Here) -> None:
    """The stages ``machine`` and ``links``, once for all runs of these ranks.

    Raises:
        PreflightError: the job is refused; on all ranks.
    """
    comm, options = here.comm, here.options
    if comm.examined:
        return
    comm.examined = True
    _check_options(comm, options)
    if not options.enabled:
        return
    with ACTIVITY.within("preflight"):
        _run(OF_MACHINE, here)
        if any(options.choice(check.name) != "off" for check in OF_LINKS):
            _run(OF_LINKS, Linked(**_fields(here), measured=measure(comm, options)))


def begin(trainer: Trainer) -> str:
    """Before the parts of ``trainer`` are built: the machine, if nobody has looked at it yet.

    Returns a word that rank 0 has left in the run directory, for ``check_job``.
    """
    here = here_of_trainer(trainer)
    check_machine(here)
    token = ""
    if here.options.enabled and here.run_dir is not None and here.comm.rank == 0:
        leave_token(here.run_dir, token := uuid.uuid4().hex)
    return token


def check_model(trainer: Trainer) -> None:
    """The stage ``model``: from now on DDP sends what it takes for the same on all ranks.

    Raises:
        PreflightError: it is not; on all ranks.
    """
    if trainer.preflight.enabled:
        _run(OF_MODEL, Modelled(**_fields(here_of_trainer(trainer)), model=trainer.model))


def check_job(trainer: Trainer, feed: Feed, token: str) -> None:
    """The stage ``job``: all is built.

    Raises:
        PreflightError: the job is refused; on all ranks.
    """
    here, options = here_of_trainer(trainer), trainer.preflight
    if not options.enabled:
        return
    with ACTIVITY.within("preflight"):
        wanted = any(options.choice(name) != "off" for name in (TrainingData.name, SharedMemory.name))
        sample = take_sample(feed, options.dataset_s) if wanted else NO_SAMPLE
        try:
            _run(OF_JOB, Job(**_fields(here), trainer=trainer, feed=feed, token=token, sample=sample))
        finally:
            if token and here.run_dir is not None:
                remove_token(here.run_dir)


def check_begun(trainer: Trainer, parts: Parts, seconds: float) -> None:
    """The stage ``begun``: the first batch is here, after ``seconds``.

    Raises:
        PreflightError: the job is refused; on all ranks.
    """
    options, here = trainer.preflight, here_of_trainer(trainer)
    if not options.enabled:
        return
    with ACTIVITY.within("preflight"):
        alone = not trainer.strategy.forward_communicates  # else a rank can't run a step by itself
        tried = options.deep and alone and options.choice(FirstStep.name) != "off"
        step = try_step(trainer, parts) if tried else None
        begun = Begun(
            **_fields(here),
            feed=parts.feed,
            seconds=seconds,
            only_checks=_collects,
            generators=generator_states(),
            step=step,
        )
        _run(OF_FIRST_BATCH, begun)


def _run(checks: Sequence[Check[Any]], here: Here) -> None:
    active = [check for check in checks if here.options.choice(check.name) != "off"]
    facts = {check.name: check.look(here) for check in active}
    all_said = here.comm.gather((socket.gethostname(), _identity(), facts))
    hosts = hosts_of([(host, identity) for host, identity, _ in all_said])
    findings = []
    for check in active:
        said = [Said(rank, hosts[rank], facts[check.name]) for rank, (_, _, facts) in enumerate(all_said)]
        findings += [under_policy(one, here.options.choice(check.name)) for one in check.judge(said)]
    _act(findings, here.comm.rank)


def _act(findings: Sequence[Finding], rank: int) -> None:
    if _collects:
        FOUND.extend(findings)
        return
    refused, strange = ([one for one in findings if one.verdict == verdict] for verdict in ("refuse", "warn"))
    if strange and rank == 0:
        logger.warning("preflight: %s", "\n  ".join(map(str, strange)))
    if refused:
        names = dict.fromkeys(one.check for one in refused)
        way_out = " ".join(f"preflight.checks.{name}=warn" for name in names)
        raise PreflightError("\n".join([*map(str, refused), f"To train in spite of it: {way_out}"]))


def under_policy(finding: Finding, choice: str | None) -> Finding:
    """What the config says about a check holds for all that it finds wrong."""
    if finding.verdict == "ok" or choice is None:
        return finding
    return replace(finding, verdict="refuse" if choice == "refuse" else "warn")


def hosts_of(places: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each rank's machine: its host name, with a number where machines have the same name. ``places``: host
    name and identity."""
    machines: dict[str, list[str]] = {}
    for host, identity in places:
        if identity not in machines.setdefault(host, []):
            machines[host].append(identity)
    return [
        host if len(machines[host]) == 1 else f"{host}#{machines[host].index(identity)}" for host, identity in places
    ]


def _identity() -> str:
    """Equal for ranks that are numbered together: of one launcher, in one container."""
    spaces = [Path("/proc/self/ns", kind) for kind in ("net", "pid")]
    return " ".join([os.environ.get("GROUP_RANK", ""), *(str(space.readlink()) for space in spaces if space.exists())])


def _check_options(comm: Comm, options: Any) -> None:
    """Whether the ranks look at all has to be the same on all of them, or they would wait for each other."""
    if len(set(map(repr, comm.gather(options)))) > 1:
        raise PreflightError(
            "config: the preflight itself is not the same on all ranks (preflight.enabled, .checks, ...): give every "
            "rank the same Preflight."
        )


def _fields(here: Here) -> Mapping[str, Any]:
    return {"comm": here.comm, "options": here.options, "settings": here.settings, "loader": here.loader,
            "run_dir": here.run_dir}  # fmt: skip

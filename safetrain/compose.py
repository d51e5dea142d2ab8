"""Hydra: from the command line to one resolved, checked config for each job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from safetrain.catalog import recipes
from safetrain.checks import join_key
from safetrain.cluster import filled
from safetrain.config import Config
from safetrain.environ import COMMAND_LINE, RECIPE, SHELL, Variable, environment, settle, shell
from safetrain.errors import ConfigError, SafetrainError, UsageError
from safetrain.explain import COMPOSITION_ERRORS, check_package, explain
from safetrain.launch_config import ONE_MACHINE, Launch
from safetrain.preflight_config import ONLY_CHECKS
from safetrain.run_dir import choose_run_dir
from safetrain.scheduler import placement
from safetrain.targets import check_targets, import_target


def for_each_job(job: Callable[[DictConfig], float | None]) -> None:
    """Call ``job`` with the composed config of each job that ``sys.argv`` asks for; return values go to the sweeper.

    In a sweep a job that raises is a failed one: the sweeper goes on as it sees fit, the error is raised at its end.
    ``--help``, ``--cfg job`` and the like print what they should, and end in SystemExit or without a job.

    Raises:
        ConfigError: nothing could be composed.
        UsageError: a flag of Hydra's stands alone that can't.
        SafetrainError: the first that a job raised.
    """
    prints = any(argument.startswith(("--cfg", "-c", "--help", "-h")) for argument in sys.argv)
    if "--resolve" in sys.argv and not prints:
        raise UsageError("--resolve says how to print a config, and goes with --cfg job or --help")
    task = _Task(job)
    _teach_omegaconf()
    sys.argv[0] = "python -m safetrain"
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):  # Hydra then raises its errors; else it prints them and exits
            hydra.main(config_path="pkg://safetrain.configs", config_name="train", version_base="1.3")(task)()
    except COMPOSITION_ERRORS as error:
        raise explain(error) from error
    if task.errors:
        raise task.errors[0]


def _teach_omegaconf() -> None:
    OmegaConf.register_new_resolver("run_dir", choose_run_dir, use_cache=True, replace=True)


class _Task:
    """What Hydra runs; no function inside a function, since engines send it to other processes."""

    def __init__(self, job: Callable[[DictConfig], float | None]) -> None:
        self.errors: list[SafetrainError] = []
        self._job = job

    def __setstate__(self, state: dict[str, Any]) -> None:
        _teach_omegaconf()  # unpickled in an engine's process, before that composes the job's config
        self.__dict__ = state

    def __call__(self, config: DictConfig) -> float | None:
        try:
            return self._job(config)
        except SafetrainError as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            self.errors.append(error)  # raised by for_each_job: Hydra would print a line of its own
            return None


def job_overrides() -> str:
    """What the command line, or the sweeper, said about the job at hand."""
    return " ".join(_overrides())


def _overrides() -> list[str]:
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return overrides


def launch_of(composed: DictConfig) -> Launch:
    """How the ranks of a job are to be started; known before anything that takes seconds is imported.

    Raises:
        ConfigError: a key or a value of ``launch`` is wrong.
        UsageError: a scheduler has started this command in a way in which it can't work.
    """
    with no_run_dir_if_refused():
        plain: Any = OmegaConf.to_container(composed.launch, resolve=True, throw_on_missing=True)
        return Launch.parse(filled(plain, os.environ))


def keys_of(composed: DictConfig) -> dict[str, str]:
    """What has to be the same on all machines of a job: each key and what was said of it. Nothing is resolved: what
    draws a number or reads a clock is the same text."""
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    own = {"run_dir", "launch.nproc_per_node", "launch.node_rank", "launch.rdzv_endpoint"}
    keys = {"recipe": str(HydraConfig.get().runtime.choices["recipe"])}
    keys |= {key: text for key, text in _flat(plain, "") if key not in own}
    return keys


def _flat(node: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _flat(value, join_key(where, str(name)))
    else:
        yield where, json.dumps(node, default=str)


def resolve(composed: DictConfig, *, as_rank: bool = False) -> Config:
    """The config with every interpolation resolved, once, and everything checked that needs no process. ``as_rank``:
    the ranks are there, and ``launch`` has not to say where.

    Its run directory is removed again where it is refused.

    Raises:
        ConfigError: a key, a value or a target is wrong.
    """
    with no_run_dir_if_refused():
        if HydraConfig.get().runtime.choices["recipe"] is None and os.environ.get(ONLY_CHECKS) != "machine":
            names = ", ".join(recipe.name for recipe in recipes()) or "none yet: write ./recipe/NAME.yaml"
            raise ConfigError(f"recipe is missing: say recipe=NAME. Allowed: {names}.")
        recipes()  # two of one name are refused
        check_package(composed)
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        plain["launch"] = {**plain["launch"], **ONE_MACHINE} if as_rank else filled(plain["launch"], os.environ)
        config = Config.parse(plain)
        settled = {v.name: v.value for v in variables(composed) if v.source != SHELL or v.name in config.env}
        config = replace(config, env=settled)
        if config.resume not in ("auto", "none") and not Path(config.resume).exists():
            raise ConfigError(
                f"resume={config.resume}: there is no such run or checkpoint. Allowed: auto, none, a path."
            )
        if config.resume == "auto" and HydraConfig.get().mode is RunMode.MULTIRUN:
            raise ConfigError(
                "resume=auto in a sweep: which of its jobs would go on with which run is not known. Give each job a "
                "path (resume=outputs/multirun/<sweep>/0,...), or run it alone."
            )
        place = placement(os.environ) if as_rank else None
        _check_what_it_builds(config, 0 if place is None else place.world_size)
        return config


def variables(composed: DictConfig) -> list[Variable]:
    """The environment variables of the job's ranks, and who set each."""
    env: Any = OmegaConf.to_container(composed.get("env") or OmegaConf.create(), resolve=True)
    choice = HydraConfig.get().runtime.choices["env"]
    sources = dict.fromkeys(env, RECIPE) | dict.fromkeys(_names_in_template(f"{choice}.yaml"), f"env={choice}")
    return settle(env, sources | dict.fromkeys(variables_said(_overrides()), COMMAND_LINE), shell())


def variables_said(arguments: Sequence[str]) -> set[str]:
    """The environment variables that a command line, or a sweeper, sets itself: ``env.NAME=...``."""
    names: set[str] = set()
    overrides = [a for a in arguments if a.startswith("~") or ("=" in a and not a.startswith("-"))]  # no flags
    for override in OverridesParser.create().parse_overrides(overrides):
        group, _, name = override.key_or_group.partition(".")
        if group == "env" and name:
            names.add(name)
        elif group == "env" and isinstance(value := override.value(), dict):
            names |= {str(key) for key in value}
    return names


def _names_in_template(file: str) -> list[str]:
    """What a choice of ``env`` sets, shipped or of the current folder."""
    for path in (Path(str(files("safetrain.configs"))) / "env" / file, Path("env", file)):
        if path.exists():
            template: Any = OmegaConf.to_container(OmegaConf.load(path))
            return list(template.get("env", template))
    return []


def _check_what_it_builds(config: Config, started: int) -> None:
    """``started``: ranks that are there already; 0: ``launch`` says how many there will be."""
    check_targets({**config.to_plain(), "trainer": None})
    from safetrain.launch import number_of_ranks  # these import torch
    from safetrain.trainer import Trainer
    from safetrain.worker import blueprint, instantiate

    ranks = started or number_of_ranks(config) * config.launch.nodes
    trainer = import_target(target := config.trainer["_target_"], "trainer")
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise ConfigError(f"trainer._target_={target}: must be a subclass of safetrain.Trainer")
    own_validation = trainer.build_val_data is not Trainer.build_val_data
    if (config.metric or "").startswith("val/") and config.data.get("val") is None and not own_validation:
        raise ConfigError(f"metric={config.metric}: there is no validation that could give it, since data.val is null.")
    check_targets(blueprint(config), "trainer")
    parts = {"precision": config.precision, "strategy": config.strategy}
    parts |= {f"policy.{name}": node for name, node in config.to_plain()["policy"].items()}
    built = {}
    for key, node in parts.items():  # cheap to build, so their values are checked here
        try:
            built[key] = instantiate(node)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {error}") from error
    built["strategy"].check_ranks(ranks)


@contextmanager
def no_run_dir_if_refused() -> Iterator[None]:
    """Around what may refuse a job before it has begun.

    Raises:
        SafetrainError: what the block raised; errors of Hydra and OmegaConf in words of our own.
    """
    try:
        yield
    except COMPOSITION_ERRORS as error:
        _discard_run_dir()
        raise explain(error) from error
    except SafetrainError:
        _discard_run_dir()
        raise


def _discard_run_dir() -> None:
    """Remove what Hydra wrote for a job that does not start, and the folders that this leaves empty."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if (run_dir / "checkpoints").exists():  # it was there before, and is worth something
        return
    shutil.rmtree(run_dir / ".hydra", ignore_errors=True)
    here = Path.cwd()
    with suppress(OSError):  # something else is in it
        for folder in (run_dir, *(parent for parent in run_dir.parents if parent != here and here in parent.parents)):
            folder.rmdir()

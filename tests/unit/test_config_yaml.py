"""The YAML side: defaults are those of the dataclasses, and every choice of every group composes and builds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from safetrain.catalog import groups, recipes
from safetrain.config import Config, Launch, Loader, Loop, Preflight
from safetrain.errors import ConfigError
from safetrain.preflight_config import CHECK_NAMES
from safetrain.targets import check_targets

CONFIGS = Path(str(files("safetrain.configs")))
CHOICES = [(group, path.stem) for group in groups() for path in sorted((CONFIGS / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    OmegaConf.register_new_resolver("run_dir", lambda parent: f"{parent}/run", replace=True)
    with initialize_config_module("safetrain.configs", version_base="1.3"):
        yield


def composed(*overrides: str) -> dict[str, Any]:
    config = compose("train", overrides=["+hydra.runtime.output_dir=/run", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def test_the_yaml_states_the_defaults_of_the_dataclasses() -> None:
    config = composed("trainer={_target_: x.y}")
    assert config["loop"] == asdict(Loop())
    assert config["loader"] == asdict(Loader())
    assert config["launch"] == asdict(Launch())
    choices = config["preflight"].pop("checks")
    assert {**config["preflight"], "checks": {}} == asdict(Preflight())
    assert choices == dict.fromkeys(CHECK_NAMES), "each check is explained there, in the order of the one list"


def test_there_are_groups_and_a_recipe() -> None:
    assert {"policy/skip", "precision", "recipe", "strategy", "preset"} <= set(groups())
    assert "resnet_ddp" in [recipe.name for recipe in recipes()]
    assert all(recipe.about for recipe in recipes())


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_every_group_composes_and_its_targets_take_what_it_gives(group: str, choice: str) -> None:
    base = ["recipe=resnet_ddp"] if group != "recipe" else []
    config = Config.parse(composed(*base, f"{group}={choice}", "++data.root=/none"))
    check_targets({**config.to_plain(), "trainer": None})


def test_the_debug_preset_stands_over_the_recipe() -> None:
    config = Config.parse(composed("recipe=resnet_ddp", "preset=debug"))
    assert (config.launch.nproc_per_node, config.loader.num_workers) == (1, 0)


def test_a_users_recipe_with_a_shipped_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# My own: 99 %.\nseed: 1\n")
    assert [(r.name, r.about) for r in recipes() if not r.shipped] == [("mine", "My own: 99 %.")]
    (tmp_path / "recipe" / "resnet_ddp.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"recipe/resnet_ddp\.yaml: safetrain ships a recipe of that name"):
        recipes()


def test_the_debug_environment_stands_over_the_recipe_and_goes_with_the_debug_preset() -> None:
    asked = ["recipe=resnet_ddp", "loader.prefetch_factor=null", "env=debug"]
    config = Config.parse(composed(*asked))
    assert config.loader.num_workers == 0
    assert config.env["NCCL_DEBUG_FILE"] == "/run/logs/nccl_%h_%p.log"
    both = Config.parse(composed(*asked, "preset=debug"))
    assert both.env == config.env
    assert (both.launch.nproc_per_node, both.loop.log_every_steps) == (1, 1)


def test_the_environment_templates_only_hold_variables_that_are_documented() -> None:
    """https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html and torch's debugging variables."""
    documented = {
        "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_RETRY_CNT",
        "NCCL_IB_TIMEOUT", "NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
        "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES",
    }  # fmt: skip
    templates = {path.stem for path in (CONFIGS / "env").glob("*.yaml")}
    assert templates == {"default", "debug", "ethernet", "no_p2p", "infiniband", "consumer_gpu"}
    held = [name for choice in templates for name in composed("trainer={_target_: x.y}", f"env={choice}")["env"]]
    assert set(held) == documented

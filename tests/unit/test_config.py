"""The schema: what a value must be, and what is said when it is not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetrain.config import Checkpoint, Config, Launch, Loader, Loop
from safetrain.errors import ConfigError

NODE = {"_target_": "torch.nn.Identity"}


def plain(**changes: Any) -> dict[str, Any]:
    policy = dict.fromkeys(("skip", "uneven", "non_finite", "out_of_memory", "unused"), NODE)
    least = {"name": "n", "run_dir": "/r", "trainer": NODE, "precision": NODE, "strategy": NODE, "policy": policy}
    return least | changes


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (Loop, {"epochs": -1}, "loop.epochs=-1: must be at least 1"),
        (Loop, {"epochs": 0, "max_steps": 3}, "loop.epochs=0: must be at least 1"),
        (Loop, {"epochs": "3"}, "loop.epochs='3': must be a whole number, not text"),
        (Loop, {"epochs": True}, "loop.epochs=True: must be a whole number, not true or false"),
        (Loop, {"accumulate": 1.5}, "loop.accumulate=1.5: must be a whole number, not a fraction"),
        (Loop, {"accumulate": 0}, "loop.accumulate=0: must be at least 1"),
        (Loop, {"max_steps": []}, "loop.max_steps=[]: must be a whole number or null, not a list"),
        (Loop, {"clip_norm": 0}, "loop.clip_norm=0: must be more than 0"),
        (Loop, {"clip_norm": 1.0, "clip_value": 1.0}, "loop.clip_norm and loop.clip_value are both set"),
        (Loader, {"batch_size": 0}, "loader.batch_size=0: must be at least 1"),
        (Loader, {"shuffle": "yes"}, "loader.shuffle='yes': must be true or false, not text"),
        (Loader, {"prefetch_factor": 2}, "loader.prefetch_factor=2 needs loader processes"),
        (Launch, {"nproc_per_node": "all"}, "launch.nproc_per_node='all': must be one of auto or a whole number"),
        (Launch, {"nproc_per_node": 0}, "launch.nproc_per_node=0: must be at least 1"),
        (Launch, {"timeout_s": 0}, "launch.timeout_s=0: must be more than 0"),
        (Checkpoint, {"every_steps": 0}, "checkpoint.every_steps=0: must be at least 1"),
        (Checkpoint, {"every_minutes": 0}, "checkpoint.every_minutes=0: must be more than 0"),
        (Checkpoint, {"keep_last": 0}, "checkpoint.keep_last=0: must be at least 1"),
        (Checkpoint, {"mode": "best"}, "checkpoint.mode='best': must be one of max, min"),
        (Checkpoint, {"mode": "mni"}, "checkpoint.mode='mni': must be one of max, min. Did you mean min?"),
        (Checkpoint, {"mode": 3}, "checkpoint.mode=3: must be one of max, min, not a whole number"),
        (Checkpoint, {"on_error": "raise"}, "checkpoint.on_error='raise': must be one of warn, stop"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(
    section: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        section(**values)
    assert message in str(refused.value)
    assert ("not text" in str(refused.value)) == ("not text" in message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": {"epchs": 3}}, "loop.epchs: no such key. Did you mean epochs? Allowed: accumulate, clip_norm,"),
        ({"optimiser": NODE}, "optimiser: no such key. Did you mean optimizer?"),
        ({"loop": 3}, "loop=3: must be a mapping, not a whole number"),
        ({"device": "gpu"}, "device='gpu': must be one of auto, cpu, cuda. Did you mean cuda?"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"model": {"width": 3}}, "model={'width': 3}: must be a mapping with a _target_"),
        ({"data": {"train": "cifar"}}, "data.train='cifar': must be a mapping with a _target_"),
        ({"optimizer": {"generator": NODE, "critic": {"lr": 1}}}, "optimizer.critic={'lr': 1}: must be a mapping with"),
        ({"observers": {"bar": "yes"}}, "observers.bar='yes': must be a mapping with a _target_"),
        ({"policy": {"skip": NODE}}, "policy.uneven is missing"),
        (
            {"policy": plain()["policy"] | {"skip": "partial"}},
            "policy.skip='partial': must be a mapping with a _target_ that names what to build. "
            "Did you mean policy/skip=partial?",
        ),
        (
            {"observers": {"bar": "yes"}},
            "_target_ that names what to build, such as\n  observers.bar: {_target_: package",
        ),
        ({"launch": {"timeout_s": 30}}, "launch.timeout_s=30 must be more than watchdog.stall_s=60: a collective"),
        ({"vars": {"flags": [{True: 1}]}}, "vars.flags[0].True: a key must be text, not true or false. YAML reads on,"),
    ],
)
def test_a_wrong_key_or_node_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.parse(plain(**changes))
    assert message in str(refused.value)


def test_whole_numbers_may_stand_for_fractions_and_null_for_what_is_optional() -> None:
    assert Loop(clip_norm=1).clip_norm == 1
    assert Loader(timeout_s=5).timeout_s == 5
    assert Config.parse(plain(observers={"bar": None}, optimizer={"a": NODE, "b": NODE})).observers == {"bar": None}


def test_a_resolved_config_holds_no_recipe_of_its_own_and_free_values_are_free() -> None:
    config = Config.parse(plain(vars={"width": 3}, data={"train": NODE, "root": "/images"}))
    assert (config.vars, config.data["root"]) == ({"width": 3}, "/images")
    assert (config.loop, config.loader) == (Loop(), Loader())


@given(
    numbers=st.lists(st.floats(allow_nan=False) | st.integers(-(2**70), 2**70), max_size=4),
    text=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20),
    flag=st.none() | st.booleans(),
)
def test_what_a_rank_reads_is_what_was_resolved(numbers: list[float], text: str, flag: bool | None) -> None:
    values = {
        "numbers": numbers,
        "text": text,
        "flag": flag,
        "looks_like": ["1e-4", "null", "yes", "012"],
        "tiny": 1e-5,
    }
    config = Config.parse(plain(vars=values))
    assert Config.from_yaml(config.to_yaml()) == config


def test_a_literal_interpolation_survives_the_way_to_the_ranks() -> None:
    config = Config.parse(plain(vars={"shell": "${HOME}"}))
    assert Config.from_yaml(config.to_yaml()).vars == {"shell": "${HOME}"}


def test_plain_data_parses_back() -> None:
    config = Config.parse(plain(loop={"epochs": 3}))
    assert Config.parse(config.to_plain()) == config
    assert asdict(config)["loop"]["epochs"] == 3

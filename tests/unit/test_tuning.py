"""What safetrain.tune tries for a model, and what it says of what came out."""

from __future__ import annotations

import pytest

from safetrain.buckets import bucket_bytes
from safetrain.errors import ConfigError
from safetrain.strategy import DDPStrategy
from safetrain.tune_config import Tune
from safetrain.tuning import Tried, Tuned, best_of_each_key, table, together, ways

MIB = 1 << 20


@pytest.mark.parametrize(
    ("parameters_mib", "cap_mb", "expected_mib"),
    [
        ([1, 1, 1], 2, [2, 1]),  # the one that brings a bucket to its limit is in it
        ([4, 4, 4], None, [4, 8]),  # torch's first bucket is closed at 1
        ([30, 30, 1], None, [30, 30, 1]),
        ([1, 1], 100, [2]),
        ([], None, [0]),
    ],
)
def test_buckets_are_those_of_ddp(parameters_mib: list[int], cap_mb: float | None, expected_mib: list[int]) -> None:
    sizes = bucket_bytes([size * MIB for size in parameters_mib], cap_mb)
    assert sizes == [size * MIB for size in expected_mib]


def test_a_bucket_size_that_changes_no_bucket_is_not_tried() -> None:
    small = ways(DDPStrategy(), [1000] * 10, "cpu")
    assert list(small) == [
        "strategy.gradient_as_bucket_view=false", "strategy.static_graph=true", "strategy.comm_hook=fp16",
    ]  # fmt: skip
    large = ways(DDPStrategy(), [4 * MIB] * 10, "cpu")
    assert [keys for keys in large if "bucket" in keys][:3] == [
        "strategy.bucket_cap_mb=1", "strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=25",
    ]  # fmt: skip
    assert large["strategy.bucket_cap_mb=5"] == DDPStrategy(bucket_cap_mb=5)


def test_what_is_configured_is_changed_one_key_at_a_time() -> None:
    configured = DDPStrategy(gradient_as_bucket_view=False, static_graph=True, comm_hook="fp16", bucket_cap_mb=1)
    tried = ways(configured, [4 * MIB] * 10, "cuda")
    assert list(tried) == [
        "strategy.bucket_cap_mb=null", "strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=25",
        "strategy.bucket_cap_mb=100", "strategy.gradient_as_bucket_view=true",
    ]  # fmt: skip
    assert "strategy.comm_hook=bf16" in ways(DDPStrategy(), [1], "cuda")
    both = together(configured, list(tried.values())[1::3])
    assert both == DDPStrategy(gradient_as_bucket_view=True, static_graph=True, comm_hook="fp16", bucket_cap_mb=5)


def _tried(keys: str, ratio: float, spread: float = 0.01) -> Tried:
    ratios = [ratio + spread * (n - 3) for n in range(7)]
    return Tried(keys, [0.01 * one for one in ratios], ratios)


def test_of_several_values_of_a_key_the_fastest_counts() -> None:
    tried = [_tried("a=1", 0.9), _tried("b=true", 0.95), _tried("a=2", 0.8)]
    assert best_of_each_key(tried) == ["a=2", "b=true"]


def test_the_table_and_the_best_line() -> None:
    base = Tried("", [0.01] * 7, [1.0] * 7)
    tried = [base, _tried("strategy.bucket_cap_mb=1", 0.9), Tried("strategy.static_graph=true", refused="no, since x")]
    assert table(Tuned(tried, _tried("strategy.bucket_cap_mb=1", 0.95), {})).splitlines() == [
        "                            ms a step  against as configured",
        "as configured                   10.00  1",
        "strategy.bucket_cap_mb=1         9.00  0.900 [0.870 to 0.930]",
        "strategy.static_graph=true  can't be used: no, since x",
        "",
        "Faster by 5 %, tried again (0.950 [0.920 to 0.980]):  strategy.bucket_cap_mb=1",
    ]
    lossy = table(Tuned([base], _tried("strategy.comm_hook=fp16", 0.5), {}))
    assert lossy.endswith(
        ":  strategy.comm_hook=fp16\nGradients are then rounded on the wire: look whether it still learns as well."
    )


def test_what_chance_may_do_is_not_called_faster() -> None:
    base, noisy = Tried("", [0.01] * 7, [1.0] * 7), _tried("strategy.bucket_cap_mb=1", 0.98, spread=0.02)
    assert not noisy.is_faster
    assert table(Tuned([base, noisy], None, {})).endswith(
        "Nothing is faster than as configured, beyond what chance may do in so few steps: leave it."
    )
    assert table(Tuned([base], noisy, {})).endswith(
        "strategy.bucket_cap_mb=1 seemed faster, and tried again it was not (0.980 [0.920 to 1.040]): leave it."
    )


def test_options_are_read_before_torch() -> None:
    options, left = Tune.said(["recipe=a", "tune.steps=7", "loop.epochs=2", "tune.rounds=8"])
    assert (options, left) == (Tune(steps=7, rounds=8), ["recipe=a", "loop.epochs=2"])
    assert Tune.from_text(options.as_text) == options


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("tune.step=7", "tune.step: no such key. Did you mean steps? Allowed: rounds, steps, warmup_steps."),
        ("tune.steps=many", "tune.steps=many: must be an integer"),
        ("tune.steps=0", "tune.steps=0: must be at least 1"),
        ("tune.rounds=2", "tune.rounds=2: must be at least 6"),
    ],
)
def test_a_wrong_option_is_named(argument: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Tune.said([argument])
    assert told in str(raised.value)

"""What is said about a checkpoint of another config."""

from __future__ import annotations

from safetrain.differences import differences
from safetrain.resume import ranks_changed

THEN = """
name: demo
run_dir: outputs/a
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loop: {epochs: 3}
model: {_target_: mine.Net, width: 8}
watchdog: {stall_s: 60}
"""


def test_nothing_is_said_about_the_same() -> None:
    assert differences(THEN, THEN) == []


def test_what_has_no_effect_on_training_is_not_told() -> None:
    assert differences(THEN, THEN.replace("outputs/a", "outputs/b").replace("60", "90").replace("demo", "other")) == []


def test_each_key_is_told_with_what_holds() -> None:
    now = (
        THEN.replace("lr: 0.1", "lr: 0.01").replace("epochs: 3", "epochs: 5, clip_norm: 1.0").replace(", width: 8", "")
    )
    assert differences(THEN, now) == [
        "optimizer.lr: 0.1 then, 0.01 now; the optimizer goes on with the checkpoint's values; change its param_groups "
        "in Python",
        "loop.epochs: 3 then, 5 now; this run's holds from here on",
        "model.width: 8 then, not there now; this run's holds from here on",
        "loop.clip_norm: not there then, 1.0 now; this run's holds from here on",
    ]


def test_a_trainer_that_was_built_in_python_has_no_config() -> None:
    assert differences(THEN, "") == differences("", THEN) == []


def test_other_ranks() -> None:
    assert ranks_changed(2, 2) == []
    [told] = ranks_changed(4, 2)
    assert told.startswith("4 ranks then, 2 now: each sample still comes once in the epoch")
    assert "every step sees 0.5 times as many" in told

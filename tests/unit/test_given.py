"""What a script gives to Trainer by the wrong spelling is told with the right one, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import safetrain
from safetrain.telemetry import ProgressBar


class Mine(safetrain.Trainer):
    def training_step(self, batch: Any) -> None:
        return None


_WORD = "is how a config and the command line say it. In a script: "


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"precision": "bf16"},
            f"precision='bf16': must be a precision. precision=bf16 {_WORD}precision=safetrain.BF16()",
        ),
        ({"precision": safetrain.FP16}, "must be a precision. In a script: precision=FP16()"),
        ({"strategy": "fsdp"}, f"strategy=fsdp {_WORD}strategy=safetrain.FSDPStrategy()"),
        ({"strategy": {"bucket_cap_mb": 2}}, "In a script: strategy=safetrain.DDPStrategy(bucket_cap_mb=2)"),
        ({"loader": 64}, "loader=64: must be a safetrain.Loader. In a script: loader=safetrain.Loader(batch_size=64)"),
        (
            {"loop": {"epochs": 1}},
            "loop={'epochs': 1}: must be a safetrain.Loop. In a script: loop=safetrain.Loop(epochs=1)",
        ),
        ({"policies": "partial"}, "In a script: policies=safetrain.Policies(skip=safetrain.policies.SkipPartial())"),
        (
            {"policies": safetrain.Policies(uneven="continue")},  # type: ignore[arg-type]
            "policies.uneven='continue': must be a policy. In a script: uneven=safetrain.policies.UnevenContinue()",
        ),
        ({"observers": "quiet"}, f"observers=quiet {_WORD}observers=[ProgressBar(), TensorBoard(), EventLog()]"),
        ({"observers": ProgressBar()}, "must be a list of observers. In a script: observers=[ProgressBar()"),
        ({"observers": [ProgressBar]}, "must be a list of observers. In a script: observers=[ProgressBar()"),
        ({"run_dir": 5}, 'run_dir=5: must be a path. In a script: run_dir="outputs/mine"'),
        ({"resume": True}, 'resume=True: must be auto, none or a path. In a script: resume="auto"'),
        ({"seed": "1"}, "seed='1': must be a whole number. In a script: seed=1"),
    ],
)
def test_a_wrong_spelling_is_told_with_the_right_one(given: dict[str, Any], told: str) -> None:
    with pytest.raises(safetrain.UsageError) as refused:
        Mine(**given)
    assert told in str(refused.value)


def test_what_the_messages_say_is_taken() -> None:
    trainer = Mine(
        precision=safetrain.BF16(), loader=safetrain.Loader(batch_size=64), observers=[ProgressBar()],
        policies=safetrain.Policies(skip=safetrain.policies.SkipPartial()), run_dir="outputs/mine", resume="auto",
    )  # fmt: skip
    assert (trainer.run_dir, trainer.loader.batch_size) == (Path("outputs/mine"), 64)
    assert [type(one) for one in trainer.observers] == [ProgressBar]

"""What a rank's user code returns or raises, as an outcome."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import safetrain
from safetrain.ballot import Outcome
from safetrain.contain import Loss, Share, check_loss, is_out_of_memory, place_of, run_training_step

WEIGHT = torch.ones(1, requires_grad=True)


def scalar() -> torch.Tensor:
    return (WEIGHT * 2).sum()


def test_a_bare_loss_weighs_its_samples() -> None:
    loss = check_loss(scalar(), 7)
    assert isinstance(loss, Loss)
    assert (loss.weight, loss.skip) == (7, False)


def test_a_loss_says_its_own_weight() -> None:
    loss = check_loss(Loss(scalar(), weight=torch.tensor(31)), 7)
    assert isinstance(loss, Loss)
    assert loss.weight == 31


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "training_step returned None"),
        (torch.tensor(1.0), "has no graph"),
        ({"g": torch.tensor(1.0)}, "has no graph"),
    ],
)
def test_nothing_to_train_on_is_a_reason_in_words(returned: Any, words: str) -> None:
    reason = check_loss(returned, 7)
    assert isinstance(reason, str)
    assert words in reason


@pytest.mark.parametrize(
    ("returned", "samples", "words"),
    [
        (3.0, 7, "returned float: return a scalar tensor"),
        (torch.ones(2, requires_grad=True) * 1, 7, r"a loss of shape \(2,\): return its mean"),
        (Loss(WEIGHT * 1, weight=-1), 7, "a weight is a count"),
        (WEIGHT * 1, None, "can't tell how many samples"),
    ],
)
def test_what_cannot_be_right_says_what_to_do(returned: Any, samples: int | None, words: str) -> None:
    with pytest.raises(safetrain.UsageError, match=words):
        check_loss(returned, samples)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (safetrain.SkipBatch("too short"), Outcome.SKIP, "SkipBatch: too short at "),
        (MemoryError(), Outcome.OUT_OF_MEMORY, "out of memory in training_step at "),
        (KeyError("label"), Outcome.FAILED, "KeyError: 'label' in training_step at "),
    ],
)
def test_an_exception_becomes_an_outcome_with_the_users_line(error: Exception, outcome: Outcome, words: str) -> None:
    def step(batch: Any, samples: Any) -> None:
        raise error

    share = Share()
    assert run_training_step(step, None, 1, share) is None
    assert share.outcome is outcome
    assert words in share.reason
    assert f"test_contain.py:{step.__code__.co_firstlineno + 1} in step" in share.reason


def test_a_lost_peer_is_not_taken_for_the_users_error() -> None:
    def step(batch: Any, samples: Any) -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run_training_step(step, None, 1, Share())


def test_out_of_memory_lets_go_of_the_activations() -> None:
    """The traceback's frames hold every tensor of the step."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def step(batch: Any, samples: Any) -> None:
        activation = torch.ones(10)
        alive.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory")

    share = Share()
    run_training_step(step, None, 1, share)
    gc.collect()
    assert alive[0]() is None
    assert share.error is not None


def test_the_gravest_outcome_stands() -> None:
    share = Share()
    share.note(Outcome.OK)
    share.note(Outcome.FAILED, "first")
    share.note(Outcome.SKIP, "second")
    assert (share.outcome, share.reason, share.spoiled) == (Outcome.FAILED, "first", True)


def test_place_of_an_error_in_torch_is_the_users_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))
    assert "test_contain.py:" in place_of(caught.value)

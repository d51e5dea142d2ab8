"""Checks of the first batch, which is then trained on, and of the random numbers that training begins with; and, on
demand, of a first step of each rank alone.

``preflight=deep``: forward and backward on the first batch, without DDP and without an optimizer step. Weights,
buffers, gradients and random numbers are afterwards as they were, to the bit. What ``training_step`` keeps elsewhere,
such as a list of its own that it appends to, is not put back.
"""

from __future__ import annotations

import copy
import hashlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safetrain.comm import is_communication_error
from safetrain.contain import check_loss, place_of
from safetrain.errors import SkipBatch
from safetrain.finding import Begun, Finding, Said, groups, ranks_of, size, spread, who
from safetrain.metrics import MetricLog
from safetrain.needs import state_bytes
from safetrain.seeding import generator_states, restore_generators
from safetrain.words import names_in_words, ranks_in_words

if TYPE_CHECKING:
    from safetrain.parts import Parts
    from safetrain.trainer import Trainer

_SLOW_S, _TIMES_OTHERS = 5.0, 5.0


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of every rank."""

    name: str = "first_batch"

    def look(self, here: Begun) -> dict[str, Any]:
        fetched = here.feed.ahead
        error = None if fetched is None else fetched.error
        return {
            "seconds": here.seconds,
            "samples": None if fetched is None else fetched.samples,
            "empty": fetched is None or fetched.empty,
            "error": "" if error is None or isinstance(error, SkipBatch) else _in_words(error),
            "only_checks": here.only_checks,
        }

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        failed, empty = ([one for one in said if one.facts[what]] for what in ("error", "empty"))
        if failed and said[0].facts["only_checks"]:  # in a job the loop says it, with the whole story
            words = f"the first batch of {who(failed, said)} can't be had: {failed[0].facts['error']}."
            return [Finding(self.name, "an error", "refuse", ranks_of(failed), words, "Look at that line.")]
        if empty and len(empty) < len(said):
            words = f"{ranks_in_words(ranks_of(empty))} {'has' if len(empty) == 1 else 'have'} no batch at all."
            remedy = "Give every rank data; with policy/uneven=continue such ranks add nothing."
            return [Finding(self.name, "none", "warn", ranks_of(empty), words, remedy)]
        longest = max(said, key=lambda one: one.facts["seconds"])
        others = sorted(one.facts["seconds"] for one in said if one is not longest)
        usual_s, longest_s = others[len(others) // 2] if others else longest.facts["seconds"], longest.facts["seconds"]
        value = f"{spread(said, lambda facts: str(facts['samples']))} samples, in {longest_s:.2g} s"
        if longest_s > max(_SLOW_S, _TIMES_OTHERS * usual_s):
            words = f"the first batch of {who([longest], said)} took {longest_s:.1f} s, that of others {usual_s:.1f} s."
            remedy = "Every step waits for the slowest rank: look at what it reads from."
            return [Finding(self.name, value, "warn", (longest.rank,), words, remedy)]
        return [Finding(self.name, value)]


@dataclass(frozen=True)
class RandomNumbers:
    """Each rank draws its own: dropout and augmentation would otherwise do the same on all of them."""

    name: str = "random"

    def look(self, here: Begun) -> dict[str, str]:
        states = {name: repr(_plain(state)).encode() for name, state in here.generators.items()}
        return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        findings = []
        for name in said[0].facts:
            for some in groups(said, lambda facts, n=name: facts[n]).values():  # type: ignore[misc]
                if len(some) > 1:
                    words = f"{who(some, said)} would draw the same random numbers from {name}."
                    remedy = "Leave the seed to safetrain; seed what must be equal in a generator of its own."
                    findings.append(Finding(self.name, f"{name} is the same", "warn", ranks_of(some), words, remedy))
        return findings or [Finding(self.name, "its own on each rank" if len(said) > 1 else "one rank")]


def _plain(state: Any) -> Any:
    """Text that holds all of a generator's state."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return tuple(map(_plain, state)) if isinstance(state, tuple) else state


@dataclass(frozen=True)
class FirstStep:
    """What the first step came to on each rank alone, where it was tried."""

    name: str = "first_step"

    def look(self, here: Begun) -> Mapping[str, Any] | None:
        return here.step

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        tried = [one for one in said if one.facts is not None]
        if not tried:
            return [Finding(self.name, "not tried (preflight=deep tries it, where forward does not communicate)")]
        findings = [
            Finding(
                self.name, "failed", "refuse", ranks_of(some),
                f"the first step of {who(some, said)}, alone, failed: {error}.", "Look at that line.",
            )
            for error, some in groups(tried, lambda facts: facts["error"]).items()
            if error
        ]  # fmt: skip
        well = [one for one in tried if not one.facts["error"]]
        for unused, some in groups(well, lambda facts: tuple(facts["unused"])).items():
            if unused:
                value = f"{len(unused)} parameters without a gradient"
                words = f"no gradient for {names_in_words(unused)} on {who(some, said)}."
                remedy = "Freeze what is never used; what is used at times costs nothing (policy/unused)."
                findings.append(Finding(self.name, value, "warn", ranks_of(some), words, remedy))
        wild = [one for one in well if not one.facts["finite"]]
        if wild:
            words = f"the first loss is not finite on {who(wild, said)}."
            findings.append(
                Finding(self.name, "loss not finite", "warn", ranks_of(wild), words, "Look at data and lr.")
            )
        if findings or not well:
            return findings or [Finding(self.name, "no batch to try it on")]
        facts = well[0].facts
        held = f"weights and optimizer {size(facts['state'])}, gradients {size(facts['gradients'])}"
        peak = f", {size(facts['peak'])} at its peak on top" if facts["peak"] else ""
        return [Finding(self.name, f"well; {held}{peak}")]


def try_step(trainer: Trainer, parts: Parts) -> dict[str, Any]:
    """Forward and backward of this rank's first batch; all ranks do it together, since forward may communicate.

    Raises:
        Exception: a collective failed.
    """
    ahead = parts.feed.ahead
    facts: dict[str, Any] = {"error": "", "unused": [], "finite": True, "state": 0, "gradients": 0, "peak": 0}
    if ahead is None or ahead.empty or ahead.error is not None:
        return facts
    with as_before(trainer):
        trainer.model.train()
        before = _memory(trainer.comm.device, reset=True)
        try:
            loss = check_loss(parts.training_step(copy.deepcopy(ahead.batch), ahead.samples), ahead.samples)
            if isinstance(loss, str):
                return {**facts, "error": loss}
            trained = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
            losses = list(loss.value.values()) if isinstance(loss.value, Mapping) else [loss.value]
            # not backward(): DDP has its hooks where gradients are accumulated, and waits for the other ranks there
            gradients = torch.autograd.grad(losses, [p for _, p in trained], allow_unused=True)
        except SkipBatch:
            return facts
        except Exception as error:  # whatever a user's step raises is what is to be found out
            if is_communication_error(error):
                raise
            return {**facts, "error": _in_words(error)}
        facts["peak"] = max(0, _memory(trainer.comm.device) - before)
        facts["finite"] = all(bool(torch.isfinite(one).all()) for one in losses)
        facts["unused"] = [name for (name, _), gradient in zip(trained, gradients, strict=True) if gradient is None]
    facts["state"] = state_bytes(trainer)
    facts["gradients"] = sum(p.numel() * p.element_size() for _, p in trained)
    return facts


@contextmanager
def as_before(trainer: Trainer) -> Iterator[None]:
    """Afterwards the model, the random numbers, the metrics and the attributes of the trainer are what they were."""
    model, device = trainer.model, trainer.comm.device
    tensors = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
    modes = [(module, module.training) for module in model.modules()]
    generators, attributes = generator_states(), dict(vars(trainer))
    on_device = None if device.type == "cpu" else torch.cuda.get_rng_state(device)
    trainer._log = MetricLog()
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(attributes)
        restore_generators(generators)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for name, tensor in _tensors(model):
                if name in tensors and not torch.equal(tensor, tensors[name]):
                    tensor.copy_(tensors[name])


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _memory(device: torch.device, *, reset: bool = False) -> int:
    """Bytes at the peak so far: of the GPU's tensors, or of the process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device)


def _in_words(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text} at {place_of(error)}"

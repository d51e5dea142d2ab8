"""Checks of what has to be the same on all ranks: versions, environment, config, code, parameters."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from safetrain import versions
from safetrain.failure import is_user_file
from safetrain.finding import Finding, Here, Job, Modelled, Said, Verdict, groups, ranks_of, short, who
from safetrain.words import names_in_words

if TYPE_CHECKING:
    from safetrain.trainer import Trainer

H = TypeVar("H", contravariant=True)

_SHOWN = 3
_ABSENT = "not set"
_PREFIXES = ("NCCL_", "TORCH_", "CUBLAS_", "CUDA_", "GLOO_", "CUDNN_", "NVIDIA_TF32_")
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "PYTHONOPTIMIZE")
_OF_ONE_RANK = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OF_ONE_MACHINE = ("launch.", "hydra.")  # a node's number, its number of ranks
_SETTINGS = ("loop", "loader", "precision", "strategy", "policies", "checkpoint", "audit", "watchdog")


@dataclass(frozen=True)
class Alike(Generic[H]):
    """Values by name that have to be equal on all ranks.

    Attributes:
        read: this rank's values.
        otherwise: the verdict where one differs, but ``warn`` for the names in ``lenient``.
        summary: the values in a few words, where all are equal.
        first_only: the names depend on each other: only the first that differs says something.
    """

    name: str
    read: Callable[[H], Mapping[str, str]]
    summary: Callable[[Mapping[str, str]], str]
    remedy: str
    otherwise: Verdict = "refuse"
    lenient: tuple[str, ...] = ()
    first_only: bool = False

    def look(self, here: H) -> dict[str, str]:
        return dict(self.read(here))

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        names = dict.fromkeys(name for one in said for name in one.facts)
        differ = [name for name in names if len(groups(said, lambda facts, n=name: facts.get(n))) > 1]  # type: ignore[misc]
        if not differ:
            return [Finding(self.name, self.summary(said[0].facts))]
        shown = differ[: 1 if self.first_only else _SHOWN]
        findings = [self._difference(name, said) for name in shown]
        if len(differ) > len(shown):
            strictest: Verdict = "warn" if all(name in self.lenient for name in differ) else self.otherwise
            value = f"{len(differ) - len(shown)} more differ"
            words = f"{value}: {names_in_words(differ[len(shown) :])}."
            findings.append(Finding(self.name, value, strictest, words=words))
        return findings

    def _difference(self, name: str, said: Sequence[Said]) -> Finding:
        found = groups(said, lambda facts: facts.get(name, _ABSENT))
        told = ", ".join(f"{short(value)} on {who(some, said)}" for value, some in found.items())
        odd = min(found.values(), key=len)
        return Finding(
            self.name,
            f"{name}: {told}",
            "warn" if name in self.lenient else self.otherwise,
            ranks_of(odd),
            f"{name} is not the same on all ranks: {told}.",
            self.remedy,
        )


# --- what is read -----------------------------------------------------------------------------------------------------


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what is computed, or how ranks talk; not those that are a rank's or a machine's own."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _OF_ONE_RANK
    }


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """What a Trainer was told, flat: in a script nothing else says how it trains."""
    parts = {name: getattr(trainer, name) for name in _SETTINGS}
    flat = {f"{name}.{key}": _text(value) for name, part in parts.items() for key, value in vars(part).items()}
    kinds = {name: type(part).__qualname__ for name, part in parts.items()}
    others = {name: str(getattr(trainer, name)) for name in ("seed", "resume", "name", "run_dir")}
    return {"trainer": type(trainer).__qualname__, **kinds, **flat, **others}


def _text(value: Any) -> str:
    """A value, or its class where its text would be of one process, as addresses are."""
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({', '.join(f'{key}={_text(one)}' for key, one in vars(value).items())})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(one)}' for key, one in value.items())}}}"
    return repr(value) if isinstance(value, (str, int, float, Path, type(None))) else type(value).__qualname__


def _settings(here: Here) -> dict[str, str]:
    return {name: str(value) for name, value in here.settings.items() if not name.startswith(_OF_ONE_MACHINE)}


def code_digests(modules: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each file of the user's that is imported, and one of safetrain's own files, by module."""
    digests = {}
    for name, module in sorted(modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(".py") and Path(file).is_absolute() and is_user_file(file):
            digests["the script" if name == "__main__" else name] = _digest([Path(file)])
    return {**digests, "safetrain": _digest(sorted(Path(__file__).parent.glob("*.py")))}


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(file.read_bytes())
        except OSError:  # it was removed, or moved, since it was imported
            return "not there any more"
    return digest.hexdigest()[:12]


def _code(_job: Job) -> dict[str, str]:
    return code_digests(dict(sys.modules))


@dataclass(frozen=True)
class Code(Alike[Job]):
    """The files of the user's that all ranks have imported: rank 0 alone may draw pictures."""

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        common = set.intersection(*(set(one.facts) for one in said))
        return super().judge([one._replace(facts={n: d for n, d in one.facts.items() if n in common}) for one in said])


def layout_of(model: Any) -> dict[str, str]:
    """Shape, dtype and kind of each parameter and buffer, by name."""
    parameters = {
        name: f"{tuple(p.shape)} {str(p.dtype).removeprefix('torch.')} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    }
    buffers = {
        name: f"{tuple(b.shape)} {str(b.dtype).removeprefix('torch.')} buffer" for name, b in model.named_buffers()
    }
    return {**parameters, **buffers}


def _tensors(facts: Mapping[str, str]) -> str:
    trained, frozen = (sum(text.endswith(kind) for text in facts.values()) for kind in ("trained", "frozen"))
    return f"{trained} trained, {frozen} frozen, {len(facts) - trained - frozen} buffers"


VERSIONS: Alike[Here] = Alike(
    "versions",
    read=lambda _: versions.facts(),
    summary=lambda facts: ", ".join(f"{name} {text}" for name, text in facts.items() if text != "none"),
    remedy="Install the same on all machines.",
    lenient=("python", "driver"),
)
ENVIRONMENT: Alike[Here] = Alike(
    "environment",
    read=lambda _: environment_that_matters(os.environ),
    summary=lambda facts: f"{len(facts)} variables that matter" if facts else "no variable that matters is set",
    remedy="Set it for all ranks, best by `++env.NAME=value`.",
    otherwise="warn",
)
CONFIG: Alike[Here] = Alike(
    "config",
    read=_settings,
    summary=lambda facts: f"{len(facts)} values",
    remedy="Give every rank the same: no value drawn, and no time read, by each process for itself.",
)
CODE = Code(
    "code",
    read=_code,
    summary=lambda facts: f"safetrain and {len(facts) - 1} file{'s' if len(facts) != 2 else ''} of yours",
    remedy="Bring the same files to all machines.",
)
PARAMETERS: Alike[Modelled] = Alike(
    "parameters",
    read=lambda here: layout_of(here.model),
    summary=_tensors,
    remedy="Build the model from the config alone, the same on every rank.",
    first_only=True,
)

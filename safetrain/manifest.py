"""What a checkpoint says about itself: ``manifest.json``, written last, with the size and SHA-256 of every other file.

It has a checksum of its own, so that no flipped bit anywhere in a checkpoint goes unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from safetrain.durable import sync
from safetrain.errors import CheckpointError

NAME = "manifest.json"
_FORMAT, _VERSION = "safetrain checkpoint", 1


@dataclass(frozen=True)
class Seal:
    """What a file held when it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """The seal of the file as it is."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """
    Attributes:
        serial: grows with each checkpoint of a folder. Steps do not: a run that goes back repeats them.
        files: every file's seal, by name.
        versions: of what wrote it.
    """

    serial: int
    step: int
    epoch: int
    world_size: int
    metric: float | None
    config_text: str
    files: Mapping[str, Seal]
    versions: Mapping[str, str]

    def write(self, folder: Path) -> None:
        facts = asdict(self)
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "sha256": _checksum(facts), **facts}, indent=1)
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        sync(path)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """
        Raises:
            CheckpointError: there is none, or it is damaged or from another program or version.
        """
        path = folder / NAME
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint of safetrain, or one that was never finished: it has no {NAME}"
            ) from None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{path} was not written by safetrain")
        if (version := facts.pop("version", None)) != _VERSION:
            remedy = "Update safetrain" if isinstance(version, int) and version > _VERSION else "Start anew"
            raise CheckpointError(
                f"{folder} has format version {version}, and this safetrain reads {_VERSION}. {remedy}, or read it "
                f"with the version that wrote it ({facts.get('versions')})."
            )
        if facts.pop("sha256", None) != _checksum(facts):
            raise CheckpointError(f"{path} is damaged: its checksum does not fit what it says")
        facts["files"] = {name: Seal(**seal) for name, seal in facts["files"].items()}
        return cls(**facts)

    def verify(self, folder: Path) -> None:
        """Read every file and compare.

        Raises:
            CheckpointError: one is missing, or is not what was written.
        """
        for name, seal in self.files.items():
            path = folder / name
            try:
                if (size := path.stat().st_size) != seal.bytes:
                    raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, and {seal.bytes:,} were written")
                if Seal.of(path) != seal:
                    raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of what was written")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing") from None
            except OSError as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

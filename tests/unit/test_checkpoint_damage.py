"""Checkpoints that are not what was written, or not safetrain's: none loads, and the newest good one is taken."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from safetrain.checkpoint import find, read
from safetrain.errors import CheckpointError
from safetrain.shelf import Shelf
from tests.states import checkpoint_at

FILES = ["__0_0.distcp", ".metadata", "structure.pt", "rank_0.pt", "manifest.json"]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return checkpoint_at(tmp_path / "checkpoints", step=1)


@pytest.fixture
def newer(good: Path) -> Path:
    return checkpoint_at(good.parent, step=2)


def cut_in_half(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1 << 3
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [cut_in_half, cut_to_nothing, lengthen, flip_a_bit, remove, replace_with_folder]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_told_and_the_one_before_taken(
    good: Path, newer: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(newer / name)
    with pytest.raises(CheckpointError, match=str(newer)):
        find(newer)
    with caplog.at_level(logging.WARNING):
        found = Shelf(good.parent).newest_good()
    assert found is not None
    assert found[0] == good
    (warning,) = caplog.messages
    assert str(newer) in warning
    assert "step_1 is used instead" in warning


def test_every_single_flipped_bit_of_a_manifest_is_seen(good: Path) -> None:
    whole = (good / "manifest.json").read_bytes()
    for index in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[index] ^= 1
        (good / "manifest.json").write_bytes(flipped)
        if json_or_none(flipped) == json.loads(whole):
            continue  # between the values: it says the same
        with pytest.raises(CheckpointError):
            find(good)


def json_or_none(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_with_none_that_is_good_a_run_does_not_start_anew(good: Path, newer: Path) -> None:
    cut_in_half(good / "rank_0.pt")
    flip_a_bit(newer / "__0_0.distcp")
    with pytest.raises(CheckpointError) as refused:
        Shelf(good.parent).newest_good()
    text = str(refused.value)
    assert f"no checkpoint in {good.parent} can be used" in text
    assert f"{newer / '__0_0.distcp'} is damaged: its SHA-256 is not that of what was written" in text
    assert f"{good / 'rank_0.pt'} is damaged: it has " in text


def test_one_that_was_never_finished_does_not_count(good: Path) -> None:
    draft = Shelf(good.parent).begin(2)
    shutil.copy(good / "rank_0.pt", draft)
    found = Shelf(good.parent).newest_good()
    assert found is not None
    assert found[0] == good


def of_version(path: Path, version: object) -> None:
    """Write the manifest as another version would have."""
    facts = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**facts, "version": version}))


@pytest.mark.parametrize(("version", "remedy"), [(0, "Start anew"), (2, "Update safetrain"), (None, "Start anew")])
def test_another_format_version_is_named(good: Path, version: object, remedy: str) -> None:
    of_version(good, version)
    with pytest.raises(
        CheckpointError, match=f"has format version {version}, and this safetrain reads 1. {remedy}.*'safetrain': '0"
    ):
        find(good)


def test_a_rank_file_that_the_manifest_leaves_out_is_missed(good: Path) -> None:
    """A manifest that contradicts itself, with a right checksum."""
    facts = json.loads((good / "manifest.json").read_text())
    kept = {name: value for name, value in facts.items() if name not in ("format", "version", "sha256")}
    kept["world_size"] = 2
    checksum = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    (good / "manifest.json").write_text(
        json.dumps({"format": facts["format"], "version": facts["version"], "sha256": checksum, **kept})
    )
    with pytest.raises(CheckpointError, match=r"rank_1\.pt"):
        read(*find(good))


def test_foreign_things_are_named_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torch.save({"model": {}}, tmp_path / "other.pt")
    save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "manifest.json").write_text('{"format": "another"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "manifest.json").write_text("[]")
    for name, said in {
        "nothing": "nothing is not there",
        "empty": "empty is not a checkpoint of safetrain, or one that was never finished",
        "dcp": "dcp is not a checkpoint of safetrain, or one that was never finished",
        "other.pt": "other.pt is a file, and a checkpoint of safetrain is a folder",
        "json": "json/manifest.json was not written by safetrain",
        "list": "list/manifest.json was not written by safetrain",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            find(tmp_path / name)

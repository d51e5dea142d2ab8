"""The folder of checkpoints: which is newest, which stay, and that nothing is ever overwritten."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from safetrain.manifest import Manifest, Seal
from safetrain.shelf import Keep, Shelf
from tests.states import checkpoint_at, shared_state


def manifest(step: int, metric: float | None = None, serial: int | None = None) -> Manifest:
    return Manifest(
        serial=step if serial is None else serial, step=step, epoch=0, world_size=1, metric=metric, config_text="",
        files={}, versions={},
    )  # fmt: skip


def put(shelf: Shelf, step: int, metric: float | None = None) -> Path:
    """A checkpoint with one small file."""
    draft = shelf.begin(step)
    (draft / "file").write_text(str(step))
    said = manifest(step, metric, shelf.next_serial())
    return shelf.commit(draft, Manifest(**{**vars(said), "files": {"file": Seal.of(draft / "file")}}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, Keep(last=2, best=1, mode="max"))
    for step, metric in enumerate([0.1, 0.9, 0.5, None, 0.2], 1):
        put(shelf, step, metric)
        assert (tmp_path / "latest").readlink() == Path(f"step_{step}")
    assert names(tmp_path) == {"step_2", "step_4", "step_5", "latest", "best"}
    assert (tmp_path / "best").readlink() == Path("step_2")


def test_without_a_limit_all_stay(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in range(5):
        put(shelf, step)
    assert names(tmp_path) == {*(f"step_{step}" for step in range(5)), "latest"}


METRICS = st.lists(st.none() | st.sampled_from([0.0, 1.0, -1.0, 2.5]), min_size=1, max_size=9)


@given(METRICS, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["min", "max"]))
def test_what_stays(metrics: list[float | None], last: int, best: int, mode: str) -> None:
    manifests = [manifest(step, metric) for step, metric in enumerate(metrics)]
    kept = Keep(last, best, mode).choose(manifests)  # type: ignore[arg-type]
    newest = {each.serial for each in manifests[-last:]}
    assert newest <= kept
    known = {each.serial: each.metric for each in manifests if each.metric is not None}
    worst_first = sorted(known.values(), reverse=mode == "min")
    for serial in kept - newest:
        assert known[serial] in worst_first[-best:]
    assert len(kept - newest) <= best
    assert len(kept & set(known)) >= min(best, len(known))


def test_a_step_that_is_saved_again_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, Keep(last=3))
    put(shelf, 1)
    first, second = put(shelf, 2), put(shelf, 2)
    assert (first.name, second.name) == ("step_2", "step_2_2")
    assert names(tmp_path) == {"step_1", "step_2_2", "latest"}
    assert put(shelf, 2).name == "step_2"
    assert names(tmp_path) == {"step_1", "step_2", "latest"}


def test_newest_is_what_was_written_last_not_the_highest_step(tmp_path: Path) -> None:
    """A run that went back to step 1, with another learning rate perhaps, does not go on from where it was before."""
    shelf = Shelf(tmp_path, Keep(last=3))
    for step in (1, 8, 9):
        put(shelf, step)
    put(shelf, 2)
    assert [found.step for _, found in shelf.readable()] == [2, 9, 8]
    found = shelf.newest_good()
    assert found is not None
    assert found[0].name == "step_2"


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for left in (".writing_step_3_abc", ".removing_step_1"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "file").write_text("half")
    (tmp_path / ".latest").symlink_to("step_0")
    (tmp_path / ".mine").write_text("not ours")
    put(Shelf(tmp_path), 4)
    assert names(tmp_path) == {"step_4", "latest", ".mine"}


def test_it_may_be_moved(tmp_path: Path) -> None:
    checkpoint_at(tmp_path / "here", step=3)
    (tmp_path / "here").rename(tmp_path / "there")
    shelf = Shelf(tmp_path / "there")
    found = shelf.newest_good()
    assert found is not None
    assert found[0] == tmp_path / "there" / "step_3"
    assert (tmp_path / "there" / "latest").resolve() == found[0]


def test_other_tools_read_the_tensors(tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path, step=3)
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for name, tensor in shared_state(3)["model"].items():
        assert torch.equal(plain[f"model.{name}"], tensor)


@pytest.mark.parametrize("missing", ["", "deeper/still"])
def test_the_folder_is_made_when_it_is_needed(tmp_path: Path, missing: str) -> None:
    assert Shelf(tmp_path / "a" / missing).newest_good() is None
    put(Shelf(tmp_path / "a" / missing), 1)
    assert Shelf(tmp_path / "a" / missing).newest_good() is not None


def test_a_file_system_may_have_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    shelf = Shelf(tmp_path, Keep(last=1))
    put(shelf, 1)
    put(shelf, 2)
    assert names(tmp_path) == {"step_2"}


def test_latest_may_not_be_in_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something else of that name is told, and the checkpoint is there all the same."""
    (tmp_path / "latest").mkdir()
    put(Shelf(tmp_path), 1)
    assert "step_1 is saved, but around it not all could be put in order" in caplog.text
    assert "latest" in caplog.text
    found = Shelf(tmp_path).newest_good()
    assert found is not None
    assert found[1].step == 1


def test_every_byte_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H83: after a power cut, a rename may have reached the disk and what was written before it not."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    path = checkpoint_at(tmp_path, step=3)
    (renamed,) = (number for number, what in enumerate(done) if what.endswith(" -> step_3"))
    draft = done[renamed].removesuffix(" -> step_3")
    assert names(path) | {draft} <= set(done[:renamed])
    assert done[renamed - 1] == draft, "its names come last"
    assert done[renamed + 1] == tmp_path.name

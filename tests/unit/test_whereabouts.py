"""Where ranks are, as their launcher sees it; how ranks that are gone have ended; processes that nothing ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from safetrain import agent, joining, machine, peers, whereabouts
from safetrain.activity import ACTIVITY
from safetrain.failure import Exit
from safetrain.joining import Meeting, Place
from safetrain.whereabouts import Whereabouts, note_whereabouts

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_rank_is_seen_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "_own_file", None)
    with Whereabouts.open() as seen:
        for name, value in seen.environment.items():
            monkeypatch.setenv(name, value)
        assert seen.of(3) == ""
        with ACTIVITY.within("validation"):
            ACTIVITY.step = 12
            note_whereabouts(3)
        assert seen.last_seen(3) == "in validation at step 12"
        assert seen.of(3).startswith("in validation at step 12, for ")
        assert seen.of(2) == ""
        assert whereabouts._own_file is not None
        os.close(whereabouts._own_file)
    ACTIVITY.step = 0


def test_without_a_launcher_of_ours_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "_own_file", None)
    monkeypatch.delenv("SAFETRAIN_WHEREABOUTS", raising=False)
    note_whereabouts(0)
    assert whereabouts._own_file == -1


@linux
@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(3)", 3), ("os.abort()", -6)],
)
def test_how_a_peer_ended_is_known_until_its_launcher_has_asked(
    monkeypatch: pytest.MonkeyPatch, end: str, code: int
) -> None:
    peer = subprocess.Popen([sys.executable, "-c", f"import os, signal; {end}"])
    here = machine.identity()
    places = (Place(0, 2, "a", os.getpid(), "", here), Place(1, 2, "a", peer.pid, "", here))
    monkeypatch.setattr(joining, "_current", Meeting(None, places))  # type: ignore[arg-type]
    try:
        while not (gone := peers.gone_ranks()):
            time.sleep(0.01)
        assert gone == [Exit(1, peer.pid, code)]
    finally:
        peer.wait()
    assert peers.gone_ranks() == [Exit(1, peer.pid, None)]


def test_a_peer_that_runs_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = 2**22 + 1  # no process has that number; on another machine, one may
    places = (Place(0, 2, "a", os.getppid(), "", machine.identity()), Place(1, 2, "a", gone, "", "a/another boot"))
    monkeypatch.setattr(joining, "_current", Meeting(None, places))  # type: ignore[arg-type]
    assert peers.gone_ranks() == []


def test_a_process_that_sigkill_does_not_end_does_not_hold_up_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # H34
    monkeypatch.setattr(agent, "_KILL_LIMIT_S", 0.1)
    release = threading.Event()
    process = SimpleNamespace(pid=4711, poll=lambda: None)
    context = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=process)})
    wait_for_ever: Callable[[], object] = release.wait
    agent.Agent._within_limit(SimpleNamespace(), wait_for_ever, context, 0.1)  # type: ignore[arg-type]
    release.set()
    assert "Processes that SIGKILL does not end" in capsys.readouterr().err

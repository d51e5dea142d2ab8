"""The verdict on every machine's terminal, also where no launcher of ours speaks: under torchrun, srun and the like.

Who draws it prints it on its own machine, and leaves it for the others in the store; it may also stand in the run
directory. On each other machine one of the ranks, which are victims, waits a moment for it, and prints it there.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetrain import machine
from safetrain.comm import Comm
from safetrain.departure import within
from safetrain.joining import connection, known_places
from safetrain.verdict import published, told_by

_KEY = "verdict"
_SPREAD_S = 1.0
_LOOK_S = 0.02


def several_machines() -> bool:
    """Whether some rank can't see this one's terminal."""
    return any(not place.is_here for place in known_places())


def spread(text: str) -> None:
    """Leave the verdict for the other machines; takes a second at most, whatever became of the store."""
    if not several_machines():
        return

    def leave() -> None:
        with suppress(Exception):  # it is gone
            _store().set(_KEY, json.dumps([machine.identity(), text]))

    within(_SPREAD_S, leave)


def retold(run_dir: Path, limit_s: float) -> str:
    """What a rank of another machine has said; empty where that is this one, where nobody does, or where another rank
    of this machine prints it."""
    if not several_machines():
        return ""
    heard: list[tuple[str, str]] = []
    within(limit_s, lambda: heard.extend(_listen(run_dir, limit_s)))
    if not heard or heard[0][0] == machine.identity() or not _first_here(run_dir):
        return ""
    return heard[0][1]


def _store() -> Any:
    comm = Comm.live()
    return connection(_KEY) if comm is None else comm.clone_store(_KEY)


def _listen(run_dir: Path, limit_s: float) -> list[tuple[str, str]]:
    """The machine whose rank has told the verdict, and the verdict, as soon as it can be read."""
    deadline = time.monotonic() + limit_s
    store = None
    with suppress(Exception):
        store = _store()
    while time.monotonic() < deadline:
        if (told := published(run_dir)) is not None:
            return [(told_by(run_dir), told.text)]
        try:
            if store is not None and store.check([_KEY]):
                whose, text = json.loads(store.get(_KEY))
                return [(whose, text)]
        except Exception:  # noqa: BLE001  it went with the process that served it: the directory is left
            store = None
        time.sleep(_LOOK_S)
    return []


def _first_here(run_dir: Path) -> bool:
    """Whether no other rank of this machine has come to print it."""
    try:
        (run_dir / "failures").mkdir(parents=True, exist_ok=True)
        (run_dir / "failures" / f"told_on_{machine.host()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better twice than not at all
        return True
    return True

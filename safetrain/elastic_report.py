"""torchrun's own report, the last that its terminal shows: whom it takes for the root cause, and in which words.

It takes the rank with the smallest timestamp. Of one that wrote no file that is the second in which torchrun noticed
its end, so a victim that was noticed first would be blamed. The file's form is that of torch's ``ErrorHandler``; seen
with 2.13 (tests/unit/test_elastic_report.py tells of another).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from safetrain.failure import Failure, headline

_FILE = "TORCHELASTIC_ERROR_FILE"
_SECONDS_APART = 1  # whole seconds are compared


def note_for_torchrun(failure: Failure) -> None:
    """Write this rank's file, where torchrun (or another elastic agent) has started it. A culprit calls it before it
    leaves its record, on which victims wait before they leave; the disk may take no file."""
    if not (path := os.environ.get(_FILE)):
        return
    seconds = failure.time_ns // 1_000_000_000 + (_SECONDS_APART if failure.victim else -_SECONDS_APART)
    text = in_words(failure)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(seconds)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))


def in_words(failure: Failure) -> str:
    """What torchrun prints as this rank's traceback."""
    if failure.victim:
        return f"rank {failure.rank} is not the cause, as far as it knows: {headline(failure.message)}"
    when = "" if failure.step is None else f" at step {failure.step}"
    where = f"{f' in {failure.phase}' if failure.phase else ''}{f' at {failure.place}' if failure.place else ''}"
    sentence = f"rank {failure.rank} failed{when}{where}: {failure.error}: {headline(failure.message)}"
    return f"{sentence}\n{failure.traceback}".rstrip()

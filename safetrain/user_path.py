"""The current directory as a place to import from: last, so that a user's queue.py never replaces Python's own.

Only ``os`` and ``sys`` are imported here: anything else could still come from the wrong place.
"""

from __future__ import annotations

import os
import sys


def search_user_code_last() -> None:
    """Move the current directory, which ``python -m`` puts first on the import path, to its end."""
    here = os.getcwd()  # noqa: PTH109  pathlib would be imported from the wrong place
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", here):
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)

"""Where in the user's code a call comes from."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

from safetrain.failure import is_user_file

_PACKAGE = str(Path(__file__).parent) + os.sep
_DOORS = (("comm.py", ""), ("sections.py", ""), ("trainer.py", "agree"), ("trainer.py", "rank_zero"))
_INJECTED = ("faults.py", "injection.py")  # stand for code of the user's
_API_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")  # noqa: PTH118  the end of a code object's file name

CallSite = tuple[tuple[CodeType, int], ...]
"""The user's frames, innermost first: code and instruction. ``describe`` makes words of it."""


_USER = 1
_API = 2  # a public function of torch.distributed or of safetrain, which user code called
_LIBRARY = 3
_LOOP = 4  # safetrain itself: what is above is the same for every call

_kinds: dict[int, tuple[int, CodeType]] = {}  # by identity (a code object's hash costs 1 µs); kept, so ids stay theirs


def call_key(frame: FrameType | None) -> tuple[int, ...]:
    """Equal for two calls with the same ``call_site``, in this process; about 0.1 µs a frame."""
    key: list[int] = []
    known = _kinds.get
    while frame is not None:
        code = frame.f_code
        number = id(code)
        kind, _ = known(number) or (_classify(code), code)
        if kind == _LOOP:
            break
        if kind != _LIBRARY:
            key.append(number)
            key.append(frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


def call_site(frame: FrameType | None) -> tuple[str, CallSite]:
    """The public function that user code called, if one, and the user's frames that lead to it, up to safetrain's
    loop."""
    api, site = "", []
    while frame is not None:
        code = frame.f_code
        known = _kinds.get(id(code))
        kind = known[0] if known is not None else _classify(code)
        if kind == _USER:
            site.append((code, frame.f_lasti))
        elif kind == _LOOP:
            break
        elif kind == _API and not site:
            api = code.co_name
        frame = frame.f_back
    return api, tuple(site)


def describe(site: CallSite) -> tuple[str, ...]:
    """``file:line`` of each frame, innermost first."""
    return tuple(f"{code.co_filename}:{_line(code, instruction)}" for code, instruction in site)


def place_here() -> str:
    """``file:line`` of the user's code that is being run; empty where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def place_of_error(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's; empty where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if is_user_file(f.filename)), "")


def _classify(code: CodeType) -> int:
    file = code.co_filename
    if is_user_file(file):
        kind = _USER
    elif file.startswith(_PACKAGE):
        name = file.removeprefix(_PACKAGE)
        kind = _API if any(name == f and fn in ("", code.co_name) for f, fn in _DOORS) else _LOOP
        if name in _INJECTED:
            kind = _LIBRARY
    else:
        kind = _API if file.endswith(_API_FILE) else _LIBRARY
    _kinds[id(code)] = kind, code
    return kind


def _line(code: CodeType, instruction: int) -> int:
    return next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line), code.co_firstlineno
    )

"""A script, or a module, run in this process as ``python`` itself would: as ``__main__``, with its own arguments."""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

_HERE = str(Path(__file__).parent)


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Raises whatever it raises. ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` are the script's from
    now on, also after its end: pickles, exit functions and spawned processes need them."""
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = Path(script)
    if path.is_dir() or zipfile.is_zipfile(path):
        _search_first(str(path))
        runpy.run_path(script, run_name="__main__")
        return
    _search_first(str(path.resolve().parent))
    file = str(path.absolute())
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__spec__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    vars(main)["__cached__"] = None
    code = compile(path.read_bytes(), file, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def without_our_frames(error: BaseException) -> None:
    """Take this package's frames, and those of Python's ``runpy``, out of the tracebacks of ``error`` and its causes:
    nobody who reads them has written these."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _thinned(link.__traceback__)
        link = link.__cause__ or link.__context__


def _thinned(traceback: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        ours = file.startswith(_HERE) and not file.startswith(str(Path(_HERE, "recipes")))
        if not ours and file != "<frozen runpy>":
            kept.append(traceback)
        traceback = traceback.tb_next
    after: types.TracebackType | None = None
    for one in reversed(kept):
        after = types.TracebackType(after, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return after


def _search_first(folder: str) -> None:
    """In place of the current folder, which ``python -m`` has put there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder

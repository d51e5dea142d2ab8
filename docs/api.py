"""Writes docs/api.md from the public names: ``python docs/api.py``. A test holds the page to what this writes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import safetrain

PAGE = Path(__file__).with_name("api.md")
_WIDTH = 100  # a longer signature takes a line for each argument
_START = """# Public names

Made by `python docs/api.py` from the code: names, signatures, the first paragraph of what each says of itself. All of
these are imported from `safetrain`; the package is typed (`py.typed`). Keys of the config are explained in
[configs/train.yaml](../configs/train.yaml); what counts as public, and how it changes, is in [upgrading](upgrading.md).
"""


class _Bare(str):
    """An annotation that is shown without quotes."""

    __repr__ = str.__str__


def page() -> str:
    """The whole of docs/api.md."""
    return "\n".join([_START, *(_section(name, getattr(safetrain, name)) for name in safetrain.__all__)])


def _section(name: str, thing: Any) -> str:
    lines = [f"## {name}\n", _code(_kind(thing), name, thing), _first_paragraph(thing)]
    if inspect.isclass(thing):
        for own, member in vars(thing).items():
            if own.startswith("_"):
                continue
            if isinstance(member, property):
                lines.append(f"### {name}.{own}\n\n```python\n{own}: {member.fget.__annotations__['return']}\n```\n")
                lines.append(_first_paragraph(member))
            elif inspect.isfunction(member) or isinstance(member, classmethod):
                lines += [f"### {name}.{own}\n", _code("def", own, getattr(thing, own)), _first_paragraph(member)]
    return "\n".join(line for line in lines if line)


def _kind(thing: Any) -> str:
    return "class" if inspect.isclass(thing) else "def"


def _code(kind: str, name: str, thing: Any) -> str:
    about = ""
    if inspect.isclass(thing):
        bases = [base.__name__ for base in thing.__bases__ if base.__name__ not in ("object", "Protocol")]
        if not inspect.isfunction(thing.__init__):  # an exception without arguments of its own
            return f"```python\nclass {name}({', '.join(bases)})\n```\n"
        about = f"  # a {bases[0]}" if bases else "  # a dataclass" if dataclasses.is_dataclass(thing) else ""
        signature = _bare(inspect.signature(thing)).replace(return_annotation=inspect.Signature.empty)
    else:
        signature = _bare(inspect.signature(thing))
    text = f"{kind} {name}{signature}"
    if len(text) > _WIDTH:
        returned = str(signature.replace(parameters=[])).removeprefix("()")
        text = f"{kind} {name}(\n" + "".join(f"    {part},\n" for part in _arguments(signature)) + f"){returned}"
    return f"```python\n{text.replace('<factory>', '...')}{about}\n```\n"


def _bare(signature: inspect.Signature) -> inspect.Signature:
    parameters = [
        each if each.annotation is each.empty else each.replace(annotation=_Bare(each.annotation))
        for each in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=_Bare(signature.return_annotation))


def _arguments(signature: inspect.Signature) -> list[str]:
    found: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(str(parameter))
    return found


def _first_paragraph(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else text
    if not own or text.startswith(f"{getattr(thing, '__name__', '')}("):  # inherited, or dataclass's own
        return ""
    return re.sub(r"``([^`]+)``", r"`\1`", text.split("\n\n")[0]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

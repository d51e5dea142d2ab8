"""For mkdocs: the pages of the top folder as pages beside those of docs/, and links into the code as their text.

The same files read well where they lie, so links are written for that, and turned here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_TOP = {"README": "index", "ARCHITECTURE": "architecture", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the top folder's pages."""
    for name, page in _TOP.items():
        files.append(File.generated(config, f"{page}.md", content=(ROOT / f"{name}.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links: to a page, to its place here; to a file of the code, into its name."""
    folder = ROOT if page.file.src_uri.removesuffix(".md") in _TOP.values() else ROOT / "docs"

    def turned(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve().relative_to(ROOT)
        if path.parts[0] == "docs" and len(path.parts) == 2:
            return f"[{text}]({path.name}{anchor})"
        if (name := path.stem) in _TOP and path.suffix == ".md":
            return f"[{text}]({_TOP[name]}.md{anchor})"
        return text

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)

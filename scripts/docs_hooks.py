# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Hooks of MkDocs for pages that link to files outside of docs/, as they do where the repository is read.

Each such file becomes a part of the site: Markdown as a page, Python as a page of code,
pictures and data as they are. Links are rewritten to them. A link to a folder becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
CODE = "---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n```python\n{text}\n```\n"


def site_path(path: str) -> str:
    """Return a file's path in the site: docs/ is its root, and README.md its front page."""
    path = "docs/index.md" if path == "README.md" else path
    return path.removeprefix("docs/") + (".md" if path.endswith(".py") else "")


def targets(text: str, path: str) -> Iterator[str]:
    """The files of the repository to which a page at this path links."""
    for match in LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if (ROOT / target).is_file():
            yield target


def on_files(files: Any, config: Any) -> Any:
    """Adds what pages link to, and what those pages link to."""
    known = {f"docs/{file.src_uri}" for file in files} | {"README.md"}
    waiting = sorted(path for path in known if path.endswith(".md") and path != "README.md")
    while waiting:
        page = waiting.pop()
        for path in targets((ROOT / page).read_text(encoding="utf-8"), page):
            if path in known:
                continue
            known.add(path)
            if path.endswith(".py"):
                text = CODE.format(path=path, text=(ROOT / path).read_text(encoding="utf-8").rstrip())
                files.append(File.generated(config, site_path(path), content=text))
            else:
                files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    path = f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if (ROOT / target).is_dir():
            return match[1]
        if not (ROOT / target).is_file():
            return match[0]
        link = posixpath.relpath(site_path(target), posixpath.dirname(uri) or ".")
        return f"[{match[1]}]({link}{match[3] or ''})"

    # Markdown in HTML is Markdown only where it says so; GitHub does not need that.
    return LINK.sub(rewritten, markdown).replace("<details>", '<details markdown="1">')

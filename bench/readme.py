# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Puts measured figures into README.md, so that none of them is typed by hand."""

from __future__ import annotations

from pathlib import Path


def refresh(readme: Path, section: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- SECTION:begin -->` and `<!-- SECTION:end -->`."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    old = readme.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{readme}: expected the lines {begin} and {end} once each, in this order")
    before, rest = old.split(begin)
    after = rest.split(end)[1]
    readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")

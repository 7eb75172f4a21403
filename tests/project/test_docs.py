# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The examples under docs/ give what the pages say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples(page, monkeypatch):
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    failed, _ = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert not failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_that_a_page_names_exist(page):
    """Links, and names of files and folders in `code`, from the page, the root, the package or the backend."""
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    names = re.findall(r"`([\w./*-]+(?:\.py|\.json|\.txt|\.md|/))`", text)
    package = ROOT / "tilegym_rmsnorm"
    folders = (page.parent, ROOT, package, package / "backends" / "cutile")
    missing = [
        name
        for name in links + names
        if name
        and not any((each / name).exists() or "*" in name and list(each.glob(name)) for each in folders)
    ]
    assert not missing

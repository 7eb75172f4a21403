# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The examples under docs/ give what the pages say, and the kernels that CONTRIBUTING.md names are those that run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tilegym_rmsnorm.backends.cutile.plans.problem import OPS, Device, Problem
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of

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


def test_the_shapes_that_contributing_names_run_the_kernels_it_names():
    """In the interpreter, where one steps through them: those of a forward and of a backward that needs dw, and, behind
    "without a gradient of weight", of one that does not."""
    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine").InterpretedMachine
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \((\d+), (\d+)\) \| (.*) \|$", text, re.M)
    assert len(rows) > 3
    for m, n, kernels in rows:
        launched = {op: launched_kernels(op, int(m), int(n), machine.facts) for op in OPS}
        with_dw, _, alone = kernels.partition("without a gradient of weight")
        assert (
            named(with_dw) <= launched["forward"] | launched["backward"] and named(alone) <= launched["dx"]
        ), (m, n)


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def launched_kernels(op: str, m: int, n: int, facts: Device) -> set[str]:
    asked = Problem(op, n, "float32", "float32", size_class(m, n), facts)
    plan = select(asked, tables_of(facts.architecture, None, None))
    return {
        step.kernel for step, grid in zip(plan.steps, plan.sizes(m).grids, strict=True) if grid is not None
    }

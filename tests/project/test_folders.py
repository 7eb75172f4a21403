# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Folders say what tests are: conftest.py has a line for each, whose markers exist, and no test lies elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def conftest(request: pytest.FixtureRequest):
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_every_folder_of_tests_has_a_line_and_nothing_else_has(conftest):
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert folders == set(conftest.FOLDERS)


def test_names_of_files_are_used_once():
    """pytest imports a file by its name alone: a second one of that name would be an error, or hide the first."""
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names))


def test_markers_exist(conftest, request):
    known = {re.split(r"[:(]", line)[0] for line in request.config.getini("markers")}
    assert {marker for markers in conftest.FOLDERS.values() for marker in markers} <= known


def test_tests_have_the_markers_of_their_folder(conftest, request):
    assert all(
        item.get_closest_marker(marker)
        for item in request.session.items
        for marker in conftest.FOLDERS[conftest.folder_of(item.path)]
    )


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/gpu/test_gpu.py::test_memory[torch]", "gpu-test_gpu"),
        ("tests/gpu/in_parts/test_every_variant.py::test_every_variant[dtype0-3]", None),
        ("tests/api/test_ops.py::test_eps_counts[inductor]", "gpu-inductor"),
        ("tests/api/test_ops.py::test_eps_counts[triton]", None),
        ("tests/plans/test_plan.py::test_inductor", None),
    ],
)
def test_on_a_gpu_tests_that_need_much_memory_share_a_process(conftest, nodeid, group):
    assert conftest.gpu_group(nodeid) == group

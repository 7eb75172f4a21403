# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The routes that calls take are those that routes.txt keeps (routes.py)."""

import pytest
import routes
from helpers import HAS_GPU, why_skip
from route_surroundings import SURROUNDINGS

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="the table is of a CPU without a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def kept():
    return routes.read(routes.KEPT.read_text(encoding="utf-8"))


def test_the_kept_table_has_every_cell(kept):
    assert set(kept[1]) == set(routes.cells()), f"rewrite it: {routes.COMMAND}"


COMPILED = ("AOTAutograd", "Dynamo", "compiled autograd")
EACH = [pytest.param(each, marks=[pytest.mark.slow] * each.startswith(COMPILED)) for each in SURROUNDINGS]


@pytest.mark.parametrize("surrounding", EACH)
def test_routes(kept, surrounding):
    version, expected = kept
    seen = routes.observed([surrounding])
    if why_skip("cutile"):
        seen = {cell: each for cell, each in seen.items() if cell.backend != "interpreter"}
    expected = {cell: expected[cell] for cell in seen if cell in expected}
    if routes.VERSION != version:
        seen, expected = (routes.of_any_version(each) for each in (seen, expected))
    if changed := routes.differences(expected, seen):
        raise AssertionError(
            "\n".join([*changed, f"Where that is meant, with torch {version}: {routes.COMMAND}"])
        )

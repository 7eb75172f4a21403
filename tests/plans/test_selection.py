# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Selections for rows of every width, as selected.txt has them: a change of rules, entries or code that moves anything
shows there as a change of that file."""

import bisect
import random
import re
from pathlib import Path

import pytest
import selection
from planning import problem, rules_of

from tilegym_rmsnorm.backends.cutile.plans.problem import OPS
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class


def test_what_is_selected_is_as_written():
    """Every range agrees at its ends and a width inside, every record at its ends and beside them."""
    chance, wrong, seen = random.Random(0), [], set()
    for key, divisor, runs in selection.read():
        seen.add(key)
        asked = {n + step for n in selection.borders(key) for step in (-2, -1, 0, 1)}
        for first, last, _ in runs:
            inside = chance.randrange(first, last + 1, divisor)
            odd = inside % (2 * divisor) == 0 and divisor != 16  # of a larger divisor: the one beside it
            asked |= {first, last, max(first, inside - divisor * odd)}
        begins = [first for first, _, _ in runs]
        for n in sorted(asked):
            if not 0 < n <= selection.WIDEST or selection.divisor_of(n) != divisor:
                continue
            place = bisect.bisect(begins, n) - 1
            written = runs[place][2] if place >= 0 and n <= runs[place][1] else None
            if (now := selection.text(key, n)) != written:
                wrong.append(f"{' '.join(key)}, {n} columns: {now}, as written {written}")
    some = "\n".join(wrong[:5])
    assert not wrong, f"where that is wanted, write the file anew: python tests/plans/selection.py\n{some}"
    assert seen == set(selection.keys())


def test_the_shapes_of_contributing_run_the_kernels_that_it_names():
    """One steps through them in the interpreter. A backward without dw is named behind "without a gradient"."""
    facts = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine").InterpretedMachine.facts
    text = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \((\d+), (\d+)\) \| (.*) \|$", text, re.M)
    assert len(rows) > 3
    for *shape, kernels in rows:
        (m, n), launched = map(int, shape), {}
        for op in OPS:
            plan = select(
                problem(op, n, "float32", size_class(m, n), facts=facts), rules_of(facts.architecture)
            )
            steps = zip(plan.steps, plan.sizes(m).grids, strict=True)
            launched[op] = {step.kernel for step, grid in steps if grid is not None}
        with_dw, alone = (set(re.findall(r"`(\w+)`", part)) for part in kernels.partition("without a")[::2])
        assert with_dw <= launched["forward"] | launched["backward"] and alone <= launched["dx"], shape

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What is selected for rows of every width is what selected.txt says: a change of rules, entries or code that moves
anything shows there as a change of that file."""

from __future__ import annotations

import bisect
import random

import selection


def test_what_is_selected_is_as_written():
    """At the ends of every range and a width inside it, and at the ends of every record and beside them."""
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

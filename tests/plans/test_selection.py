# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What is selected for rows of every width is what selected.txt says: a change of rules, entries or code that moves
anything shows there as a change of that file."""

from __future__ import annotations

import random

import selection


def test_the_ends_of_every_range_and_a_width_inside_are_selected_as_written():
    """Each width of a range that its divisor has (`selection.DIVISORS`)."""
    chance, wrong, seen = random.Random(0), [], set()
    for key, divisor, runs in selection.read():
        seen.add(key)
        for first, last, chosen in runs:
            inside = chance.randrange(first, last + 1, divisor)
            odd = inside % (2 * divisor) == 0 and divisor != 16  # of a larger divisor: the one beside it
            for n in {first, last, max(first, inside - divisor * odd)}:
                is_of_divisor = divisor == next(each for each in selection.DIVISORS if n % each == 0)
                if is_of_divisor and (now := selection.text(key, n)) != chosen:
                    wrong.append((key, n, chosen, now))
    assert not wrong, wrong[:5]
    assert seen == set(selection.keys())

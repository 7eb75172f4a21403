# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Cover every two options of a call at once, by few calls: a fault of two options shows in one of them.

for case in pairwise({"dtype": [FP16, BF16], "bias": [True, False], "n": [64, 100]}):
    check(**case)
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = tuple[str, int]  # an option, and the number of a value of it


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Return cases, each with a value of every option, that hold each two values of two options that `allowed` lets
    stand together, whatever the others are. The same options give the same cases.

    allowed: whether a case may be. It reads options by `case[name]` alone: it is asked about parts of cases, and the
    KeyError for an option that is not chosen yet names the one to choose next.
    """
    pairs = [
        pair
        for first, second in itertools.combinations(options, 2)
        for pair in itertools.product(_choices(options, first), _choices(options, second))
    ]
    # By a choice those that wait to stand beside it.
    waiting: dict[Choice, set[Choice]] = collections.defaultdict(set)
    for pair in pairs:
        _each_beside_the_other(waiting, pair, set.add)

    def complete(chosen: dict[str, int]) -> dict[str, int] | None:
        """Return a case with these choices, of the most pairs that wait, or None if there is none."""
        try:
            if not allowed({name: options[name][number] for name, number in chosen.items()}):
                return None
            following = next((name for name in options if name not in chosen), None)
        except KeyError as missing:
            following = missing.args[0]
            if following not in options or following in chosen:
                raise
        if following is None:
            return chosen
        for choice in sorted(_choices(options, following), key=lambda each: news(each, chosen), reverse=True):
            case = complete(chosen | dict([choice]))
            if case is not None:
                return case
        return None

    def news(choice: Choice, chosen: dict[str, int]) -> tuple[int, int]:
        return len(waiting[choice].intersection(chosen.items())), len(waiting[choice])

    cases = []
    for pair in pairs:
        if pair[1] not in waiting[pair[0]]:
            continue
        case = complete(dict(pair))
        _each_beside_the_other(waiting, pair, set.discard)
        if case is not None:
            for covered in itertools.combinations(case.items(), 2):
                _each_beside_the_other(waiting, covered, set.discard)
            cases.append({name: options[name][case[name]] for name in options})
    return cases


def _each_beside_the_other(
    waiting: Mapping[Choice, set[Choice]], pair: tuple[Choice, Choice], change: Callable[[set, Choice], None]
) -> None:
    for one, other in (pair, pair[::-1]):
        change(waiting[one], other)


def _choices(options: Mapping[str, Sequence[Any]], name: str) -> list[Choice]:
    """Return the values of an option by their numbers: a value need not be hashable."""
    return [(name, number) for number in range(len(options[name]))]

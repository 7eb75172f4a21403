# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results that a command line names, and figures and tables as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from bench.measure.shapes import Result
from tilegym_rmsnorm.commands import options


def read_result(text: str) -> Result:
    """A parser of command lines: the result that a file holds."""
    try:
        result = json.loads(options.path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a result in JSON, got {text}: {error}") from None
    if not isinstance(result, dict) or not result.get("records"):
        raise argparse.ArgumentTypeError(f"expected a result with records, got {text}")
    return result


def table_text(
    rows: Sequence[Sequence[Any]], headers: Sequence[str], style: str = "pipe", left: Sequence[int] = (0,)
) -> str:
    """A table whose columns are figures, but for those of `left`; nothing without rows."""
    align = ["left" if number in left else "right" for number in range(len(headers))]
    return tabulate(rows, headers, tablefmt=style, colalign=align, disable_numparse=True) if rows else ""


def figure_text(figure: float | None, form: str = ".0%") -> str:
    """Nothing, where there is no figure."""
    return "" if figure is None else format(figure, form)

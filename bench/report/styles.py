# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Style of each provider in pictures and in report.html: a colour and a marker that no other has. Backends under a
level of reproducibility are drawn nowhere: tables have what a level costs (levels.py).

The first eight colours are Okabe and Ito's. The others were chosen to be far from these and from one another, also as
people see them who are blind to red or green. The marker tells apart what is still alike.
"""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    """A colour, and the name of one marker in matplotlib and in plotly."""

    color: str
    marker: str
    symbol: str


STYLES = {
    "cutile": Style("#D55E00", "o", "circle"),
    "triton": Style("#0072B2", "s", "square"),
    "F.rms_norm": Style("#000000", "x", "x-thin"),
    "torch.compile": Style("#CC79A7", "D", "diamond"),
    "quack": Style("#56B4E9", "h", "hexagon"),
    "liger.cute": Style("#E8D44D", ">", "triangle-right"),
    "cutile[P=M]": Style("#E69F00", "P", "cross"),
    "torch.compile-max-autotune": Style("#663355", "d", "diamond-tall"),
    "liger.cutile": Style("#403500", "<", "triangle-left"),
    "liger.triton": Style("#6CD97E", "v", "triangle-down"),
    "tilegym": Style("#D90048", "p", "pentagon"),
    "torch.quack": Style("#00178C", "X", "x"),
    "torch": Style("#707070", "+", "cross-thin"),
}
OTHER = Style("#7A8B99", "*", "star")


def style_of(provider: str) -> Style:
    return STYLES.get(provider, OTHER)

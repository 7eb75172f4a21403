# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Writes the table of docs/residual-bias-heads.md: up to how many columns kernels do all of each kind of call.

python scripts/docs_variants.py     after a change of VARIANTS in tests/support/variants.py, or of rules.is_fused
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "residual-bias-heads.md"
TABLE = re.compile(r"^\| call \|.*\n(?:\|.*\n)+", re.MULTILINE)
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from planning import problem  # noqa: E402
from variants import VARIANTS, Variant  # noqa: E402

from tilegym_rmsnorm.backends.cutile.plans.problem import Form  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.rules import is_fused  # noqa: E402

ASKED = range(16, 65536 + 1, 16)  # aligned rows, whatever the dtype


def form_of(variant: Variant) -> Form:
    """The form of such a call, as host/norm.py makes it, its dtypes aside."""
    has_heads = variant.weight == "heads" or variant.layout != "contiguous"
    return Form(
        residual=variant.has_residual,
        bias=variant.bias_dtype is not None,
        heads=variant.size[-2] if has_heads else 0,
        per_head=variant.weight == "heads",
        d_residual=variant.has_residual and variant.alpha != 1.0,
    )


def widest(op: str, dtype: torch.dtype, form: Form, architecture: int = 90) -> str:
    """The most columns that kernels take, or "any"."""
    last = max(n for n in ASKED if is_fused(problem(op, n, dtype, architecture=architecture, form=form)))
    return "any" if last == ASKED[-1] else str(last)


def row(variant: Variant) -> tuple[str, str, str]:
    """`cutile`: forward, backward; `triton`."""
    if torch.float64 in variant:
        return ("refused",) * 3
    form = form_of(variant)
    without_db = form._replace(bias=False)
    if variant.weight == "none":  # nothing beside which db could be summed
        return (
            widest("forward", variant.dtype, form),
            f"{widest('dx', variant.dtype, without_db)}, db none",
            "any",
        )
    rest = widest("backward", variant.dtype, without_db)
    db = widest("backward", variant.dtype, form)
    backward = rest if rest == db else f"{rest}, db {db}"
    return widest("forward", variant.dtype, form), backward, "any"


def table() -> str:
    rows = ["| call | `cutile`: forward | `cutile`: backward | `triton` |", "|---|---|---|---|"]
    rows += [f"| {name} | {' | '.join(row(variant))} |" for name, variant in VARIANTS.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), page), encoding="utf-8")


if __name__ == "__main__":
    main()

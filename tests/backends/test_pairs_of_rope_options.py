# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope with every two options together, on each backend by each route: values and gradients against float64.

As test_pairs_of_options.py. Without k it is rms_norm_rope.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
from covering import pairwise
from helpers import BF16, DEVICE, FP16, FP32, settle_interpreters
from rope_cases import RopeCall, RopeCase, check_forward, check_gradients, make
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope, rope
from tilegym_rmsnorm.call.rope_spec import ROPE_OPTIONS, RopeRounding
from tilegym_rmsnorm.routes import rope_eager
from tilegym_rmsnorm.routes.rope_op import FORWARD

NAMES, RESULTS = ("q", "k", "q_weight", "k_weight"), ("q_out", "k_out")
WEIGHTS, WEIGHT_DTYPES = ("vector", "heads", "none"), (FP32, BF16, FP16)
LAYOUTS = "contiguous", "transposed", "offset", "gaps", "columns", "expanded"
OPTIONS = {
    "dtype": (BF16, FP16, FP32),
    "batch": (2, 1),
    "length": (5, 1),
    "heads": ((4, 2), (3, 3), (5, 0)),
    "widths": ((64, 64), (64, 16), (80, 20), (7, 4), (6, 6)),  # D and R
    "interleaved": (False, True),
    "q_weight": WEIGHTS,
    "q_weight_dtype": WEIGHT_DTYPES,
    "k_weight": WEIGHTS,
    "k_weight_dtype": WEIGHT_DTYPES,
    "tables": ("full", "half"),
    "has_tables_of_q": (False, True),  # cos and sin have q's dtype
    "rows": (
        "(T, R)",
        "(1, T, R)",
        "(B, T, R)",
        "(T,)",
        "(1, T)",
        "(B, T)",
        "outside",
    ),  # positions: the last ones
    "offset": (0.0, 1.0),
    "eps": (1e-3, 0.25),
    "casting": ("once", "llama"),
    "rounding": get_args(RopeRounding),
    "layout": ("packed", "gate", *LAYOUTS),
    "dy_layout": LAYOUTS,
    "table_layout": ("contiguous", "gaps", "offset", "columns"),
    "needs": ("all", *NAMES, "none"),  # which tensors require grad
    "used": ("all", "q_out", "k_out"),  # the results that a loss depends on
    "route": ("eager", "known", "op", "create_graph"),
}


def is_allowed(case: Mapping[str, Any]) -> bool:
    needs, used, has_k = case["needs"], case["used"], case["heads"][1] > 0
    if not has_k and (needs in ("k", "k_weight") or used != "all" or case["k_weight"] != "none"):
        return False
    for side in "qk":
        if case[f"{side}_weight"] == "none":
            if needs == f"{side}_weight" or case[f"{side}_weight_dtype"] != FP32:
                return False
    if used != "all" and (needs not in ("all", used[0], f"{used[0]}_weight") or case["rows"] == "outside"):
        return False
    return needs != "none" or (used == "all" and case["route"] != "create_graph")


CASES = pairwise(OPTIONS, is_allowed)


def made(case: Mapping[str, Any], seed: int) -> RopeCall:
    """The call as a backend gets it."""
    rows, dtype = case["rows"], case["dtype"]
    same = "batch", "length", "heads", "interleaved", "tables", "offset", "eps", "casting", "rounding"
    layouts = "layout", "dy_layout", "table_layout"
    call = make(
        RopeCase(
            dtype,
            n=case["widths"][0],
            rotary_dim=case["widths"][1],
            weight=(case["q_weight"], case["k_weight"]),
            weight_dtype=case["q_weight_dtype"],
            k_weight_dtype=case["k_weight_dtype"],
            table_dtype=dtype if case["has_tables_of_q"] else FP32,
            has_rows_of_batch=rows == "(B, T, R)",
            positions={"(T,)": "one", "(1, T)": "one", "(B, T)": "each", "outside": "each"}.get(rows),
            **{name: case[name] for name in (*same, *layouts)},
        ),
        DEVICE,
        seed,
    )
    if rows == "outside":
        call.tensors[6][-1, -1] = random.Random(seed).choice((-1, len(call.tensors[4]), 2**40))
    return call


def present(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: each for name, each in zip(names, values, strict=True) if each is not None}


def run(
    call: RopeCall, backend: str, rows: str, needs: str, used: str, route: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results, and the gradients that there are, by their names."""
    *heads, cos, sin, positions = call.tensors
    leaves = [
        None if each is None else each.detach().requires_grad_(needs in ("all", name))
        for name, each in zip(NAMES, heads, strict=True)
    ]
    if rows in ("(1, T, R)", "(B, T, R)"):
        cos, sin = (each.unflatten(0, (-1, leaves[0].shape[1])) for each in (cos, sin))
    if rows == "(T,)":
        positions = positions[0]
    spec = call.spec
    if route == "op":
        results = FORWARD(*leaves, cos, sin, positions, *spec[1:], backend)
    else:
        named = dict(zip(ROPE_OPTIONS, spec[1:], strict=True))
        named |= {"position_ids": positions, "backend": backend}
        if leaves[1] is None:
            results = rms_norm_rope(leaves[0], leaves[2], cos, sin, **named), None
        else:
            results = qk_norm_rope(*leaves, cos, sin, **named)
    found, dys = present(RESULTS, results), present(RESULTS, call.dys)
    recorded = {name: each for name, each in present(NAMES, leaves).items() if each.requires_grad}
    outputs = [name for name in found if used in ("all", name)]
    assert all(found[name].requires_grad == bool(recorded) for name in outputs)
    gradients = ()
    if recorded:
        gradients = torch.autograd.grad(
            [found[name] for name in outputs],
            list(recorded.values()),
            [dys[name] for name in outputs],
            create_graph=route == "create_graph",
            allow_unused=used != "all",
        )
    assert used != "all" or None not in gradients
    given = present([f"d{name}" for name in recorded], gradients)
    if route == "create_graph":  # PyTorch's operations keep other strides
        given = {name: each.detach().contiguous() for name, each in given.items()}
    return {name: each.detach() for name, each in found.items()}, given


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(backend, number, monkeypatch):
    case = CASES[number]
    seed = random.SystemRandom().getrandbits(31)
    print(case, "seed", seed)
    call, how = made(case, seed), {name: case[name] for name in ("rows", "needs", "used", "route")}
    if how["route"] == "known":
        settle_interpreters(monkeypatch)
        run(made(case, seed + 1), backend, **how)
        for owner, name in ((rope, "checked_rope"), (rope_eager, "checked_rope_backward")):
            monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("not a known call"))
    outputs, gradients = run(call, backend, **how)
    check_forward(call, outputs["q_out"], outputs.get("k_out"))
    used = (
        None if dy is None else dy if how["used"] in ("all", name) else torch.zeros_like(dy)
        for name, dy in zip(RESULTS, call.dys, strict=True)
    )
    check_gradients(call._replace(dys=tuple(used)), gradients)

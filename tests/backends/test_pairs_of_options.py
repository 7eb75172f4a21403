# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rms_norm with every two options together, on each backend by each route: values and gradients against float64.

Tests of one option leave out what two of them make together.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from covering import pairwise
from every_op import OPS, of_norm
from helpers import FP32
from option_cases import NORM_CALLS, is_norm_call
from option_pairs import ROUTES, values_of
from torch import Tensor
from variants import LAYOUTS, Variant, check, check_residual_out, llama_share, make

from tilegym_rmsnorm import RMSNorm

GRADIENTS = {"input": "dx", "weight": "dw", "bias": "db", "residual": "d_residual"}
OPTIONS = NORM_CALLS | {
    "size": (
        (2, 3, 4, 64),
        (3, 4, 7),
        (5, 2, 1),
        (2, 3, 2, 200),
        (1, 3, 2, 2560),
        (1, 1, 3, 3001),
        (2, 1, 2, 16392),
    ),
    "dims": (1, 2),  # that are normalized
    "eps": (1e-3, 0.25),
    "layout": tuple(LAYOUTS),
    "needs": ("all", *GRADIENTS, "none"),
    "used": ("all", "y", "residual_out"),
    "route": (*ROUTES, "module"),
}


def is_allowed(case: Mapping[str, Any]) -> bool:
    needs, used = case["needs"], case["used"]
    if case["residual_dtype"] is None and (needs == "residual" or used != "all"):
        return False
    if case["weight"] == "none":
        if needs == "weight" or (case["bias_dtype"] and case["route"] == "module"):
            return False
    if needs == "bias" and case["bias_dtype"] is None:
        return False
    if used == "residual_out" and needs in ("weight", "bias"):
        return False
    return is_norm_call(case) and (needs != "none" or (used == "all" and case["route"] != "create_graph"))


CASES = pairwise(OPTIONS, is_allowed)


def by_module(variant: Variant, leaves: Mapping[str, Tensor], backend: str) -> tuple[Tensor, ...]:
    x, weight, bias, residual = map(leaves.get, GRADIENTS)
    module = RMSNorm(
        x.shape[-variant.dims :],
        variant.eps,
        weight is not None,
        device=x.device,
        offset=variant.offset,
        bias=bias is not None,
        heads=variant.size[-2] if variant.weight == "heads" else None,
        residual_alpha=variant.alpha,
        residual_dtype=variant.residual_out_dtype,
        out_dtype=variant.out_dtype,
        casting=variant.casting,
        backend=backend,
    )
    for name, value in {"weight": weight, "bias": bias}.items():
        if value is not None:
            assert getattr(module, name).shape == value.shape
            setattr(module, name, value)
    return (module(x),) if residual is None else module(x, residual)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(backend, number, monkeypatch):
    case = CASES[number]
    variant = Variant(**{name: value for name, value in case.items() if name in Variant._fields})
    names, apart = ("y", "residual_out"), ("residual_out",)
    function = functools.partial(by_module, variant) if case["route"] == "module" else None
    seed, results, gradients = values_of(
        OPS[0], case, lambda seed: of_norm(variant, seed=seed), names, backend, monkeypatch, function, apart
    )
    found = results | {GRADIENTS[name]: each for name, each in gradients.items()}
    found = {name: each.detach().flatten(-variant.dims) for name, each in found.items()}

    inputs, residual_out = make(variant, seed=seed), found.pop("residual_out", None)
    if residual_out is not None:
        check_residual_out(variant, inputs, residual_out)
    if case["used"] == "y":
        inputs = inputs._replace(d_residual_out=None)
    if case["used"] == "residual_out":
        inputs = inputs._replace(dy=torch.zeros_like(inputs.dy))
    check(variant, inputs, residual_out, **found)
    if variant.normalized_dtype is not FP32:
        normalized = inputs.x if residual_out is None else residual_out
        share = llama_share(variant, inputs, normalized, found["y"])
        assert math.isnan(share) or (share > 0.5) == (variant.casting == "llama"), share

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rms_norm with every two options together, on each backend by each route: values and gradients against float64.

Tests of one option leave out what two of them make together. Numbers are new in each run; a failure prints the seed.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from covering import pairwise
from helpers import FP32, settle_interpreters
from option_cases import NORM_CALLS, is_norm_call
from torch import Tensor
from torch.nn import Parameter
from variants import LAYOUTS, Variant, VariantInputs, check, check_residual_out, llama_share, make, options

from tilegym_rmsnorm import RMSNorm, rms_norm
from tilegym_rmsnorm.ops.norm.op import FORWARD

NAMES = "x", "weight", "bias", "residual"
GRADIENTS = dict(zip(NAMES, ("dx", "dw", "db", "d_residual"), strict=True))
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
    "needs": ("all", *NAMES, "none"),  # which tensors require grad
    "used": ("all", "y", "residual_out"),  # the results that a loss depends on
    "route": ("eager", "known", "op", "module", "create_graph"),
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


def by_module(variant: Variant, inputs: VariantInputs, shape: tuple[int, ...], backend: str) -> Any:
    module = RMSNorm(
        shape,
        variant.eps,
        inputs.weight is not None,
        device=inputs.x.device,
        offset=variant.offset,
        bias=inputs.bias is not None,
        heads=variant.size[-2] if variant.weight == "heads" else None,
        residual_alpha=variant.alpha,
        residual_dtype=variant.residual_out_dtype,
        out_dtype=variant.out_dtype,
        casting=variant.casting,
        backend=backend,
    )
    for name in ("weight", "bias"):
        if (value := getattr(inputs, name)) is not None:
            assert getattr(module, name).shape == value.shape
            setattr(module, name, value)
    return module(inputs.x) if inputs.residual is None else module(inputs.x, inputs.residual)


def by_op(variant: Variant, inputs: VariantInputs, shape: tuple[int, ...], backend: str) -> Any:
    x, weight, bias, residual = inputs[:4]
    numbers = len(shape), variant.eps, variant.offset, variant.casting, variant.alpha
    dtypes = variant.residual_out_dtype, variant.out_dtype
    y, _, residual_out = FORWARD(x, residual, weight, bias, *numbers, *dtypes, backend)
    return y if residual is None else (y, residual_out)


def by_function(variant: Variant, inputs: VariantInputs, shape: tuple[int, ...], backend: str) -> Any:
    given = options(variant, inputs)
    return rms_norm(inputs.x, shape, inputs.weight, variant.eps, **given, backend=backend)


ROUTES = {"op": by_op, "module": by_module}


def run(
    variant: Variant, inputs: VariantInputs, backend: str, dims: int, needs: str, used: str, route: str
) -> dict[str, Tensor]:
    """y, residual_out and the gradients that there are, by their names."""
    shape = (variant.n,) if dims == 1 else (math.gcd(variant.n, 8), variant.n // math.gcd(variant.n, 8))
    inputs = VariantInputs(*(None if each is None else each.unflatten(-1, shape) for each in inputs))
    leaves = {
        name: Parameter(each, requires_grad=needs in ("all", name))
        for name, each in zip(NAMES, inputs, strict=False)
        if each is not None
    }
    results = ROUTES.get(route, by_function)(variant, inputs._replace(**leaves), shape, backend)
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, (inputs.dy, inputs.d_residual_out), strict=False)
    outputs = [pair for number, pair in enumerate(pairs) if used in ("all", ("y", "residual_out")[number])]
    outputs = [pair for pair in outputs if pair[0].requires_grad]  # not the sum where weight alone needs it
    recorded = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    assert bool(outputs) == bool(recorded)
    gradients: Sequence[Tensor | None] = ()
    if recorded:
        gradients = torch.autograd.grad(
            [output for output, _ in outputs],
            list(recorded.values()),
            [gradient for _, gradient in outputs],
            create_graph=route == "create_graph",
            allow_unused=used == "residual_out",
        )
    names = [GRADIENTS[name] for name in recorded]
    found = dict(zip(("y", "residual_out"), results, strict=False)) | dict(zip(names, gradients, strict=True))
    assert used == "residual_out" or None not in found.values()
    flat = {name: each.detach().flatten(-dims) for name, each in found.items() if each is not None}
    for name, each in flat.items():
        # PyTorch's operations, and the gradient of the sum that is passed on, have strides of their own.
        is_free = name in names and (route == "create_graph" or used == "residual_out")
        assert is_free or each.is_contiguous(), name
    return flat


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(backend, number, monkeypatch, checks):
    case = dict(CASES[number])
    seed = random.SystemRandom().getrandbits(31)
    print(case, "seed", seed)
    how = {name: case.pop(name) for name in ("dims", "needs", "used", "route")}
    variant = Variant(**case)
    inputs = make(variant, seed=seed)
    if how["route"] == "known":
        settle_interpreters(monkeypatch)
        run(variant, make(variant, seed=seed + 1), backend, **how)
        checks.clear()
    found = run(variant, inputs, backend, **how)
    assert how["route"] != "known" or not checks

    residual_out = found.pop("residual_out", None)
    if residual_out is not None:
        check_residual_out(variant, inputs, residual_out)
    if how["used"] == "y":
        inputs = inputs._replace(d_residual_out=None)
    if how["used"] == "residual_out":
        inputs = inputs._replace(dy=torch.zeros_like(inputs.dy))
    check(variant, inputs, residual_out, **found)
    if variant.normalized_dtype is not FP32:
        normalized = inputs.x if residual_out is None else residual_out
        share = llama_share(variant, inputs, normalized, found["y"])
        assert math.isnan(share) or (share > 0.5) == (variant.casting == "llama"), share

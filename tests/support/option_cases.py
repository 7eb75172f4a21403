# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Options of calls, and calls that a backend may be given (contract.py) by pairs of them: each two values that the
checks of a call let through together are in one.

    for case in norm_cases():
        run_norm(case, make(case.variant, dy_dtype=case.dy_dtype), forward, backward)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from covering import pairwise
from helpers import FP32
from rope_cases import RopeCase
from variants import BACKEND_LAYOUTS, Variant, VariantInputs, spec_of

from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.call.spec import Casting, dtype_of
from tilegym_rmsnorm.ops.norm.spec import wanted_of
from tilegym_rmsnorm.ops.rope.spec import RopeRounding

_OR_NONE = None, *KERNEL_DTYPES
_BOTH = False, True

# Of each call, whoever makes it: fields of a Variant, and of a RopeCase.
NORM_CALLS: dict[str, Sequence[Any]] = {
    "dtype": KERNEL_DTYPES,
    "weight": ("vector", "heads", "none"),
    "weight_dtype": KERNEL_DTYPES,
    "bias_dtype": _OR_NONE,
    "residual_dtype": _OR_NONE,
    "residual_out_dtype": _OR_NONE,
    "alpha": (1.0, 0.22, -2.0),
    "out_dtype": _OR_NONE,
    "offset": (0.0, 1.0),
    "casting": get_args(Casting),
}
ROPE_CALLS: dict[str, Sequence[Any]] = {
    "dtype": KERNEL_DTYPES,
    "heads": ((4, 2), (5, 0), (3, 3)),
    "length": (1, 5),
    "interleaved": _BOTH,
    "q_weight": ("vector", "heads", "none"),
    "k_weight": ("vector", "heads", "none"),
    "weight_dtype": KERNEL_DTYPES,
    "k_weight_dtype": KERNEL_DTYPES,
    "tables": ("full", "half"),
    "table_dtype": KERNEL_DTYPES,
    "has_rows_of_batch": _BOTH,
    "positions": (None, "one", "each"),
    "position_dtype": (torch.int64, torch.int32),
    "offset": (0.0, 1.0),
    "casting": get_args(Casting),
    "rounding": get_args(RopeRounding),
}
# Of the calls that a backend is given
NORM_OPTIONS = NORM_CALLS | {
    "n": (64, 100, 1024),
    "length": (3,),  # M, or T
    "has_heads": _BOTH,  # rows (M, N), or (B, T, H, N)
    "layout": tuple(dict.fromkeys((*BACKEND_LAYOUTS[2], *BACKEND_LAYOUTS[4]))),
    "dy_dtype": KERNEL_DTYPES,
    "has_d_residual_out": _BOTH,
    "needs_x": _BOTH,
    "needs_residual": _BOTH,
    "needs_weight": _BOTH,
    "needs_bias": _BOTH,
}
ROPE_OPTIONS = ROPE_CALLS | {
    "n": (6, 64, 99, 256),
    "rotary_dim": (6, 64, 80, 256),
    "layout": ("contiguous", "packed", "gate", "offset"),
    "dy_layout": ("contiguous", "transposed", "offset"),
    "dy_dtype": KERNEL_DTYPES,
    "needs_q_weight": _BOTH,
    "needs_k_weight": _BOTH,
}


class NormCase(NamedTuple):
    """A call of rms_norm and of its backward. needs: whether gradients of x, residual, weight and bias are needed.
    has_d_residual_out: whether residual_out is used behind the call."""

    variant: Variant
    dy_dtype: torch.dtype
    has_d_residual_out: bool
    needs: tuple[bool, bool, bool, bool]


def norm_cases(**changes: Sequence[Any]) -> list[NormCase]:
    """Return calls that hold every two options together. changes: in place of NORM_OPTIONS."""
    found = []
    for case in pairwise(NORM_OPTIONS | changes, _may_norm):
        n, length, has_heads = (case.pop(name) for name in ("n", "length", "has_heads"))
        dy_dtype, has_d_residual_out = (case.pop(name) for name in ("dy_dtype", "has_d_residual_out"))
        needs = tuple(case.pop(f"needs_{name}") for name in ("x", "residual", "weight", "bias"))
        variant = Variant(size=(2, length, 4, n) if has_heads else (length, n), **case)
        found.append(NormCase(variant, dy_dtype, has_d_residual_out, needs))
    return found


def is_norm_call(case: Mapping[str, Any]) -> bool:
    """Whether NORM_CALLS are given that mean something together."""
    if case["weight"] == "none" and case["weight_dtype"] != FP32:
        return False
    return case["residual_dtype"] is not None or (case["residual_out_dtype"] is None and case["alpha"] == 1.0)


def _may_norm(case: Mapping[str, Any]) -> bool:
    if case["layout"] != "far" and case["layout"] not in BACKEND_LAYOUTS[4 if case["has_heads"] else 2]:
        return False
    if case["weight"] == "heads" and not case["has_heads"]:
        return False
    if case["weight"] == "none" and case["needs_weight"]:
        return False
    if case["bias_dtype"] is None and case["needs_bias"]:
        return False
    if case["residual_dtype"] is None and (case["needs_residual"] or case["has_d_residual_out"]):
        return False
    # No backend is asked for db alone.
    return is_norm_call(case) and (case["needs_x"] or case["needs_residual"] or case["needs_weight"])


def run_norm(
    case: NormCase, inputs: VariantInputs, forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Any, Any]:
    """Return the results of a backend's functions. Of the backward they may be fewer than needed (`as_needed`)."""
    x, weight, bias, residual, dy, d_residual_out = inputs
    spec = spec_of(case.variant)
    outputs = forward(spec, (x, weight, bias, residual))
    _, rstd, residual_out = outputs
    alpha, wanted = wanted_of(case.needs, spec.alpha, tuple(map(dtype_of, (x, residual, weight, bias))))
    normalized = x if residual_out is None else residual_out
    tensors = normalized, dy, weight, rstd, d_residual_out if case.has_d_residual_out else None
    return outputs, backward(spec._replace(alpha=alpha), tensors, wanted)


def rope_cases(
    allowed: Callable[[Mapping[str, Any]], bool] = lambda case: True, **changes: Sequence[Any]
) -> list[RopeCase]:
    """Return calls that hold every two options together.

    changes: in place of ROPE_OPTIONS. allowed: as of `pairwise`, besides what the checks of a call say."""
    found = []
    for case in pairwise(ROPE_OPTIONS | changes, lambda case: _may_rope(case) and allowed(case)):
        case["wanted"] = case.pop("needs_q_weight"), case.pop("needs_k_weight")
        found.append(rope_case(**case))
    return found


def rope_case(*, q_weight: str, k_weight: str, **fields: Any) -> RopeCase:
    """Return the case whose weights are options of their own."""
    return RopeCase(**fields, weight=(q_weight, k_weight))


def is_rope_call(case: Mapping[str, Any]) -> bool:
    """Whether ROPE_CALLS, n and rotary_dim are given that mean something together, and may."""
    if case["rotary_dim"] > case["n"] or case["table_dtype"] not in (FP32, case["dtype"]):
        return False
    if case["heads"][1] == 0 and case["k_weight"] != "none":
        return False
    for weight, dtype in (("q_weight", "weight_dtype"), ("k_weight", "k_weight_dtype")):
        if case[weight] == "none" and case[dtype] != FP32:
            return False
    if case["positions"] is None:
        return case["position_dtype"] is torch.int64
    return not case["has_rows_of_batch"]


def _may_rope(case: Mapping[str, Any]) -> bool:
    weights = "q_weight", "k_weight"
    return is_rope_call(case) and not any(case[each] == "none" and case[f"needs_{each}"] for each in weights)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls whose memory is counted: their options, and functions that run them and their gradients."""

import torch
from helpers import BF16, FP32, HAS_GPU
from variants import Variant, options

from tilegym_rmsnorm import rms_norm

ROWS, HEADS = ((16384, 4096), (4, 4096, 32, 128)) if HAS_GPU else ((384, 64), (2, 48, 4, 64))
OF_ROWS = Variant(BF16, ROWS, weight_dtype=BF16)
OF_HEADS = OF_ROWS._replace(size=HEADS, layout="heads")
ADDED = OF_ROWS._replace(residual_dtype=BF16)
KINDS = {
    "plain": OF_ROWS,
    "bias": OF_ROWS._replace(bias_dtype=FP32),
    "y in float32": OF_ROWS._replace(out_dtype=FP32),
    "residual": ADDED,
    "residual, alpha": ADDED._replace(alpha=0.5),
    "residual in float32": ADDED._replace(residual_dtype=FP32),
    "residual kept in float32": ADDED._replace(residual_out_dtype=FP32),
    "residual and bias": ADDED._replace(bias_dtype=BF16),
    "heads": OF_HEADS,
    "heads, residual": OF_HEADS._replace(residual_dtype=BF16),
    "per-head": OF_HEADS._replace(weight="heads"),
    "per-head, all": OF_HEADS._replace(weight="heads", bias_dtype=FP32, residual_dtype=FP32, alpha=0.5),
}
NAMES = ("x", "weight", "bias", "residual")


def leaves_of(inputs, needing=NAMES):
    given = {name: getattr(inputs, name) for name in NAMES}
    return {n: None if t is None else t.detach().requires_grad_(n in needing) for n, t in given.items()}


def norm(variant, inputs, leaves, backend):
    """y, and residual_out behind it where there is one."""
    given = options(variant, inputs._replace(**leaves))
    results = rms_norm(leaves["x"], variant.n, leaves["weight"], variant.eps, **given, backend=backend)
    return results if variant.has_residual else (results,)


def gradients_of(results, leaves, inputs):
    needed = [leaf for leaf in leaves.values() if leaf is not None and leaf.requires_grad]
    given = (inputs.dy, inputs.d_residual_out)[: len(results)]
    return torch.autograd.grad(results, needed, given)

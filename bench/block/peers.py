# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Other libraries' functions for a block's ops, called below their autograd functions as providers/peers.py does it.

A library is called for the ops that it has, with what its autograd function does around them: quack and Liger copy
strided heads to rows, and save the copy of x for the backward, which then copies dy alone. None multiplies the branch
before it adds it. Of quack those settings are timed that were the fastest of a plain op (quack_configs.FASTEST), and
only where a family says so; of the others, those of providers/peers.py that the library chooses by itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.block.families import BlockInputs, Family
from bench.block.providers import BlockProvider, Compute, Results, make_block_providers
from bench.measure.shapes import Shape
from bench.providers.ours import EPS
from bench.providers.peers import GEMMA
from bench.providers.quack_configs import quack_fastest, quack_grids


def make_providers(
    name: str, family: Family, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[BlockProvider]:
    """The provider of that name for a family's ops at one shape; of a peer that has settings, one for each."""
    if name == "quack":
        return _quack(family, shape, dtype, device)
    if name in LIBRARIES:
        return LIBRARIES[name](shape, dtype, device)
    return make_block_providers(name, family, device)


def _rows(tensor: Tensor) -> Tensor:
    """(M, N): a copy where the dimensions before the last do not collapse."""
    return tensor.reshape(-1, tensor.shape[-1])


def _has(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _forwards(forward: Compute, residual_forward: Compute) -> dict[str, Compute]:
    return {"residual_forward": residual_forward, "qk_norm_forward": forward, "bias_forward": forward}


def _backwards(backward: Callable[[tuple[str, ...], BlockInputs], Results]) -> dict[str, Compute]:
    """backward: of the names of the results that are wanted, and the inputs."""
    wanted = {
        "residual_backward": ("dx", "dw"),
        "qk_norm_backward": ("dx", "dw"),
        "bias_backward": ("dx", "dw", "db"),
        "frozen_weight_backward": ("dx",),
    }
    return {op: functools.partial(backward, names) for op, names in wanted.items()}


def _quack(family: Family, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[BlockProvider]:
    """Its heuristic, which always sums dw; for a frozen weight the same config without; and others where they are
    tried."""
    quack, configs = importlib.import_module("quack.rmsnorm"), importlib.import_module("quack.rmsnorm_config")
    cols, bits = shape[1], dtype.itemsize * 8

    def forward(t: BlockInputs) -> Results:
        y, _, rstd = quack.rmsnorm_fwd(_rows(t.x), t.weight, bias=t.bias, eps=EPS, store_rstd=True)
        return y, rstd

    def residual_forward(t: BlockInputs) -> Results:
        return quack.rmsnorm_fwd(t.x, t.weight, residual=t.residual, eps=EPS, store_rstd=True)

    def backward(wanted: tuple[str, ...], t: BlockInputs) -> Results:
        options = {"has_bias": "db" in wanted, "has_residual": t.residual is not None}
        arguments = (t.packed, t.weight, _rows(t.dy), t.rstd, t.d_residual_out)
        return quack.rmsnorm_bwd(*arguments, **options)[: len(wanted)]

    calls = _forwards(forward, residual_forward) | _backwards(backward)
    providers = [BlockProvider("quack", calls, "its heuristic", is_lenient=True)]
    chosen = configs.RmsNormBwdConfig.from_analytical_heuristic(cols, bits, bits)
    usual, per_sm = configs.get_sm_count(cols, device), configs.get_sm_count(8192, device)
    frozen = _quack_backwards(quack, chosen, usual)["frozen_weight_backward"]
    providers.append(BlockProvider("quack", {"frozen_weight_backward": frozen}, "without dw"))
    if not family.tries_settings:
        return providers
    found = [(text, config, usual) for text, config in quack_fastest(chosen, cols, dtype.itemsize)]
    if shape[0] < usual:  # a partial row that no row of x is in is summed all the same
        found += quack_grids(chosen, cols, dtype.itemsize, usual, per_sm, shape[0])
    chosen = configs.RmsNormFwdConfig.from_analytical_heuristic(cols, bits)
    for text, config in quack_fastest(chosen, cols, dtype.itemsize):
        providers.append(BlockProvider("quack", _quack_forwards(quack, config), f"forward {text}", True))
    for text, config, partial_rows in found:
        calls = _quack_backwards(quack, config, partial_rows)
        providers.append(BlockProvider("quack", calls, f"backward {text}"))
    return providers


def _quack_forwards(quack: Any, config: Any) -> dict[str, Compute]:
    def forward(t: BlockInputs) -> Results:
        x = _rows(t.x)
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
        quack.rmsnorm_fwd_tuned.fn(x, t.weight, y, bias=t.bias, rstd=rstd, eps=EPS, config=config)
        return y, rstd

    def residual_forward(t: BlockInputs) -> Results:
        y, total = torch.empty_like(t.x), torch.empty_like(t.x)
        rstd = t.x.new_empty(t.x.shape[0], dtype=torch.float32)
        outputs = {"rstd": rstd, "residual": t.residual, "residual_out": total}
        quack.rmsnorm_fwd_tuned.fn(t.x, t.weight, y, **outputs, eps=EPS, config=config)
        return y, total, rstd

    return _forwards(forward, residual_forward)


def _quack_backwards(quack: Any, config: Any, partial_rows: int) -> dict[str, Compute]:
    def backward(wanted: tuple[str, ...], t: BlockInputs) -> Results:
        x = t.packed
        dx, options = torch.empty_like(x), {"dresidual_out": t.d_residual_out, "sm_count": partial_rows}
        sums: list[Tensor] = []
        for name in wanted[1:]:
            sums.append(x.new_empty((partial_rows, x.shape[1]), dtype=torch.float32))
            options |= {f"{name}_partial": sums[-1], f"has_{name}_partial": True}
        arguments = (x, t.weight, _rows(t.dy), t.rstd, dx)
        quack.rmsnorm_bwd_tuned.fn(*arguments, **options, config=config)
        return dx, *(each.sum(dim=0).to(t.weight.dtype) for each in sums)

    return _backwards(backward)


def _liger_triton(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[BlockProvider]:
    """Each as by default: the plain backward in place, that of the fused add not."""
    norm = importlib.import_module("liger_kernel.ops.rms_norm")
    fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
    block, warps = norm.calculate_settings(shape[1])

    def forward(t: BlockInputs) -> Results:
        y, _, rstd, *_ = norm.rms_norm_forward(_rows(t.x), t.weight, EPS, 0.0, GEMMA, None)
        return y, rstd

    # Before 0.8 dw is always summed, and Triton chooses the stages.
    can_skip_dw = _has(norm.rms_norm_backward, "needs_dw")
    stages = (2,) if _has(fused.fused_add_rms_norm_backward, "num_stages") else ()

    def backward(wanted: tuple[str, ...], t: BlockInputs) -> Results:
        arguments = (_rows(t.dy), t.packed, t.weight, t.rstd, 0.0, GEMMA, block, warps, True, None)
        options = {"needs_dw": "dw" in wanted} if can_skip_dw else {}
        return norm.rms_norm_backward(*arguments, **options)[: len(wanted)]

    def residual_forward(t: BlockInputs) -> Results:
        return fused.fused_add_rms_norm_forward(t.x, t.residual, t.weight, EPS, 0.0, GEMMA)[:3]

    def residual_backward(t: BlockInputs) -> Results:
        arguments = (t.dy, t.d_residual_out, t.normalized, t.weight, t.rstd, 0.0, GEMMA, block, warps)
        dx, _, dw = fused.fused_add_rms_norm_backward(*arguments, *stages, False)
        return dx, dw

    calls = _forwards(forward, residual_forward) | _backwards(backward)
    calls |= {"residual_backward": residual_backward}
    calls = {op: call for op, call in calls.items() if not op.startswith("bias")}
    return [BlockProvider("liger.triton", calls, is_lenient=True, overwrites_dy=True)]


def _liger_cutile(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[BlockProvider]:
    fused = importlib.import_module("liger_kernel.ops.cutile.ops.fused_add_rms_norm")
    block = fused.calculate_settings(shape[1])

    def forward(t: BlockInputs) -> Results:
        return fused._fused_add_rms_norm_forward_ct(t.x, t.residual, t.weight, EPS, 0.0, GEMMA)[:3]

    def backward(t: BlockInputs) -> Results:
        arguments = (t.dy, t.d_residual_out, t.normalized, t.weight, t.rstd, 0.0, GEMMA, block)
        dx, _, dw = fused._fused_add_rms_norm_backward_ct(*arguments)
        return dx, dw

    calls: dict[str, Compute] = {"residual_forward": forward, "residual_backward": backward}
    return [BlockProvider("liger.cutile", calls, is_lenient=True)]


def _liger_cute(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[BlockProvider]:
    fused = importlib.import_module("liger_kernel.ops.backends._cutedsl.fused_add_rms_norm")

    def forward(t: BlockInputs) -> Results:
        arguments = (t.x, t.residual, t.weight, EPS, 0.0, GEMMA)
        y, total, _, rstd = fused._fused_add_rms_norm_cutedsl_forward(*arguments)
        return y, total, rstd

    def backward(t: BlockInputs) -> Results:
        arguments = (t.dy, t.d_residual_out, t.normalized, t.weight, t.rstd, False, GEMMA)
        dx, _, dw = fused._fused_add_rms_norm_cutedsl_backward(*arguments)
        return dx, dw.to(t.weight.dtype)

    calls: dict[str, Compute] = {"residual_forward": forward, "residual_backward": backward}
    return [BlockProvider("liger.cute", calls, is_lenient=True)]


LIBRARIES = {
    "quack": _quack,
    "liger.cutile": _liger_cutile,
    "liger.cute": _liger_cute,
    "liger.triton": _liger_triton,
}

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The calls of `qk_norm_rope` that a search times and checks, as calls.py has those of rows: ENTRY_HEADS of a packed
projection, halves of whole heads, tables of T rows, gradients as attention leaves them.

M is B * T * (Hq + Hk).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile import rope
from tilegym_rmsnorm.backends.cutile.plans import rope as plans
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.rope import RopeChoice
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine
from tilegym_rmsnorm.call.rope_spec import RopeSpec, RopeTensors, RopeWanted
from tilegym_rmsnorm.measure import accuracy
from tilegym_rmsnorm.reference import rstd_torch
from tilegym_rmsnorm.rope_reference import (
    Tables,
    rope_forward_torch,
    rope_gradients_torch,
    rotated,
    rotated_back,
    tables_at,
)

EPS = 1e-6
LENGTH = 4096  # T where B * T is a multiple of it

Outputs = dict[str, Tensor]


class Inputs(NamedTuple):
    """Of one call. q and k are (B, T, H, D), as their gradients; weights (D,); cos and sin (T, D), any values."""

    q: Tensor
    k: Tensor
    dq_out: Tensor
    dk_out: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def spec(self) -> RopeSpec:
        n = self.q.shape[3]
        return RopeSpec(n, EPS, 0.0, n, False, "once", "end")

    @property
    def tensors(self) -> RopeTensors:
        return self.q, self.k, self.q_weight, self.k_weight, self.cos, self.sin, None


Run = Callable[[Inputs], Outputs]


def counts_of(bucket: Bucket) -> tuple[int, range]:
    """As of calls.py: multiples of the heads of a token."""
    return sum(plans.ENTRY_HEADS), plans.tokens_of_class(bucket.size, bucket.n)


def rows_moved(bucket: Bucket) -> tuple[int, int]:
    """How many arrays of rows a call reads, and writes."""
    return (1, 1) if bucket.op == "forward" else (2, 1)


def timed_inputs(m: int, bucket: Bucket, sets: int, device: torch.device) -> Iterator[Inputs]:
    """Of each set its own, as in each layer: or else they come from L2."""
    dtype = getattr(torch, bucket.dtype)
    normal = functools.partial(torch.randn, device=device)
    for _ in range(sets):
        yield _made(m, bucket.n, lambda *size: normal(size, dtype=dtype), lambda *size: normal(size))


def checked_inputs(m: int, bucket: Bucket, device: torch.device, seed: int) -> Inputs:
    """That tell wrong from right: heads of different scale, an outlier column, tables whose halves differ. Of an odd
    seed with float32 weights, whose gradients hide nothing, beside tables in the dtype of the heads."""
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, bucket.dtype)
    odd, n = seed % 2, bucket.n

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    def rows(*size: int) -> Tensor:
        heads = normal(*size) * normal(*size[:-1], 1).exp()
        heads[..., n // 3] *= 8
        return heads.to(dtype)

    made = _made(m, n, rows, lambda *size: normal(*size).to(dtype if odd else torch.float32))
    weights = ((normal(n) * 0.5 + 1.5).to(torch.float32 if odd else dtype) for _ in range(2))
    return made._replace(**dict(zip(("q_weight", "k_weight"), weights, strict=True)))


def _made(m: int, n: int, rows: Callable[..., Tensor], table: Callable[..., Tensor]) -> Inputs:
    """Inputs with weights of ones in the dtype of rows."""
    queries, keys = plans.ENTRY_HEADS
    tokens = m // (queries + keys)
    batch = 1 if tokens % LENGTH else tokens // LENGTH
    length = tokens // batch
    packed = rows(batch, length, queries + 2 * keys, n)
    q, k = packed[:, :, :queries], packed[:, :, queries : queries + keys]
    dq, dk = (rows(batch, heads, length, n).transpose(1, 2) for heads in (queries, keys))
    q_weight, k_weight = (packed.new_ones(n) for _ in range(2))
    return Inputs(q, k, dq, dk, q_weight, k_weight, table(length, n), table(length, n))


def runner(machine: Machine, bucket: Bucket, choice: RopeChoice) -> Run:
    """Return a function that runs a bucket's op by a choice, and names the results."""
    if bucket.op == "forward":
        return functools.partial(_forward, machine, choice)
    return functools.partial(_backward, machine, choice, bucket.op == "backward")


def _forward(machine: Machine, choice: RopeChoice, inputs: Inputs) -> Outputs:
    run = _bound(rope.bind_forward(inputs.spec, inputs.tensors, machine, choice))
    return _present(("q_out", "k_out"), run(inputs.tensors))


def _backward(machine: Machine, choice: RopeChoice, has_dw: bool, inputs: Inputs) -> Outputs:
    tensors = (inputs.dq_out, inputs.dk_out, *inputs.tensors)
    wanted = RopeWanted(inputs.q_weight.dtype, inputs.k_weight.dtype) if has_dw else RopeWanted()
    run = _bound(rope.bind_backward(inputs.spec, tensors, wanted, machine, choice))
    return _present(("dq", "dk", "dq_weight", "dk_weight"), run(tensors))


def _bound(run: Callable[..., Any] | None) -> Callable[..., Any]:
    if run is None:
        raise ValueError("no kernel takes such heads")
    return run


def _present(names: tuple[str, ...], results: tuple[Tensor | None, ...]) -> Outputs:
    pairs = zip(names, results, strict=True)
    return {name: result for name, result in pairs if result is not None}


def why_wrong(inputs: Inputs, outputs: Outputs) -> str | None:
    """Why results are not what they should be, None if they are: within what accuracy.py allows against float64."""
    worst, rounding = accuracy.Worst(), accuracy.Worst()
    steps: dict[str, float] = {}

    def meet(kind: str, part: Any, dtype: torch.dtype, exact: Tensor, scale: Tensor) -> None:
        rounding.meet(kind, exact.to(dtype), exact, scale)
        if kind in outputs:
            worst.meet(kind, outputs[kind][part], exact, scale)

    for name in ("q", "k"):
        x, dy, weight = (getattr(inputs, each) for each in (name, f"d{name}_out", f"{name}_weight"))
        batch, length, heads, n = x.shape
        sums = torch.zeros(2, n, dtype=torch.float64, device=x.device)
        chunk = max(1, accuracy.CHUNK_ELEMENTS // (batch * heads * n))
        for start in range(0, length, chunk):
            part = slice(None), slice(start, start + chunk)
            tables = (each[part[1]] for each in (inputs.cos, inputs.sin))
            y, dx, of_sums = _in_float64(inputs.spec, x[part], dy[part], weight, *tables)
            meet(f"{name}_out", part, x.dtype, *y)
            meet(f"d{name}", part, x.dtype, *dx)
            sums += of_sums
        dw, scale = sums[0], accuracy.row_scale(torch.maximum(sums[0].abs(), sums[1].sqrt()))
        meet(f"d{name}_weight", ..., weight.dtype, dw, scale)
        of_dw = max(32.0, 4 * math.sqrt(batch * length * heads))
        steps |= {f"{name}_out": 32.0, f"d{name}": 32.0, f"d{name}_weight": of_dw}
    allowed = {
        kind: 3 * error + steps[kind] * accuracy.FLOAT32_STEP for kind, error in rounding.errors.items()
    }
    return accuracy.why_wrong(worst.errors, allowed)


def _in_float64(
    spec: RopeSpec, x: Tensor, dy: Tensor, weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Compute the exact y and dx of some heads, each with the scale of its errors, the sum of the magnitudes of what is
    added up; these heads' part of dw, and of the squares of its terms, (2, D)."""
    x, dy, weight, cos, sin = (each.double() for each in (x, dy, weight, cos, sin))
    y, _ = rope_forward_torch((x, None, weight, None, cos, sin, None), spec)
    tensors = (dy, None, x, None, weight, None, cos, sin, None)
    dx, _, dw, _ = rope_gradients_torch(tensors, spec, RopeWanted(torch.float64))
    assert dw is not None

    first_cos, second_cos, first_sin, second_sin = (
        each.abs() for each in tables_at(cos, sin, None, spec, x.shape[:2])
    )
    added = Tables(first_cos, second_cos, -first_sin, second_sin)  # of magnitudes: nothing is taken away
    rstd = rstd_torch(x, spec.eps, 1)
    xhat, scale = (x * rstd).abs(), weight.abs()
    y_scale = rotated(xhat * scale, added, spec, x.dtype)
    dn = rotated_back(dy.abs(), added, spec)
    g = dn * scale
    dx_scale = (g + xhat * (xhat * g).mean(-1, keepdim=True)) * rstd
    squares = (dn * xhat).square().sum((0, 1, 2))
    of_y, of_dx = accuracy.row_scale(y_scale), accuracy.row_scale(dx_scale)
    return (y, of_y), (dx, of_dx), torch.stack([dw, squares])

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe a call of a backend's qk_norm_rope as one record: make its tensors, and check its results against float64.

    call = make(RopeCase(BF16, heads=(8, 2), interleaved=True))
    check_forward(call, *forward(call.spec, call.tensors))

The exact results are of a formula of its own, y = n * C + sign * n[partner] * S with tables of D columns, and of its
gradients by autograd. Tolerances are some roundings of the magnitudes that are added up, half a unit in the last place
of the result, and of each number that `casting` and `rounding` round on the way. That they are rounded the bits say.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from helpers import BF16, FP16, FP32, FP64, Expected, _half_ulp, assert_within
from torch import Tensor
from variants import arranged

from tilegym_rmsnorm.ops.rope.reference import rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import RopeBackwardTensors, RopeSpec, RopeTensors, RopeWanted

EPSILON = torch.finfo(FP32).eps
TURNED = 0.02  # of y in 16 bits: an rstd of other bits turns less than 1 % of the roundings over


class RopeCase(NamedTuple):
    """One kind of call. heads: Hq and Hk, which is 0 without k. weight: "vector", "heads" or "none", of q and of k.
    tables: "full" (rows, R) with random, different halves, or "half" (rows, R / 2). positions: "one" (1, T), "each"
    (B, T), or None: then the tables have T rows, or with has_rows_of_batch B * T. wanted: which weights of q and k
    need gradients."""

    dtype: torch.dtype = FP32
    batch: int = 2
    length: int = 5
    heads: tuple[int, int] = (4, 2)
    n: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    weight: tuple[str, str] = ("vector", "vector")
    weight_dtype: torch.dtype | None = None  # None: dtype
    k_weight_dtype: torch.dtype | None = None  # None: that of q's weight
    tables: str = "full"
    table_dtype: torch.dtype = FP32
    has_rows_of_batch: bool = False
    positions: str | None = None
    position_dtype: torch.dtype = torch.int64
    offset: float = 0.0
    eps: float = 1e-3
    casting: str = "once"
    rounding: str = "end"
    layout: str = "contiguous"  # of q and k: "packed", "gate", "far" on device meta, or as of `arranged`
    dy_layout: str = "transposed"  # as of `arranged`, or "far" on device meta
    table_layout: str = "contiguous"
    dy_dtype: torch.dtype | None = None  # None: dtype
    wanted: tuple[bool, bool] = (True, True)


# D and R: halves and rests of one tile and of several, of powers of two and not, aligned to 16 bytes and not
WIDTHS = [
    *((64, 64), (128, 64), (256, 64), (128, 128), (256, 256), (80, 80), (96, 96), (96, 48), (80, 20)),
    *((6, 6), (6, 4), (66, 34), (2, 2), (7, 4), (100, 2)),
]
CASES = {
    "plain": RopeCase(BF16, weight_dtype=BF16),
    "no weight": RopeCase(FP16, weight=("none", "none"), layout="packed"),
    "weight of q alone": RopeCase(BF16, weight=("vector", "none"), weight_dtype=FP32, offset=1.0),
    "weights of heads": RopeCase(BF16, weight=("heads", "heads"), heads=(5, 1)),
    "weights of as many heads": RopeCase(FP16, weight=("heads", "heads"), heads=(3, 3), weight_dtype=FP32),
    "weights of heads of k": RopeCase(BF16, weight=("vector", "heads"), weight_dtype=FP16, layout="gate"),
    "without k": RopeCase(BF16, heads=(5, 0), weight_dtype=FP32),
    "half tables": RopeCase(BF16, tables="half", layout="packed"),
    "tables of 16 bits": RopeCase(BF16, table_dtype=BF16),
    "half tables of 16 bits": RopeCase(FP16, table_dtype=FP16, tables="half", dy_dtype=FP32),
    "rows of each batch": RopeCase(BF16, batch=3, has_rows_of_batch=True, dy_layout="contiguous"),
    "one row of positions": RopeCase(BF16, positions="one", heads=(4, 1)),
    "positions of each batch": RopeCase(BF16, positions="each", batch=3, tables="half"),
    "positions of 32 bits": RopeCase(BF16, positions="each", position_dtype=torch.int32),
    "beside a gate": RopeCase(BF16, layout="gate", dy_layout="contiguous"),
    "begun elsewhere": RopeCase(BF16, layout="offset", dy_layout="offset"),
    "one step": RopeCase(BF16, batch=3, length=1, heads=(8, 1)),
    "one step, a tile of more heads than k has": RopeCase(BF16, batch=3, length=1, heads=(4, 2), eps=0.0),
    "one step at positions": RopeCase(BF16, batch=3, length=1, positions="each"),
    "64 heads": RopeCase(BF16, batch=1, length=3, heads=(64, 8)),
    "40 heads": RopeCase(FP32, batch=1, length=3, heads=(40, 8)),
    "all": RopeCase(
        FP32,
        weight=("heads", "vector"),
        weight_dtype=BF16,
        table_dtype=FP16,
        positions="each",
        offset=-0.5,
        layout="packed",
        dy_dtype=BF16,
    ),
}


def cases_of_widths(n: int, rotary_dim: int, interleaved: bool) -> list[RopeCase]:
    """Return two or three of CASES, of this form, in turn."""
    number = 2 * WIDTHS.index((n, rotary_dim)) + interleaved
    chosen = [case for index, case in enumerate(CASES.values()) if (index + number) % 9 == 0]
    return [case._replace(n=n, rotary_dim=rotary_dim, interleaved=interleaved) for case in chosen]


class RopeCall(NamedTuple):
    """A backend's arguments."""

    spec: RopeSpec
    tensors: RopeTensors
    dys: tuple[Tensor, Tensor | None]
    wanted: RopeWanted

    @property
    def backward_tensors(self) -> RopeBackwardTensors:
        return *self.dys, *self.tensors


def make(case: RopeCase, device: torch.device | str = "cpu", seed: int = 0) -> RopeCall:
    """Heads of scale 1/4 to 4, weights of both signs and away from 1."""
    generator = None if str(device) == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    b, t, n, dtype = case.batch, case.length, case.n, case.dtype
    queries, keys = case.heads

    def rows(heads: int, dtype: torch.dtype) -> Tensor:
        return (normal(b, t, heads, n) * torch.exp2(4 * uniform(b, t, heads, 1) - 2)).to(dtype)

    if case.layout == "packed":  # a projection of q, k and v
        both = rows(queries + 2 * keys, dtype)
        both[:, :, queries + keys :] = math.nan
        q, k = both[:, :, :queries], both[:, :, queries : queries + keys]
    elif case.layout == "gate":  # each head of q beside one of a gate
        q, k = rows(queries, dtype).repeat(1, 1, 1, 2)[..., :n], rows(keys, dtype)
    else:
        q, k = _both_laid_out(rows(queries, dtype), rows(keys, dtype), case.layout)

    def weight(kind: str, heads: int, dtype: torch.dtype) -> Tensor | None:
        size = (heads, n) if kind == "heads" else (n,)
        values = (0.3 + 1.7 * uniform(*size)) * normal(*size).sign() - case.offset
        return None if kind == "none" or not heads else values.to(dtype)

    table_rows = b * t if case.has_rows_of_batch else t
    columns = case.rotary_dim // (2 if case.tables == "half" else 1)
    positions = None
    if case.positions:
        table_rows += 3
        size = (1 if case.positions == "one" else b, t)
        positions = torch.randint(0, table_rows, size, generator=generator, device=device).to(
            case.position_dtype
        )
    cos, sin = (
        arranged(normal(table_rows, columns).to(case.table_dtype), case.table_layout) for _ in range(2)
    )
    spec = RopeSpec(n, case.eps, case.offset, case.rotary_dim, case.interleaved, case.casting, case.rounding)
    weight_dtype = case.weight_dtype or dtype
    weights = (
        weight(case.weight[0], queries, weight_dtype),
        weight(case.weight[1], keys, case.k_weight_dtype or weight_dtype),
    )
    wanted = RopeWanted(
        *(
            None if each is None or not needs else each.dtype
            for each, needs in zip(weights, case.wanted, strict=True)
        )
    )
    dy_dtype = case.dy_dtype or dtype
    dq, dk = _both_laid_out(rows(queries, dy_dtype), rows(keys, dy_dtype), case.dy_layout)
    if not keys:
        k = dk = None
    return RopeCall(spec, (q, k, *weights, cos, sin, positions), (dq, dk), wanted)


def _both_laid_out(of_q: Tensor, of_k: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "far":  # of q alone: a stride of batches that does not fit into 32 bits
        return of_q.new_empty_strided(of_q.shape, (2**31, *of_q.stride()[1:])), of_k
    return arranged(of_q, layout), arranged(of_k, layout)


class _Tables(NamedTuple):
    """y = n * cos + n[partner] * sin, with the sign in sin: (B or 1, T, 1, D), float64."""

    cos: Tensor
    sin: Tensor
    partner: Tensor


def tables_of(spec: RopeSpec, tensors: RopeTensors) -> _Tables:
    q, _, _, _, cos, sin, positions = tensors
    t, half, device = q.shape[1], spec.rotary_dim // 2, q.device
    pairs = torch.arange(half, device=device)
    first, second = (2 * pairs, 2 * pairs + 1) if spec.interleaved else (pairs, pairs + half)
    if cos.shape[1] == half:
        cos, sin = (
            (torch.cat((each, each), 1)[:, torch.argsort(torch.cat((first, second)))]) for each in (cos, sin)
        )
    rows = torch.arange(cos.shape[0], device=device).view(-1, t) if positions is None else positions
    is_inside = (rows >= 0) & (rows < cos.shape[0])
    nan = torch.full((), math.nan, dtype=FP64, device=device)
    cos, sin = (
        torch.where(is_inside[..., None], each.double()[torch.where(is_inside, rows, 0)], nan)[:, :, None]
        for each in (cos, sin)
    )
    partner = torch.arange(spec.n, device=device)
    partner[first], partner[second] = second, first
    sign = torch.ones(spec.rotary_dim, dtype=FP64, device=device)
    sign[first] = -1
    behind = cos.new_ones(*cos.shape[:3], spec.n - spec.rotary_dim)
    return _Tables(torch.cat((cos, behind), -1), torch.cat((sin * sign, 0 * behind), -1), partner)


def rotated(n: Tensor, tables: _Tables) -> Tensor:
    return n * tables.cos + n[..., tables.partner] * tables.sin


def _rotated_back(dy: Tensor, tables: _Tables) -> Tensor:
    return dy * tables.cos + (dy * tables.sin)[..., tables.partner]


def _magnitudes(tables: _Tables) -> _Tables:
    return tables._replace(cos=tables.cos.abs(), sin=tables.sin.abs())


def check_forward(call: RopeCall, q_out: Tensor, k_out: Tensor | None) -> None:
    tables, expected = tables_of(call.spec, call.tensors), _expected_forward(call)
    for number, (name, y) in enumerate((("q_out", q_out), ("k_out", k_out))):
        _check(name, y, expected[number])
        if y is not None and y.dtype != FP32:
            rounded = _rounded(call.spec, call.tensors[number], call.tensors[2 + number], tables).to(y.dtype)
            others = int(((y != rounded) & ~rounded.isnan()).sum())
            assert others <= 2 + TURNED * y.numel(), f"{name}: {others} of {y.numel()} are rounded otherwise"


def check_backward(
    call: RopeCall, dq: Tensor, dk: Tensor | None, dq_weight: Tensor | None, dk_weight: Tensor | None
) -> None:
    check_gradients(call, {"dq": dq, "dk": dk, "dq_weight": dq_weight, "dk_weight": dk_weight})


def assert_xhat_is_rounded(call: RopeCall, *dws: Tensor) -> None:
    """casting="llama" takes xhat in its dtype into dw: of one not rounded dw is far."""
    near, far = (
        rope_gradients_torch(call.backward_tensors, call.spec._replace(casting=casting), call.wanted)[2:]
        for casting in ("llama", "once")
    )
    for dw, rounded, exact in zip(dws, near, far, strict=True):
        assert (dw - rounded).norm() < 0.1 * (dw - exact).norm()


def check_gradients(call: RopeCall, found: Mapping[str, Tensor | None]) -> None:
    """Check found gradients by name."""
    expected = dict(zip(("dq", "dk", "dq_weight", "dk_weight"), _expected_backward(call), strict=True))
    for name, value in found.items():
        _check(name, value, expected[name])


def _check(name: str, value: Tensor | None, expected: Expected | None) -> None:
    """NaN where NaN is expected, elsewhere within the tolerance."""
    if expected is None:
        assert value is None, f"{name} was not asked for"
        return
    assert value is not None and value.is_contiguous()
    is_nan = expected.truth.isnan()
    assert torch.equal(value.isnan(), is_nan), f"{name}: NaN elsewhere than expected"
    kept = [torch.where(is_nan, 0, each) for each in (expected.truth, expected.tolerance)]
    assert_within({name: Expected(*kept, expected.dtype)}, **{name: torch.where(is_nan, 0, value)})


def _expected_forward(call: RopeCall) -> tuple[Expected | None, ...]:
    tables, expected = tables_of(call.spec, call.tensors), []
    for x, weight in zip(call.tensors[:2], call.tensors[2:4], strict=True):
        if x is None:
            expected.append(None)
            continue
        n = _normalized(call.spec, x.double(), None if weight is None else weight.double())
        magnitude = rotated(n.abs(), _magnitudes(tables))
        y = rotated(n, tables)
        tolerance = 8 * EPSILON * magnitude + _half_ulp(y, x.dtype)
        expected.append(Expected(y, tolerance + _bound_of_roundings(call.spec, x, weight, tables), x.dtype))
    return tuple(expected)


def outputs_of(spec: RopeSpec, tensors: RopeTensors) -> tuple[Tensor | None, ...]:
    """q_out and k_out in float64, rounded on the way as the spec asks, not at the end. Differentiable where it asks for
    no rounding."""
    tables = tables_of(spec, tensors)
    pairs = zip(tensors[:2], tensors[2:4], strict=True)
    return tuple(None if x is None else _rounded(spec, x, weight, tables) for x, weight in pairs)


def _rounded(spec: RopeSpec, x: Tensor, weight: Tensor | None, tables: _Tables) -> Tensor:
    """Compute y in float64, with the roundings to x's dtype that the spec asks for before the last one."""

    def r(value: Tensor, is_rounded: bool) -> Tensor:
        return value.to(x.dtype).double() if is_rounded else value

    n = r(_normalized(spec, x.double(), None), spec.casting == "llama")
    if weight is not None:
        n = n * (weight.double() + spec.offset)
    n, is_each = r(n, spec.rope_rounding != "end"), spec.rope_rounding == "each"
    return r(n * tables.cos, is_each) + r(n[..., tables.partner] * tables.sin, is_each)


def _bound_of_roundings(spec: RopeSpec, x: Tensor, weight: Tensor | None, tables: _Tables) -> Tensor:
    """Bound the change of y by the roundings that `_rounded` makes."""
    xhat = _normalized(spec, x.double(), None)
    factor = 1.0 if weight is None else weight.double() + spec.offset
    n, error = xhat * factor, torch.zeros_like(xhat)
    if spec.casting == "llama":
        error = _half_ulp(xhat, x.dtype) * abs(factor)
    if spec.rope_rounding != "end":
        error = error + _half_ulp(n.abs() + error, x.dtype)
    bound = rotated(error, _magnitudes(tables))
    if spec.rope_rounding == "each":
        products = n * tables.cos, n[..., tables.partner] * tables.sin
        bound = bound + sum(_half_ulp(each.abs() + bound, x.dtype) for each in products)
    return bound


def _expected_backward(call: RopeCall) -> tuple[Expected | None, ...]:
    tables, dxs, dws = tables_of(call.spec, call.tensors), [], []
    absolute = _magnitudes(tables)
    for x, weight, dy, dtype in zip(call.tensors[:2], call.tensors[2:4], call.dys, call.wanted, strict=True):
        if x is None:
            dxs.append(None)
            dws.append(None)
            continue
        leaf = x.double().requires_grad_()
        scale = torch.ones(call.spec.n, dtype=FP64, device=x.device) if weight is None else weight.double()
        scale.requires_grad_(weight is not None)
        y = rotated(_normalized(call.spec, leaf, scale if weight is not None else None), tables)
        dx, *dw = torch.autograd.grad(y, [leaf] if weight is None else [leaf, scale], dy.double())

        with torch.no_grad():
            dn = _rotated_back(dy.double().abs(), absolute)
            xhat = _normalized(call.spec, leaf, None).abs()
            g = dn if weight is None else dn * (scale + call.spec.offset).abs()
            rstd = 1 / torch.sqrt(leaf.square().mean(-1, keepdim=True) + call.spec.eps)
            magnitude = (g + xhat * (xhat * g).mean(-1, keepdim=True)) * rstd
            dxs.append(Expected(dx, 16 * EPSILON * magnitude + _half_ulp(dx, x.dtype), x.dtype))
            if weight is None or dtype is None:
                dws.append(None)
                continue
            summed, terms = tuple(range(4 - weight.ndim)), (dn * xhat).square()
            roundings = 8 + math.sqrt(terms[..., 0].numel()) / 4
            tolerance = roundings * EPSILON * terms.sum(summed).sqrt()
            exact = dw[0]
            if (
                call.spec.casting == "llama"
            ):  # xhat as it was multiplied, of which two roundings may turn over
                rounded = _normalized(call.spec, leaf, None).to(x.dtype).double()
                exact = (_rotated_back(dy.double(), tables) * rounded).sum(summed)
                tolerance = tolerance + 2 * (dn * xhat).amax(summed) * torch.finfo(x.dtype).eps
            dws.append(Expected(exact, tolerance + _half_ulp(exact, dtype), dtype))
    return *dxs, *dws


def _normalized(spec: RopeSpec, x: Tensor, weight: Tensor | None) -> Tensor:
    xhat = x / torch.sqrt(x.square().mean(-1, keepdim=True) + spec.eps)
    return xhat if weight is None else xhat * (weight + spec.offset)

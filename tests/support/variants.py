# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe a call of rms_norm with all its options as one record: make its inputs, and its results in float64.

    variant = Variant(FP32, residual_dtype=BF16, alpha=0.5, size=(2, 3, 4, 64), layout="heads")
    inputs = make(variant)
    check_all(variant, inputs, run(variant, inputs, backend))

or, of a backend's functions, by spec_of and wanted_of:

    check_residual_out(variant, inputs, residual_out)
    check(variant, inputs, residual_out, y=y, rstd=rstd, dx=dx)

residual_out is rounded before it is normalized, and all that follows depends on that rounding. So residual_out is
checked by itself, and the rest is computed from the residual_out that was returned.

Tolerances are those of helpers.py: twice the error that PyTorch's F.rms_norm and autograd make in float32 on the same
inputs, a floor of a few roundings, and half a unit in the last place of the result. casting="llama" adds half a unit of
xhat; that it rounds at all `llama_share` says.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP16, FP32, FP64, Expected, _half_ulp, assert_within
from torch import Tensor

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

# How the tensors of rows lie in memory, in the order x, residual, dy, d_residual_out. Sizes of two dimensions are rows.
LAYOUTS = {
    "contiguous": ("contiguous",) * 4,
    "heads": (
        "slice",
        "transposed",
        "transposed",
        "slice",
    ),  # q of qkv, and the gradient that attention leaves
    "mixed": ("contiguous", "slice", "transposed", "offset"),
    "slices": ("slice",) * 4,
    "transposed": ("transposed",) * 4,
    "offset": ("offset",) * 4,
    "gaps": ("gaps",) * 4,
    "columns": ("columns", "contiguous", "columns", "contiguous"),
    "expanded": ("contiguous", "contiguous", "expanded", "expanded"),
    "all expanded": ("expanded",) * 4,
}

# Layouts that contract.py lets a backend be given: of rows, and of more dimensions.
_ON_META = LAYOUTS | {"far": ("far", "contiguous", "far", "contiguous")}  # no other device has the memory
BACKEND_LAYOUTS = {
    2: ("contiguous", "slices", "offset", "gaps"),
    4: ("contiguous", "heads", "mixed", "slices", "transposed", "offset", "gaps"),
}


class Variant(NamedTuple):
    """One kind of call. size: of x, its last dimension normalized. dims: how many dimensions are normalized
    in a call of every_op.py; 2 splits the last."""

    dtype: torch.dtype = FP32
    size: tuple[int, ...] = (5, 64)
    weight: str = "vector"  # "none", "vector" (N,), or "heads" (H, N)
    weight_dtype: torch.dtype = FP32
    bias_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None  # of the residual that is given; None: none is
    residual_out_dtype: torch.dtype | None = None  # the argument residual_dtype
    alpha: float = 1.0
    out_dtype: torch.dtype | None = None
    offset: float = 0.0
    casting: str = "once"
    layout: str = "contiguous"
    eps: float = 1e-3
    dims: int = 1

    @property
    def n(self) -> int:
        return self.size[-1]

    @property
    def has_residual(self) -> bool:
        return self.residual_dtype is not None

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def normalized_dtype(self) -> torch.dtype:
        """Dtype of residual_out, or x."""
        if self.residual_dtype is None:
            return self.dtype
        return self.residual_out_dtype or torch.promote_types(self.dtype, self.residual_dtype)

    @property
    def vector_shape(self) -> tuple[int, ...]:
        return self.size[-2:] if self.weight == "heads" else self.size[-1:]


_HEADS = (2, 3, 4, 16)
# One call of each kind: the rows of the table of docs/residual-bias-heads.md.
VARIANTS = {
    "plain": Variant(BF16),
    "weight of another dtype": Variant(FP32, weight_dtype=BF16),
    "y of another dtype": Variant(BF16, out_dtype=FP32, weight_dtype=FP16),
    "bias": Variant(BF16, bias_dtype=FP16),
    "bias without a weight": Variant(BF16, weight="none", bias_dtype=FP32, casting="llama", out_dtype=FP32),
    "residual": Variant(BF16, residual_dtype=BF16),
    "residual kept in float32": Variant(BF16, residual_dtype=BF16, residual_out_dtype=FP32),
    "residual of another dtype, alpha": Variant(BF16, residual_dtype=FP32, alpha=0.22, casting="llama"),
    "residual rounded": Variant(FP32, residual_dtype=FP32, residual_out_dtype=FP16, casting="llama"),
    "residual and bias": Variant(FP16, residual_dtype=BF16, alpha=-2.0, bias_dtype=FP32, offset=1.0),
    "heads in place": Variant(BF16, _HEADS, layout="heads"),
    "heads in place, residual": Variant(BF16, _HEADS, residual_dtype=BF16, layout="heads"),
    "weights of heads": Variant(BF16, _HEADS, "heads", BF16, offset=1.0),
    "weights of heads, llama": Variant(
        BF16, _HEADS, "heads", casting="llama", out_dtype=FP32, layout="heads"
    ),
    "all of it": Variant(BF16, _HEADS, "heads", FP16, FP32, FP16, BF16, 0.5, FP32, 1.0, "llama", "mixed"),
    "float64": Variant(FP32, _HEADS, "heads", FP64, FP32, FP64, alpha=3.0),
}


class VariantInputs(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    dy: Tensor
    d_residual_out: Tensor | None


def make(
    variant: Variant,
    *,
    seed: int = 0,
    dy_dtype: torch.dtype | None = None,
    device: torch.device | str = DEVICE,
) -> VariantInputs:
    """Rows of scale 1/16 to 16, an outlier column, weight + offset of both signs and away from 1; rows of dy and of
    d_residual_out of different scale. dy_dtype: None for that of y."""
    generator = None if str(device) == "meta" else torch.Generator(device).manual_seed(seed)
    size, shape = variant.size, variant.vector_shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def rows(exponent: float, dtype: torch.dtype, layout: str) -> Tensor:
        scale = torch.exp2(exponent * (torch.rand((*size[:-1], 1), generator=generator, device=device) - 0.5))
        values = normal(*size) * scale
        if exponent == 8:
            values[..., size[-1] // 2] *= 16
        return arranged(values.to(dtype), layout)

    layouts = _ON_META[variant.layout]
    x, weight, bias, residual, d_residual_out = rows(8, variant.dtype, layouts[0]), None, None, None, None
    if variant.has_residual:
        residual = rows(8, variant.residual_dtype, layouts[1])
        d_residual_out = rows(4, variant.normalized_dtype, layouts[3])
    if variant.weight != "none":
        uniform = torch.rand(shape, generator=generator, device=device)
        weight = ((0.3 + 1.7 * uniform) * normal(*shape).sign() - variant.offset).to(variant.weight_dtype)
    if variant.bias_dtype is not None:
        bias = normal(*shape).to(variant.bias_dtype)
    dy = rows(4, dy_dtype or variant.y_dtype, layouts[2])
    return VariantInputs(x, weight, bias, residual, dy, d_residual_out)


def arranged(values: Tensor, layout: str) -> Tensor:
    """Return the same values in another layout; "expanded" repeats those of the first index. Memory between them is
    NaN, of integers -1."""
    size, gap = values.shape, math.nan if values.is_floating_point() else -1
    if layout == "contiguous":
        return values.contiguous()
    if layout == "expanded":
        return values[:1].expand(size)
    if layout == "one number":
        return values.flatten()[0].expand(size)
    if layout == "offset":
        parent = values.new_full((values.numel() + 1,), gap)
        view = parent[1:].view(size)
    elif layout == "gaps":  # rows farther apart than they are long
        view = values.new_full((*size[:-1], size[-1] + 8), gap)[..., : size[-1]]
    elif layout == "columns":  # a last stride of 2
        view = values.new_full((*size[:-1], 2 * size[-1]), gap)[..., ::2]
    elif layout == "slice" and len(size) >= 3:  # q, k or v of (B, T, 3, H, D)
        view = values.new_full((*size[:-2], 3, *size[-2:]), gap).select(-3, 1)
    elif layout == "slice":
        view = values.new_full((size[0], 3, size[1]), gap)[:, 1]
    elif layout == "transposed" and len(size) >= 3:
        view = values.new_full((*size[:-3], size[-2], size[-3], size[-1]), gap).transpose(-2, -3)
    elif layout == "transposed":
        view = values.new_full(size[::-1], gap).t()
    elif layout == "far":  # the first dimension's stride does not fit into 32 bits
        view = values.new_empty_strided(size, (2**31, *values.stride()[1:]))
    else:
        raise ValueError(f"layout: {layout!r}")
    return view.copy_(values)


def options(variant: Variant, inputs: VariantInputs) -> dict[str, Any]:
    """The keyword arguments of `rms_norm` and of `rms_norm_forward`."""
    given: dict[str, Any] = {"offset": variant.offset, "casting": variant.casting, "bias": inputs.bias}
    if variant.out_dtype is not None:
        given["out_dtype"] = variant.out_dtype
    if inputs.residual is not None:
        given |= {"residual": inputs.residual, "residual_alpha": variant.alpha}
        given["residual_dtype"] = variant.residual_out_dtype
    return given


def spec_of(variant: Variant) -> Spec:
    """Return the spec that a backend gets."""
    residual_dtype = variant.normalized_dtype if variant.has_residual else None
    numbers = variant.n, variant.eps, variant.offset, variant.casting, variant.alpha
    return Spec(*numbers, variant.out_dtype, residual_dtype)


def wanted_of(variant: Variant) -> Wanted:
    """All gradients, each of its tensor's dtype; one for x and residual where one serves both."""
    serves_both = variant.alpha == 1.0 and variant.residual_dtype == variant.dtype
    return Wanted(
        variant.dtype,
        None if serves_both else variant.residual_dtype,
        None if variant.weight == "none" else variant.weight_dtype,
        variant.bias_dtype,
    )


def check_residual_out(variant: Variant, inputs: VariantInputs, residual_out: Tensor) -> None:
    """alpha * x + residual in float32 has one value where alpha is 1; else a product may be rounded, or not."""
    x, residual, dtype = inputs.x, inputs.residual, variant.normalized_dtype
    wide = FP64 if FP64 in (x.dtype, residual.dtype) else FP32
    if variant.alpha == 1.0:
        torch.testing.assert_close(residual_out, (x.to(wide) + residual.to(wide)).to(dtype), rtol=0, atol=0)
    truth = variant.alpha * x.double() + residual.double()
    magnitude = (variant.alpha * x.double()).abs() + residual.double().abs()
    tolerance = 2 * torch.finfo(wide).eps * magnitude + _half_ulp(truth, dtype)
    assert_within({"residual_out": Expected(truth, tolerance, dtype)}, residual_out=residual_out)


def check(
    variant: Variant, inputs: VariantInputs, normalized: Tensor | None = None, **results: Tensor | None
) -> None:
    """Each result, of y, rstd, dx, d_residual, dw and db, has its dtype, shape and values. normalized: residual_out."""
    assert_within(expected(variant, inputs, normalized), **results)


def expected(
    variant: Variant, inputs: VariantInputs, normalized: Tensor | None = None
) -> dict[str, Expected]:
    """Return all exact results, each with its tolerance."""
    x = inputs.x if normalized is None else normalized
    truth, scale = _results(variant, inputs, x, FP64)
    double = any(tensor is not None and tensor.dtype == FP64 for tensor in inputs)
    low, _ = _results(variant, inputs, x, FP64 if double else FP32)
    eps = torch.finfo(FP64 if double else FP32).eps
    floor = dict.fromkeys(truth, 4 * eps)
    sum_of = math.prod(variant.size) // math.prod(variant.vector_shape)
    floor["dw"] = floor["db"] = (4 + math.sqrt(sum_of) / 2) * eps
    dtypes = {
        "y": variant.y_dtype,
        "rstd": FP64 if x.dtype == FP64 else FP32,
        "dx": variant.dtype,
        "d_residual": variant.residual_dtype,
        "dw": variant.weight_dtype,
        "db": variant.bias_dtype,
    }
    rounding = _rounding_of_xhat(variant, inputs, x)
    found = {}
    for name, value in truth.items():
        dtype = dtypes[name]
        if dtype is None:
            continue
        excess = ((low[name].double() - value).abs() / scale[name].clamp(min=1e-300)).max()
        tolerance = (2 * excess + floor[name]) * scale[name] + _half_ulp(value, dtype)
        found[name] = Expected(value, tolerance + rounding.get(name, 0.0), dtype)
    return found


def run(
    variant: Variant, inputs: VariantInputs, backend: str, function: Callable[..., Any] = rms_norm
) -> dict[str, Tensor | None]:
    """All results, by autograd: its `grad`, since `backward` may rearrange what becomes a leaf's gradient. function:
    `rms_norm`, or that compiled."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs[:4]]
    x, weight, bias, residual = leaves
    given = options(variant, inputs._replace(bias=bias, residual=residual))
    y = function(x, variant.n, weight, variant.eps, **given, backend=backend)
    residual_out, outputs, given = None, (y,), (inputs.dy,)
    if residual is not None:
        y, residual_out = outputs = y
        given = inputs.dy, inputs.d_residual_out
    gradients = iter(torch.autograd.grad(outputs, [t for t in leaves if t is not None], given))
    dx, dw, db, d_residual = (None if t is None else next(gradients) for t in leaves)
    results = {"y": y.detach(), "residual_out": residual_out, "dx": dx, "dw": dw, "db": db}
    return {**results, "d_residual": d_residual}


def check_all(variant: Variant, inputs: VariantInputs, results: dict[str, Tensor | None]) -> None:
    """All that `run` returns has its dtype, shape and values, and is contiguous."""
    assert not [name for name, each in results.items() if each is not None and not each.is_contiguous()]
    residual_out = results.pop("residual_out")
    if residual_out is not None:
        residual_out = residual_out.detach()
        check_residual_out(variant, inputs, residual_out)
    check(variant, inputs, residual_out, **{k: v for k, v in results.items() if v is not None})


def llama_share(variant: Variant, inputs: VariantInputs, x: Tensor, y: Tensor) -> float:
    """Return the share of elements of y that casting="llama" gives, of those that casting="once" gives otherwise; NaN
    without any. x: the forward's x, or residual_out."""
    xhat, factor, bias = _xhat(variant, x, FP64), _factor(variant, inputs, FP64), inputs.bias
    bias = 0.0 if bias is None else bias.double()
    llama, once = ((v.double() * factor + bias).to(y.dtype) for v in (xhat.to(x.dtype), xhat))
    # By more than y of float32 is rounded: of rows of one number a share is all or nothing.
    differ = (llama.double() - once.double()).abs() > 1e-5 * once.double().abs()
    count = differ.sum().item()
    return ((y == llama) & differ).sum().item() / count if count else math.nan


def _xhat(variant: Variant, x: Tensor, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x.to(dtype), (variant.n,), None, variant.eps)


def _factor(variant: Variant, inputs: VariantInputs, dtype: torch.dtype) -> Tensor | float:
    return 1.0 if inputs.weight is None else inputs.weight.to(dtype) + variant.offset


def _results(
    variant: Variant, inputs: VariantInputs, x: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results in `dtype`, by F.rms_norm and PyTorch's autograd, and the magnitudes of what each is a sum of."""
    shape, alpha = variant.vector_shape, variant.alpha if variant.has_residual else 1.0
    x = x.detach().to(dtype).requires_grad_()
    factor = torch.ones(shape, dtype=dtype, device=x.device) * _factor(variant, inputs, dtype)
    factor.requires_grad_()
    bias = torch.zeros_like(factor) if inputs.bias is None else inputs.bias.to(dtype)
    dy = inputs.dy.to(dtype)
    xhat = _xhat(variant, x, dtype)
    y = xhat * factor + bias
    d, dw = torch.autograd.grad(y, (x, factor), dy)
    d_residual_out = 0.0 if inputs.d_residual_out is None else inputs.d_residual_out.to(dtype)
    with torch.no_grad():
        rstd = (x.square().mean(-1, keepdim=True) + variant.eps).rsqrt()
        g, product = dy * factor, dy * xhat
        size = (g.abs() + xhat.abs() * (xhat * g).abs().mean(-1, keepdim=True)) * rstd
        size = size + abs(d_residual_out)
        db = dy.reshape(-1, *shape).sum(0)
        results = {
            "y": y.detach(),
            "rstd": rstd.flatten(),
            "dx": alpha * (d + d_residual_out),
            "d_residual": d + d_residual_out,
            "dw": dw,
            "db": db,
        }
        scales = {
            "y": (xhat * factor).abs() + bias.abs(),
            "rstd": rstd.flatten(),
            "dx": abs(alpha) * size,
            "d_residual": size,
            "dw": product.reshape(-1, *shape).square().sum(0).sqrt(),
            "db": dy.reshape(-1, *shape).square().sum(0).sqrt(),
        }
    return results, scales


def _rounding_of_xhat(variant: Variant, inputs: VariantInputs, x: Tensor) -> dict[str, Tensor]:
    """Bound the change of results by the rounding of xhat with casting="llama"."""
    if variant.casting != "llama":
        return {}
    rounding = _half_ulp(_xhat(variant, x.double(), FP64), x.dtype)
    factor = _factor(variant, inputs, FP64)
    summed = (inputs.dy.double().abs() * rounding).reshape(-1, *variant.vector_shape).sum(0)
    return {"y": rounding * abs(factor), "dw": summed}

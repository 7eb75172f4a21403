# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": qk_norm_rope, in all forms that contract.py knows, against the formula in float64.

Each case runs with the tiles that are selected, and with small ones: then each program of the backward walks over
several. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy
import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, FP64, HAS_GPU, Expected, _half_ulp, assert_within, why_skip
from torch import Tensor
from variants import arranged

from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.backends.registry import get_available_backends_for_op
from tilegym_rmsnorm.call.rope_spec import RopeSpec, RopeTensors, RopeWanted
from tilegym_rmsnorm.rope_reference import rope_forward_torch, rope_gradients_torch

pytestmark = [
    pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
    pytest.mark.usefixtures("poisoned_empty"),
]
VECTORS = "vector", "vector"
SMALL_TILE = 512  # elements


class Case(NamedTuple):
    D: int = 64
    R: int | None = None  # None: D
    size: tuple[int, int, int, int] = (2, 5, 4, 2)  # B, T, and heads of q and k, 0 without a k
    dtype: torch.dtype = BF16
    weights: tuple[str, str] = VECTORS  # or "heads", (H, D), or "none"
    weight_dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32)
    table_dtype: torch.dtype = FP32
    has_half_tables: bool = False
    rows: str = "T"  # or "B * T" rows, or positions: "shared", "own" by each batch, or some "outside"
    position_dtype: torch.dtype = torch.int64
    layouts: tuple[str, str, str, str] = (
        "packed",
        "packed",
        "transposed",
        "transposed",
    )  # q, k, dq_out, dk_out
    interleaved: bool = False
    casting: str = "once"
    rounding: str = "end"
    offset: float = 0.0
    eps: float = 1e-3
    dy_dtype: torch.dtype | None = None  # None: dtype
    frozen: tuple[str, ...] = ()

    @property
    def spec(self) -> RopeSpec:
        R = self.R or self.D
        return RopeSpec(self.D, self.eps, self.offset, R, self.interleaved, self.casting, self.rounding)


CASES = {
    "64": Case(),
    "80": Case(80, dtype=FP16, table_dtype=FP16),
    "128, grouped": Case(128, size=(2, 7, 8, 1), weight_dtypes=(BF16, FP16), offset=1.0),
    "256": Case(256, weights=("vector", "none"), layouts=("gaps", "slice", "slice", "offset")),
    "6": Case(6, size=(3, 29, 3, 2), dtype=FP32, layouts=("offset", "gaps", "contiguous", "transposed")),
    "a quarter of 256": Case(256, 64, size=(1, 6, 4, 2), offset=1.0),
    "a quarter of 80": Case(80, 20, has_half_tables=True, weights=("none", "vector")),
    "half of 128": Case(128, 64, rows="B * T", dtype=FP32, dy_dtype=BF16),
    "4 of 7": Case(7, 4, size=(2, 5, 5, 3), dtype=FP16, rows="shared"),
    "2 of 100": Case(100, 2, rows="own", has_half_tables=True),
    "interleaved": Case(interleaved=True, size=(2, 7, 3, 1)),
    "interleaved 80": Case(80, interleaved=True, rows="own", table_dtype=BF16, weights=("heads", "vector")),
    "interleaved quarter": Case(256, 64, interleaved=True, has_half_tables=True, rows="shared"),
    "interleaved 4 of 7": Case(7, 4, interleaved=True, dtype=FP32, rows="B * T"),
    "per-head": Case(128, size=(2, 5, 5, 3), weights=("heads", "heads"), offset=-0.25),
    "q per-head": Case(64, 32, size=(2, 9, 7, 2), weights=("heads", "vector"), rows="B * T"),
    "k per-head": Case(size=(2, 9, 2, 9), weights=("none", "heads"), interleaved=True, frozen=("q",)),
    "q alone": Case(96, size=(2, 5, 3, 0), dtype=FP32, rows="shared"),
    "no weights": Case(128, size=(2, 5, 2, 2), weights=("none", "none"), dy_dtype=FP32),
    "frozen weights": Case(frozen=("q", "k")),
    "a frozen k_weight": Case(128, weights=("vector", "heads"), frozen=("k",)),
    "one token": Case(128, size=(37, 1, 4, 2), rows="own"),
    "one of all": Case(size=(1, 1, 1, 1), layouts=("contiguous",) * 4),
    "no eps": Case(80, size=(1, 3, 3, 1), eps=0.0),
    "outside": Case(64, 32, size=(2, 6, 3, 2), rows="outside", dtype=FP32),
    "outside, of 32 bits": Case(size=(2, 6, 3, 2), rows="outside", position_dtype=torch.int32),
    "outside, interleaved": Case(48, size=(2, 6, 3, 2), rows="outside", interleaved=True),
    "llama, each": Case(128, casting="llama", rounding="each", table_dtype=BF16, weight_dtypes=(BF16, BF16)),
    "llama": Case(80, 40, casting="llama", dtype=FP16, interleaved=True),
    "each": Case(64, 16, rounding="each", weights=("heads", "none"), has_half_tables=True),
    "norm": Case(256, 64, rounding="norm", weights=("heads", "none"), has_half_tables=True, rows="own"),
    "llama, norm": Case(64, casting="llama", rounding="norm", dtype=FP16, interleaved=True, offset=1.0),
}


class Call(NamedTuple):
    tensors: RopeTensors
    dys: tuple[Tensor, Tensor | None]
    wanted: RopeWanted

    def run(self, spec: RopeSpec) -> dict[str, Tensor | None]:
        from tilegym_rmsnorm.backends.triton import launch

        before = [None if t is None else t.clone() for t in (*self.dys, *self.tensors)]
        forward = launch.qk_norm_rope_forward(spec, self.tensors)
        gradients = launch.qk_norm_rope_backward(spec, (*self.dys, *self.tensors), self.wanted)
        for tensor, old in zip((*self.dys, *self.tensors), before, strict=True):
            assert tensor is None or torch.equal(tensor, old), "an input is overwritten"
        names = "q_out", "k_out", "dq", "dk", "dq_weight", "dk_weight"
        return dict(zip(names, (*forward, *gradients), strict=True))


def make(case: Case, seed: int = 0) -> Call:
    """Heads of scale 1/16 to 16, tables of random numbers, not angles, and NaN between rows."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    B, T, *counts = case.size

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE)

    def heads(H: int, dtype: torch.dtype, layout: str) -> Tensor | None:
        if H == 0:
            return None
        values = (normal(B, T, H, case.D) * torch.exp2(2 * normal(B, T, H, 1)).clamp(1 / 16, 16)).to(dtype)
        if layout != "packed":
            return arranged(values, layout)
        return values.new_full((B, T, H + 3, case.D), math.nan)[:, :, 2 : H + 2].copy_(values)

    def weight(kind: str, H: int, dtype: torch.dtype) -> Tensor | None:
        if kind == "none" or H == 0:
            return None
        values = normal(H, case.D) if kind == "heads" else normal(case.D)
        return (values.sign() * (values.abs() + 0.3) - case.offset).to(dtype)

    columns = case.spec.rotary_dim // (2 if case.has_half_tables else 1)
    positions, count = None, {"T": T, "B * T": B * T}.get(case.rows, 3 * T + 1)
    if case.rows not in ("T", "B * T"):
        positions = torch.randint(
            count, (1 if case.rows == "shared" else B, T), generator=generator, device=DEVICE
        )
    if case.rows == "outside":
        positions[0, 1], positions[0, 4], positions[1, 2] = -1, count, torch.iinfo(case.position_dtype).max
    positions = None if positions is None else positions.to(case.position_dtype)
    cos, sin = (
        arranged(normal(count, columns).to(case.table_dtype), layout) for layout in ("gaps", "offset")
    )

    q, k, dq_out, dk_out = (
        heads(H, dtype, layout)
        for H, dtype, layout in zip(
            counts * 2, [case.dtype] * 2 + [case.dy_dtype or case.dtype] * 2, case.layouts, strict=True
        )
    )
    weights = [weight(*each) for each in zip(case.weights, counts, case.weight_dtypes, strict=True)]
    wanted = (
        None if each is None or name in case.frozen else each.dtype
        for name, each in zip("qk", weights, strict=True)
    )
    return Call((q, k, *weights, cos, sin, positions), (dq_out, dk_out), RopeWanted(*wanted))


def whole_tables(case: Case, tensors: RopeTensors) -> tuple[Tensor, Tensor]:
    """cos and sin of each rotated element of each token, (B, T, 1, R), in float64."""
    q, *_, cos, sin, positions = tensors
    B, T, R = *q.shape[:2], case.spec.rotary_dim
    if case.has_half_tables:
        cos, sin = (t.repeat_interleave(2, 1) if case.interleaved else t.repeat(1, 2) for t in (cos, sin))
    if positions is None:
        rows = torch.arange(len(cos), device=DEVICE).view(-1, T)
    else:
        rows = torch.where((positions >= 0) & (positions < len(cos)), positions, len(cos))
        cos, sin = (torch.cat([t, t.new_full((1, R), math.nan)]) for t in (cos, sin))
    return tuple(t.double()[rows.expand(B, T)][:, :, None] for t in (cos, sin))


def partners(case: Case) -> tuple[Tensor, Tensor]:
    """The other element of each one's pair, and the sign of its product."""
    elements, half = torch.arange(case.spec.rotary_dim, device=DEVICE), case.spec.rotary_dim // 2
    is_first = elements % 2 == 0 if case.interleaved else elements < half
    step = 1 if case.interleaved else half
    return torch.where(is_first, elements + step, elements - step), torch.where(is_first, -1.0, 1.0).double()


def side_in_float64(
    case: Case, x: Tensor, weight: Tensor | None, dy: Tensor, tables: tuple[Tensor, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """y, dx and dw of one of q and k, each with the magnitude of what it sums; the gradients by autograd."""
    (cos, sin), (partner, sign), R = tables, partners(case), case.spec.rotary_dim
    x = x.double().requires_grad_()
    shape = (case.D,) if weight is None else weight.shape
    factor = torch.ones(shape, dtype=FP64, device=DEVICE) if weight is None else weight.double() + case.offset
    factor.requires_grad_()
    rstd = 1 / (x.square().mean(-1, keepdim=True) + case.eps).sqrt()
    xhat = x * rstd
    n = xhat * factor
    y = torch.cat([n[..., :R] * cos + sign * n[..., partner] * sin, n[..., R:]], -1)
    dx, dw = torch.autograd.grad(y, (x, factor), dy.double())

    with torch.no_grad():
        dy, n = dy.double().abs(), n.abs()
        y_scale = torch.cat([n[..., :R] * cos.abs() + n[..., partner] * sin.abs(), n[..., R:]], -1)
        dn = torch.cat(
            [dy[..., :R] * cos.abs() + dy[..., partner] * sin[..., partner].abs(), dy[..., R:]], -1
        )
        g, xhat = dn * factor.abs(), xhat.abs()
        dx_scale = (g + xhat * (xhat * g).mean(-1, keepdim=True)) * rstd
        dw_scale = (dn * xhat).square().sum(tuple(range(4 - len(shape)))).sqrt()
    return [(y.detach(), y_scale), (dx, dx_scale), (dw, dw_scale)]


def expected_results(case: Case, call: Call) -> dict[str, Expected]:
    """By helpers.py: twice the error of rope_reference.py in float32, a few roundings, half a unit in the last place of
    the result. Roundings on the way are four of at most half a unit of what y sums; those of xhat in dw add up."""
    tables = whole_tables(case, call.tensors)
    q, k, q_weight, k_weight, *rest = call.tensors
    wide = [t if t is None else t.float() for t in (*call.dys, q, k, q_weight, k_weight, *rest[:2])]
    spec = case.spec._replace(casting="once", rope_rounding="end")
    low = dict(zip(("q_out", "k_out"), rope_forward_torch((*wide[2:], rest[2]), spec), strict=True))
    gradients = rope_gradients_torch((*wide, rest[2]), spec, RopeWanted(FP32, FP32))
    low |= dict(zip(("dq", "dk", "dq_weight", "dk_weight"), gradients, strict=True))

    eps, expected = torch.finfo(FP32).eps, {}
    for name, x, weight, dy in (("q", q, q_weight, call.dys[0]), ("k", k, k_weight, call.dys[1])):
        if x is None:
            continue
        y, dx, dw = side_in_float64(case, x, weight, dy, tables)
        found = {f"{name}_out": (*y, x.dtype, 6), f"d{name}": (*dx, x.dtype, 8)}
        if weight is not None:
            count = math.sqrt(x.numel() / weight.numel())
            found[f"d{name}_weight"] = (*dw, weight.dtype, 6 + count / 2)
        for key, (truth, scale, dtype, floor) in found.items():
            excess = ((low[key].double() - truth).abs() / scale.clamp(min=1e-300)).nan_to_num(0).max()
            tolerance = (2 * excess + floor * eps) * scale + _half_ulp(truth, dtype)
            if key.endswith("_out") and (case.casting, case.rounding) != ("once", "end"):
                tolerance += 4 * _half_ulp(scale, dtype)
            if key.endswith("weight") and case.casting == "llama":
                tolerance += torch.finfo(x.dtype).eps / 2 * scale * count
            expected[key] = Expected(truth, tolerance, dtype)
    return expected


def check(case: Case, call: Call, results: dict[str, Tensor | None]) -> None:
    """Each result is there if it is wanted, contiguous, and within its tolerance: NaN exactly where truth is NaN."""
    expected = expected_results(case, call)
    for name in case.frozen:
        expected.pop(f"d{name}_weight", None)
    assert {name for name, result in results.items() if result is not None} == set(expected)
    for name, (truth, tolerance, dtype) in expected.items():
        got, is_nan = results[name], truth.isnan()
        assert got.is_contiguous() and torch.equal(got.isnan(), is_nan), name
        assert case.rows == "outside" or not is_nan.any()
        numbers = Expected(truth.masked_fill(is_nan, 0), tolerance.masked_fill(is_nan, 0), dtype)
        assert_within({name: numbers}, **{name: got.masked_fill(is_nan, 0)})


@pytest.fixture(params=["selected", "small"])
def tiles(request, monkeypatch):
    from tilegym_rmsnorm.backends.triton import config

    if request.param == "small":
        monkeypatch.setattr(config, "FORWARD_TILE", SMALL_TILE)
        monkeypatch.setattr(config, "BACKWARD_TILE", SMALL_TILE)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_results(name, tiles):
    case = CASES[name]
    call = make(case)
    check(case, call, call.run(case.spec))


@pytest.mark.parametrize("name", ["64", "interleaved 80"])
def test_same_bits_twice(name, tiles):
    case = CASES[name]
    call = make(case)
    first, second = call.run(case.spec), call.run(case.spec)
    for key, result in first.items():
        assert torch.equal(result, second[key]), key


ROUNDINGS = tuple(itertools.product(("once", "llama"), ("end", "norm", "each")))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_casting_and_rounding_is_its_own(dtype, interleaved):
    """Tolerances alone let one pass as another. Not bit by bit: another rstd may turn a rounding over."""
    case = Case(128, 96, (2, 9, 4, 2), dtype, interleaved=interleaved, table_dtype=dtype)
    call = make(case)
    specs = {each: case.spec._replace(casting=each[0], rope_rounding=each[1]) for each in ROUNDINGS}
    references = {each: rope_forward_torch(call.tensors, spec) for each, spec in specs.items()}
    for each, spec in specs.items():
        results = call.run(spec)
        for index, name in enumerate(("q_out", "k_out")):
            shares = {
                other: (results[name] == reference[index]).float().mean().item()
                for other, reference in references.items()
            }
            assert shares.pop(each) > 0.995 and max(shares.values()) < 0.9, (each, shares)


@pytest.mark.parametrize("rounding", ["end", "norm", "each"])
def test_rounded_products_are_not_contracted(rounding, monkeypatch):
    """On a GPU (gpu/test_gpu_rope.py) that drops a rounding; Triton's interpreter contracts nothing."""
    from tilegym_rmsnorm.backends.triton import launch

    seen = []
    kernel = {(2,): lambda *arrays, **options: seen.append(options)}
    monkeypatch.setattr(launch.rope, "rope_forward", kernel)
    q, table = torch.ones(1, 1, 1, 16, device=DEVICE, dtype=BF16), torch.ones(1, 16, device=DEVICE)
    qk_norm_rope(q, q.clone(), None, None, table, table.clone(), rope_rounding=rounding, backend="triton")
    assert [each["enable_fp_fusion"] for each in seen] == [rounding != "each"]


def test_llama_rounds_xhat_in_the_gradients_of_weights():
    case = Case(128, size=(2, 9, 4, 2))
    call = make(case)
    q, k, *_ = call.tensors
    tables = whole_tables(case, call.tensors)
    results = {casting: call.run(case.spec._replace(casting=casting)) for casting in ("once", "llama")}
    for name, x, dy in (("dq_weight", q, call.dys[0]), ("dk_weight", k, call.dys[1])):
        xhat = x.double() / (x.double().square().mean(-1, keepdim=True) + case.eps).sqrt()
        (cos, sin), (partner, sign) = tables, partners(case)
        dn = dy.double() * cos - sign * dy.double()[..., partner] * sin[..., partner]
        exact = {"once": dn * xhat, "llama": dn * xhat.to(x.dtype).double()}
        effect = (exact["llama"] - exact["once"]).sum((0, 1, 2)).norm()
        for casting, terms in exact.items():
            assert (results[casting][name] - terms.sum((0, 1, 2))).norm() < 0.2 * effect


MISTAKES = {
    "another form": lambda case, call: (case._replace(interleaved=True), call),
    "sin of the other sign": lambda case, call: (case, _with(call, 5, -call.tensors[5])),
    "cos and sin swapped": lambda case, call: (case, _with(call, 4, call.tensors[5])),
    "k's weight for q": lambda case, call: (case, _with(call, 2, call.tensors[3])),
    "positions one off": lambda case, call: (case, _with(call, 6, call.tensors[6].roll(1, 1))),
    "another offset": lambda case, call: (case._replace(offset=1e-3), call),
    "another eps": lambda case, call: (case._replace(eps=2e-3), call),
    "heads of another order": lambda case, call: (case, _with(call, 0, call.tensors[0].flip(2))),
}


def _with(call: Call, index: int, tensor: Tensor) -> Call:
    tensors = list(call.tensors)
    tensors[index] = tensor
    return call._replace(tensors=tuple(tensors))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake):
    case = Case(rows="own", size=(2, 5, 3, 2), dtype=FP32)
    call = make(case)
    results = call.run(case.spec)
    check(case, call, results)
    wrong_case, wrong = MISTAKES[mistake](case, call)
    with pytest.raises(AssertionError, match="beyond the tolerance"):
        check(wrong_case, wrong, results)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_element_beside_a_row_is_read_or_written(interleaved, tiles):
    """Memory around arrays is NaN (see `make`); here the results' memory is watched."""
    empty, taken = torch.empty, []

    def guarded(shape, **kwargs):
        count = math.prod(shape)
        storage = empty((count + 128,), **kwargs).fill_(math.nan)
        storage[:64] = storage[64 + count :] = 77
        taken.append((storage, count))
        return storage[64 : 64 + count].view(shape)

    case = Case(20, 12, (2, 7, 3, 1), weights=("heads", "vector"), interleaved=interleaved)
    call = make(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        results = call.run(case.spec)
    check(case, call, results)
    assert len(taken) == 8, "two outputs, four gradients, two partial sums"
    for storage, count in taken:
        assert (storage[:64] == 77).all() and (storage[64 + count :] == 77).all()


@pytest.mark.much_memory
def test_strides_beyond_32_bits():
    """Of q and of dq_out by the batch, of dk_out by heads; and a row of cos that begins beyond element 2^31."""
    far = 2**31 + 8
    case = Case(8, size=(2, 3, 2, 2), dtype=FP16, table_dtype=FP16, rows="own")
    call = make(case)
    q, k, *weights, cos, sin, positions = call.tensors

    def moved(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        if HAS_GPU:
            storage = torch.zeros(far + 1024, dtype=FP16, device=DEVICE)
        else:
            storage = torch.from_numpy(
                numpy.zeros(far + 1024, numpy.float16)
            )  # no memory until it is written
        return storage.as_strided(tensor.shape, strides).copy_(tensor)

    cos = moved(cos[:2], (far, 1))
    tensors = moved(q, (far, 64, 16, 1)), k, *weights, cos, sin[:2], positions % 2
    dys = moved(call.dys[0], (far, 8, 32, 1)), moved(call.dys[1], (64, 8, far, 1))
    call = Call(tensors, dys, call.wanted)
    check(case, call, call.run(case.spec))


@pytest.mark.much_memory
def test_offsets_of_rows_beyond_32_bits_by_positions_of_32():
    """A position and a stride of a row of cos that 32 bits hold, but not their product."""
    far = 2**30
    case = Case(8, size=(2, 3, 2, 2), dtype=FP16, table_dtype=FP16, rows="own", position_dtype=torch.int32)
    call = make(case)
    *heads, cos, sin, positions = call.tensors
    storage = torch.from_numpy(numpy.zeros(3 * far + 8, numpy.float16))  # no memory until it is written
    storage = storage.to(DEVICE) if HAS_GPU else storage
    cos = storage.as_strided((4, 8), (far, 1)).copy_(cos[:4])
    call = Call((*heads, cos, sin[:4], positions % 2 + 2), call.dys, call.wanted)
    check(case, call, call.run(case.spec))


def test_the_registry_has_both_ops():
    for op in ("qk_norm_rope_forward", "qk_norm_rope_backward"):
        assert "triton" in get_available_backends_for_op(op)

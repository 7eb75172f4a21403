# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": residual, bias, heads in place, per-head weights and mixed dtypes, in every plan of its kernels.

Without a GPU the kernels run in Triton's interpreter, one program after the other: there a second run has the same
bits unless the first one leaves something behind, so one case of each plan looks. Expected values are those of
variants.py, in float64.
"""

import math
from typing import NamedTuple

import helpers
import pytest
import torch
import variants
from helpers import BF16, FP16, FP32, HAS_GPU, why_skip
from test_triton import BACKWARDS, FORWARDS
from variants import Variant

from tilegym_rmsnorm.ops.norm.spec import Wanted

pytestmark = [
    pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
    pytest.mark.usefixtures("guarded_empty"),
]
GUARD = 64  # elements on either side of an array that a launch allocates


class Case(NamedTuple):
    variant: Variant
    dy_dtype: torch.dtype | None = None  # None: y's
    frozen: tuple[str, ...] = ()  # gradients that nobody wants
    loose: bool = False  # dimensions of extent 1 have a stride that means nothing


def case(size=(13, 100), dtype=BF16, dy_dtype=None, frozen=(), loose=False, **rest) -> Case:
    return Case(Variant(dtype, size, **rest), dy_dtype, frozen, loose)


RESIDUAL = {"residual_dtype": BF16}
CASES = {
    "plain": case(offset=1.0),
    "float32": case(size=(13, 96), dtype=FP32, layout="gaps"),
    "16 bits, llama": case(dtype=FP16, weight_dtype=FP16, casting="llama", offset=-0.25, layout="offset"),
    "no weight": case(size=(13, 96), weight="none", casting="llama", offset=1.0),
    "bias": case(bias_dtype=FP16, offset=1.0, layout="gaps"),
    "bias without a weight": case(size=(13, 96), weight="none", bias_dtype=FP32, dy_dtype=FP32),
    "residual": case(**RESIDUAL, layout="slices"),
    "float32 residual_out, alpha": case(
        dtype=FP16,
        weight_dtype=BF16,
        alpha=0.22,
        casting="llama",
        layout="offset",
        **RESIDUAL,
        residual_out_dtype=FP32,
    ),
    "all at once": case(
        size=(2, 2, 3, 100),
        residual_dtype=FP32,
        residual_out_dtype=FP16,
        alpha=-1.5,
        bias_dtype=FP32,
        out_dtype=FP32,
        dy_dtype=FP16,
        weight_dtype=FP16,
        weight="heads",
        casting="llama",
        offset=-0.25,
        layout="mixed",
    ),
    "mixed dtypes": case(dtype=FP32, weight_dtype=FP16, out_dtype=BF16, dy_dtype=FP16, casting="llama"),
    "heads in place": case(size=(2, 3, 2, 96), layout="heads"),
    "heads and residual": case(size=(2, 3, 2, 100), layout="mixed", **RESIDUAL),
    "per-head": case(size=(2, 3, 2, 100), weight="heads", weight_dtype=BF16, offset=1.0, layout="heads"),
    "per-head and bias": case(size=(1, 5, 3, 96), weight="heads", bias_dtype=FP32, layout="slices"),
    "one head, one token": case(size=(5, 1, 1, 100), weight="heads", bias_dtype=BF16, loose=True),
    "one batch, one head": case(size=(1, 6, 1, 100), **RESIDUAL, loose=True),
    "one row": case(size=(1, 100), bias_dtype=FP32, **RESIDUAL, loose=True),
    "a frozen weight": case(bias_dtype=FP32, **RESIDUAL, frozen=("dw",)),
    "a frozen x": case(bias_dtype=FP32, frozen=("dx",)),
    "the residual's gradient alone": case(residual_dtype=FP32, alpha=2.0, frozen=("dx", "dw")),
}


# The cases that no plan is without, and whose bits are compared without a GPU
EVERY_PLAN = "all at once", "plain", "a frozen weight"
ALONE = "chunks", "reread"  # plans that have a kernel to themselves


def pairs_of(plans) -> list[tuple[str, str]]:
    """Plans and cases. Without a GPU and --every-config a plan has every second case and the next one the others, so
    that each case meets each kernel."""
    every = HAS_GPU or helpers.every_config
    return [
        (name, case)
        for number, name in enumerate(plans)
        for index, case in enumerate(CASES)
        if every or case in EVERY_PLAN or name in ALONE or (number + index) % 2 == 0
    ]


@pytest.fixture
def guarded_empty(monkeypatch):
    """Fill a launch's arrays with NaN, between elements that nobody may write."""
    taken, empty = [], torch.empty

    def guarded(shape, **kwargs):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(shape)
        storage = empty(count + 2 * GUARD, **kwargs).fill_(math.nan)
        storage[:GUARD] = storage[GUARD + count :] = 77
        taken.append((storage, count))
        return storage[GUARD : GUARD + count].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    yield
    assert taken
    for storage, count in taken:
        assert (storage[:GUARD] == 77).all() and (storage[GUARD + count :] == 77).all()


class Call:
    """Fresh tensors of a case, which its runs must leave as they are."""

    def __init__(self, case: Case, seed: int) -> None:
        self.variant = variant = case.variant
        inputs = variants.make(variant, seed=seed, dy_dtype=case.dy_dtype)
        if case.loose:
            inputs = inputs._replace(
                **{
                    name: loosened(getattr(inputs, name))
                    for name in ("x", "residual", "dy", "d_residual_out")
                }
            )
        self.inputs, self.before = inputs, [None if each is None else each.clone() for each in inputs]
        self.wanted = variants.wanted_of(variant)._replace(**dict.fromkeys(case.frozen))

    def forward(self, config):
        from tilegym_rmsnorm.backends.triton import host_norm

        x, weight, bias, residual, *_ = self.inputs
        results = host_norm.launch_forward(
            config, variants.spec_of(self.variant), (x, weight, bias, residual)
        )
        self._check_inputs()
        return results

    def backward(self, config, normalized, rstd):
        from tilegym_rmsnorm.backends.triton import host_norm

        tensors = (normalized, self.inputs.dy, self.inputs.weight, rstd, self.inputs.d_residual_out)
        results = host_norm.launch_backward(config, variants.spec_of(self.variant), tensors, self.wanted)
        self._check_inputs()
        return results

    def _check_inputs(self):
        for each, before in zip(self.inputs, self.before, strict=True):
            assert each is None or torch.equal(each, before)


def loosened(rows):
    if rows is None:
        return None
    strides = [stride if extent > 1 else 7 for extent, stride in zip(rows.shape, rows.stride(), strict=True)]
    return rows.as_strided(rows.shape, (*strides[:-1], 1))


@pytest.mark.parametrize(("name", "case"), pairs_of(FORWARDS))
def test_forward(name, case):
    call = Call(CASES[case], seed=0)
    y, rstd, residual_out = call.forward(FORWARDS[name])
    if residual_out is not None:
        variants.check_residual_out(call.variant, call.inputs, residual_out)
    variants.check(call.variant, call.inputs, residual_out, y=y, rstd=rstd)
    assert (residual_out is None) == (call.inputs.residual is None)
    assert all(each is None or each.is_contiguous() for each in (y, rstd, residual_out))
    if (
        call.variant.casting == "llama"
        and call.inputs.weight is not None
        and call.variant.normalized_dtype != FP32
    ):
        normalized = call.inputs.x if residual_out is None else residual_out
        assert variants.llama_share(call.variant, call.inputs, normalized, y) > 0.9
    if HAS_GPU or case in EVERY_PLAN:
        for one, again in zip((y, rstd, residual_out), call.forward(FORWARDS[name]), strict=True):
            assert one is None or torch.equal(one, again)


@pytest.mark.parametrize(("name", "case"), pairs_of(BACKWARDS))
def test_backward(name, case):
    call = Call(CASES[case], seed=1)
    x, residual, dtype = call.inputs.x, call.inputs.residual, call.variant.normalized_dtype
    normalized = x if residual is None else (call.variant.alpha * x.float() + residual.float()).to(dtype)
    rstd = (normalized.double().square().mean(-1) + call.variant.eps).rsqrt().float().flatten()
    gradients = call.backward(BACKWARDS[name], normalized, rstd)
    compares = HAS_GPU or case in EVERY_PLAN
    again = call.backward(BACKWARDS[name], normalized, rstd) if compares else gradients

    wanted = {
        each: dtype for each, dtype in zip(Wanted._fields, call.wanted, strict=True) if dtype is not None
    }
    got = dict(zip(Wanted._fields, gradients, strict=True))
    variants.check(call.variant, call.inputs, normalized, **{each: got[each] for each in wanted})
    for each, other in zip(got, again, strict=True):
        if each in wanted:
            assert got[each].is_contiguous() and torch.equal(got[each], other)
        else:
            assert got[each] is None and other is None

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A call like one that has passed all checks skips them. Whatever may differ between two calls must be seen: each case
makes a call known, changes one thing, and must get what it would get as the first call of a process."""

import inspect
import math

import pytest
import torch
from known_calls import B, N, R, W, X, call, make_known
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.routes import known_calls


class Subclass(Tensor):
    pass


def outcome(**arguments):
    """Return a call's results or error, to compare."""
    try:
        result = call(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        (type(t), t.dtype, t.shape, t.device, None if isinstance(t, FakeTensor) or t.is_meta else t.tolist())
        for t in tensors
    ]


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"weight": Parameter(W)},
        {"weight": None},
        {"eps": None},
        {"input": X.bfloat16(), "weight": W.bfloat16()},
        {"offset": 1.0},
        {"casting": "llama"},
        {"normalized_shape": N},
        {"normalized_shape": [N]},
        {"normalized_shape": torch.Size([N])},
        {"input": X[0]},
        {"input": X.view(3, 1, N)},
        {"backend": "auto"},
        {"backend": None},
        {"residual_alpha": float("1")},
        {"bias": torch.rand(N)},
        {"weight": None, "bias": torch.rand(N)},
        {"residual": R},
        {"residual": R, "residual_alpha": 0.5, "residual_dtype": torch.float64, "bias": torch.rand(N)},
        {"out_dtype": torch.bfloat16},
        {"input": X.view(3, 2, 4), "normalized_shape": (2, 4), "weight": W.view(2, 4)},
        {"input": torch.randn(2, 3, 5, N), "weight": torch.rand(5, N), "bias": torch.rand(5, N)},
        {"input": torch.randn(2, 5, 7, N)[:, :, 1:4], "weight": torch.rand(3, N)},
        {"input": torch.randn(2, 5, 3, N).transpose(1, 2)},
        {"input": X[:1].expand(3, N)},
    ],
)
def test_the_second_call_is_known(same, checks):
    make_known(checks, **same)
    shortly = outcome(**same)
    known_calls.forget()
    assert shortly == outcome(**same)


def test_known_calls_read_their_own_tensors(checks):
    """Other values at other addresses are seen as alike."""
    make_known(checks, residual=R, bias=B)
    tensors = {
        "input": torch.randn(3, N),
        "weight": torch.rand(N),
        "residual": torch.randn(3 * N + 4)[4:].view(3, N),
    }
    tensors["bias"] = torch.rand(N)
    shortly = outcome(**tensors)
    assert not checks
    known_calls.forget()
    assert shortly == outcome(**tensors) and shortly != outcome(residual=R, bias=B)


def test_a_weight_changed_in_place_or_replaced_counts(checks):
    weight = Parameter(W.clone(), requires_grad=False)
    make_known(checks, weight=weight)
    for change in (lambda: weight.mul_(2), lambda: setattr(weight, "data", torch.rand(N))):
        change()
        assert torch.equal(call(weight=weight), call(weight=weight.detach().clone()))
    weight.data = torch.rand(N, dtype=torch.float64)
    assert torch.equal(call(weight=weight), call(weight=weight.detach().clone()))


UNKNOWN = {  # must go through the checks, to run or to be refused
    "eps": {"eps": 0.5},
    "no eps": {"eps": None},
    "offset": {"offset": 1.0},
    "more rows": {"input": torch.randn(7, N)},
    "another width": {"input": torch.randn(3, 5), "normalized_shape": (5,), "weight": torch.rand(5)},
    "one dimension": {"input": X[1]},
    "three dimensions": {"input": torch.randn(2, 3, N)},
    "row stride": {"input": torch.randn(3, 2 * N)[:, :N]},
    "column stride": {"input": torch.randn(3, 2 * N)[:, ::2]},
    "transposed": {"input": torch.randn(N, 3).t()},
    "transposed heads": {"input": torch.randn(2, 5, 3, N).transpose(1, 2)},
    "expanded": {"input": X[:1].expand(3, N)},
    "one row of any stride": {"input": X.as_strided((1, N), (0, 1))},
    "alignment": {"input": torch.randn(3 * N + 1)[1:].view(3, N)},
    "strided weight": {"weight": torch.rand(2 * N)[::2]},
    "parameter": {"weight": Parameter(W + 1, requires_grad=False)},
    "out_dtype": {"out_dtype": torch.float64},
    "out_dtype of x": {"out_dtype": torch.float32},
    "residual_dtype without a residual": {"residual_dtype": torch.float32},
    "dtype": {"input": X.double()},
    "dtype of weight": {"weight": W.bfloat16()},
    "parameter of another dtype": {"weight": Parameter(W.half())},
    "no weight": {"weight": None},
    "casting": {"casting": "llama"},
    "bias": {"bias": torch.ones(N)},
    "residual": {"residual": torch.ones(3, N)},
    "several dimensions": {
        "input": torch.randn(3, 2, 4),
        "normalized_shape": (2, 4),
        "weight": torch.rand(2, 4),
    },
    "device": {"input": X.to("meta"), "weight": W.to("meta")},
    "device of input": {"input": X.to("meta")},
    "device of weight": {"weight": W.to("meta")},
    "subclass": {"input": X.as_subclass(Subclass)},
    "subclass as weight": {"weight": W.as_subclass(Subclass)},
    "sparse": {"input": X.to_sparse()},
    "sparse weight": {"weight": W.to_sparse()},
    "integers": {"input": X.long()},
    "no tensor": {"input": X.tolist()},
    "weight no tensor": {"weight": W.tolist()},
    "no dimension": {"input": torch.ones(())},
    "no rows": {"input": torch.empty(0, N)},
    "no rows of many dimensions": {"input": torch.empty(2, 0, N)},
    "no columns": {"input": torch.ones(3, 0), "normalized_shape": (0,), "weight": torch.ones(0)},
    "longer weight": {"weight": torch.rand(N + 1)},
    "weight of two dimensions": {"weight": torch.rand(1, N)},
    "weight of no dimension": {"weight": torch.rand(())},
    "narrower": {"normalized_shape": (N - 1,)},
    "float size": {"normalized_shape": (float(N),)},
    "bool size": {"input": X[:, :1], "normalized_shape": (True,), "weight": W[:1]},
    "no size": {"normalized_shape": ()},
    "text": {"normalized_shape": "8"},
    "negative eps": {"eps": -1e-6},
    "eps nan": {"eps": math.nan},
    "eps infinite": {"eps": math.inf},
    "eps bool": {"eps": True},
    "eps int": {"eps": 1},
    "eps text": {"eps": "1"},
    "offset nan": {"offset": math.nan},
    "offset infinite": {"offset": -math.inf},
    "offset int": {"offset": 1},
    "offset None": {"offset": None},
    "alpha int": {"residual_alpha": 1},
    "alpha bool": {"residual_alpha": True},
    "alpha tensor": {"residual_alpha": torch.ones(2)},
    "alpha": {"residual_alpha": 0.5},
    "unknown casting": {"casting": "gemma"},
    "casting not hashable": {"casting": ["once"]},
    "unknown backend": {"backend": "cuda"},
    "backend not hashable": {"backend": ["torch"]},
}


def test_every_argument_of_rms_norm_is_part_of_the_key():
    """One that is not would be ignored by all calls but the first."""
    tried = {name for change in UNKNOWN.values() for name in change if len(change) == 1}
    assert tried == set(inspect.signature(rms_norm).parameters)


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_everything_else_goes_through_all_checks(change, checks):
    make_known(checks)
    changed = outcome(**change)
    assert len(checks) == 1
    known_calls.forget()
    assert changed == outcome(**change)


def test_each_tensor_of_rows_must_begin_as_before(checks):
    """Kernels read rows that begin at multiples of 16 bytes otherwise than others."""
    apart = torch.randn(3 * N + 1)[1:].view(3, N)
    make_known(checks, input=apart, residual=R)
    for change in ({"input": X, "residual": apart}, {"input": X, "residual": R}):
        call(**change)
        assert checks
        checks.clear()
    call(input=apart, residual=X)
    assert not checks


def test_a_fake_tensor_goes_through_all_checks(checks):
    make_known(checks)
    with FakeTensorMode() as mode:
        change = {"input": mode.from_tensor(X), "weight": mode.from_tensor(W)}
        assert outcome(**change)[0][:3] == (FakeTensor, X.dtype, X.shape)
    assert len(checks) == 1


def test_a_dtensor_goes_through_all_checks(mesh, checks):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    make_known(checks)
    x, weight = (distribute_tensor(t, mesh, [Replicate()]) for t in (X, W))
    y = call(input=x, weight=weight)
    assert isinstance(y, DTensor) and torch.equal(y.full_tensor(), call())
    assert len(checks) == 1

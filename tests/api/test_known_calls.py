# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls like one that has passed all checks skip them. Whatever may differ between two calls must be seen: each case
makes a call known, changes one thing, and must get what it would get as the first call of a process. Calls of kernels
have the bits of calls that passed all checks; no tensor is kept, and threads share what is known."""

import contextlib
import gc
import inspect
import itertools
import math
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from every_op import assert_same_bits, each_op, note_unknown, of_each_op, of_options, present, usual
from helpers import BF16, DEVICE, settle_interpreters
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from variants import Variant

from tilegym_rmsnorm import (
    BackendUnavailableError,
    RMSNorm,
    override_aten,
    rms_norm,
    set_backend,
    settings,
    use_backend,
)
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.integrations import aten as overrides
from tilegym_rmsnorm.ops.norm import eager, passes
from tilegym_rmsnorm.routes import known_calls

N = 8
X, W, R, B = torch.randn(3, N), torch.rand(N) + 0.5, torch.randn(3, N), torch.rand(N)


def rows(*size, dtype=BF16):
    return torch.randn(size, dtype=dtype, device=DEVICE)


def call(**changes):
    arguments = {
        "input": X,
        "normalized_shape": (N,),
        "weight": W,
        "eps": 1e-6,
        "backend": "torch",
        **changes,
    }
    return rms_norm(**arguments)


def make_known(checks: list, **arguments) -> None:
    call(**arguments)
    checks.clear()
    call(**arguments)
    assert not checks, "a call like the one before went through all checks"


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


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_each_vector_must_begin_as_before(name, checks):
    """Under a level of reproducibility cutile binds a copy of those between multiples of 16 bytes."""
    make_known(checks, bias=torch.rand(N))
    call(**{"bias": torch.rand(N), name: torch.rand(N + 1)[1:]})
    assert checks
    checks.clear()
    call(**{"bias": torch.rand(N), name: torch.rand(N + 1)[1:]})
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


def test_gradients_may_be_wanted_later_and_no_longer(checks):
    make_known(checks)
    x, weight = X.clone().requires_grad_(), Parameter(W)
    ops_first = call(input=x, weight=weight)
    assert len(checks) == 1, "the backward's implementation was not chosen yet, and nothing was recorded"
    checks.clear()
    y = call(input=x, weight=weight)
    assert not checks and torch.equal(y, ops_first)
    dy = torch.randn(3, N)
    again = torch.autograd.grad(y, (x, weight), dy)
    expected = torch.autograd.grad(ops_first, (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))

    assert call(input=X, weight=weight).requires_grad and not call(input=X, weight=W).requires_grad
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert not call(input=x, weight=weight).requires_grad
    x.requires_grad_(False)
    weight.requires_grad_(False)
    assert not call(input=x, weight=weight).requires_grad


def test_a_parameter_replaced_in_a_module_by_one_of_another_dtype(checks):
    module = RMSNorm(N, eps=1e-6, backend="torch")
    for _ in range(2):
        module(X)
    module.weight = Parameter(torch.rand(N, dtype=torch.float64))
    checks.clear()
    y = module(X)
    assert len(checks) == 1 and torch.equal(y, rms_norm(X, (N,), module.weight, 1e-6, backend="torch"))
    module.double()
    assert module(X.double()).dtype == torch.float64


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_known_call_is_traced(checks):
    """Its y was a constant of the trace."""
    make_known(checks)
    traced = torch.jit.trace(lambda x: call(input=x) * 2.0, (X,))
    x = torch.randn(7, N)
    torch.testing.assert_close(traced(x), 2.0 * F.rms_norm(x, (N,), W, 1e-6))


@pytest.mark.parametrize("size", [(3, N), (2, 3, N)])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_tensor_that_outlived_its_transform(size, needs_grad, checks):
    """A wrapper around nothing is unwrapped by Function.apply, and by what stands in for it."""
    x, weight, outlived = torch.randn(size), W.clone().requires_grad_(needs_grad), []
    torch.func.grad(lambda t: (outlived.append(t), t.sum())[1])(x)
    make_known(checks, weight=weight)
    y = call(input=outlived[0], weight=weight)
    assert torch.equal(y, call(input=x, weight=weight)) and y.requires_grad == needs_grad
    if needs_grad:
        grads = [torch.autograd.grad(call(input=t, weight=weight).sum(), weight)[0] for t in (outlived[0], x)]
        assert torch.equal(*grads)


class Probe:
    IMPLEMENTATION = "tilegym_rmsnorm.backends"

    def unusable(self, request):
        return None


@pytest.fixture
def two_backends(monkeypatch):
    """ "triton" and "torch", replaced: y is all 1 or all 2."""

    def forward(value):
        return lambda spec, tensors: (
            torch.full_like(tensors[0], value),
            tensors[0].new_ones(len(tensors[0])),
            None,
        )

    monkeypatch.setattr(registry, "_probe", lambda name: Probe())
    settle_interpreters(monkeypatch)
    values = {"cutile": 0.0, "triton": 1.0, "torch": 2.0}
    impls = {("rms_norm_forward", name): forward(value) for name, value in values.items()}
    impls |= {("rms_norm_backward", name): lambda *_: pytest.fail("not called") for name in values}
    monkeypatch.setattr(registry, "_impls", impls)
    return lambda **arguments: {value: name for name, value in values.items()}[call(**arguments)[0, 0].item()]


def test_every_way_to_choose_a_backend_reaches_a_known_call(two_backends, monkeypatch, checks):
    ran = two_backends
    for name in ("triton", "torch", "auto", None):
        make_known(checks, backend=name)
    assert ran(backend="triton") == "triton" and ran(backend="torch") == "torch"
    assert ran(backend=None) == ran(backend="auto") == "cutile"

    monkeypatch.setenv(settings.BACKEND_VARIABLE, "triton")
    assert ran(backend=None) == "triton"
    set_backend("torch")
    assert ran(backend=None) == "torch"
    with use_backend("triton"):
        assert ran(backend=None) == "triton"
        assert ran(backend="torch") == "torch"
    assert ran(backend=None) == "torch"
    set_backend(None)
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "torch")
    assert ran(backend=None) == "torch"
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="TILEGYM_RMSNORM_BACKEND: expected one of"):
        call(backend=None)
    monkeypatch.delenv(settings.BACKEND_VARIABLE)
    assert ran(backend=None) == "cutile"
    assert not [x for x in checks if x is not X]


def test_an_environment_without_its_private_dictionary_is_read_too(two_backends, monkeypatch):
    monkeypatch.setattr(settings.os, "environ", {settings.BACKEND_VARIABLE: "triton"})
    assert two_backends(backend=None) == "triton"
    monkeypatch.setattr(settings.os, "environ", {})
    assert two_backends(backend=None) == "cutile"


def test_a_backend_that_the_environment_may_take_back_is_never_known(monkeypatch, checks):
    """cutile runs CPU tensors only while its variable says so."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
    for _ in range(2):
        call(backend="cutile")
    assert len(checks) == 2
    monkeypatch.delenv("TILEGYM_RMSNORM_INTERPRET")
    with pytest.raises(BackendUnavailableError):
        call(backend="cutile")


def test_autocast_is_another_call(checks):
    x, weight = X.to(DEVICE, torch.bfloat16), W.to(DEVICE, torch.bfloat16)
    make_known(checks, input=x, weight=weight)
    with torch.autocast(DEVICE.type):
        y, expected = call(input=x, weight=weight), F.rms_norm(x, (N,), weight, 1e-6)
    assert y.dtype == expected.dtype and len(checks) == 1
    assert call(input=x, weight=weight).dtype == torch.bfloat16 and len(checks) == 1


def found():
    numbers = (N,), 1e-6, 0.0, "once", 1.0, None, None
    return passes.KNOWN.find(passes.norm_call((X, W, None, None), numbers, "torch"))


def inside_of(transform):
    """Return what `found` returns where a transform of torch.func, or the tracer, calls a function."""
    seen = []
    transform(lambda x: (seen.append(found()), x.sum())[1])(torch.ones(3))
    return seen[0]


def in_block(block):
    with block:
        return found()


KEY, INCLUDED = torch._C.DispatchKey, torch._C._IncludeDispatchKeyGuard
WATCHES = {
    "a dispatch mode": lambda: in_block(FakeTensorMode()),
    "a function mode": lambda: in_block(torch.overrides.BaseTorchFunctionMode()),
    "forward mode": lambda: in_block(torch.autograd.forward_ad.dual_level()),
    "grad": lambda: inside_of(torch.func.grad),
    "vmap": lambda: inside_of(torch.func.vmap),
    "functionalize": lambda: inside_of(torch.func.functionalize),
    "jit": lambda: inside_of(lambda f: lambda x: torch.jit.trace(f, (x,))),
    "export above autograd": lambda: in_block(INCLUDED(KEY.PreDispatch)),
    "functionalization": lambda: in_block(INCLUDED(KEY.Functionalize)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_a_watched_call_is_not_known(watch, checks):
    """By what is asked of PyTorch, or by the dispatch keys, which guards compare."""
    make_known(checks)
    assert found() is not None and watch() is None and found() is not None


@pytest.mark.parametrize("key", ["PreDispatch", "Functionalize"])
def test_nothing_is_kept_of_a_watched_call(key, checks, monkeypatch):
    """Guards made under a key would fit the next call under that key."""
    with INCLUDED(getattr(KEY, key)):
        assert not known_calls.may_remember((X, W), (X, W), registry.dispatch)
    monkeypatch.setattr(known_calls, "is_settled", lambda *_: True)
    assert known_calls.may_remember((X, W), (X, W), registry.dispatch)


WIDTH = 40
PLAIN_ROWS = Variant(BF16, (6, WIDTH), weight_dtype=BF16)
MORE = {  # layouts of x, of all kinds of calls
    "rms_norm": {
        "one row": PLAIN_ROWS._replace(size=(WIDTH,)),
        "strided rows": PLAIN_ROWS._replace(layout="gaps"),
        "overlapping rows": PLAIN_ROWS._replace(layout="all expanded"),
        "columns apart": PLAIN_ROWS._replace(layout="columns"),
        "rows that begin between 16 bytes": PLAIN_ROWS._replace(layout="offset"),
        "odd rows": PLAIN_ROWS._replace(size=(5, 37)),
        "residual of other strides": PLAIN_ROWS._replace(
            size=(3, 2, WIDTH), residual_dtype=BF16, layout="heads"
        ),
        "wide residual": PLAIN_ROWS._replace(size=(2, 16392), residual_dtype=BF16),
    }
}


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@of_each_op(lambda op: {**usual(op), **MORE.get(op.name, {})})
def test_the_bits_of_calls_that_passed_all_checks(op, kind, needs_grad, monkeypatch):
    call, other = op.make(kind), op.make(kind, seed=1)

    def run(call):
        return (
            call.both_passes(backend="cutile") if needs_grad else call.public(*call.tensors, backend="cutile")
        )

    run(other)
    with contextlib.nullcontext() if needs_grad else torch.no_grad():
        run(other)  # under another grad mode it was another call
        unknown = note_unknown(op, monkeypatch)
        known = run(call)
        results = call.public(*(call.recorded() if needs_grad else call.tensors), backend="cutile")
    assert not unknown
    assert all(each._base is None for each in results), "autograd refuses operations in place on such views"
    known_calls.forget()
    expected = run(call)
    assert unknown and [each.stride() for each in known] == [each.stride() for each in expected]
    assert_same_bits(known, expected)


@pytest.mark.usefixtures("known_kernels")
@each_op
def test_a_tensor_that_is_another_kind_makes_another_call(op):
    """By its strides, or that it requires a gradient."""
    first = op.make(op.alike)
    changes = (lambda t: torch.stack([t, t.cos()], -1)[..., 0], lambda t: t.detach().clone().requires_grad_())
    for name in first.leaves:
        for change in changes:
            found, given = [], (first.leaves | first.fixed) | {name: change(first.leaves[name])}
            for before in (first.tensors, given.values()):
                known_calls.forget()
                first.public(*before, backend="cutile")
                found.append(first.public(*given.values(), backend="cutile"))
            assert [each.requires_grad for each in found[0]] == [each.requires_grad for each in found[1]]
            assert_same_bits(*found)


@each_op
def test_every_option_is_tried(op):
    """One that is not part of the key would be ignored by all calls but the first."""
    parameters = inspect.signature(op.function).parameters.items()
    options = {name for name, each in parameters if "Tensor" not in each.annotation}
    assert set(op.options[1]) == options - {"normalized_shape", "backend"}


@pytest.mark.usefixtures("known_kernels")
@of_each_op(of_options)
def test_an_option_is_part_of_a_known_call(op, kind):
    call = op.make(kind)
    for name, values in op.options[1].items():
        for value in values:
            call.both_passes(backend="cutile", **{name: value})
        found = [call.both_passes(backend="cutile", **{name: value}) for value in values]
        for value, known in zip(values, found, strict=True):
            known_calls.forget()
            assert_same_bits(known, call.both_passes(backend="cutile", **{name: value}))
        for one, other in itertools.combinations(found, 2):
            assert not all(map(torch.equal, one, other)), f"{name} changes nothing"


@pytest.mark.usefixtures("known_kernels")
def test_one_gradient_for_both_results(checks, monkeypatch):
    """A sum of both hands each the same tensor."""
    x, r = rows(6, WIDTH).requires_grad_(), rows(6, WIDTH).requires_grad_()
    slow, gradients = [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))
    dy, found = rows(6, WIDTH), []
    for _ in range(3):
        results = rms_norm(x, (WIDTH,), None, 1e-5, residual=r, backend="cutile")
        found.append(torch.autograd.grad(results, (x, r), (dy, dy)))
    assert len(slow) == 1
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@each_op
def test_one_tensor_given_twice_is_known(op, needs_grad, monkeypatch):
    """Guards take no tensor twice. A call of two tensors of the same metadata is another call."""
    first = op.make(op.alike)
    every = list((first.leaves | first.fixed).items())
    pairs = [
        (one, other)
        for (one, x), (other, y) in itertools.combinations(every, 2)
        if x.shape == y.shape and x.dtype == y.dtype and (one in first.leaves) == (other in first.leaves)
    ]
    assert pairs

    def run(seed, pairs):
        call = op.make(op.alike, seed=seed)
        given = {name: each.detach().requires_grad_(needs_grad) for name, each in call.leaves.items()}
        given |= call.fixed
        for one, other in pairs:
            given[other] = given[one]
        results, found = call.public(*given.values(), backend="cutile"), []
        leaves = {id(each): each for each in given.values() if each.requires_grad}
        if needs_grad:
            found = torch.autograd.grad(results, list(leaves.values()), call.dys)
        wide = {
            id(each): each.detach().double().requires_grad_(each.requires_grad) for each in given.values()
        }
        exact = call.exact(*(wide[id(each)] for each in given.values()))
        expected = list(exact)
        if needs_grad:
            dys = [each.double() for each in call.dys]
            expected += torch.autograd.grad(exact, [wide[each] for each in leaves], dys)
        for one, other in zip([*results, *found], expected, strict=True):
            limit = 1e-5 * other.abs().max().item()
            torch.testing.assert_close(one.double(), other, rtol=0, atol=limit)

    for twice in (pairs[:1], [], *([each] for each in pairs[1:]), pairs):
        run(0, twice)
        with monkeypatch.context() as patch:
            unknown = note_unknown(op, patch)
            run(1, twice)
            assert not unknown


@pytest.mark.usefixtures("known_kernels")
def test_the_grad_mode_counts(checks):
    x = rows(6, WIDTH).requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not rms_norm(x, (WIDTH,), None, 1e-5, backend="cutile").requires_grad
        assert rms_norm(x, (WIDTH,), None, 1e-5, backend="cutile").requires_grad


@pytest.mark.usefixtures("known_kernels")
def test_the_override_of_aten(checks):
    x, w = rows(6, WIDTH).requires_grad_(), rows(WIDTH).requires_grad_()

    def step():
        y = torch.nn.functional.rms_norm(x, (WIDTH,), w, 1e-5)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    aten = torch.ops.aten
    with use_backend("cutile"), override_aten(DEVICE.type) as override:
        first, *others = step(), step(), step()
        assert overrides._FORWARDS._kinds and overrides._BACKWARDS._kinds
        assert all(all(map(torch.equal, first, each)) for each in others)
        assert override.stats["_fused_rms_norm"] == override.stats["_fused_rms_norm_backward"] == {"taken": 3}
        y, rstd = aten._fused_rms_norm(x.detach(), [WIDTH], w.detach(), 1e-5)
        for mask in ((True, True), (True, False), (False, True), (True, True)):
            for _ in range(2):
                dx, dw = aten._fused_rms_norm_backward(y, x.detach(), [WIDTH], rstd, w.detach(), mask)
                assert (dx is not None, dw is not None) == mask
    with use_backend("cutile"), override_aten(DEVICE.type):
        for _ in range(2):  # a view at an offset, without rows
            y, rstd = aten._fused_rms_norm(x.detach()[6:], [WIDTH], w.detach(), 1e-5)
            assert y.shape == (0, WIDTH) and rstd.shape == (0, 1)


@pytest.mark.usefixtures("known_kernels")
@of_each_op()
def test_no_tensor_is_kept(op, kind, quick_gc):
    """Nothing bound to the backward of a known call keeps one, nor do known calls of ops."""
    for seed in range(3):
        call = op.make(kind, seed=seed)
        given = call.recorded()
        results = [*call.public(*given, *call.fixed.values(), backend="cutile")]
        results += torch.autograd.grad(results, given, call.dys)
        of_forward, of_backward = (
            call.of_forward(*given, backend="cutile"),
            call.of_backward(op.wanted(kind)[-1], "cutile"),
        )
        with torch.no_grad():
            results += present(op.forward(*of_forward)) + present(op.backward(*of_backward))
        tensors = (*results, *given, *call.tensors, *of_forward, *of_backward)
        references = [weakref.ref(each) for each in tensors if isinstance(each, torch.Tensor)]
        del call, given, results, of_forward, of_backward, tensors
        gc.collect()
        assert not [each for each in references if each() is not None]
    assert sum(bool(each._kinds) for each in known_calls._SHARED) >= 3


@pytest.mark.usefixtures("known_kernels")
def test_no_more_calls_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_KEYS", 5)
    module = RMSNorm(WIDTH, device=DEVICE, dtype=BF16, backend="cutile")
    for m in range(1, 12):
        module(rows(m, WIDTH))
    assert len(passes.KNOWN._kinds) <= 5
    for stride in range(WIDTH, WIDTH + 40, 4):  # the same key
        module(rows(4, stride)[:, :WIDTH])
    assert all(len(kinds) <= known_calls.MOST_KINDS for kinds in passes.KNOWN._kinds.values())


@pytest.mark.usefixtures("known_kernels")
def test_threads():
    """Each with its own rows, which are known or not."""
    module, errors = RMSNorm(WIDTH, device=DEVICE, dtype=BF16, backend="cutile"), []
    inputs = [rows(m, WIDTH) for m in range(1, 9)]
    expected = [module(x).detach().clone() for x in inputs]
    known_calls.forget()

    def work(first):
        try:
            for i in range(24):
                at = (first + i) % len(inputs)
                x = inputs[at].clone().requires_grad_(i % 2 == 0)
                assert torch.equal(module(x), expected[at])
                if i % 7 == 0:
                    known_calls.forget()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors

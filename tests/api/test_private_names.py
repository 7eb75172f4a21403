# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Names that PyTorch keeps private and that a call of rms_norm uses, from functional.py to the backends, or a pass over
traced graphs: what is relied on, of each by itself. Where a new PyTorch changes one, a test here says which."""

import contextvars
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

X = torch.arange(6.0).view(2, 3)


class Silent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def functionalized_by_hand(function):
    torch._enable_functionalization(reapply_views=True)
    try:
        function(X)
    finally:
        torch._disable_functionalization()


def within(context):
    def run(function):
        with context():
            function(X)

    return run


PLACES = {  # each calls a function of X in it
    "nowhere": lambda function: function(X),
    "torch.func.grad": lambda function: torch.func.grad(function)(X),
    "torch.func.vmap": lambda function: torch.func.vmap(function)(X),
    "torch.func.jvp": lambda function: torch.func.jvp(function, (X,), (X,)),
    "torch.func.functionalize": lambda function: torch.func.functionalize(function)(X),
    "dual_level": within(forward_ad.dual_level),
    "torch.jit.trace": lambda function: torch.jit.trace(function, (X,), check_trace=False),
    "a mode": within(Silent),
    "FakeTensorMode": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "FunctionalTensorMode": within(FunctionalTensorMode),
    "functionalization by hand": functionalized_by_hand,
    "make_fx": lambda function: make_fx(function)(X),
    "make_fx with fake tensors": lambda function: make_fx(function, tracing_mode="fake")(X),
    "make_fx before dispatch": lambda function: make_fx(function, pre_dispatch=True)(X),
}


def is_key_included(key):
    return torch._C._dispatch_tls_is_dispatch_key_included(getattr(torch._C.DispatchKey, key))


def has_mode(key):
    return torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, key)) is not None


STATES = {  # what is asked, and the places where the answer is yes
    "_C._are_functorch_transforms_active": (
        lambda: torch._C._are_functorch_transforms_active(),
        {"torch.func.grad", "torch.func.vmap", "torch.func.jvp", "torch.func.functionalize"},
    ),
    "_C._is_tracing": (lambda: torch._C._is_tracing(), {"torch.jit.trace"}),
    "_C._len_torch_dispatch_stack": (
        lambda: torch._C._len_torch_dispatch_stack() != 0,
        {"a mode", "FakeTensorMode", "FunctionalTensorMode", "make_fx", "make_fx with fake tensors"},
    ),
    "_C._dispatch_tls_is_dispatch_key_included(PreDispatch)": (
        lambda: is_key_included("PreDispatch"),
        {"make_fx before dispatch"},
    ),
    "_C._dispatch_tls_is_dispatch_key_included(Functionalize)": (
        lambda: is_key_included("Functionalize"),
        {"functionalization by hand"},
    ),
    "_C._get_dispatch_mode(PROXY)": (lambda: has_mode("PROXY"), {"make_fx", "make_fx with fake tensors"}),
    "_C._get_dispatch_mode(FAKE)": (
        lambda: has_mode("FAKE"),
        {"FakeTensorMode", "make_fx with fake tensors"},
    ),
    "_C._get_dispatch_mode(FUNCTIONAL)": (lambda: has_mode("FUNCTIONAL"), {"FunctionalTensorMode"}),
    "forward_ad._current_level": (lambda: forward_ad._current_level >= 0, {"dual_level", "torch.func.jvp"}),
    "compiler._is_exporting_flag": (lambda: torch.compiler._is_exporting_flag, set()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STATES)
def test_what_a_call_is_inside_of(name, place):
    ask, places = STATES[name]
    answers = []

    def function(x):
        answers.append(ask())
        return x.sin().sum()

    PLACES[place](function)
    assert answers and set(answers) == {place in places}
    assert not ask(), "it is still said afterwards"


def test_len_torch_dispatch_stack_counts():
    with Silent(), Silent():
        assert torch._C._len_torch_dispatch_stack() == 2


def test_len_torch_function_stack_counts():
    """Of the modes, which are off below their own __torch_function__."""
    seen = []

    class Asking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(torch._C._len_torch_function_stack())
            return function(*args, **(kwargs or {}))

    assert torch._C._len_torch_function_stack() == 0
    with Asking():
        assert torch._C._len_torch_function_stack() == 1
        X.sin()
        with Asking():
            assert torch._C._len_torch_function_stack() == 2
    assert seen == [0]


@pytest.mark.parametrize("strict", [False, True])
def test_is_exporting_flag_in_torch_export(strict):
    class Asking(torch.nn.Module):
        def forward(self, x):
            return x + 1 if torch.compiler._is_exporting_flag else x - 1

    torch._dynamo.reset()
    assert torch.equal(torch.export.export(Asking(), (X,), strict=strict).module()(X), X + 1)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(Asking(), backend="eager", fullgraph=True)(X), X - 1)


def test_disable_current_modes():
    with Silent(), Silent():
        with _disable_current_modes():
            assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 2


def kept_from(transform):
    """A wrapper of `transform`, and what is said of it while the transform lasts."""
    kept = []

    def function(x):
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
        kept.extend((x, is_wrapped, torch._C._functorch.unwrap_if_dead(x) is x))
        return x.sum()

    transform(function)(X)
    return kept


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_is_functorch_wrapped_tensor(transform):
    wrapper, is_wrapped, _ = kept_from(transform)
    assert is_wrapped and torch._C._functorch.is_functorch_wrapped_tensor(wrapper)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(X)


def test_unwrap_if_dead():
    wrapper, _, is_kept_alive = kept_from(torch.func.grad)
    assert is_kept_alive
    unwrapped = torch._C._functorch.unwrap_if_dead(wrapper)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(unwrapped)
    assert unwrapped.data_ptr() == X.data_ptr()
    assert torch._C._functorch.unwrap_if_dead(X) is X


class Scaled(torch.autograd.Function):
    """x * factor, flattened; `gradients` keeps each dy."""

    gradients: list = []

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.ops.aten._unsafe_view.default(x * factor, (x.numel(),))

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        Scaled.gradients.append(dy)
        return (dy * ctx.factor).view(x.shape), None


def test_is_legacy_batchedtensor():
    """autograd.grad's is_grads_batched makes one of dy."""
    Scaled.gradients.clear()
    x = X.clone().requires_grad_()
    torch.autograd.grad(Scaled.apply(x, 2.0), x, torch.ones(4, 6), is_grads_batched=True)
    assert [torch._C._functorch.is_legacy_batchedtensor(dy) for dy in Scaled.gradients] == [True]
    assert not torch._C._functorch.is_legacy_batchedtensor(X)


def test_apply_of_a_function_s_own_base():
    """It is the one in C++: Function.apply without the Python around it, which PyTorch 2.14 no longer has."""
    named = "super(torch.autograd.Function, ...).apply, `apply_of` in routes/autograd.py"
    record = getattr(super(torch.autograd.Function, Scaled), "apply", None)
    assert type(record) is type(len), named
    has_python_around_it = TorchVersion(torch.__version__) < "2.14"
    assert (type(Scaled.apply) is not type(len)) == has_python_around_it, named
    x = X.clone().requires_grad_()
    y = record(x, 2.0)
    assert torch.equal(y, 2 * X.flatten()) and y.grad_fn.name() == "ScaledBackward"
    assert torch.equal(torch.autograd.grad(y, x, torch.ones(6))[0], torch.full_like(X, 2))
    with torch.no_grad():
        assert record(x, 2.0).grad_fn is None


def test_unsafe_view():
    """It moves no data, and its result is no view to autograd, which forbids in-place changes of a Function's views."""
    assert torch.ops.aten._unsafe_view.default(X, (6,)).data_ptr() == X.data_ptr()
    x = X.clone().requires_grad_()
    y = Scaled.apply(x, 2.0)
    assert not y._is_view()
    y.mul_(3)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(X, 6))


def test_torch_dispatch_of_subclasses_without_one():
    class Plain(torch.Tensor):
        pass

    for cls in (torch.nn.Parameter, Plain):
        assert cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    assert TwoTensor.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def test_is_functional_tensor():
    assert torch._is_functional_tensor(torch._to_functional_tensor(X))
    assert not torch._is_functional_tensor(X)


def test_is_zerotensor():
    """A copy has memory."""
    zero = torch._efficientzerotensor((2, 3))
    assert zero._is_zerotensor() and not torch.zeros(2, 3)._is_zerotensor()
    copy = zero.clone()
    assert not copy._is_zerotensor() and copy.data_ptr() != 0 and torch.equal(copy, torch.zeros(2, 3))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_async_collective_tensor():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    waited = AsyncCollectiveTensor(X).wait()
    assert type(waited) is torch.Tensor and torch.equal(waited, X)


@torch._disable_dynamo
def hidden(x):
    assert not torch.compiler.is_dynamo_compiling()
    return x * 2


def test_disable_dynamo():
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: hidden(x + 1) - 1, backend="eager")(X), 2 * X + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: hidden(x + 1) - 1, backend="eager", fullgraph=True)(X)


def test_disable_dynamo_does_not_import_dynamo():
    code = "import sys, torch; torch._disable_dynamo(print); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@torch._disable_dynamo
def explained(x):
    return x * 2


explained._torchdynamo_disable = True
explained._torchdynamo_disable_msg = "what to do instead"


def test_torchdynamo_disable_msg():
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: explained(x), backend="eager")(X), 2 * X)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="what to do instead"):
        torch.compile(lambda x: explained(x), backend="eager", fullgraph=True)(X)


FACTOR = contextvars.ContextVar("FACTOR", default=2)


def factor():
    return FACTOR.get()


factor._dynamo_marked_constant = True


def test_dynamo_marked_constant():
    """The function is called, not traced, and what it returns is put into the graph."""
    torch._dynamo.reset()
    token = FACTOR.set(3)
    try:
        compiled = torch.compile(lambda x: x * factor(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), X * 3)
    finally:
        FACTOR.reset(token)
    assert torch.equal(compiled(X), X * 3)


def test_dispatch_has_kernel_for_dispatch_key():
    """Of operations on the list of autocast for CUDA devices, and of no others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("aten::layer_norm", "AutocastCUDA") and not has_kernel("aten::relu", "AutocastCUDA")
    is_listed = TorchVersion(torch.__version__) >= "2.12"
    assert has_kernel("aten::rms_norm", "AutocastCUDA") == is_listed


def test_fused_rms_norms():
    """What a node of a graph is given, and what its getitem nodes take."""
    forward = torch.ops.aten._fused_rms_norm.default
    backward = torch.ops.aten._fused_rms_norm_backward.default
    assert str(forward._schema) == (
        "aten::_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
    )
    assert str(backward._schema) == (
        "aten::_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd,"
        " Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)"
    )


def test_the_mark_of_a_constant_result():
    """reproducibility.py sets it by itself: `torch.compiler.assume_constant_result` imports Dynamo."""
    marked = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(marked) == {"_dynamo_marked_constant": True}

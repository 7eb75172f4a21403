# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Inputs of F.rms_norm that rms_norm takes too: kinds that no kernel is for, subclasses, tracers."""

import math

import pytest
import torch
import torch.nn.functional as F
from gate_cases import Named

from tilegym_rmsnorm import (
    BackendUnavailableError,
    RMSNorm,
    get_current_backend,
    rms_norm,
    rms_norm_forward,
    use_backend,
)
from tilegym_rmsnorm.ops.norm import checks

N = 8
NAMES = ("auto", "torch")
KERNELS = ("cutile", "triton")


def jagged(dtype=torch.float32):
    return torch.nested.nested_tensor(
        [torch.randn(2, N, dtype=dtype), torch.randn(3, N, dtype=dtype)], layout=torch.jagged
    )


KINDS = {
    "jagged": (jagged, lambda: torch.rand(N)),
    "jagged bfloat16": (lambda: jagged(torch.bfloat16), lambda: torch.rand(N, dtype=torch.bfloat16)),
    "complex": (lambda: torch.randn(3, N, dtype=torch.complex64), lambda: torch.rand(N)),
    "complex weight": (
        lambda: torch.randn(3, N, dtype=torch.complex64),
        lambda: torch.randn(N, dtype=torch.complex64),
    ),
    "complex128": (
        lambda: torch.randn(3, N, dtype=torch.complex128),
        lambda: torch.rand(N, dtype=torch.float64),
    ),
    "rows of no elements": (lambda: torch.empty(4, 0), lambda: torch.empty(0)),
    "nothing at all": (lambda: torch.empty(0, 0), lambda: torch.empty(0)),
}


def values(tensor):
    return tensor.values() if tensor.is_nested else tensor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("make_x", "make_weight"), KINDS.values(), ids=KINDS)
def test_kinds_that_no_kernel_is_for(name, eps, has_weight, make_x, make_weight):
    x = make_x().requires_grad_()
    weight = make_weight().requires_grad_() if has_weight else None
    leaves, shape = [x, *([weight] if has_weight else [])], x.shape[-1:]
    results = []
    for norm in (
        lambda: rms_norm(x, shape, weight, eps, backend=name),
        lambda: F.rms_norm(x, shape, weight, eps),
    ):
        y = norm()
        gradients = torch.autograd.grad(values(y).abs().square().sum(), leaves)
        results.append([y.dtype, *(values(each) for each in (y, *gradients))])
    got, expected = results
    assert got[0] == expected[0]
    for one, other in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options", [{"offset": 1.0}, {"casting": "llama"}, {"bias": True}, {"residual": True}]
)
def test_options_of_kinds_that_no_kernel_is_for(options):
    """Against the formula, on the values of a jagged tensor."""
    x, weight = jagged(torch.bfloat16), torch.rand(N)
    options = dict(options)
    dense = dict(options)
    if "bias" in options:
        options["bias"] = dense["bias"] = torch.rand(N)
    if "residual" in options:
        options["residual"], dense["residual"] = x, x.values()
    got = rms_norm(x, (N,), weight, 1e-6, **options)
    expected = rms_norm(x.values(), (N,), weight, 1e-6, backend="torch", **dense)
    pairs = zip(got, expected, strict=True) if "residual" in options else [(got, expected)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.values(), other)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("kind", "text"),
    [("jagged", "nested tensor"), ("complex", "complex"), ("rows of no elements", "have no elements")],
)
def test_kernels_say_why_not(name, kind, text):
    x = KINDS[kind][0]()
    with pytest.raises(BackendUnavailableError, match=text):
        rms_norm(x, x.shape[-1:], backend=name)


def test_the_functions_below_autograd_say_why_not():
    with pytest.raises(TypeError, match=r"no nested tensor, but its values\(\)"):
        rms_norm_forward(jagged(), None)
    with pytest.raises(TypeError, match="x: expected a dtype of .* got torch.complex64"):
        rms_norm_forward(torch.randn(3, N, dtype=torch.complex64), None)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["complex", "jagged", "rows of no elements"])
def test_kinds_that_no_kernel_is_for_under_torch_compile(kind, name, compiler):
    """Complex numbers lost their imaginary part without a word."""
    torch._dynamo.reset()
    x = KINDS[kind][0]()
    weight = KINDS[kind][1]().requires_grad_()
    compiled = torch.compile(
        lambda x, weight: rms_norm(x, x.shape[-1:], weight, 1e-6, backend=name), backend=compiler
    )
    y, expected = compiled(x, weight), F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(values(y), values(expected))
    (dw,) = torch.autograd.grad(values(y).abs().square().sum(), weight)
    torch.testing.assert_close(dw, torch.autograd.grad(values(expected).abs().square().sum(), weight)[0])


def test_autocast_leaves_complex_numbers_alone():
    assert checks._autocast_dtype(torch.complex64) is torch.complex64
    assert checks._autocast_dtype(torch.complex128) is torch.complex128
    assert checks._autocast_dtype(torch.bfloat16) is torch.float32


class Counted(torch.Tensor):
    """A subclass that sees which functions it is handed to."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("name", [*NAMES, *KERNELS])
def test_a_subclass_in_is_a_subclass_out(name):
    from helpers import DEVICE, why_skip

    if name in KERNELS and (reason := why_skip(name)):
        pytest.skip(reason)
    x, weight = torch.randn(3, N, device=DEVICE), torch.rand(N, device=DEVICE).requires_grad_()
    named = x.as_subclass(Named).requires_grad_()
    expected = rms_norm(x, (N,), weight, backend=name)
    for _ in range(2):
        y = rms_norm(named, (N,), weight, backend=name)
        assert type(y) is type(F.rms_norm(named, (N,), weight)) is Named
        assert torch.equal(y.as_subclass(torch.Tensor), expected)
        dx, dw = torch.autograd.grad(y.sin().sum(), (named, weight))
        leaf = x.clone().requires_grad_()
        others = torch.autograd.grad(rms_norm(leaf, (N,), weight, backend=name).sin().sum(), (leaf, weight))
        assert torch.equal(dx.as_subclass(torch.Tensor), others[0]) and torch.equal(dw, others[1])
    y, out = rms_norm(x, (N,), weight, residual=named, backend=name)
    assert type(y) is type(out) is Named
    assert type(RMSNorm(N, device=DEVICE, backend=name)(named)) is Named
    assert type(rms_norm(x, (N,), weight.detach().as_subclass(Named), backend=name)) is Named


def test_a_subclass_sees_the_function():
    """Subclasses give rules of their own by this for some functions, as for F.rms_norm."""
    Counted.seen.clear()
    rms_norm(torch.randn(3, N).as_subclass(Counted), (N,))
    assert rms_norm in Counted.seen


def in_block(name):
    def norm(x):
        with use_backend(name):
            y = rms_norm(x * 1, (N,), None, 1e-6)
        return y * 2

    return norm


def decorated(name):
    @use_backend(name)
    def norm(x):
        return rms_norm(x * 1, (N,), None, 1e-6) * 2

    return norm


@pytest.mark.parametrize("make", [in_block, decorated])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_use_backend_inside_a_compiled_function(make, fullgraph):
    """use_backend failed: Dynamo traces no context variables."""
    x = torch.randn(3, N, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(make("torch"), backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        y = compiled(x)
        torch.testing.assert_close(y, F.rms_norm(x, (N,), None, 1e-6) * 2)
        (dx,) = torch.autograd.grad(y.sin().sum(), x)
        torch.testing.assert_close(
            dx, torch.autograd.grad((2 * F.rms_norm(x, (N,), None, 1e-6)).sin().sum(), x)[0]
        )


def test_use_backend_of_a_kernel_in_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(in_block("auto"), backend="eager", fullgraph=True)
    x = torch.randn(3, N)
    torch.testing.assert_close(compiled(x), F.rms_norm(x, (N,), None, 1e-6) * 2)


def test_use_backend_nests_and_repeats():
    block = use_backend("torch")
    with block, block:
        with use_backend("triton"):
            assert get_current_backend() == "triton"
        assert get_current_backend() == "torch"
    assert get_current_backend() == "auto"
    with block, use_backend("triton"):  # and then a name that stands outside, too
        with block:
            assert get_current_backend() == "torch"
        assert get_current_backend() == "triton"

    @use_backend("triton")
    def nested(depth):
        assert get_current_backend() == "triton"
        return nested(depth - 1) if depth else get_current_backend()

    assert nested(3) == "triton" and get_current_backend() == "auto"
    with pytest.raises(ZeroDivisionError), use_backend("torch"):
        raise ZeroDivisionError
    assert get_current_backend() == "auto"


def test_one_block_in_several_threads_and_tasks():
    """They ended in each other's, and stayed there."""
    import asyncio
    import threading

    block, seen, meeting = use_backend("torch"), [], threading.Barrier(2)

    def work():
        meeting.wait()
        with block:
            meeting.wait()
            seen.append(get_current_backend())
            meeting.wait()
        seen.append(get_current_backend())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == ["auto", "auto", "torch", "torch"]

    async def task():
        with block:
            await asyncio.sleep(0)
            inside = get_current_backend()
            await asyncio.sleep(0)
        return inside, get_current_backend()

    async def both():
        return await asyncio.gather(task(), task())

    assert asyncio.run(both()) == [("torch", "auto")] * 2


def test_a_block_that_is_left_in_another_context():
    """pytest leaves async fixtures so: the block's own error replaced the one in flight."""
    import contextvars

    block = use_backend("torch")
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert get_current_backend() == "auto"


def test_use_backend_decorates_plain_functions_alone():
    """A coroutine's body ran on another backend, without a word."""

    async def coroutine():
        pass

    def generator():
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="use_backend: expected a plain function"):
            use_backend("torch")(function)


@pytest.mark.parametrize("eps", [-0.5, math.inf, math.nan, True, torch.tensor(0.5)], ids=str)
def test_an_eps_that_f_rms_norm_takes_and_we_refuse(eps):
    """docs/limits.md says so."""
    x = torch.randn(3, N)
    F.rms_norm(x, (N,), None, eps)
    torch.nn.RMSNorm(N, eps=eps)
    for call in (lambda: rms_norm(x, (N,), None, eps), lambda: RMSNorm(N, eps=eps)):
        with pytest.raises(
            (TypeError, ValueError), match="eps: expected a finite number, at least 0, or None, got"
        ):
            call()


def test_a_negative_eps_of_f_rms_norm():
    """No number for rows that are small, which is why it is refused."""
    y = F.rms_norm(torch.tensor([[0.5], [1.0]]), (1,), None, -0.5)
    assert y[0].isnan() and y[1].isfinite()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_a_weight_that_f_rms_norm_takes_and_we_refuse(dtype):
    x, weight = torch.randn(3, N), torch.ones(N, dtype=dtype)
    F.rms_norm(x, (N,), weight)
    with pytest.raises(TypeError, match=f"weight: expected a dtype of .*, got {dtype}"):
        rms_norm(x, (N,), weight)

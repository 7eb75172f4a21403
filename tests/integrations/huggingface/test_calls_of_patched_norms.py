# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of a patched norm, and which of its calls a kernel does. y lies in memory as the original's does, and the
kernel is given rows wherever x has them."""

import contextlib
import copy
import random

import pytest
import torch
import torch._dynamo.testing
from helpers import DEVICE
from hf_models import ARCHITECTURES
from hf_norms import N, changed, norm_of, rows
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import tilegym_rmsnorm
from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import mapping, norms
from tilegym_rmsnorm.integrations.huggingface import strides as strides_of_results


class Unweighted(nn.Module):
    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "weight_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("cls", [LlamaRMSNorm, T5LayerNorm, nn.RMSNorm], ids=lambda cls: cls.__name__)
def test_dtypes_are_the_original_s(cls, x_dtype, weight_dtype):
    """Llama's norm returns float32 for bfloat16 beside a float32 weight."""
    norm = norm_of(cls, weight_dtype)
    x = rows(x_dtype).requires_grad_()
    expected = norm(x)
    patch_model(norm)
    y = norm(x)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    y.sum().backward()
    assert x.grad.dtype == x_dtype and norm.weight.grad.dtype == weight_dtype


def test_which_calls_a_kernel_does(calls):
    for x_dtype, weight_dtype, made in (
        (torch.bfloat16, torch.bfloat16, 1),
        (torch.bfloat16, torch.float32, 1),
        (torch.float64, torch.float64, 0),
        (torch.float32, torch.float64, 0),
    ):
        norm = norm_of(dtype=weight_dtype)
        patch_model(norm)
        del calls[:]
        norm(rows(x_dtype))
        assert len(calls) == made


def test_a_weight_that_is_broadcast(calls):
    norm = changed(weight=nn.Parameter(torch.full((1,), 2.0)))
    expected = norm(rows())
    patch_model(norm)
    assert torch.equal(norm(rows()), expected) and not calls


def test_torch_s_own_norm(calls):
    norm = nn.RMSNorm(N)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    plain, wide = nn.RMSNorm(N, elementwise_affine=False), nn.RMSNorm((5, N))
    for module in (norm, plain, wide):
        expected = [module(rows()), copy.deepcopy(module).bfloat16()(rows(torch.bfloat16))]
        report = patch_model(module, backend="torch")
        assert report.counts["patched"] == (module is not wide)
        got = [module(rows()), copy.deepcopy(module).bfloat16()(rows(torch.bfloat16))]
        assert all(map(torch.equal, got, expected))
    assert len(calls) == 4
    assert report.declined == (("", "RMSNorm", "it normalizes several dimensions"),)


def test_autocast_changes_nothing_in_a_norm_that_is_written_out(monkeypatch):
    norm = norm_of(dtype=torch.bfloat16)
    expected = norm(rows(torch.bfloat16))
    patch_model(norm)
    plain = nn.RMSNorm(N, dtype=torch.bfloat16)  # PyTorch casts its input
    patch_model(plain)
    seen = []

    def autocast(*arguments, **options):
        seen.append((arguments, options))
        return contextlib.nullcontext()  # autocast itself would ask is_autocast_enabled what to go back to

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(norms, "norm_of", lambda tensors, *_: tensors[0])
    plain(rows())
    assert not seen
    norm(rows())
    assert seen == [(("cuda",), {"enabled": False})]
    monkeypatch.undo()
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(rows(torch.bfloat16)), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [LlamaRMSNorm, T5LayerNorm, nn.RMSNorm], ids=lambda cls: cls.__name__)
def test_a_compiled_call_has_the_bits_of_an_eager_call(cls, weight_dtype, is_autocast):
    """Also under autocast, which casts the input of PyTorch's own norm alone, and on GPUs alone."""
    norm = norm_of(cls, weight_dtype).to(DEVICE)
    patch_model(norm)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    for x_dtype in (torch.bfloat16, torch.float32):
        x = rows(x_dtype).to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_autocast):
            expected, y = norm(x), compiled(x)
        assert y.dtype == expected.dtype and torch.equal(y, expected)


def test_what_has_no_kernel_after_the_patch_runs_as_before():
    """A weight that is gone and eps that is no number; for PyTorch's norm, rows of another width; one number."""
    norm = norm_of()
    patch_model(norm)
    norm.variance_epsilon = torch.tensor(1e-3)
    assert torch.equal(norm(rows()), LlamaRMSNorm.forward(norm, rows()))
    norm.variance_epsilon, norm.weight = 1e-6, None
    with pytest.raises(TypeError, match="NoneType"):
        norm(rows())
    unweighted = nn.RMSNorm(N, elementwise_affine=False)
    patch_model(unweighted)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        unweighted(rows()[..., 1:])
    other = Unweighted()
    assert patch_model(other).counts["patched"] == 1
    assert other(torch.tensor(3.0)) == Unweighted()(torch.tensor(3.0))


class Adding(Tensor):
    """Tensor that adds in its own way, to its epsilon too."""

    def __add__(self, other):
        return 2 * self.as_subclass(Tensor) + other


class Watching(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        return 3 * found if function is Tensor.mean else found


class Marked(Tensor):
    """Tensor that computes as any other."""


@pytest.mark.parametrize("is_bound", [False, True], ids=["patch_model", "kernelize"])
@pytest.mark.parametrize("cls", [Adding, Watching, Marked], ids=lambda cls: cls.__name__)
def test_subclasses_of_tensors_with_operations_of_their_own(calls, monkeypatch, cls, is_bound):
    norm = norm_of()
    x = rows().as_subclass(cls)
    expected = norm(x)
    if is_bound:
        monkeypatch.setattr(mapping, "run", norms.run)
        norm.forward = mapping.TileGymRMSNorm.forward.__get__(norm)
    else:
        patch_model(norm)
    y = norm(x)
    assert torch.equal(y.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert len(calls) == (cls is Marked)


def test_classes_of_pytorch_that_leave_operations_to_the_dispatcher():
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    every = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor, AsyncCollectiveTensor, DTensor, Marked)
    assert all(map(norms._leaves_operations, every))
    assert not any(map(norms._leaves_operations, (int, torch.fx.Proxy, Adding, Watching)))


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cls", ["Llama", "Gemma2", "GptOss", "T5"])
@pytest.mark.parametrize("kernels", ["cutile", "triton"])
def test_on_the_kernels(kernels, cls, weight_dtype):
    """Kernels, interpreted without a GPU, give y within a rounding or two of the original's, in its dtype."""
    if not tilegym_rmsnorm.is_backend_available(kernels):
        pytest.skip(f"backend {kernels} cannot run here")
    (case,) = (case for case in ARCHITECTURES if case.name == cls)
    original, model = (case.built().to(DEVICE, torch.bfloat16) for _ in range(2))
    patch_model(model, patch_layers=True, backend=kernels)
    seen = [], []
    for each, outputs in zip((original, model), seen, strict=True):
        for part in list(each.modules()):
            if "Norm" in type(part).__name__:
                part.to(weight_dtype)
                x = rows(torch.bfloat16)[..., : part.weight.numel()].to(DEVICE, copy=True).requires_grad_()
                y = part(x)
                y.float().square().sum().backward()
                outputs.append((y, x.grad, part.weight.grad))
    assert len(seen[0]) == len(seen[1]) == sum(case.arithmetics.values())
    for expected, ours in zip(*seen, strict=True):
        for value, other in zip(expected, ours, strict=True):
            assert other.dtype == value.dtype
            scale = value.float().abs().max().item()
            # T5's norm reads x twice, and rounds both gradients before they are added.
            rounding = 2**-7 if value is expected[0] else 2**-5
            torch.testing.assert_close(other.float(), value.float(), rtol=0, atol=rounding * scale)
    if weight_dtype is torch.bfloat16:
        given = {name: t.to(DEVICE) for name, t in case.given(torch.bfloat16).items()}
        logits = [each(**given).logits.float() for each in (original, model)]
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2**-4 * logits[0].abs().max().item())


WIDTH = 8


def both():
    original = LlamaRMSNorm(WIDTH)
    ours = copy.deepcopy(original)
    patch_model(ours, backend="torch")
    return original, ours


def permuted(shape, order, step=1):
    """x of this shape, whose dimensions lie in memory in this order, dense or with gaps of `step` between elements."""
    x = torch.randn([shape[dim] * step for dim in order], generator=torch.Generator().manual_seed(0))
    x = x[(slice(None, None, step),) * len(shape)]
    return x.permute([order.index(dim) for dim in range(len(shape))])


HEAD = """
    root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    h = x.float()
    w = self.weight
"""
WRITTEN = [
    "return (h * root * w).to(x.dtype)",
    "return (root * h * w).to(x.dtype)",
    "return (w * (h * root)).to(x.dtype)",
    "return (w.float() * (root * h)).type_as(x)",
    "return w * (root * h).to(x.dtype)",
    "return (root * h).to(x.dtype) * w",
    "return (root * h * (1 + w.float())).to(x.dtype)",
    "return ((1 + w.float()) * (h * root)).to(x.dtype)",
    "return (root * h).to(x.dtype)",
    "return (h * root).to(x.dtype)",
    "return w * (root * x).to(x.dtype)",
    "return w * (x * root).to(x.dtype)",
]


@pytest.fixture
def norm_written(class_from):
    """A norm whose forward ends with this statement."""

    def make(statement):
        norm = class_from(f"def forward(self, x):{HEAD}    {statement}")()
        norm.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))
        return norm

    return make


def any_layout(numbers):
    """x with dimensions of 1, gaps, expanded dimensions, in any order."""
    dims = numbers.choice([2, 3, 4, 5])
    shape = [*(numbers.choice([1, 2, 3, 4]) for _ in range(dims - 1)), WIDTH]
    x = permuted(shape, numbers.sample(range(dims), dims), numbers.choice([1, 1, 2]))
    if numbers.random() < 0.3:
        dim = numbers.randrange(dims - 1)
        x = x.narrow(dim, 0, 1).expand(*shape[:dim], numbers.choice([1, 3]), *shape[dim + 1 :])
    if numbers.random() < 0.3:  # the stride of a dimension of one element may be any
        strides = [
            s if n != 1 else numbers.choice([0, 1, s, 100]) for n, s in zip(x.shape, x.stride(), strict=True)
        ]
        x = x.as_strided(x.shape, strides)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("statement", WRITTEN)
def test_strides_of_products_in_any_order(norm_written, statement, dtype):
    """PyTorch lays out a product by its first factor, where that says how."""
    original = norm_written(statement).to(dtype)
    ours = copy.deepcopy(original)
    assert patch_model(ours, backend="torch").counts["patched"] == 1
    numbers = random.Random(statement)
    for _ in range(200):
        layout = any_layout(numbers)
        x = torch.empty_strided(layout.shape, layout.stride(), dtype=dtype)
        y, expected = ours(x), original(x)
        assert strides(y) == strides(expected), (x.shape, x.stride())
    x = torch.randn(2, 5, 4, WIDTH).to(dtype).transpose(1, 2)
    torch.testing.assert_close(ours(x), original(x))
    if "root * h" in statement:
        ours(x).view(8, 5, WIDTH)  # as the original's


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_strides_of_compiled_products(norm_written, is_first):
    torch._dynamo.reset()
    original = norm_written(
        "return (root * h * w).to(x.dtype)" if is_first else "return (h * root * w).to(x.dtype)"
    )
    ours = copy.deepcopy(original)
    patch_model(ours, backend="torch")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 3, 4, WIDTH), (5, 6, 7, WIDTH)):
        x = permuted(shape, (0, 2, 1, 3))
        assert compiled(x).stride() == original(x).stride()


def strides(x):
    """Leave out strides of dimensions of one element, which mean nothing."""
    return [stride for stride, length in zip(x.stride(), x.shape, strict=True) if length != 1]


def test_heads_that_were_transposed_are_rows(calls):
    original, ours = both()
    results = []
    for norm in (original, ours):
        q = torch.randn(2, 5, 4, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = norm(q.transpose(1, 2))
        results.append(y.transpose(1, 2).view(2, 5, 4 * WIDTH))  # as the original's
        (y * 2).add_(1).square().sum().backward()
        results.append(q.grad)
    torch.testing.assert_close(results[2:], results[:2])
    (call,) = calls
    assert call["x"].shape == (2, 5, 4, WIDTH) and call["x"].is_contiguous()


@pytest.mark.parametrize("name", ["Gemma3", "Exaone4", "NanoChat", "Qwen3", "DeepseekV3"])
def test_what_the_norms_of_models_are_given(name, calls):
    """Rows of which each lies in one piece, whether heads are transposed before their norm or after it."""
    (case,) = (case for case in ARCHITECTURES if case.name == name)
    model = case.built()
    patch_model(model, backend="torch")
    model(**case.given(torch.float32))
    assert len(calls) >= sum(case.arithmetics.values())
    given = [strides(call["x"]) for call in calls]
    assert all(each == sorted(each, reverse=True) for each in given)


@pytest.mark.parametrize("is_x", [True, False], ids=["x", "residual"])
def test_sums_of_transposed_tensors(is_x):
    original, ours = both()
    x, residual = permuted((3, 4, WIDTH), (1, 0, 2)), permuted((3, 4, WIDTH), (0, 1, 2))
    if not is_x:
        x, residual = residual, x
    total = residual + x
    y, ours_total = norms.add_norm(residual, x, ours)
    assert torch.equal(ours_total, total) and ours_total.stride() == total.stride()
    assert torch.equal(y, original(total)) and y.stride() == original(total).stride()


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str)
def test_sums_of_any_two_layouts(calls, dtypes):
    """An expanded tensor leaves the order of the sum's dimensions to the other."""
    original, ours = both()
    numbers = random.Random(torch.seed())
    for _ in range(500):
        shape = [*(numbers.choice([1, 2, 3]) for _ in range(numbers.choice([1, 2, 3]))), WIDTH]
        given = []
        for dtype in dtypes:
            dims = (
                numbers.sample(range(len(shape)), len(shape)) if numbers.random() < 0.5 else range(len(shape))
            )
            kept = [1 if numbers.random() < 0.25 else size for size in shape]
            given.append(permuted(kept, tuple(dims), numbers.choice([1, 1, 2])).to(dtype).expand(shape))
        x, residual = given
        total = residual + x
        y, ours_total = norms.add_norm(residual, x, ours)
        assert torch.equal(ours_total, total), (x.stride(), residual.stride())
        assert strides(ours_total) == strides(total), (x.stride(), residual.stride())
        assert strides(y) == strides(original(total)), (x.stride(), residual.stride())
    assert any(call["residual"] is not None for call in calls)


def test_an_order_is_found_once(monkeypatch):
    """Sorting takes longer than asking for what was found: 6 us against 2."""
    _, ours = both()
    x = permuted((3, 5, 7, WIDTH), (0, 2, 1, 3))
    expected = ours(x)
    monkeypatch.setattr(strides_of_results, "_sorted_dims", lambda *_: pytest.fail("sorted again"))
    assert torch.equal(ours(x), expected)


ORDERS = [(0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 2, 0)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_strides_of_fake_and_traced_norms(order):
    original, ours = both()
    x = permuted((2, 3, 4, WIDTH), order)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert ours(mode.from_tensor(x)).stride() == original(x).stride()
    other = permuted((5, 6, 7, WIDTH), order)
    expected = original(other)
    dims = {dim: torch.export.Dim(name) for dim, name in enumerate(("batch", "heads", "rows"))}
    exported = torch.export.export(ours, (x,), dynamic_shapes=(dims,)).module()
    for traced in (exported, torch.jit.trace(ours, (x,))):
        y = traced(other)
        torch.testing.assert_close(y, expected)
        assert y.stride() == expected.stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "backend", "dynamic"),
    [
        *((order, "aot_eager", dynamic) for order in ORDERS for dynamic in (False, True)),
        (
            ORDERS[-1],
            "inductor",
            True,
        ),  # whose code keeps the strides that the graph says: of rows in no piece
    ],
    ids=str,
)
def test_strides_of_compiled_norms(order, dynamic, backend):
    torch._dynamo.reset()
    original, ours = both()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    for shape in ((2, 3, 4, WIDTH), (5, 6, 7, WIDTH), (8, 9, 11, WIDTH)):
        x = permuted(shape, order).requires_grad_()
        y, expected = compiled(x), original(x)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
        counts.append(counter.frame_count)
    assert len(set(counts)) == (1 if dynamic else 3)

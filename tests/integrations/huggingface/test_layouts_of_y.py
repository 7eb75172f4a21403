# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""y of a patched norm lies in memory as the original's does, and the kernel is given rows wherever x has them."""

import copy
import random

import pytest
import torch
import torch._dynamo.testing
from hf_models import ARCHITECTURES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import norms
from tilegym_rmsnorm.integrations.huggingface import strides as strides_of_results

N = 8


def both():
    original = LlamaRMSNorm(N)
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
        norm.weight = nn.Parameter(torch.linspace(0.5, 2, N))
        return norm

    return make


def any_layout(numbers):
    """x with dimensions of 1, gaps, expanded dimensions, in any order."""
    dims = numbers.choice([2, 3, 4, 5])
    shape = [*(numbers.choice([1, 2, 3, 4]) for _ in range(dims - 1)), N]
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
    x = torch.randn(2, 5, 4, N).to(dtype).transpose(1, 2)
    torch.testing.assert_close(ours(x), original(x))
    if "root * h" in statement:
        ours(x).view(8, 5, N)  # as the original's


@pytest.mark.parametrize("is_first", [True, False])
def test_strides_of_compiled_products(norm_written, is_first):
    torch._dynamo.reset()
    original = norm_written(
        "return (root * h * w).to(x.dtype)" if is_first else "return (h * root * w).to(x.dtype)"
    )
    ours = copy.deepcopy(original)
    patch_model(ours, backend="torch")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 3, 4, N), (5, 6, 7, N)):
        x = permuted(shape, (0, 2, 1, 3))
        assert compiled(x).stride() == original(x).stride()


def strides(x):
    """Leave out strides of dimensions of one element, which mean nothing."""
    return [stride for stride, length in zip(x.stride(), x.shape, strict=True) if length != 1]


def test_heads_that_were_transposed_are_rows(calls):
    original, ours = both()
    results = []
    for norm in (original, ours):
        q = torch.randn(2, 5, 4, N, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = norm(q.transpose(1, 2))
        results.append(y.transpose(1, 2).view(2, 5, 4 * N))  # as the original's
        (y * 2).add_(1).square().sum().backward()
        results.append(q.grad)
    torch.testing.assert_close(results[2:], results[:2])
    (call,) = calls
    assert call["x"].shape == (2, 5, 4, N) and call["x"].is_contiguous()


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
    x, residual = permuted((3, 4, N), (1, 0, 2)), permuted((3, 4, N), (0, 1, 2))
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
        shape = [*(numbers.choice([1, 2, 3]) for _ in range(numbers.choice([1, 2, 3]))), N]
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
    x = permuted((3, 5, 7, N), (0, 2, 1, 3))
    expected = ours(x)
    monkeypatch.setattr(strides_of_results, "_sorted_dims", lambda *_: pytest.fail("sorted again"))
    assert torch.equal(ours(x), expected)


ORDERS = [(0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 2, 0)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_strides_of_fake_and_traced_norms(order):
    original, ours = both()
    x = permuted((2, 3, 4, N), order)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert ours(mode.from_tensor(x)).stride() == original(x).stride()
    other = permuted((5, 6, 7, N), order)
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
    for shape in ((2, 3, 4, N), (5, 6, 7, N), (8, 9, 11, N)):
        x = permuted(shape, order).requires_grad_()
        y, expected = compiled(x), original(x)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
        counts.append(counter.frame_count)
    assert len(set(counts)) == (1 if dynamic else 3)

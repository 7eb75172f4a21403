# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms inside torch.compiler.nested_compile_region. Its second call takes the graph of its first, if all that Dynamo
guarded on in the first is the same: Dynamo has to find each of those values again by its name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32
from llama_like import LlamaLikeNorm
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm, patch_model, rms_norm, rms_norm_backward, rms_norm_forward

HEADS, N = 4, 16

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


def twice(module: nn.Module, is_region: bool):
    def called(x: Tensor) -> Tensor:
        return module(x)

    region = torch.compiler.nested_compile_region(called) if is_region else called
    return lambda x: region(region(x))


def assert_alike_compiled(module: nn.Module, x: Tensor) -> None:
    """Two calls of a region, beside two calls of the module: y by the backend "eager", with gradients by "aot_eager",
    since autograd does not enter a region by "eager", whatever is in it."""
    with torch.no_grad():
        compiled = torch.compile(twice(module, True), backend="eager", fullgraph=True)
        assert_close(compiled(x), twice(module, False)(x))
    leaves = [x.requires_grad_(), *module.parameters()]
    found = []
    for call in (
        torch.compile(twice(module, True), backend="aot_eager", fullgraph=True),
        twice(module, False),
    ):
        y = call(x)
        found.append([y, *torch.autograd.grad(y.float().sin().sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Up to roundings: those of sums of 24 rows, since with backend="torch" AOTAutograd derives a gradient itself."""
    assert got.dtype is expected.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item())


@pytest.fixture(scope="module")
def pytorch_compiles_regions():
    class Doubled(nn.Module):
        def forward(self, x):
            return F.rms_norm(x + x, (N,))

    try:
        assert_alike_compiled(Doubled(), torch.randn(3, N, device=DEVICE))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"this torch compiles no region with F.rms_norm in it: {error}")


class WithResidual(nn.Module):
    """A norm and its residual stream, in one tensor."""

    def __init__(self, shape, is_biased=False, residual_dtype=None, **options):
        super().__init__()
        self.weight = None if shape is None else nn.Parameter(torch.rand(shape, device=DEVICE))
        self.bias = nn.Parameter(torch.rand(shape, device=DEVICE)) if is_biased else None
        self.residual_dtype, self.options = residual_dtype, options

    def forward(self, x):
        residual = x.sin() if self.residual_dtype is None else x.sin().to(self.residual_dtype)
        y, total = rms_norm(x, (N,), self.weight, 1e-6, bias=self.bias, residual=residual, **self.options)
        return (y + total).to(x.dtype)


class ModuleWithResidual(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = RMSNorm(N, device=DEVICE, **options)

    def forward(self, x):
        y, total = self.norm(x, x.sin())
        return (y + total).to(x.dtype)


class Passes(nn.Module):
    """The forward and the backward, each by itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.rand(N, device=DEVICE)

    def forward(self, x):
        y, total, rstd = rms_norm_forward(x, self.weight, residual=x.double())
        return y + rms_norm_backward(total, y, self.weight, rstd, d_residual_out=total)[0].to(x.dtype)


LLAMA = {
    "casting": "llama",
    "residual_dtype": BF16,
    "residual_alpha": 0.5,
    "out_dtype": FP32,
    "is_biased": True,
}
NORMS = {
    "plain": lambda backend: RMSNorm(N, device=DEVICE, backend=backend),
    "residual": lambda backend: WithResidual(None, backend=backend),
    "weight": lambda backend: WithResidual((N,), backend=backend),
    "bias": lambda backend: WithResidual((N,), is_biased=True, backend=backend),
    "heads": lambda backend: WithResidual((HEADS, N), is_biased=True, backend=backend),
    "float64 residual": lambda backend: WithResidual((N,), residual_dtype=torch.float64, backend=backend),
    "llama": lambda backend: WithResidual((N,), **LLAMA, backend=backend),
    "RMSNorm": lambda backend: ModuleWithResidual(bias=True, backend=backend),
    "RMSNorm of heads": lambda backend: ModuleWithResidual(heads=HEADS, residual_dtype=FP32, backend=backend),
}


@pytest.mark.usefixtures("pytorch_compiles_regions")
@pytest.mark.parametrize(("backend", "dtype"), [(None, BF16), ("torch", FP32)])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_in_a_region(name, backend, dtype):
    assert_alike_compiled(NORMS[name](backend), torch.randn(6, HEADS, N, device=DEVICE, dtype=dtype))


@pytest.mark.usefixtures("pytorch_compiles_regions")
def test_the_two_passes_in_a_region():
    x, module = torch.randn(6, N, device=DEVICE), Passes()
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(twice(module, True), backend=backend, fullgraph=True)
        assert_close(compiled(x), twice(module, False)(x))


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaLikeNorm(N, dtype, DEVICE) for _ in range(2)
        )
        self.self_attn, self.mlp = (nn.Linear(N, N, device=DEVICE, dtype=dtype) for _ in range(2))

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


@pytest.mark.usefixtures("pytorch_compiles_regions")
@pytest.mark.parametrize(("dtype", "x_dtype"), [(BF16, BF16), (FP32, BF16)])
def test_a_patched_norm_in_a_region(dtype, x_dtype):
    norm = nn.Sequential(LlamaLikeNorm(N, dtype, DEVICE))
    original = copy.deepcopy(norm)
    assert len(patch_model(norm).patched) == 1
    x = torch.randn(6, N, device=DEVICE).to(x_dtype)
    assert_alike_compiled(norm, x)
    assert_close(norm(x), original(x))


@pytest.mark.usefixtures("pytorch_compiles_regions")
def test_a_patched_layer_in_a_region():
    """The layer's second norm adds the residual."""
    layer = Layer(BF16)
    original = copy.deepcopy(layer)
    assert patch_model(layer, patch_layers=True).layers
    x = torch.randn(6, N, device=DEVICE, dtype=BF16)
    assert_alike_compiled(layer, x)
    assert_close(layer(x), original(x))

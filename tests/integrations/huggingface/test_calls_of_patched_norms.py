# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of a patched norm, and which of its calls a kernel does."""

import contextlib
import copy

import pytest
import torch
from helpers import DEVICE
from hf_models import ARCHITECTURES
from hf_norms import N, changed, norm_of, rows
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import tilegym_rmsnorm
from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import mapping, norms


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
    monkeypatch.setattr(norms, "rms_norm", lambda *given, **named: given[0])
    plain(rows())
    assert not seen
    norm(rows())
    assert seen == [(("cuda",), {"enabled": False})]
    monkeypatch.undo()
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(rows(torch.bfloat16)), expected)


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

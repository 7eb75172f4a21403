# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Out-of-tree classes for vLLM's layers, by stand-ins of vLLM 0.33: which class is built, which forward runs, and what
it computes, in our words. vLLM itself needs a GPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, FP64, why_skip
from peer_signatures import installed_signature, signature
from test_vllm import native
from torch import nn

from tilegym_rmsnorm import reproducible, use_backend
from tilegym_rmsnorm.integrations import vllm as ours

SIZE, EPS = 256, 1e-5


class CustomOp(nn.Module):
    """Build the class that is registered for this class's name; run the forward of the platform, or the native one."""

    registered: dict = {}
    platform = "cuda"
    custom_ops = "all"

    def __new__(cls, *args, **kwargs):
        return super().__new__(CustomOp.registered.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        is_on = CustomOp.custom_ops in ("all", f"+{self.name}")
        self.run = getattr(self, f"forward_{CustomOp.platform if is_on else 'native'}")

    def forward(self, *args):
        return self.run(*args)

    def forward_oot(self, *args):
        return ("oot", self.forward_native(*args))

    def forward_cuda(self, *args):
        return ("cuda", self.forward_native(*args))

    @classmethod
    def register_oot(cls, op_cls):
        assert cls.__name__ not in CustomOp.registered, "Duplicate op name"
        op_cls.name = cls.__name__
        CustomOp.registered[cls.__name__] = op_cls
        return op_cls


class RMSNorm(CustomOp):
    name = "rms_norm"

    def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.has_weight = hidden_size, eps, has_weight
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        weight = torch.randn(hidden_size, dtype=dtype, device=DEVICE)
        # Without a weight there is a tensor of it all the same.
        self.weight = nn.Parameter(weight) if has_weight else weight

    def forward_native(self, x, residual=None):
        total = x if residual is None else x.float() + residual.float()
        weight = self.weight.data if self.has_weight else None
        y = native(total, weight, self.variance_epsilon, self.variance_size_override).to(x.dtype)
        return y if residual is None else (y, total.to(x.dtype))


class GemmaRMSNorm(CustomOp):
    name = "gemma_rms_norm"

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, device=DEVICE).to(BF16))
        self.variance_epsilon = eps

    def forward_native(self, x, residual=None):
        total = x if residual is None else x.float() + residual.float()
        y = native(total, self.weight.float() + 1, self.variance_epsilon).to(x.dtype)
        return y if residual is None else (y, total.to(x.dtype))


@pytest.fixture
def vllm(monkeypatch):
    """Modules of vLLM with the stand-ins."""
    CustomOp.registered, CustomOp.platform, CustomOp.custom_ops = {}, "cuda", "all"
    root, layers, registry = (ModuleType(name) for name in ("vllm", ours.LAYERS, ours.OUT_OF_TREE))
    root.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    layers.RMSNorm, layers.GemmaRMSNorm, registry.op_registry_oot = RMSNorm, GemmaRMSNorm, CustomOp.registered
    for name in ("vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (root, layers, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return root


def rows(dtype=BF16):
    torch.manual_seed(0)
    return [torch.randn(4, 16, SIZE, device=DEVICE).mul(2).to(dtype) for _ in range(2)]


def rounded_once(layer, x, residual=None, offset=0.0):
    """Compute the layer as vLLM's CUDA kernels do: the sum is rounded, and then the result."""
    total = x if residual is None else x + residual
    weight = layer.weight.double() if getattr(layer, "has_weight", True) else torch.ones(())
    wide = total.double()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (weight.to(x.device) + offset)
    return y.to(x.dtype), total


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    if found.dtype == FP32:
        torch.testing.assert_close(found, expected)
    else:
        assert (found == expected).float().mean() > 0.99  # an rstd in float32 may round to another neighbour


@pytest.mark.parametrize("platform", ["cuda", "oot"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["own", "float32", "no weight", "gemma"])
def test_a_layer_computes_what_the_cuda_kernels_compute(vllm, kind, dtype, platform):
    CustomOp.platform = platform
    x, residual = rows(dtype)
    before = x.clone(), residual.clone()
    with ours.register_layers(), torch.inference_mode():
        if kind == "gemma":
            layer = GemmaRMSNorm(SIZE, EPS)
        else:
            layer = RMSNorm(SIZE, EPS, None, kind != "no weight", FP32 if kind == "float32" else dtype)
        offset = float(kind == "gemma")
        assert_same(layer(x), rounded_once(layer, x, offset=offset)[0])
        y, total = layer(x, residual)
        expected, summed = rounded_once(layer, x, residual, offset)
        assert torch.equal(total, summed)
        assert_same(y, expected)
        torch.testing.assert_close(y, layer.forward_native(x, residual)[0], rtol=2e-2, atol=2e-2)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("platform", ["cuda", "oot"])
@pytest.mark.parametrize("why", ["part of a row", "narrow weight", "float64", "batch invariant"])
def test_left_to_vllm(vllm, why, platform):
    CustomOp.platform = platform
    dtype = {"narrow weight": FP32, "float64": FP64}.get(why, BF16)
    x, residual = rows(dtype)
    vllm.envs.VLLM_BATCH_INVARIANT = why == "batch invariant"
    with ours.register_layers():
        layer = RMSNorm(SIZE, EPS, 64 if why == "part of a row" else SIZE, dtype=BF16)
    ran, y = layer(x)
    assert ran == platform and torch.equal(y, layer.forward_native(x))
    ran, (y, total) = layer(x, residual)
    expected = layer.forward_native(x, residual)
    assert ran == platform and torch.equal(y, expected[0]) and torch.equal(total, expected[1])


def test_gemma_is_left_to_vllm(vllm):
    with ours.register_layers():
        layer = GemmaRMSNorm(SIZE)
    assert layer(rows(FP64)[0])[0] == "cuda"
    vllm.envs.VLLM_BATCH_INVARIANT = True
    assert layer(rows()[0])[0] == "cuda"


@pytest.mark.parametrize("is_invariant", [True, False])
def test_a_layer_has_the_bits_of_the_batch_invariant_mode(vllm, is_invariant):
    if reason := why_skip("triton"):
        pytest.skip(reason)
    import vllm_kernel

    vllm.envs.VLLM_BATCH_INVARIANT = is_invariant
    x, residual = rows()
    with ours.register_layers(), use_backend("triton"), reproducible(order="vllm"), torch.inference_mode():
        layer = RMSNorm(SIZE, EPS, dtype=BF16)
        assert torch.equal(layer(x), vllm_kernel.rms_norm(x, layer.weight, EPS))
        y, total = layer(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, vllm_kernel.rms_norm(total, layer.weight, EPS))
        assert GemmaRMSNorm(SIZE)(x)[0] == "cuda"


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_registered_until_the_last_one_ends(vllm, first_ends_first):
    built = RMSNorm(SIZE)
    one = ours.register_layers()
    classes = dict(CustomOp.registered)
    other = ours.register_layers()
    assert CustomOp.registered == classes and sorted(classes) == ["GemmaRMSNorm", "RMSNorm"]
    layer = RMSNorm(SIZE, has_weight=False)
    assert isinstance(layer, RMSNorm) and type(layer).__name__ == "TileGymRMSNorm" and not layer.has_weight
    assert type(GemmaRMSNorm(SIZE)).__name__ == "TileGymGemmaRMSNorm" and type(built) is RMSNorm
    (one if first_ends_first else other).undo()
    assert CustomOp.registered == classes
    (other if first_ends_first else one).undo()
    one.undo()
    assert not CustomOp.registered and type(RMSNorm(SIZE)) is RMSNorm
    assert torch.is_tensor(layer(rows()[0]))  # built ones stay
    with pytest.raises(RuntimeError, match=r"call register_layers\(\) for another one"), one:
        pass
    with ours.register_layers():
        assert type(RMSNorm(SIZE)).__name__ == "TileGymRMSNorm"
    assert not CustomOp.registered


@pytest.mark.parametrize("switch", ["none", "+rms_norm"])
def test_custom_ops_switches_as_before(vllm, switch):
    CustomOp.custom_ops = switch
    with ours.register_layers():
        layer = RMSNorm(SIZE)
    is_ours = layer.run.__func__ is type(layer).forward_cuda
    assert is_ours is (switch == "+rms_norm") and RMSNorm.name == "rms_norm"


@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_another_librarys_class_stays(vllm, name):
    CustomOp.registered[name] = nn.Identity
    with pytest.raises(
        RuntimeError, match=f"expected no out-of-tree {name} in vLLM, got torch.nn.modules.linear.Identity"
    ):
        ours.register_layers()
    assert CustomOp.registered == {name: nn.Identity}
    del CustomOp.registered[name]
    registration = ours.register_layers()
    CustomOp.registered[name] = nn.Identity
    registration.undo()
    assert CustomOp.registered == {name: nn.Identity}


@pytest.mark.parametrize("missing", ["vllm", "GemmaRMSNorm"])
def test_without_vllm(vllm, monkeypatch, missing):
    if missing == "vllm":
        monkeypatch.delitem(sys.modules, ours.OUT_OF_TREE)
        monkeypatch.setitem(sys.modules, "vllm", None)
    else:
        monkeypatch.delattr(sys.modules[ours.LAYERS], missing)
    with pytest.raises(ImportError, match="register_layers needs vLLM with vllm.model_executor"):
        ours.register_layers()
    assert not CustomOp.registered


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
def test_the_stand_ins_have_the_installed_signatures(cls):
    theirs = installed_signature("vllm", "model_executor/layers/layernorm.py", cls.__name__)
    assert signature(cls) == theirs

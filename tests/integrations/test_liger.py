# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Liger's names: casting modes against their formulas and float64, and models that have Liger's norms."""

import copy
import importlib.util
import inspect
import io
import pickle
import sys
from types import MethodType, ModuleType

import pytest
import torch
from helpers import BF16, DEVICE, FP32, assert_llama_rounds, expected_results, make_inputs
from torch import nn

import tilegym_rmsnorm
from tilegym_rmsnorm.integrations import liger as ours

MODES = {"llama": "llama", "gemma": "once", "none": "once"}
MODELS = ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Olmo2", "Glm4", "Qwen3Next")


def test_llama_rounds_before_the_weight_and_gemma_does_not():
    inputs = make_inputs(64, 256, BF16, FP32)
    results = {}
    for mode in MODES:
        weight = inputs.weight.clone().requires_grad_()
        y = ours.liger_rms_norm(inputs.x, weight, inputs.eps, 0.0, mode)
        y.backward(inputs.dy)
        results[mode] = {"y": y.detach(), "dw": weight.grad}
    assert_llama_rounds(inputs, results["llama"], results["gemma"])
    assert torch.equal(results["none"]["y"], results["gemma"]["y"])


def test_none_is_closer_to_float64_than_16_bits_are():
    """Liger's "none" computes all of it in x's dtype."""
    inputs = make_inputs(64, 256, BF16, BF16)
    x, weight = inputs.x, inputs.weight
    exact = expected_results(inputs)["y"].truth
    in_16_bits = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + inputs.eps) * weight
    error = (ours.liger_rms_norm(x, weight, inputs.eps, 0.0, "none").double() - exact).norm()
    assert error < 0.7 * (in_16_bits.double() - exact).norm()


@pytest.mark.parametrize("mode", MODES)
def test_fused_add(mode):
    torch.manual_seed(0)
    x, residual = (torch.randn(5, 3, 16, device=DEVICE).to(BF16).requires_grad_() for _ in range(2))
    weight = torch.randn(16, device=DEVICE, requires_grad=True)
    y, summed = ours.liger_fused_add_rms_norm(x, residual, weight, 1e-6, 1.0, mode)
    assert summed.dtype == BF16 and torch.equal(summed, x + residual)
    alone = ours.liger_rms_norm(x + residual, weight, 1e-6, 1.0, mode)
    assert y.dtype == BF16 and (y == alone).float().mean() > 0.99  # another kernel may have another rstd
    dy, ds = torch.randn_like(y), torch.randn_like(y)
    got = torch.autograd.grad((y, summed), (x, residual, weight), (dy, ds))
    s = (x + residual).detach().double().requires_grad_()
    exact = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * (weight.double() + 1)
    want = torch.autograd.grad((exact, s * 1), (s, s, weight), (dy.double(), ds.double()), allow_unused=True)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(got[0], got[1])
    torch.testing.assert_close(got[2], want[2], rtol=2e-2, atol=2e-2)


def test_the_sum_has_the_dtype_of_x():
    x, residual = torch.randn(3, 8, dtype=BF16), torch.randn(3, 8)
    assert ours.liger_fused_add_rms_norm(x, residual, None, 1e-6)[1].dtype == BF16


def test_gradients_that_come_in_stay():
    """Liger's in_place=True overwrites them."""
    x = torch.randn(3, 8, requires_grad=True)
    dy = torch.randn(3, 8)
    before = dy.clone()
    ours.liger_rms_norm(x, torch.ones(8), 1e-6, in_place=True).backward(dy)
    assert torch.equal(dy, before)


def test_refused():
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got list"):
        ours.apply_to([nn.Linear(2, 2)])


def test_modules():
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    norm = ours.LigerRMSNorm(8, 1e-5, 1.0, "gemma", "zeros")
    assert list(norm.state_dict()) == ["weight"] and not norm.weight.any()
    assert torch.equal(norm(x), tilegym_rmsnorm.rms_norm(x, 8, norm.weight, 1e-5, offset=1.0))
    assert (norm.variance_epsilon, norm.offset, norm.casting_mode) == (1e-5, 1.0, "gemma")
    assert norm.in_place is True and norm.row_mode is None and "eps=1e-05" in repr(norm)
    bare = ours.LigerRMSNorm(8, elementwise_affine=False)
    assert bare.weight is None and not bare.state_dict() and torch.equal(bare(x), norm(x)) is False
    assert "weight_shape=None" in repr(bare)
    add = ours.LigerFusedAddRMSNorm(8)
    assert add.in_place is False and torch.equal(add(x, residual)[1], x + residual)


@pytest.mark.parametrize("model", MODELS)
def test_modules_of_models(model):
    norm = getattr(ours, f"LigerRMSNormFor{model}")(8, 1e-5)
    assert isinstance(norm, ours.LigerRMSNorm) and list(norm.state_dict()) == ["weight"]
    assert torch.equal(norm.weight + norm.offset, torch.ones(8))  # each starts with a factor of 1
    x = torch.randn(3, 8, dtype=BF16)
    casting = "llama" if model in ("Olmo2", "Glm4") else "once"
    expected = tilegym_rmsnorm.rms_norm(x, 8, norm.weight, 1e-5, offset=norm.offset, casting=casting)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("model", MODELS)
def test_classes_of_models(model):
    name = f"LigerRMSNormFor{model}"
    cls = getattr(ours, name)
    bases = {"Qwen3Next": ours.LigerRMSNormForGemma2, "Glm4": ours.LigerRMSNormForOlmo2}
    assert issubclass(cls, bases.get(model, ours.LigerRMSNorm)) and cls.__doc__
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (name, name, ours.__name__)
    base = name if model not in bases else bases[model].__name__
    assert cls.__init__.__qualname__ == f"{base}.__init__"  # errors and tracebacks name it
    norm = cls(8, 1e-5, in_place=True)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(other) is cls and repr(other) == repr(norm)
    first, *others = inspect.signature(cls).parameters
    assert cls(**{first: 8, "eps": 1e-5}).variance_epsilon == 1e-5
    last = {name: True for name in others[5:]}
    norm = cls(8, 1e-5, 0.5, "none", "ones", True, *last.values())
    assert (norm.variance_epsilon, norm.offset, norm.casting_mode, norm.in_place) == (1e-5, 0.5, "none", True)
    assert norm.weight.all() and all(getattr(norm, name) is value for name, value in last.items())
    with pytest.raises(TypeError, match=f"{base}.*missing 1 required positional argument: '{first}'"):
        cls()
    with pytest.raises(TypeError, match=f"{base}.*takes from 2 to .* positional arguments but"):
        cls(8, 1e-5, 0.5, "none", "ones", True, *last.values(), True)
    with pytest.raises(TypeError, match=f"{base}.*unexpected keyword argument 'elementwise_affine'"):
        cls(8, elementwise_affine=False)


def test_a_class_derived_from_one_of_a_model():
    class Wider(ours.LigerRMSNormForGemma3):
        def __init__(self, dim):
            super().__init__(2 * dim, offset=2.0)

    norm = Wider(4)
    assert norm.weight.shape == (8,) and (norm.offset, norm.casting_mode) == (2.0, "gemma")


def test_gemma4_without_a_scale():
    norm = ours.LigerRMSNormForGemma4(8, with_scale=False)
    assert norm.weight is None and norm.with_scale is False and not norm.state_dict()
    x = torch.randn(3, 8, dtype=BF16)
    assert torch.equal(norm(x), tilegym_rmsnorm.rms_norm(x, 8, eps=1e-6))


# Models that have Liger's norms


def stand_ins():
    """Liger's modules, with classes that say whose forward ran."""

    class LigerRMSNorm(ours.LigerRMSNorm):
        def forward(self, hidden_states):
            raise AssertionError("Liger's forward")

    class LigerRMSNormForGemma(LigerRMSNorm):
        pass

    class LigerRMSNormForGemma4(LigerRMSNorm):
        def forward(self, hidden_states):
            raise AssertionError("Gemma 4's forward")

    class LigerFusedAddRMSNorm(ours.LigerFusedAddRMSNorm):
        def forward(self, hidden_states, residual):
            raise AssertionError("Liger's forward")

    names = {
        "rms_norm": (LigerRMSNorm, LigerRMSNormForGemma, LigerRMSNormForGemma4),
        "fused_add_rms_norm": (LigerFusedAddRMSNorm,),
    }
    for name, classes in names.items():
        module = ModuleType(f"liger_kernel.transformers.{name}")
        for each in classes:
            each.__qualname__, each.__module__ = each.__name__, module.__name__
            setattr(module, each.__name__, each)
        yield module


@pytest.fixture
def liger(monkeypatch):
    modules = {module.__name__: module for module in stand_ins()}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    classes = {}
    for module in modules.values():
        classes |= {name: each for name, each in vars(module).items() if isinstance(each, type)}
    return classes


class OfAModel(nn.Module):
    """A norm of a model, to which Liger binds its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))
        self.variance_epsilon, self.offset, self.casting_mode = 1e-6, 0.0, "llama"

    def forward(self, x):
        return x


def test_apply_to(liger):
    bound = OfAModel()
    bound.forward = MethodType(liger["LigerRMSNorm"].forward, bound)
    model = nn.ModuleDict(
        {
            "llama": liger["LigerRMSNorm"](8),
            "gemma": liger["LigerRMSNormForGemma"](8, 1e-6, 1.0, "gemma", "zeros"),
            "gemma4": liger["LigerRMSNormForGemma4"](8, elementwise_affine=False, casting_mode="gemma"),
            "add": liger["LigerFusedAddRMSNorm"](8),
            "bound": bound,
            "other": OfAModel(),
            "linear": nn.Linear(8, 8),
        }
    )
    keys, seen = list(model.state_dict()), []
    model["llama"].register_forward_hook(lambda *_: seen.append("hook"))
    assert ours.apply_to(model) == ["llama", "gemma", "gemma4", "add", "bound"]
    assert ours.apply_to(model) == [] and list(model.state_dict()) == keys
    x = torch.randn(3, 8, dtype=BF16)
    llama = tilegym_rmsnorm.rms_norm(x, 8, torch.ones(8), 1e-6, casting="llama")
    assert torch.equal(model["llama"](x), llama) and seen == ["hook"]
    assert isinstance(model["llama"], liger["LigerRMSNorm"])
    once = tilegym_rmsnorm.rms_norm(x, 8, None, 1e-6)
    assert torch.equal(model["gemma"](x), once) and torch.equal(model["gemma4"](x), once)
    assert torch.equal(model["add"](x, x)[1], x + x) and torch.equal(model["other"](x), x)
    expected = tilegym_rmsnorm.rms_norm(x, 8, bound.weight, 1e-6, casting="llama")
    assert torch.equal(model["bound"](x), expected)


def test_copies_of_a_changed_model_are_changed_and_pickles_are_not(liger):
    model = nn.Sequential(liger["LigerRMSNorm"](8))
    ours.apply_to(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.fill_(3.0)
    x = torch.randn(3, 8)
    torch.testing.assert_close(copied(x), 3 * model(x))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    with pytest.raises(AssertionError, match="Liger's forward"):
        loaded(x)
    assert ours.apply_to(loaded) == ["0"] and torch.equal(loaded(x), model(x))


def test_a_model_without_liger(monkeypatch):
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.delitem(sys.modules, f"liger_kernel.transformers.{name}", raising=False)
    assert ours.apply_to(nn.Sequential(torch.nn.RMSNorm(8), OfAModel())) == []


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
def test_apply_to_the_installed_liger():
    transformers = pytest.importorskip("liger_kernel.transformers.rms_norm", exc_type=ImportError)
    from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm

    classes = [
        each
        for name, each in vars(transformers).items()
        if name.startswith("LigerRMSNorm") and isinstance(each, type) and issubclass(each, nn.Module)
    ]
    assert len(classes) > 5
    model = nn.ModuleList([*(each(8) for each in classes), LigerFusedAddRMSNorm(8)])
    x = torch.randn(3, 8, dtype=BF16)
    assert len(ours.apply_to(model)) == len(model)
    for norm in model[:-1]:
        casting = "llama" if norm.casting_mode == "llama" else "once"
        expected = tilegym_rmsnorm.rms_norm(x, 8, norm.weight, 1e-6, offset=norm.offset, casting=casting)
        assert torch.equal(norm(x), expected), type(norm).__name__

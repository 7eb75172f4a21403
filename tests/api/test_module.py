# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm as a module: what torch.nn.RMSNorm promises, and what is added."""

import copy
import pickle
import re

import pytest
import torch

import tilegym_rmsnorm
from tilegym_rmsnorm import RMSNorm, rms_norm


def test_is_a_torch_rms_norm_with_the_same_state_dict():
    ours, theirs = RMSNorm(64), torch.nn.RMSNorm(64)
    assert isinstance(ours, torch.nn.RMSNorm)
    with torch.no_grad():
        theirs.weight.copy_(torch.linspace(0.5, 2, 64))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("normalized_shape", [64, [64], (2, 32), torch.Size([64])])
def test_signature_of_torch(normalized_shape):
    positional = (normalized_shape, 1e-5, True, "cpu", torch.bfloat16)
    ours, theirs = RMSNorm(*positional), torch.nn.RMSNorm(*positional)
    assert ours.normalized_shape == theirs.normalized_shape and ours.eps == theirs.eps
    assert ours.weight.shape == theirs.weight.shape and ours.weight.dtype == theirs.weight.dtype
    assert torch.equal(ours.weight, theirs.weight)
    x = torch.randn(3, *theirs.normalized_shape, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_offset_one_starts_at_zero_and_acts_as_one():
    gemma, plain = RMSNorm(64, offset=1.0), RMSNorm(64)
    assert torch.equal(gemma.weight, torch.zeros(64)) and torch.equal(plain.weight, torch.ones(64))
    x = torch.randn(3, 64)
    assert torch.equal(gemma(x), plain(x))
    with torch.no_grad():
        gemma.weight.fill_(3.0)
    gemma.reset_parameters()
    assert torch.equal(gemma.weight, torch.zeros(64))


def test_without_weight():
    module = RMSNorm(64, elementwise_affine=False, bias=True, offset=1.0)
    assert not list(module.parameters()) and not module.state_dict()
    x = torch.randn(3, 64)
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (64,)))


def test_bias_is_learned():
    module = RMSNorm(64, bias=True)
    assert list(module.state_dict()) == ["weight", "bias"] and torch.equal(module.bias, torch.zeros(64))
    module(torch.randn(3, 64)).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((64,), 3.0))
    with torch.no_grad():
        module.bias.fill_(3.0)
    module.reset_parameters()
    assert torch.equal(module.bias, torch.zeros(64))


def test_the_backend_is_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(tilegym_rmsnorm.nn.module, "rms_norm", lambda *_, backend, **__: seen.append(backend))
    for name in (None, "auto", "triton"):
        RMSNorm(64, backend=name)(torch.ones(3, 64))
    assert seen == [None, "auto", "triton"]


def _parametrized(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    return 2 * module.parametrizations.weight.original


def _plain_tensor(module):
    """Set a tensor, as FSDP does a view of its flat parameter."""
    weight = 3 * module.weight.detach()
    del module.weight
    module.weight = weight
    return weight


def _replaced(module):
    module.weight = torch.nn.Parameter(4 * module.weight.detach())
    return module.weight


def _removed(module):
    module.weight = None


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("change", [_parametrized, _plain_tensor, _replaced, _removed])
def test_the_weight_is_whatever_the_attribute_is(change):
    module, x = RMSNorm(64, bias=True, backend="torch"), torch.randn(3, 64)
    module(x)
    weight = change(module)
    assert torch.equal(module(x), rms_norm(x, (64,), weight, bias=module.bias, backend="torch"))


def _later(module):
    module.bias = torch.nn.Parameter(torch.rand(64))
    return module.bias


def _later_parametrized(module):
    _later(module)
    torch.nn.utils.parametrize.register_parametrization(module, "bias", Doubled())
    return 2 * module.parametrizations.bias.original


def _later_plain(module):
    module.bias = torch.rand(64)
    return module.bias


def _later_a_buffer(module):
    module.register_buffer("bias", torch.rand(64))
    return module.bias


def _as_data_parallel_does(module):
    _later(module)
    replica = module._replicate_for_data_parallel()
    assert not replica._parameters
    module.__dict__ = {**replica.__dict__, "weight": module.weight.detach(), "bias": module.bias.detach()}
    return module.bias


@pytest.mark.parametrize(
    "change", [_later, _later_parametrized, _later_plain, _later_a_buffer, _as_data_parallel_does]
)
def test_a_bias_that_is_set_later_counts(change):
    module, x = RMSNorm(64, backend="torch"), torch.randn(3, 64)
    assert not hasattr(module, "bias")
    bias = change(module)
    assert torch.equal(module(x), rms_norm(x, (64,), module.weight, bias=bias, backend="torch"))
    assert "bias=True" in repr(module)


def test_without_a_bias_there_is_no_attribute():
    for module in (RMSNorm(64), RMSNorm(64, elementwise_affine=False, bias=True)):
        assert not hasattr(module, "bias") and "bias" not in module._parameters
        assert "bias=False" in repr(module)
    module = RMSNorm(64, bias=True)
    del module.bias
    assert not hasattr(module, "bias")
    x = torch.randn(3, 64)
    assert torch.equal(module(x), RMSNorm(64)(x))


def test_pickles_of_the_time_when_there_was_always_a_bias():
    module = RMSNorm(64, backend="torch")
    module._parameters["bias"] = None
    twin, x = pickle.loads(pickle.dumps(module)), torch.randn(3, 64)
    assert torch.equal(twin(x), RMSNorm(64)(x)) and repr(twin) == repr(RMSNorm(64, backend="torch"))
    assert list(twin.state_dict()) == ["weight"]
    twin.bias = torch.nn.Parameter(torch.ones(64))
    assert torch.equal(twin(x), rms_norm(x, (64,), bias=twin.bias))


@pytest.mark.parametrize("cls", [RMSNorm, RMSNorm.configured(offset=1.0, casting="llama", backend="torch")])
def test_a_built_torch_norm_can_change_its_class(cls):
    module, x = torch.nn.RMSNorm(64, 1e-5), torch.randn(3, 64, dtype=torch.bfloat16)
    module.__class__ = cls
    text = f"offset={cls.offset}, bias=False, casting={cls.casting!r}, backend={cls.backend!r}"
    options = {"offset": cls.offset, "casting": cls.casting, "backend": cls.backend}
    assert text in repr(module) and list(module.state_dict()) == ["weight"]
    expected = rms_norm(x, (64,), torch.ones(64), 1e-5, **options)
    assert torch.equal(torch.compile(copy.deepcopy(module), backend="eager")(x), expected)
    assert torch.equal(module(x), expected)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.full((64,), 1.0 - cls.offset))


def test_y_has_the_dtype_of_x_where_hugging_face_widens_it():
    """LlamaRMSNorm multiplies its float32 weight by the 16-bit xhat, and returns float32."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    ours, theirs = RMSNorm(64, 1e-6, casting="llama"), modeling.LlamaRMSNorm(64, eps=1e-6)
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(64))
    ours.load_state_dict(theirs.state_dict())
    assert theirs(x).dtype == torch.float32 and ours(x).dtype == torch.bfloat16
    torch.testing.assert_close(ours(x), theirs(x).bfloat16(), rtol=0, atol=0)


def test_a_bias_that_is_set_later_and_a_changed_class_do_not_break_a_graph():
    module, x = RMSNorm(64, backend="torch"), torch.randn(3, 64)
    torch._dynamo.reset()
    module.bias = torch.nn.Parameter(torch.rand(64))
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))
    changed = torch.nn.RMSNorm(64)
    changed.__class__ = RMSNorm.configured(backend="torch")
    assert torch.equal(torch.compile(changed, backend="eager", fullgraph=True)(x), RMSNorm(64)(x))


def test_copies_pickles_and_the_meta_device():
    module = RMSNorm(64, 1e-5, offset=1.0, bias=True, casting="llama", backend="torch")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        x = torch.randn(3, 64)
        assert torch.equal(twin(x), module(x))
    meta = RMSNorm(64, device="meta", offset=1.0, bias=True).to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.equal(meta.weight, torch.zeros(64)) and torch.equal(meta.bias, torch.zeros(64))


def test_repr_tells_every_option():
    text = "RMSNorm((64,), eps=1e-05, elementwise_affine=True, offset=1.0, bias=True, casting='llama', backend='torch')"
    assert repr(RMSNorm(64, 1e-5, offset=1.0, bias=True, casting="llama", backend="torch")) == text


BAD_SIZES_AND_DTYPES = [
    ((8.0,), {}, TypeError, "normalized_shape: expected an int or a sequence of ints, got 8.0"),
    (("8",), {}, TypeError, "normalized_shape: expected an int or a sequence of ints, got '8'"),
    (((8, 8.0),), {}, TypeError, "normalized_shape: expected an int or a sequence of ints, got (8, 8.0)"),
    ((True,), {}, TypeError, "normalized_shape: expected an int or a sequence of ints, got True"),
    (
        (torch.ones(8),),
        {},
        TypeError,
        "normalized_shape: expected an int or a .*, got a tensor of shape (8,)",
    ),
    ((-3,), {}, ValueError, "normalized_shape: expected sizes of at least 1, got (-3,)"),
    (((),), {}, ValueError, "normalized_shape: expected at least one dimension, got ()"),
    ((8,), {"dtype": "bf16"}, TypeError, "dtype: expected None or a dtype of .*, got 'bf16'"),
    ((8,), {"dtype": torch.int8}, TypeError, "dtype: expected None or a dtype of .*, got torch.int8"),
    ((8, 1e-6, torch.bfloat16), {}, TypeError, "elementwise_affine: expected a bool, got torch.bfloat16"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("positional", "named", "error", "text"), BAD_SIZES_AND_DTYPES)
def test_sizes_and_dtypes_are_checked_as_those_of_the_function(positional, named, error, text, compiled):
    """nn.RMSNorm said "'float' object is not iterable", or nothing until the first call."""

    def make():
        return RMSNorm(*positional, **named)(torch.ones(3, 8))

    torch._dynamo.reset()
    with pytest.raises(error, match=re.escape(text).replace(r"\.\*", ".*")):
        (torch.compile(make, backend="eager") if compiled else make)()
    if "dtype" in named:
        with pytest.raises(error, match="dtype: expected None or a dtype of"):
            RMSNorm.configured(**named)


@pytest.mark.parametrize("size", [0, (0,), (3, 0)])
def test_a_norm_of_no_elements_is_one_of_torch_too(size):
    ours, theirs = RMSNorm(size), torch.nn.RMSNorm(size)
    x = torch.ones(2, *theirs.normalized_shape)
    assert ours.normalized_shape == theirs.normalized_shape and ours.weight.shape == theirs.weight.shape
    assert ours(x).shape == theirs(x).shape


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.complex64])
def test_every_dtype_that_a_call_takes_is_one_of_parameters(dtype):
    x = torch.randn(3, 8).to(dtype or torch.float32)
    torch.testing.assert_close(RMSNorm(8, dtype=dtype)(x), torch.nn.RMSNorm(8, dtype=dtype)(x))

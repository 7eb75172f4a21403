# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm as a module: what torch.nn.RMSNorm promises, of which each use comes to the same with both classes, and what
is added; models that torch.fx traces; and keywords of other libraries' norms, to which the error names ours."""

import copy
import inspect
import pickle
import pydoc
import re
from typing import Any

import pytest
import torch
from module_uses import REFUSALS, USES
from torch import Tensor, fx, nn

import tilegym_rmsnorm
from tilegym_rmsnorm import RMSNorm, rms_norm
from tilegym_rmsnorm.nn import configured, keywords


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
    monkeypatch.setattr(tilegym_rmsnorm.nn.module, "norm_of", lambda *given: seen.append(given[-1]))
    for name in (None, "auto", "triton"):
        RMSNorm(64, backend=name)(torch.ones(3, 64))
    assert seen == [None, "auto", "triton"]


CHANGED = {
    "eps": 0.5,
    "offset": 1.0,
    "casting": "llama",
    "out_dtype": torch.float32,
    "residual_alpha": 0.5,
    "residual_dtype": torch.float32,
    "backend": "torch",
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_attribute_that_is_changed_after_a_call_counts(name):
    module = RMSNorm(64, eps=1e-6, dtype=torch.bfloat16)
    torch.nn.init.normal_(module.weight)
    given = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16() if "residual" in name else None
    before = [module(*given) for _ in range(2)][-1]
    options = {"eps": 1e-6, "residual": given[1], name: CHANGED[name]}
    setattr(module, name, CHANGED[name])
    expected = tilegym_rmsnorm.rms_norm(given[0], (64,), module.weight, **options)
    for _ in range(2):
        found = module(*given)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if name != "backend":
        pairs = zip(found, before, strict=True) if given[1] is not None else [(found, before)]
        assert not all(y.dtype == other.dtype and torch.equal(y, other) for y, other in pairs)


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


def _doubled_by_the_class(module, name="weight"):
    """Give the module a class with a property, as SimpleFSDP does, which gathers the parameter there."""
    doubled = property(lambda self: 2 * self._parameters[name])
    module.__class__ = type("SimpleFSDPRMSNorm", (type(module),), {name: doubled})
    return 2 * module._parameters[name]


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("change", [_parametrized, _plain_tensor, _replaced, _removed, _doubled_by_the_class])
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


def _later_by_the_class(module):
    _later(module)
    return _doubled_by_the_class(module, "bias")


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
    "change",
    [_later, _later_parametrized, _later_by_the_class, _later_plain, _later_a_buffer, _as_data_parallel_does],
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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
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


class Named(RMSNorm):
    def __init__(self, width, **options):
        super().__init__(width, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden_size": 8}, "normalized_shape= for hidden_size="),
        ({"dim": 8, "epsilon": 1e-6}, "normalized_shape= for dim=, eps= for epsilon="),
        ({"normalized_shape": 8, "variance_epsilon": 1e-6}, "eps= for variance_epsilon="),
        ({"normalized_shape": 8, "casting_mode": "gemma"}, 'casting="llama" or "once" for casting_mode='),
        (
            {"normalized_shape": 8, "other": 1, "zero_centered_gamma": True},
            "offset=1.0 for zero_centered_gamma=",
        ),
        (
            {"hidden_size": 8, "params_dtype": None},
            "normalized_shape= for hidden_size=, dtype= for params_dtype=",
        ),
    ],
)
def test_ours_are_named(options, said):
    with pytest.raises(TypeError, match=f"^RMSNorm: expected {re.escape(said)}; docs/coming-from.md has"):
        RMSNorm(**options)


@pytest.mark.parametrize("theirs", keywords.OURS)
def test_each_in_a_subclass_and_a_configured_class(theirs):
    with pytest.raises(TypeError, match=f"^Named: expected .* for {theirs}=; "):
        Named(8, **{theirs: 1})
    cls = RMSNorm.configured(offset=1.0)
    if theirs not in configured.OTHER_NAMES:  # such a class takes these, as models of transformers pass them
        with pytest.raises(TypeError, match=f"^RMSNorm: expected .* for {theirs}=; "):
            cls(8, **{theirs: 1})


def test_ours_are_named_where_a_class_is_configured():
    with pytest.raises(
        TypeError, match='^configured: expected casting="llama" or "once" for casting_mode=; '
    ):
        RMSNorm.configured(casting_mode="gemma")
    with pytest.raises(TypeError, match="^configured: expected options among eps, .*, got 'hidden_size'$"):
        RMSNorm.configured(hidden_size=8)


def test_ours_exist_and_theirs_do_not():
    parameters = inspect.signature(RMSNorm).parameters
    assert not parameters.keys() & keywords.OURS.keys()
    assert {text.partition("=")[0] for text in keywords.OURS.values()} <= parameters.keys()


def test_a_name_of_nobody_is_refused_as_python_refuses_it():
    with pytest.raises(TypeError, match=r"^RMSNorm.__init__\(\) got an unexpected keyword argument 'ep'"):
        RMSNorm(8, ep=1e-6)


def test_help_shows_the_signature_itself():
    assert not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(RMSNorm).parameters.values())
    shown = pydoc.plain(pydoc.render_doc(RMSNorm))
    assert "RMSNorm(normalized_shape: 'int | Sequence[int]', eps: 'float | None' = None" in shown


CLASSES = pytest.mark.parametrize(
    "cls", [RMSNorm, RMSNorm.configured(eps=None)], ids=["RMSNorm", "configured"]
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Mismatch dtype")
@pytest.mark.parametrize("name", USES)
@CLASSES
def test_it_comes_to_the_same_as_with_torch(name, cls):
    assert_same(USES[name](cls), USES[name](nn.RMSNorm))


@pytest.mark.parametrize("name", REFUSALS)
@CLASSES
def test_it_raises_as_with_torch(name, cls):
    """Errors are of the same kind and name what is wrong. Where arguments do not fit, rms_norm raises TypeError or
    ValueError, F.rms_norm mostly RuntimeError. No more of the messages is compared: PyTorch's change from version to
    version."""
    function, text = REFUSALS[name]
    with pytest.raises(Exception, match=text) as theirs:
        function(nn.RMSNorm)
    with pytest.raises(Exception, match=text) as ours:
        function(cls)
    is_of_arguments = ours.type in (TypeError, ValueError) and issubclass(theirs.type, RuntimeError)
    assert ours.type is theirs.type or is_of_arguments


def assert_same(result: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(result, nn.Parameter) == isinstance(expected, nn.Parameter)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, (list, tuple)):
        assert type(result) is type(expected) and len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key in expected:
            assert_same(result[key], expected[key])
    else:
        assert result == expected


N = 8
OPTIONS = {
    "as torch": {},
    "bias": {"bias": True},
    "everything": {"eps": 1e-5, "offset": 1.0, "bias": True, "casting": "llama", "backend": "torch"},
    "no weight": {"elementwise_affine": False},
}


class WithResidual(nn.Module):
    """Two norms around a residual stream."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.last = RMSNorm(N, **options), RMSNorm(N, **options)

    def forward(self, x, residual):
        x, residual = self.first(x, residual)
        return self.last(x + residual), residual


def changed(model: nn.Module) -> nn.Module:
    """Make all parameters unlike each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter))
    return model


def calls_of(traced: fx.GraphModule) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op == "call_function" and node.target is rms_norm]


def results(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs, and the gradients of inputs and parameters."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = model(*leaves)
    outputs = list(y) if isinstance(y, tuple) else [y]
    total = sum(output.square().sum() for output in outputs)
    return outputs + list(torch.autograd.grad(total, [*leaves, *model.parameters()]))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_norm_is_one_node(name):
    model = changed(nn.Sequential(nn.Linear(N, N), RMSNorm(N, **OPTIONS[name])))
    x = torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    (call,) = calls_of(traced)
    assert call.kwargs["casting"] == model[1].casting and call.kwargs["backend"] == model[1].backend
    assert list(traced.state_dict()) == list(model.state_dict())
    for one, other in zip(results(traced, x), results(model, x), strict=True):
        assert torch.equal(one, other)


def test_the_parameters_are_looked_up_when_the_graph_runs():
    model = changed(nn.Sequential(RMSNorm(N, bias=True)))
    traced, x = fx.symbolic_trace(model), torch.randn(5, N)
    with torch.no_grad():
        traced.load_state_dict({"0.weight": torch.full((N,), 2.0), "0.bias": torch.full((N,), 3.0)})
    assert torch.equal(traced(x), rms_norm(x, (N,), torch.full((N,), 2.0), bias=torch.full((N,), 3.0)))


@pytest.mark.parametrize("name", OPTIONS)
def test_with_a_residual(name):
    model = changed(WithResidual(**OPTIONS[name]))
    inputs = torch.randn(5, N), torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    assert len(calls_of(traced)) == 2
    for one, other in zip(results(traced, *inputs), results(model, *inputs), strict=True):
        assert torch.equal(one, other)


def test_traced_again_and_by_itself():
    model, x = changed(nn.Sequential(RMSNorm(N, bias=True))), torch.randn(5, N)
    again = fx.symbolic_trace(fx.symbolic_trace(model))
    assert len(calls_of(again)) == 1 and list(again.state_dict()) == list(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert torch.equal(fx.symbolic_trace(model[0])(x), model(x))


def test_a_traced_model_can_be_copied():
    model, x = changed(nn.Sequential(RMSNorm(N))), torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    assert torch.equal(copy.deepcopy(traced)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


class Tracer(fx.Tracer):
    """The tracer of docs/limits.md."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, RMSNorm) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tracer_of_ones_own_keeps_the_module(name):
    """Hooks of the norm run when the graph runs, as an nn.RMSNorm's do."""
    model = changed(WithResidual(**OPTIONS[name]))
    inputs = torch.randn(5, N), torch.randn(5, N)
    traced = fx.GraphModule(model, Tracer().trace(model))
    assert not calls_of(traced)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["first", "last"]
    for one, other in zip(results(traced, *inputs), results(model, *inputs), strict=True):
        assert torch.equal(one, other)
    y, _ = traced(*inputs)
    traced.last.register_forward_hook(lambda module, given, y: 2 * y)
    assert torch.equal(traced(*inputs)[0], 2 * y)

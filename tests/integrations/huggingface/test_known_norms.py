# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A call of a patched norm like an earlier one skips what finds the arguments of its kernel. What may change between
two calls must be seen: each case makes a call known, changes one thing, and must get what a norm without a patch gets.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hf_norms import N, norm_of, rows
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tilegym_rmsnorm import patch_model, unpatch_model, use_backend
from tilegym_rmsnorm.integrations.huggingface import norms
from tilegym_rmsnorm.routes import known_calls

BF16 = torch.bfloat16


@pytest.fixture
def slow(monkeypatch):
    """Each call that was not known, with its result."""
    seen, call = [], norms.Match.call

    def counted(self, *given):
        seen.append(given)
        return call(self, *given)

    monkeypatch.setattr(norms.Match, "call", counted)
    return seen


def made_known(norm, slow, x=None):
    patch_model(norm)
    x = rows() if x is None else x
    norm(x)
    slow.clear()
    norm(x)
    assert not slow, "a call like the one before went through all checks"
    return norm


def original_of(norm):
    """A copy without the patch."""
    norm = copy.deepcopy(norm)
    unpatch_model(norm)
    return norm


def outcome(call, *given):
    try:
        y = call(*given)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return "an error"
    return type(y), y.dtype, y.shape, y.stride(), y.requires_grad


def assert_as_without_patch(norm, *given):
    """By the rounding of a kernel."""
    expected = original_of(norm)
    assert outcome(norm, *given) == outcome(expected, *given)
    if isinstance(outcome(norm, *given), tuple) and given[0].device.type != "meta":
        torch.testing.assert_close(norm(*given), expected(*given))


NORMS = {
    "Llama": norm_of,
    "Gemma": lambda: norm_of(GemmaRMSNorm),
    "T5": lambda: norm_of(T5LayerNorm),
    "a switch": lambda: norm_of(Gemma3nRMSNorm),
    "torch": lambda: norm_of(nn.RMSNorm, eps=1e-6),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_the_second_call_is_known(make, slow):
    norm = made_known(make(), slow)
    others = rows(seed=1), rows(seed=2)[:2]
    with torch.no_grad():
        norm.weight.mul_(2)
    y = norm(others[0])
    assert not slow
    torch.testing.assert_close(y, original_of(norm)(others[0]))
    known_calls.forget()
    assert torch.equal(y, norm(others[0])) and slow
    assert_as_without_patch(norm, others[1])


def test_gradients_of_known_calls(slow):
    norm = norm_of()
    expected = copy.deepcopy(norm)
    made_known(norm, slow, rows().requires_grad_())
    found = []
    for each in (norm, expected):
        for _ in range(2):
            x, dy = rows(seed=3).requires_grad_(), rows(seed=4)
            found.append(torch.autograd.grad(each(x), (x, each.weight), dy))
    assert not slow
    for each in found[:-1]:
        for one, other in zip(each, found[-1], strict=True):
            torch.testing.assert_close(one, other)


def replaced(**attributes):
    def change(norm):
        for name, value in attributes.items():
            setattr(norm, name, value() if callable(value) else value)

    return change


def in_the_dictionary(norm):
    norm.__dict__["weight"] = torch.full((N,), 3.0)


def hidden_by_a_class(norm):
    """A class that was derived from the patched one has a property in the place of the parameter."""
    norm.__class__ = type("Hidden", (type(norm),), {"weight": property(lambda self: torch.full((N,), 3.0))})


def a_tensor(norm):
    """As FSDP sets a view of its flat parameter."""
    del norm.weight
    norm.weight = torch.rand(N)


def in_parameters(norm):
    """As torch.func.functional_call swaps tensors."""
    norm._parameters["weight"] = torch.rand(N, dtype=torch.float64)


def a_buffer(norm):
    del norm.weight
    norm.register_buffer("weight", torch.rand(N))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "eps": replaced(variance_epsilon=0.5),
    "an int as eps": replaced(variance_epsilon=1),
    "a bool as eps": replaced(variance_epsilon=True),
    "a negative eps": replaced(variance_epsilon=-1.0),
    "eps without a number": replaced(variance_epsilon=lambda: torch.tensor(0.5)),
    "no eps": lambda norm: delattr(norm, "variance_epsilon"),
    "weight": replaced(weight=lambda: nn.Parameter(torch.rand(N))),
    "a weight of another dtype": replaced(weight=lambda: nn.Parameter(torch.rand(N, dtype=BF16))),
    "a float64 weight": replaced(weight=lambda: nn.Parameter(torch.rand(N, dtype=torch.float64))),
    "a weight of one element": replaced(weight=lambda: nn.Parameter(torch.rand(1))),
    "a weight of two dimensions": replaced(weight=lambda: nn.Parameter(torch.rand(5, N))),
    "a longer weight": replaced(weight=lambda: nn.Parameter(torch.rand(N + 1))),
    "no weight": replaced(weight=None),
    "a deleted weight": lambda norm: delattr(norm, "weight"),
    "a frozen weight": lambda norm: norm.requires_grad_(False),
    "a weight that is a tensor": a_tensor,
    "a weight that is a buffer": a_buffer,
    "a tensor among the parameters": in_parameters,
    "a weight in the dictionary of the module": in_the_dictionary,
    "a weight that a class hides": hidden_by_a_class,
    "data": lambda norm: setattr(norm.weight, "data", torch.rand(N, dtype=BF16)),
    "a parametrization": lambda norm: parametrize.register_parametrization(norm, "weight", Doubled()),
    "half()": lambda norm: norm.half(),
    "to()": lambda norm: norm.to(torch.float64),
    "a state dict": lambda norm: norm.load_state_dict({"weight": torch.rand(N)}, assign=True),
    "eval()": lambda norm: norm.eval(),
    "a forward hook": lambda norm: norm.register_forward_hook(lambda norm, given, y: 2 * y),
    "a pre-hook": lambda norm: norm.register_forward_pre_hook(lambda norm, given: (2 * given[0],)),
    "another forward": lambda norm: norm.__dict__.__setitem__("forward", lambda x: x + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_module_is_seen(change, slow):
    norm = made_known(norm_of(), slow)
    plain = copy.deepcopy(norm)
    unpatch_model(plain)
    for each in (norm, plain):
        torch.manual_seed(0)
        change(each)
    for x in (rows(), rows().requires_grad_()):
        assert outcome(norm, x) == outcome(plain, x)
        if isinstance(outcome(plain, x), tuple):
            torch.testing.assert_close(norm(x), plain(x), equal_nan=True)


def test_an_eps_that_a_class_hides_is_seen(slow):
    """It may be another in each call, while that of the module stays."""
    norm = made_known(norm_of(), slow)
    plain = copy.deepcopy(norm)
    unpatch_model(plain)
    for each in (norm, plain):
        members = {"variance_epsilon": property(lambda self: self.own_eps)}
        each.__class__ = type("Hidden", (type(each),), members)
    for norm.own_eps in (0.5, 0.5, 2.0):
        plain.own_eps = norm.own_eps
        torch.testing.assert_close(norm(rows()), plain(rows()))


def in_eval_another(name, value):
    """Return a property that is the module's own while it trains, and `value` in evaluation."""

    def get(self):
        own = self._parameters if name == "weight" else self.__dict__
        return own[name] if self.training else value

    def set_(self, given):
        (self._parameters if name == "weight" else self.__dict__)[name] = given

    return property(get, set_)


PROPERTIES = {"weight": torch.full((N,), 3.0), "variance_epsilon": 0.5}


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("is_later", [False, True], ids=["before the patch", "after known calls"])
def test_a_property_of_the_class_is_read_in_each_call(name, is_later, monkeypatch):
    """A known call took the parameter in its place."""
    norm = norm_of()
    plain, member = copy.deepcopy(norm), in_eval_another(name, PROPERTIES[name])
    plain.__class__ = type("Switching", (type(norm),), {name: member})
    if not is_later:
        norm.__class__ = type(plain)
    model = nn.Sequential(norm)
    patch_model(model)
    for _ in range(3):
        model(rows())
    if is_later:
        monkeypatch.setattr(type(norm), name, member, raising=False)
    for is_training in (True, False, True, False):
        torch.testing.assert_close(model.train(is_training)(rows()), plain.train(is_training)(rows()))


@pytest.mark.parametrize("name", ["input", "weight"])
def test_freed_memory_is_refused(name, slow):
    """A known call does not read it either."""
    with torch.no_grad():
        norm, x = made_known(norm_of(), slow), rows()
        (x if name == "input" else norm.weight).untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{name}: expected memory behind its elements"):
            norm(x)


INPUTS = {
    "more rows": lambda: torch.randn(4, 5, N),
    "one row": lambda: torch.randn(N),
    "no rows": lambda: torch.randn(0, 5, N),
    "bfloat16": lambda: rows(BF16),
    "float64": lambda: rows(torch.float64),
    "recorded": lambda: rows().requires_grad_(),
    "another width": lambda: torch.randn(3, 5, N + 1),
    "transposed": lambda: torch.randn(5, 3, N).transpose(0, 1),
    "columns apart": lambda: torch.randn(N, 3, 5).permute(1, 2, 0),
    "between 16 bytes": lambda: torch.randn(15 * N + 1)[1:].view(3, 5, N),
    "integers": lambda: rows().long(),
    "sparse": lambda: rows().to_sparse(),
    "no tensor": lambda: rows().tolist(),
    "negated": lambda: torch.complex(rows(), rows()).conj().imag,
    "a parameter": lambda: nn.Parameter(rows(), requires_grad=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_another_input_is_seen(make, dtype, slow):
    norm, x = made_known(norm_of(dtype=dtype), slow, rows(dtype)), make()
    plain = original_of(norm)
    for _ in range(2):
        assert outcome(norm, x) == outcome(plain, x)
        if isinstance(outcome(plain, x), tuple):
            torch.testing.assert_close(norm(x), plain(x), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_error_of_an_original_forward_stays():
    """Such a tensor does not say whether it is contiguous."""
    norm, x, errors = norm_of(), rows(torch.float64)[0].to_sparse_csr(), []
    plain = copy.deepcopy(norm)
    patch_model(norm)
    for each in (norm, plain):
        with pytest.raises(RuntimeError) as error:
            each(x)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_switch_is_seen(slow):
    norm = made_known(norm_of(Gemma3nRMSNorm), slow)
    for is_on in (False, True, False):
        norm.with_scale = is_on
        for _ in range(2):
            assert_as_without_patch(norm, rows())


def test_norms_of_one_weight_and_eps_are_told_apart(slow):
    """By their arithmetic, offset and class: their tensors and eps are alike."""
    made = [norm_of(cls) for cls in (LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm)]
    made.append(norm_of(nn.RMSNorm, eps=1e-6))
    for each in made:
        each.to(BF16)
        patch_model(each)
    for _ in range(2):
        for each in made:
            assert torch.equal(each(rows(BF16)), original_of(each)(rows(BF16)))
    with_offset = made[1](rows(BF16))
    assert not any(torch.equal(with_offset, each(rows(BF16))) for each in (made[0], *made[2:]))


def test_the_grad_mode_and_the_mode_of_inference_are_seen(slow):
    norm, x = made_known(norm_of(), slow), rows()
    assert norm(x).requires_grad
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            for _ in range(2):
                assert not norm(x).requires_grad
            y = norm(rows())
        assert y.is_inference() == (quiet is torch.inference_mode)
    assert norm(x).requires_grad


def test_the_backend_in_effect_is_seen(slow):
    norm = made_known(norm_of(), slow)
    with use_backend("torch"):
        norm(rows())
        norm(rows())
    assert len(slow) == 1
    norm(rows())
    assert len(slow) == 1


def test_a_forward_of_another_patched_class_is_told_apart(slow):
    """As a class may call that is derived from two."""
    norm, other, x = made_known(norm_of(), slow, rows(BF16)), norm_of(T5LayerNorm), rows(BF16)
    patch_model(other)
    for _ in range(2):
        y = type(other).forward(norm, x)
        torch.testing.assert_close(y, T5LayerNorm.forward(norm, x))
        assert not torch.equal(y, norm(x)), "Llama rounds before it multiplies"


def test_the_shape_of_a_norm_without_a_weight_is_seen(slow):
    norm = nn.RMSNorm(N, eps=1e-6, elementwise_affine=False)
    patch_model(norm)
    for _ in range(2):
        assert_as_without_patch(norm, rows())
    norm.normalized_shape = (N + 1,)
    assert_as_without_patch(norm, rows())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cls", [LlamaRMSNorm, Gemma3nRMSNorm])
def test_a_known_norm_is_compiled(cls, slow):
    norm = made_known(norm_of(cls), slow)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    for x in (rows(), rows().transpose(0, 1)):
        torch.testing.assert_close(compiled(x), original_of(norm)(x))


def test_autocast_is_left_each_time(monkeypatch, slow):
    norm = made_known(norm_of(dtype=BF16), slow, rows(BF16))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    norm(rows(BF16))
    norm(rows(BF16))
    assert len(slow) == 2


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, given=(), options=None):
        self.seen.append(function)
        return function(*given, **(options or {}))


def test_what_watches_a_call_is_seen(slow):
    norm, x = made_known(norm_of(), slow), rows()
    expected = original_of(norm)
    with Seeing() as mode:
        norm(x)
    assert mode.seen
    torch.testing.assert_close(torch.func.vmap(norm)(x), expected(x))
    grads = [torch.func.grad(lambda t, each=each: each(t).square().sum())(x) for each in (norm, expected)]
    torch.testing.assert_close(*grads)
    _, tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.jvp(expected, (x,), (torch.ones_like(x),))[1])
    swapped = {"weight": torch.rand(N)}
    y, other = (torch.func.functional_call(each, swapped, x) for each in (norm, expected))
    torch.testing.assert_close(y, other)
    graph = torch.fx.experimental.proxy_tensor.make_fx(norm)(x)
    torch.testing.assert_close(graph(2 * x), expected(2 * x))


def test_the_base_class_gets_another_forward(monkeypatch, slow):
    norm = made_known(norm_of(), slow)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * x)
    assert torch.equal(norm(rows()), 2 * rows())


def test_copies_and_pickles_hold_nothing_of_known_calls(slow):
    """Their bytes are those of a norm that was never called."""
    norm = norm_of()
    patch_model(norm)
    before = pickle.dumps(norm)
    made_known(norm, slow)
    assert pickle.dumps(norm) == before
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        copied.variance_epsilon = 0.5
        assert_as_without_patch(copied, rows())


@pytest.mark.usefixtures("quick_gc")
def test_no_tensor_is_kept(slow):
    norm = made_known(norm_of(), slow, rows().requires_grad_())
    x = rows().requires_grad_()
    y = norm(x)
    y.sum().backward()
    references = [weakref.ref(each) for each in (x, y, norm.weight, norm)]
    del norm, x, y
    gc.collect()
    assert not [each for each in references if each() is not None]
    assert norms._KNOWN._kinds


def test_a_tensor_given_twice(slow):
    """x is the weight itself."""
    norm = norm_of()
    norm.weight.requires_grad_(False)
    plain = copy.deepcopy(norm)
    patch_model(norm)
    for _ in range(3):
        torch.testing.assert_close(norm(norm.weight), plain(plain.weight))
    one_row: Tensor = torch.rand(N)
    for _ in range(2):
        torch.testing.assert_close(norm(one_row), plain(one_row))

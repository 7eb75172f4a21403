# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""patch_model and unpatch_model: what they keep, what they refuse, and what they leave as it is."""

import contextlib
import copy
import functools
import io
import pickle
import subprocess
import sys
import types

import pytest
import torch
from helpers import DEVICE
from hf_models import ARCHITECTURES, TOKENS, results
from torch import nn

import tilegym_rmsnorm
from tilegym_rmsnorm import RMSNorm, patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface import norms

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

LLAMA = ARCHITECTURES[0]
N = 32


NONE = {"patched": 0, "layers": 0, "declined": 0, "restored": 0, "already": 0}


def norm_of(cls=LlamaRMSNorm, dtype=torch.float32, **options):
    module = cls(N, **options).to(dtype)
    nn.init.normal_(module.weight, 1.0, 0.3)
    return module


def rows(dtype=torch.float32, seed=0):
    return torch.randn(3, 5, N, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """The calls of rms_norm by patched norms."""
    made = []

    def rms_norm(*arguments, **options):
        made.append(options)
        return tilegym_rmsnorm.rms_norm(*arguments, **options)

    monkeypatch.setattr(norms, "rms_norm", rms_norm)
    return made


def test_the_report():
    model = LLAMA.built()
    model.extra = nn.LayerNorm(N)
    report = patch_model(model, patch_layers=True)
    assert report.counts == {"patched": 5, "layers": 2, "declined": 1, "restored": 0, "already": 0}
    assert report.patched[-1] == ("model.norm", "LlamaRMSNorm", "llama")
    assert report.layers[0] == ("model.layers.0", "LlamaDecoderLayer", ("post_attention_layernorm",))
    assert report.declined == (("extra", "LayerNorm", "its forward calls F.layer_norm"),)
    assert str(report) == (
        "patched: 5\n"
        "     5 LlamaRMSNorm (llama): model.layers.0.input_layernorm and 4 more\n"
        "layers: 2\n"
        "     2 LlamaDecoderLayer (post_attention_layernorm): model.layers.0 and 1 more\n"
        "declined: 1\n"
        "     1 LayerNorm (its forward calls F.layer_norm): extra"
    )
    assert str(unpatch_model(model)).startswith("restored: 7\n")


def test_a_second_patch_and_a_model_without_norms_change_nothing():
    model = LLAMA.built()
    patch_model(model)
    classes = [type(part) for part in model.modules()]
    again = patch_model(model)
    assert again.counts == {"patched": 0, "layers": 0, "declined": 0, "restored": 0, "already": 5}
    assert str(again) == "patched before: 5"
    assert [type(part) for part in model.modules()] == classes
    assert patch_model(model, patch_layers=True).counts["layers"] == 2
    assert patch_model(model, patch_layers=True).counts["already"] == 7
    for function in (patch_model, unpatch_model):
        report = function(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        assert not any(report.counts.values()) and str(report) == "no norms"
    ours = nn.Sequential(RMSNorm(N))
    assert patch_model(ours).counts["already"] == 1 and type(ours[0]) is RMSNorm


def test_another_backend_is_taken_by_a_second_patch(calls):
    norm = norm_of()
    patch_model(norm, backend="torch")
    assert patch_model(norm).counts["patched"] == 1
    norm(rows())
    assert calls[-1]["backend"] is None
    assert unpatch_model(norm).counts["restored"] == 1 and type(norm) is LlamaRMSNorm


@pytest.mark.parametrize("function", [patch_model, unpatch_model])
@pytest.mark.parametrize(
    "given", [None, LlamaRMSNorm, [norm_of()], "model"], ids=["None", "class", "list", "str"]
)
def test_what_is_no_module_is_refused(function, given):
    with pytest.raises(TypeError, match=f"^{function.__name__}: expected a torch.nn.Module, got "):
        function(given)


def test_a_backend_that_is_not_there_is_refused_before_anything_changes():
    model = LLAMA.built()
    with pytest.raises(ValueError, match="backend"):
        patch_model(model, backend="nonsense")
    assert type(model.model.norm) is LlamaRMSNorm


def test_what_a_patched_module_keeps():
    norm = norm_of(eps=1e-3).eval()
    norm.register_buffer("count", torch.zeros(1))
    norm.note = "kept"
    seen = []
    norm.register_forward_hook(lambda *given: seen.append(given))
    weight, expected = norm.weight, norm(rows())
    patch_model(norm)
    assert isinstance(norm, LlamaRMSNorm) and type(norm) is not LlamaRMSNorm
    assert type(norm).__name__ == "LlamaRMSNorm" and type(norm).__module__ == LlamaRMSNorm.__module__
    assert norm.weight is weight and norm.note == "kept" and not norm.training
    assert norm.variance_epsilon == 1e-3 and list(norm.state_dict()) == ["weight", "count"]
    assert torch.equal(norm(rows()), expected) and len(seen) == 2
    assert torch.equal(norm(hidden_states=rows()), expected)  # by its name, as the original takes it
    assert repr(norm) == f"LlamaRMSNorm(({N},), eps=0.001, tilegym_rmsnorm: llama)"
    norm.variance_epsilon = 1.0  # read at each call
    assert not torch.equal(norm(rows()), expected)
    with pytest.raises(TypeError):
        norm()
    with pytest.raises(TypeError):
        norm(rows(), nonsense=1)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_copies_and_pickles(copied, layers):
    model = LLAMA.built()
    patch_model(model, patch_layers=layers)
    again = copied(model)
    assert [type(part) for part in again.modules()] == [type(part) for part in model.modules()]
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert patch_model(again, patch_layers=layers).counts["already"] == (7 if layers else 5)
    assert unpatch_model(again).counts["restored"] == (7 if layers else 5)


def test_saved_whole_and_loaded_in_another_process(tmp_path):
    norm = norm_of()
    patch_model(norm)
    torch.save(norm, tmp_path / "norm.pt")
    torch.save(norm(rows()), tmp_path / "y.pt")
    code = f"""
import torch
norm = torch.load({str(tmp_path / "norm.pt")!r}, weights_only=False)
x = torch.randn(3, 5, {N}, generator=torch.Generator().manual_seed(0))
assert torch.equal(norm(x), torch.load({str(tmp_path / "y.pt")!r})), "other bits"
assert "tilegym_rmsnorm: llama" in repr(norm)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "weight_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("cls", [LlamaRMSNorm, T5LayerNorm], ids=lambda cls: cls.__name__)
def test_dtypes_are_the_original_s(cls, x_dtype, weight_dtype):
    """In bfloat16 beside a float32 weight Llama's norm returns float32."""
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


class Meta(type):
    pass


class Named(LlamaRMSNorm):
    def __init_subclass__(cls, *, kind, **kwargs):  # which a derived class without a kind makes raise
        super().__init_subclass__(**kwargs)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class StaticNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))

    @staticmethod
    def _norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return (self._norm(x.float()) * self.weight).to(x.dtype)


class Unweighted(nn.Module):
    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Replaced(StaticNorm):
    pass


def looked_up(self, name):
    return object.__getattribute__(self, name)


def parametrized(norm):
    return nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())


def changed(**attributes):
    norm = norm_of()
    for name, value in attributes.items():
        setattr(norm, name, value)
    return norm


def frozen(self, name, value):
    if "_parameters" in self.__dict__ and "variance_epsilon" in self.__dict__:
        raise AttributeError(f"{name} is frozen")
    nn.Module.__setattr__(self, name, value)


@pytest.mark.parametrize(
    "cls",
    [
        type("OtherNorm", (LlamaRMSNorm,), {"__setattr__": frozen}),
        type("OtherNorm", (LlamaRMSNorm,), {"__class__": property(lambda self: LlamaRMSNorm)}),
        type("OtherNorm", (LlamaRMSNorm,), {"__slots__": ("note",)}),
        type("OtherNorm", (Named,), {}, kind="has no subclass without it"),
    ],
    ids=["setattr", "property", "slots", "init_subclass"],
)
def test_a_class_that_lets_nothing_be_set_or_derived(cls):
    model = nn.Sequential(norm_of(), cls(N), norm_of())
    expected = model(rows())
    assert patch_model(model).counts["patched"] == 3
    assert torch.equal(model(rows()), expected) and "tilegym_rmsnorm: llama" in repr(model[1])
    assert torch.equal(copy.deepcopy(model)(rows()), expected)
    assert unpatch_model(model).counts["restored"] == 3 and type(model[1]) is cls


def test_a_registry_of_classes_does_not_see_the_patched_ones():
    registered = []

    class Registry:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            registered.append(cls)

    model = LLAMA.built()
    for module in (model.model.norm, model.model.layers[0]):
        module.__class__ = type(type(module).__name__, (Registry, type(module)), {})
    del registered[:]
    assert (
        patch_model(model, patch_layers=True).counts == {**NONE, "patched": 5, "layers": 2} and not registered
    )
    derived = type("Derived", (type(model.model.norm),), {})  # as fully_shard derives one
    assert registered == [derived]


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (lambda: changed(forward=lambda x: x), "its forward was replaced on the module"),
        (lambda: changed(forward=types.MethodType(T5LayerNorm.forward, norm_of())), "its forward was replaced"),
        (lambda: changed(variance_epsilon=torch.tensor(1e-6)), "its variance_epsilon is no finite number"),
        (lambda: changed(variance_epsilon=None), "its variance_epsilon is no finite number"),
        (lambda: changed(variance_epsilon=-1e-9), "its variance_epsilon is no finite number of at least 0"),
        (lambda: changed(variance_epsilon=float("inf")), "its variance_epsilon is no finite number"),
        (lambda: parametrized(norm_of()), "it is parametrized"),
        (lambda: changed(weight=nn.Parameter(torch.ones(2, N))), "its weight is no tensor of one dimension"),
        (lambda: changed(weight=nn.UninitializedParameter()), "its weight is no tensor of one dimension"),
        (lambda: changed(weight=None), "it has no weight"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"__call__": lambda self, x: x})(N), "its class has a __call__"),
        (lambda: Meta("OtherNorm", (LlamaRMSNorm,), {})(N), "its class has a metaclass, a _call_impl or"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"_call_impl": lambda self, x: x})(N), "its class has a metaclass"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"__getattribute__": looked_up})(N), "its class has a metaclass"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"forward": lambda self, x: x})(N), "its forward has no source"),
    ],
)  # fmt: skip
def test_what_is_declined_stays_as_it_is(norm, reason):
    norm = norm()
    before = type(norm), dict(norm.__dict__)
    report = patch_model(nn.Sequential(norm))
    assert not report.patched and report.declined[0].name == "0"
    assert report.declined[0].reason.startswith(reason)
    assert (type(norm), norm.__dict__) == before


def test_a_static_method_that_was_replaced_on_the_module():
    norm = StaticNorm()
    assert patch_model(norm).counts["patched"] == 1
    unpatch_model(norm)
    norm._norm = lambda x: 0 * x
    (declined,) = patch_model(norm).declined
    assert declined.reason == "its _norm was replaced on the module"


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


def test_a_pickle_of_a_class_that_changed_since_is_loaded_without_the_patch(monkeypatch):
    norm = Replaced()
    patch_model(norm)
    saved = pickle.dumps(norm)
    assert type(pickle.loads(saved)) is type(norm)
    monkeypatch.setattr(Replaced, "forward", Doubled.forward)
    loaded = pickle.loads(saved)
    assert type(loaded) is Replaced
    assert torch.equal(loaded(rows()), 2 * rows())


def test_weights_on_the_meta_device_are_not_read():
    """As from_pretrained builds a model. It is loaded afterwards."""
    from transformers import LlamaForCausalLM

    original = LLAMA.built()
    with torch.device("meta"):
        model = LlamaForCausalLM(original.config)
    assert patch_model(model, patch_layers=True).counts["patched"] == 5
    assert model.model.norm.weight.is_meta
    assert model.model.norm(torch.empty(2, N, device="meta")).is_meta
    model.load_state_dict(original.state_dict(), assign=True)
    model.model.rotary_emb = original.model.rotary_emb  # its buffers are in no state dict
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)


def hooked(module, hook):
    """As accelerate.hooks.add_hook_to_module does it: a wrapper on the module, and the forward it had behind it."""
    old = module.forward
    module._hf_hook, module._old_forward = hook, old

    def new_forward(module, *given, **named):
        hook.append(module)
        return module._old_forward(*given, **named)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    return module


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_hooks_of_accelerate_stay_in_front(layers, calls):
    original, model = LLAMA.built(), LLAMA.built()
    seen = []
    for module in list(model.modules()):
        if not list(module.children()) or type(module).__name__ == "LlamaDecoderLayer":
            hooked(module, seen)
    model(TOKENS)
    per_call = len(seen)
    report = patch_model(model, patch_layers=layers)
    assert report.counts["patched"] == 5 and report.counts["layers"] == (2 if layers else 0)
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)
    assert len(seen) == 2 * per_call and len(calls) == 5
    unpatch_model(model)
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)
    assert len(seen) == 3 * per_call and len(calls) == 5


def test_a_hook_of_accelerate_can_be_removed_after_a_patch(calls):
    """remove_hook_from_module leaves the forward that was behind the hook on the module."""
    norm = hooked(norm_of(), [])
    expected = norm(rows())
    patch_model(norm)
    norm.forward = norm._old_forward
    del norm._old_forward, norm._hf_hook
    assert torch.equal(norm(rows()), expected) and len(calls) == 1
    assert patch_model(norm).counts["already"] == 1
    unpatch_model(norm)
    assert torch.equal(norm(rows()), expected) and len(calls) == 1


def test_a_class_given_after_the_patch_is_left(calls):
    """As fully_shard gives one to what it shards."""
    norm = norm_of()
    patch_model(norm)
    norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})
    report = unpatch_model(norm)
    assert report.declined == (("", "FSDPLlamaRMSNorm", "was given another class after the patch"),)
    norm(rows())
    assert len(calls) == 1 and patch_model(norm).counts["already"] == 1


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_fully_sharded_before_or_after(mesh, is_first):
    from torch.distributed.fsdp import fully_shard

    expected, gradients = results(LLAMA.built(), {"input_ids": TOKENS})
    model = LLAMA.built()
    if is_first:
        patch_model(model, patch_layers=True, backend="torch")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    if not is_first:
        assert patch_model(model, patch_layers=True, backend="torch").counts["layers"] == 2
    logits, ours = results(model, {"input_ids": TOKENS})
    assert torch.equal(logits, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name].full_tensor(), gradient)
    report = unpatch_model(model)
    assert report.counts["restored"] == (5 if is_first else 7)
    assert [each.class_name for each in report.declined] == ["FSDPLlamaDecoderLayer"] * 2 * is_first
    assert torch.equal(model(TOKENS).logits, expected)


def test_initialized_again_by_transformers():
    """As from_pretrained does with a norm that the checkpoint does not have."""
    model = LLAMA.built()
    patch_model(model)
    model._init_weights(model.model.norm)
    assert torch.equal(model.model.norm.weight, torch.ones(N))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_gradient_checkpointing(layers, reentrant):
    plain, model = LLAMA.built(), LLAMA.built()
    for each in (plain, model):
        patch_model(each, patch_layers=layers)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    counted = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: counted.append(1))
    expected, gradients = results(plain.train(), {"input_ids": TOKENS})
    logits, ours = results(model.train(), {"input_ids": TOKENS})
    assert torch.equal(logits, expected) and len(counted) == 2  # it was recomputed
    assert all(torch.equal(ours[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_generate(layers):
    original, model = LLAMA.built(), LLAMA.built()
    patch_model(model, patch_layers=layers)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(model.generate(TOKENS, **options), original.generate(TOKENS, **options))


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_recorded_outputs(layers):
    original, model = LLAMA.built(), LLAMA.built()
    for each in (original, model):
        each.set_attn_implementation("eager")
    patch_model(model, patch_layers=layers)
    options = {"output_hidden_states": True, "output_attentions": True}
    expected, out = original(TOKENS, **options), model(TOKENS, **options)
    assert len(out.hidden_states) == len(expected.hidden_states) == 3
    assert all(map(torch.equal, out.hidden_states, expected.hidden_states))
    assert len(out.attentions) == len(expected.attentions) == 2


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cls", ["Llama", "Gemma2", "GptOss", "T5"])
@pytest.mark.parametrize("kernels", ["cutile", "triton"])
def test_on_the_kernels(kernels, cls, weight_dtype):
    """In their interpreters, where there is no GPU: y within a rounding or two of the original's, in its dtype."""
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_compiled_without_a_graph_break(layers, backend):
    torch._dynamo.reset()
    model = LLAMA.built().bfloat16()
    patch_model(model, patch_layers=layers)
    eager, gradients = results(model, {"input_ids": TOKENS})
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    logits = compiled(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, eager, rtol=0, atol=2**-7 * eager.abs().max().item())
    model.zero_grad()
    logits.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_neither_the_package_nor_a_patch_imports_transformers():
    code = """
import sys, torch, tilegym_rmsnorm
assert not [name for name in sys.modules if name.startswith("tilegym_rmsnorm.integrations")]
report = tilegym_rmsnorm.patch_model(torch.nn.Sequential(torch.nn.RMSNorm(8)))
assert report.counts["patched"] == 1 and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pickled_bytes_name_the_original_class():
    norm = norm_of()
    patch_model(norm)
    with io.BytesIO(pickle.dumps(norm)) as file:
        assert b"LlamaRMSNorm" in file.getvalue()
    assert pickle.loads(pickle.dumps(type(norm))) is type(norm)

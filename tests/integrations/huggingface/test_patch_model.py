# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""patch_model and unpatch_model: the report, a second call, and what is refused. Patched models where models are used:
gradient checkpointing, generate, recorded outputs, torch.compile, accelerate, peft and transformers' Trainer; modules
that accelerate has put hooks on, and those that fully_shard gives a class, before a patch and after it."""

import copy
import functools
import math

import pytest
import torch
import transformers
from helpers import skipped_where_fails
from hf_models import ARCHITECTURES, TOKENS, VOCABULARY, results
from hf_norms import LLAMA, N, norm_of, rows
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import PatchReport, RMSNorm, patch_model, unpatch_model


def test_the_report():
    model = LLAMA.built()
    model.extra = nn.LayerNorm(N)
    report = patch_model(model, patch_layers=True)
    assert report.counts == {
        "patched": 5,
        "layers": 2,
        "attention": 0,
        "declined": 1,
        "restored": 0,
        "already": 0,
        "apart": 0,
    }
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
    assert again.already == sum(again.counts.values()) == 5
    assert str(again) == "patched before: 5"
    assert [type(part) for part in model.modules()] == classes
    assert patch_model(model, patch_layers=True).counts["layers"] == 2
    assert patch_model(model, patch_layers=True).counts["already"] == 7
    for function in (patch_model, unpatch_model):
        report = function(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        said = "no norms" if function is patch_model else "nothing in this model is patched"
        assert not any(report.counts.values()) and str(report) == said
        assert report == PatchReport() and hash(report) == hash(PatchReport())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [None, lambda n: torch.nn.RMSNorm(n, 1e-6)], ids=["Llama's", "PyTorch's"])
def test_a_norm_learns_behind_what_ran_in_inference_mode(cls, dtype):
    """A norm behind a frozen encoder learns, twice."""
    original, norm = (norm_of(cls, dtype) for _ in range(2))
    norm.load_state_dict(original.state_dict())
    assert patch_model(norm).counts["patched"] == 1
    with torch.inference_mode():
        x = rows(dtype).clone()
    for _ in range(2):
        for each in (original, norm):
            each.weight.grad = None
            each(x).float().sin().sum().backward()
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(norm.weight.grad, original.weight.grad, rtol=tolerance, atol=tolerance)


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traced_by_jit_with_its_layers(dtype):
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits

    original, model = Logits(LLAMA.built().to(dtype)), Logits(LLAMA.built().to(dtype))
    assert patch_model(model, patch_layers=True).counts["layers"] == 2
    with skipped_where_fails(lambda: torch.jit.trace(original, (TOKENS,), check_trace=False)):
        traced = torch.jit.trace(model, (TOKENS,), check_trace=False)
    for tokens in (TOKENS, TOKENS[:1, :7]):
        assert torch.equal(traced(tokens), original(tokens))
    traced(TOKENS).float().square().sum().backward()
    original(TOKENS).float().square().sum().backward()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        rounding = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(
            one.grad, other.grad, rtol=0, atol=rounding * other.grad.abs().max().item()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "backend"),
    # With layers the last norm is still one by itself: Inductor is given both kinds.
    [(False, "aot_eager"), (True, "aot_eager"), (True, "inductor")],
    ids=["norms-aot_eager", "layers-aot_eager", "layers-inductor"],
)
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


def hooked(module, hook):
    """Wrap as accelerate.hooks.add_hook_to_module: a wrapper on the module, and the forward it had behind it."""
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
    """fully_shard gives a class to what it shards."""
    norm = norm_of()
    patch_model(norm)
    norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})
    report = unpatch_model(norm)
    assert report.declined == (("", "FSDPLlamaRMSNorm", "was given another class after the patch"),)
    norm(rows())
    assert len(calls) == 1 and patch_model(norm).counts["already"] == 1


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


(QWEN3,) = (case for case in ARCHITECTURES if case.name == "Qwen3")
both = pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def dispatched(model, folder):
    return library("accelerate").dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def offloaded_to_memory(model, folder):
    return library("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_to_disk(model, folder):
    return library("accelerate").disk_offload(model, folder, execution_device=torch.device("cpu"))


@both
@pytest.mark.parametrize("is_patched_first", [False, True])
@pytest.mark.parametrize("spread", [dispatched, offloaded_to_memory, offloaded_to_disk])
def test_accelerate_spreads_a_model(spread, is_patched_first, layers, tmp_path):
    """The weights are on the meta device between calls where they are offloaded."""
    model = QWEN3.built().eval()
    expected = model(TOKENS).logits
    if is_patched_first:
        patch_model(model, patch_layers=layers)
    model = spread(model, tmp_path)
    assert model.model.norm._hf_hook is not None
    if not is_patched_first:
        assert patch_model(model, patch_layers=layers).counts["layers"] == (2 if layers else 0)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected)
        # Attention whose norms had hooks before the patch is left.
        assert unpatch_model(model).counts["restored"] == ((13 if is_patched_first else 11) if layers else 9)
        assert torch.equal(model(TOKENS).logits, expected)


@both
def test_a_model_on_meta_is_patched_then_loaded(layers, tmp_path):
    accelerate = library("accelerate")
    original = QWEN3.built().eval()
    original.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        model = copy.deepcopy(original)
    assert patch_model(model, patch_layers=layers).counts["patched"] == 9
    model = accelerate.load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, force_hooks=True)
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)


@both
def test_from_pretrained_with_a_device_map(layers, tmp_path):
    library("accelerate")
    original = QWEN3.built().eval()
    original.save_pretrained(tmp_path)
    model = type(original).from_pretrained(tmp_path, device_map={"": "cpu"})
    assert patch_model(model, patch_layers=layers).counts["patched"] == 9
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)


def test_low_rank_adapters_around_a_patched_and_a_patch_inside_of_them():
    peft = library("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    original = QWEN3.built()
    torch.manual_seed(0)
    original = peft.get_peft_model(original, copy.deepcopy(config))
    expected, gradients = results(original, {"input_ids": TOKENS})
    assert set(gradients) == {name for name, p in original.named_parameters() if "lora" in name}
    for is_patched_first in (False, True):
        model = QWEN3.built()
        if is_patched_first:
            patch_model(model, patch_layers=True)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, copy.deepcopy(config))
        if not is_patched_first:
            assert patch_model(model, patch_layers=True).counts == {
                **dict.fromkeys(("declined", "restored", "already", "apart"), 0),
                "patched": 9,
                "layers": 2,
                "attention": 2,
            }
        logits, ours = results(model, {"input_ids": TOKENS})
        assert torch.equal(logits, expected)
        torch.testing.assert_close(ours, gradients, rtol=1e-5, atol=1e-6)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_norms_that_peft_trains_whole():
    """modules_to_save: the norm itself and the copy that is trained are both patched."""
    peft = library("peft")
    model = peft.get_peft_model(
        QWEN3.built(),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["post_attention_layernorm"]),
    )
    expected, gradients = results(model, {"input_ids": TOKENS})
    assert patch_model(model).counts["patched"] == 9 + 2
    logits, ours = results(model, {"input_ids": TOKENS})
    assert torch.equal(logits, expected) and set(ours) == set(gradients)
    assert any("post_attention_layernorm" in name for name in ours)
    torch.testing.assert_close(ours, gradients, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_trainer_learns_as_without_the_patch(layers, is_checkpointed, tmp_path):
    library("accelerate")
    rows = torch.randint(VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = {"max_steps": 4, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    losses = []
    for is_patched in (False, True):
        model = QWEN3.built()
        if is_patched:
            patch_model(model, patch_layers=layers)
        arguments = transformers.TrainingArguments(
            str(tmp_path), gradient_checkpointing=is_checkpointed, learning_rate=1e-2, **options
        )
        losses.append(transformers.Trainer(model, arguments, train_dataset=data).train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert math.isfinite(losses[0])

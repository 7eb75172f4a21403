# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Patched models in accelerate, peft and transformers' Trainer themselves."""

import copy
import math

import pytest
import torch
import transformers
from hf_models import ARCHITECTURES, TOKENS, VOCABULARY, results

from tilegym_rmsnorm import patch_model, unpatch_model

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

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every class of attention of the installed transformers whose q and k are normalized and rotated: rewritten, with the
same bits and gradients, or declined with a reason."""

import collections
import importlib
import inspect
import itertools
import types

import pytest
import torch
import transformers
from hf_models import SIZES, classes_of_models

from tilegym_rmsnorm import patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface.attention import norms_of, rotates
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

REWRITTEN = 40  # of transformers 5.23.0
# Classes with the same statements, whose norms are none that is patched.
OTHER_NORMS = {
    "Nemotron3_5TranscribeAttention": "LayerNorm",
    "Qwen3OmniMoeCode2WavAttention": "Identity",
    "Qwen4ExpTextAttention": "Qwen4ExpTextRMSNorm",  # in groups
}
DECLINED = {  # classes with a norm and a rotary function, and why
    "has no statement q, k = ROTARY(q, k, cos, sin)": 15,
    "calls apply_rotary_pos_emb": 6,
    "rotates ": 42,
}
D = 16  # elements of a head
# The config of a model's text, where attention is annotated with that of the model, or not at all.
CONFIGS = {
    "Exaone4_5_Attention": "exaone4.Exaone4Config",
    "Qwen3_5Attention": "qwen3_5.Qwen3_5TextConfig",
    "Qwen3_5MoeAttention": "qwen3_5_moe.Qwen3_5MoeTextConfig",
    "Qwen3OmniMoeThinkerTextAttention": "qwen3_omni_moe.Qwen3OmniMoeTextConfig",
    "Qwen3OmniMoeTalkerCodePredictorAttention": "qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorConfig",
}


def attention_classes():
    for cls in classes_of_models("_norm|layernorm"):
        if "forward" in vars(cls) and rotates(cls):
            yield cls


@pytest.fixture(scope="module")
def found():
    """Map each class to its norms' names, or why it is declined."""
    result = {}
    for cls in attention_classes():
        try:
            result[cls] = norms_of(cls)
        except Unclear as error:
            if "norm" in inspect.getsource(cls.__init__):
                result[cls] = str(error)
    return result


def config_of(cls):
    if cls.__name__ in CONFIGS:
        model, name = CONFIGS[cls.__name__].split(".")
        module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
        made = getattr(module, name)
    else:
        made = list(inspect.signature(cls.__init__).parameters.values())[1].annotation
    options = {
        **SIZES,
        "head_dim": D,
        "global_head_dim": D,
        "pad_token_id": 0,
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
        "index_head_dim": D,
        "index_n_heads": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_groups": 2,
        **dict.fromkeys(
            ("indexer_n_heads", "indexer_kv_heads", "indexer_budget", "indexer_compress_ratio"), 1
        ),
        "indexer_head_dim": D,
    }
    if "Vision" in cls.__name__:  # it has no head_dim
        heads = SIZES["hidden_size"] // D
        options |= {"num_heads": heads, "num_attention_heads": heads, "num_key_value_heads": heads}
        options["adapter_in_dim"] = SIZES["hidden_size"]
        del options["num_hidden_layers"], options["layer_types"]
    if cls.__name__ in ("Qwen3OmniMoeCode2WavAttention", "Qwen4ExpTextAttention"):
        del options["layer_types"]
    config = made(**options)
    config._attn_implementation = "eager"
    return config


def built(cls, layer):
    """Attention with random weights."""
    torch.manual_seed(0)
    if cls.__name__ == "EsmFold2AtomAttention":
        config = types.SimpleNamespace(_attn_implementation="eager")
        module = cls(config, types.SimpleNamespace(head_dim=D, hidden_size=SIZES["hidden_size"]))
    elif "num_heads" in inspect.signature(cls.__init__).parameters:
        module = cls(config_of(cls), layer, num_heads=4)
    else:
        module = cls(config_of(cls), *[layer][: len(inspect.signature(cls).parameters) - 1])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5)
    return module.eval()


def given(module, dtype, rotary_dim):
    """Arguments of attention, of any class."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    every = {
        "hidden_states": random(2, 5, SIZES["hidden_size"]).requires_grad_(),
        "encoder_hidden_states": random(2, 3, SIZES["hidden_size"]),
        "position_embeddings": (random(2, 5, rotary_dim), random(2, 5, rotary_dim)),
        "attention_mask": torch.zeros(2, 1, 5, 5, dtype=dtype),
        "merged_attention_mask": torch.zeros(2, 1, 5, 8, dtype=dtype),
        "position_ids": torch.arange(5).expand(2, 5),
        "past_key_values": None,
    }
    names = inspect.signature(module.forward).parameters
    if "cu_seqlens" in names:  # one row of tokens, of two images
        every["cu_seqlens"], every["attention_mask"] = torch.tensor([0, 2, 5]), None
        every["hidden_states"] = random(5, SIZES["hidden_size"]).requires_grad_()
        every["position_embeddings"] = random(5, rotary_dim), random(5, rotary_dim)
    return {name: value for name, value in every.items() if name in names}


def results(module, dtype, rotary_dim):
    """Return attention's output, and the gradients of its parameters and its input."""
    arguments = given(module, dtype, rotary_dim)
    out = module(**arguments)
    y = out[0] if isinstance(out, tuple) else out
    if not y.is_floating_point():  # of an indexer
        return y, []
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    sources = [arguments["hidden_states"], *(each for each in module.parameters() if each.requires_grad)]
    return y, torch.autograd.grad((y.float() * weights).sum(), sources, allow_unused=True)


def joined(gradients):
    return torch.cat([each.double().flatten() for each in gradients if each is not None])


@pytest.mark.slow
def test_which_attention_is_rewritten(found):
    names = {cls.__name__: names for cls, names in found.items() if isinstance(names, tuple)}
    assert len(names) >= 15 and {"Qwen3Attention", "Gemma3Attention", "Glm4MoeAttention"} <= set(names)
    reasons = [reason for reason in found.values() if isinstance(reason, str)]
    if transformers.__version__ == "5.23.0":
        assert len(names) == REWRITTEN + len(OTHER_NORMS)
        by_reason = {begin: sum(each.startswith(begin) for each in reasons) for begin in DECLINED}
        assert by_reason == DECLINED and sum(by_reason.values()) == len(reasons)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rewritten_attention_computes_the_same_bits(found, folded, dtype):
    """A part of each head is rotated in float32 alone: a width changes no rounding."""
    widths = (D, D // 2) if dtype is torch.float32 else (D,)
    checked = collections.Counter()
    for cls, names in found.items():
        if isinstance(names, str) or cls.__name__ in OTHER_NORMS:
            continue
        for layer, width in itertools.product((0, 1), widths):
            original, ours = (built(cls, layer).to(dtype) for _ in range(2))
            report = patch_model(ours, patch_layers=True, backend="torch")
            assert [each.norms for each in report.attention if not each.name] == [names], cls
            try:
                expected, gradients = results(original, dtype, width)
            except RuntimeError:  # its rotary embedding takes whole heads
                assert width != D
                continue
            del folded[:]
            y, our_gradients = results(ours, dtype, width)
            assert y.dtype == expected.dtype and torch.equal(y, expected), cls
            checked[cls] += len(folded)
            assert len(folded) <= 1
            for call in folded:
                *batch, heads, n = call["shape"]
                assert batch in ([2, 5], [5]) and heads in (4, 2) and (n, call["rotary_dim"]) == (D, width)
            if len(gradients):
                wide = built(cls, layer).to(dtype).float()
                exact = joined(results(wide, torch.float32, width)[1])
                theirs, mine = joined(gradients), joined(our_gradients)
                rounding = max((theirs - exact).norm(), 16 * torch.finfo(dtype).eps * exact.norm())
                assert (mine - theirs).norm() <= rounding and (mine - exact).norm() <= 1.1 * rounding, cls
            unpatch_model(ours)
            assert type(ours) is cls and torch.equal(results(ours, dtype, width)[0], expected)
    assert len(checked) >= 14 and all(checked.values()), checked
    if transformers.__version__ == "5.23.0":
        assert len(checked) == REWRITTEN


@pytest.mark.slow
def test_attention_with_other_norms_is_declined(found):
    for cls, names in found.items():
        if cls.__name__ in OTHER_NORMS:
            report = patch_model(built(cls, 0), patch_layers=True)
            reason = f"its {names[0]}, of class {OTHER_NORMS[cls.__name__]}, is not patched"
            last = report.declined[-1]
            assert last[:2] == ("", cls.__name__) and last.reason.startswith(reason)

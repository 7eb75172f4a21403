# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Models of transformers with random weights, so small that a step takes milliseconds on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 64
TOKENS = torch.randint(VOCABULARY - 1, (2, 12), generator=torch.Generator().manual_seed(2))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
}
# All experts take part, so that no rounding changes which ones do.
_EXPERTS = {
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# Layers without attention, and with it.
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


class Architecture(NamedTuple):
    """name: of the model's class, without ForCausalLM. The counts are those of a patch with its layers.
    attention: how many are rewritten."""

    name: str
    arithmetics: dict[str, int]  # how many norms have which
    layers: int = 0
    attention: int = 0
    declined: dict[str, int] = {}  # how many modules of which class are declined
    options: dict[str, Any] = {}  # of the config
    config: str = ""  # its class, where it is not the name's
    is_fast: bool = False
    make: Callable[[Architecture], nn.Module] | None = None
    inputs: Callable[[], dict[str, Tensor]] | None = None

    def built(self) -> nn.Module:
        torch.manual_seed(0)
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = self._causal() if self.make is None else self.make(self)
            except Exception as error:  # of the config's class, or that there is none
                if importlib.metadata.version("transformers") == "5.23.0":
                    raise
                pytest.skip(f"not among the models of the installed transformers: {error}")
        spread(model)
        return model

    def _causal(self) -> nn.Module:
        import transformers

        config_class = getattr(transformers, self.config or f"{self.name}Config")
        return getattr(transformers, f"{self.name}ForCausalLM")(config_class(**{**SIZES, **self.options}))

    def given(self, dtype: torch.dtype) -> dict[str, Tensor]:
        given = {"input_ids": TOKENS} if self.inputs is None else self.inputs()
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}


def classes_of_models(pattern: str) -> Iterator[type[nn.Module]]:
    """The modules that each file of a model of the installed transformers defines whose source has this pattern. Files
    that need a library that is not here are left out."""
    import transformers

    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if not re.search(pattern, path.read_text(), re.MULTILINE):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:
            continue
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name:
                yield cls


def spread(model: nn.Module) -> None:
    """Norm weights unlike each other and their starts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.5 * torch.rand(parameter.shape, generator=generator))


def results(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a loss by name."""
    model.zero_grad()
    tokens = given.get("decoder_input_ids", given["input_ids"])
    logits = model(**given).logits
    nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _t5(case: Architecture) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes, **ids))


def _gemma3n(case: Architecture) -> nn.Module:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    if "/ torch.sqrt" in inspect.getsource(Gemma3nRMSNorm):
        raise NotImplementedError("Gemma 3n's norm divides by a root, and is declined")
    return case._causal()


def _paligemma(case: Architecture) -> nn.Module:
    from transformers import (
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipVisionConfig,
    )

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32)
    text = GemmaConfig(**{**SIZES, "pad_token_id": 0})
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=vision.to_dict(),
            text_config=text.to_dict(),
            projection_dim=32,
            image_token_index=VOCABULARY - 1,
            image_token_id=VOCABULARY - 1,
        )
    )


def _text_and_image() -> dict[str, Tensor]:
    tokens = TOKENS.clone()
    tokens[:, :4] = VOCABULARY - 1
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "pixel_values": pixels, "token_type_ids": torch.zeros_like(tokens)}


ARCHITECTURES = [
    Architecture("Llama", {"llama": 5}, 2, is_fast=True),
    Architecture("Qwen3", {"llama": 9}, 2, 2, is_fast=True),
    Architecture("Gemma2", {"offset": 9}, 2, is_fast=True),
    Architecture(
        "Olmo2", {"once": 9}, 0, declined={"Olmo2DecoderLayer": 2, "Olmo2Attention": 2}, is_fast=True
    ),
    Architecture("GptOss", {"once": 5}, 2, options=_EXPERTS, is_fast=True),
    Architecture("Granite", {"llama": 5}, 2, options={"residual_multiplier": 0.3}, is_fast=True),
    Architecture("Cohere2", {}, declined={"Cohere2LayerNorm": 3}, is_fast=True),
    Architecture(
        "T5",
        {"t5": 12},
        declined={"T5LayerSelfAttention": 4, "T5LayerCrossAttention": 2, "T5LayerFF": 4},
        make=_t5,
        inputs=lambda: {"input_ids": TOKENS, "decoder_input_ids": TOKENS.flip(1)},
        is_fast=True,
    ),
    Architecture("Mistral", {"llama": 5}, 2),
    Architecture("Mixtral", {"llama": 5}, 2, options=_EXPERTS),
    Architecture("Qwen2", {"llama": 5}, 2),
    Architecture("Qwen3Moe", {"llama": 9}, 2, 2, options=_EXPERTS),
    Architecture(
        "Qwen3Next", {"offset": 7}, 2, 1, {"Qwen3NextRMSNormGated": 1}, options={**_EXPERTS, **_LINEAR}
    ),
    Architecture(
        "Qwen3_5",
        {"offset": 7},
        2,
        1,
        {"Qwen3_5RMSNormGated": 1},
        config="Qwen3_5TextConfig",
        options=_LINEAR,
    ),
    Architecture(
        "Glm4Moe",
        {"llama": 9},
        2,
        2,
        options={
            **_EXPERTS,
            "use_qk_norm": True,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture(
        "Llama4",
        {"llama": 5, "no weight": 2},
        2,
        declined={"Llama4TextAttention": 2},
        config="Llama4TextConfig",
        options={
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": True,
            "attention_chunk_size": 16,
        },
    ),
    Architecture("Gemma", {"offset": 5}, 2),
    Architecture("Gemma3", {"offset": 13}, 2, 2, config="Gemma3TextConfig"),
    Architecture(
        "Gemma3n",
        {"optional weight": 22},
        declined={"Gemma3nTextDecoderLayer": 2, "Gemma3nTextAttention": 2},
        config="Gemma3nTextConfig",
        options={
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
            "altup_num_inputs": 2,
        },
        make=_gemma3n,
    ),
    Architecture("Phi3", {"llama": 5}, 2),
    Architecture(
        "DeepseekV3",
        {"llama": 9},
        2,
        declined={"DeepseekV3Attention": 2},
        options={
            "num_key_value_heads": 4,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    Architecture("Glm4", {"llama": 9}, 2),
    Architecture(
        "NemotronH",
        {"once": 4},
        declined={"NemotronHBlock": 3, "NemotronHRMSNormGated": 1},
        options={
            "layer_types": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    Architecture(
        "FalconH1",
        {"llama": 5},
        2,
        options={
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    Architecture("Helium", {"once": 5}, 2),
    Architecture("SmolLM3", {"llama": 5}, 2),
    Architecture(
        "Mamba2",
        {"llama": 3},
        declined={"MambaRMSNormGated": 2, "Mamba2Block": 2},
        options={"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    Architecture(
        "PaliGemma", {"offset": 5}, 2, declined={"LayerNorm": 4}, make=_paligemma, inputs=_text_and_image
    ),
    Architecture("Exaone4", {"llama": 9}, 0, 2, {"Exaone4DecoderLayer": 2}),
    Architecture("NanoChat", {"no weight": 9}, 2, declined={"NanoChatAttention": 2}),
    Architecture(
        "RecurrentGemma",
        {"offset": 5},
        2,
        options={"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 16},
    ),
]

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Give each model its norms: the ways to compute them that are compared."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.train import traced
from bench.train.decoder import Decoder
from bench.train.models import HUGGING_FACE, LARGE_VOCABULARY, MODELS, Sizes
from tilegym_rmsnorm import RMSNorm, override_aten, patch_model

LLAMA, QWEN3 = HUGGING_FACE
Loss = Callable[[Tensor], Tensor]  # of (batch, length + 1) tokens


@dataclass(frozen=True)
class Way:
    """A way to compute the norms of a model.

    build: makes the model. around: what surrounds its steps. compiles: whether torch.compile makes it another one.
    change: for a graph of the whole step, see traced.py.
    """

    build: Callable[[Sizes, torch.device], nn.Module]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    compiles: bool = True
    change: traced.Change | None = None


def build_hugging_face(name: str, sizes: Sizes, device: torch.device) -> nn.Module:
    """Build a model of transformers with random weights."""
    import transformers

    kind = "Llama" if name == LLAMA else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        rms_norm_eps=sizes.eps,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=sizes.vocabulary >= LARGE_VOCABULARY,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        return getattr(transformers, f"{kind}ForCausalLM")(config)


def replace_norms(model: nn.Module) -> nn.Module:
    """Put nn.RMSNorm, which calls F.rms_norm, in the place of each norm of transformers, with its weight and eps."""
    found = [(path, each) for path, each in model.named_modules() if type(each).__name__.endswith("RMSNorm")]
    for path, old in found:
        new = nn.RMSNorm(old.weight.shape, old.variance_epsilon, device=old.weight.device)
        new.weight = old.weight
        model.set_submodule(path, new)
    return model


def patch_norms(model: nn.Module, patch_layers: bool) -> nn.Module:
    report = patch_model(model, patch_layers=patch_layers)
    counts = report.counts
    if counts["declined"] or not counts["patched"] or patch_layers and not counts["layers"]:
        raise RuntimeError(f"patch_model left norms or layers as they are: {report}")
    return model


def patch_with_liger(name: str, model: nn.Module) -> nn.Module:
    """Patch the norms alone: not the loss, the MLP and the rotary embedding. The class that Liger replaces for models
    to come is put back."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3

    apply = apply_liger_kernel_to_llama if name == LLAMA else apply_liger_kernel_to_qwen3
    others = dict.fromkeys(("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False)
    modeling = sys.modules[type(model).__module__]
    norms = {each: value for each, value in vars(modeling).items() if each.endswith("RMSNorm")}
    apply(rms_norm=True, model=model, **others)
    vars(modeling).update(norms)
    return model


def of_hugging_face(name: str) -> dict[str, Way]:
    def way(change: Callable[[nn.Module], nn.Module]) -> Way:
        return Way(lambda sizes, device: change(build_hugging_face(name, sizes, device)))

    ways = {
        "original": way(lambda model: model),
        "F.rms_norm": way(replace_norms),
        "norms": way(functools.partial(patch_norms, patch_layers=False)),
        "layers": way(functools.partial(patch_norms, patch_layers=True)),
    }
    if importlib.util.find_spec("liger_kernel"):
        ways["liger"] = way(functools.partial(patch_with_liger, name))
    return ways


def of_decoder(sizes: Sizes) -> dict[str, Way]:
    def way(norm: type[nn.RMSNorm], style: str = "plain", **options: Any) -> Way:
        return Way(lambda sizes, device: Decoder(sizes, norm, style, device), **options)

    # A CPU has no kernel for the fused norm, and would trace what it is composed of.
    has_gpu = torch.cuda.is_available()
    override = functools.partial(override_aten, "cuda" if has_gpu else "cpu")
    traceable = contextlib.nullcontext if has_gpu else override
    ways = {
        "F.rms_norm": way(nn.RMSNorm),
        "rms_norm": way(RMSNorm),
        "residual": way(RMSNorm, "residual"),
        "fused": way(RMSNorm, "fused"),
        "override_aten": way(nn.RMSNorm, around=override, compiles=False),
    }
    for name, change in traced.CHANGES.items():
        ways[name] = way(nn.RMSNorm, around=traceable, compiles=False, change=change)
    if not sizes.has_qk_norm:
        del ways["fused"]  # as "residual" there
    return ways


def ways_of(model: str) -> dict[str, Way]:
    """Return the ways to compute a model's norms by name; others are compared with the first."""
    return of_hugging_face(model) if model in HUGGING_FACE else of_decoder(MODELS[model])


def loss_of(model: nn.Module) -> Loss:
    """Return a function that computes the mean cross entropy of the next token, in float32."""

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss

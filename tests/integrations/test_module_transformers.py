# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm.configured in the place of the norm classes of transformers' models: tiny ones, with random weights."""

import contextlib
import io
from typing import Any, NamedTuple

import pytest
import torch
from hf_models import SIZES, spread
from torch import nn

from tilegym_rmsnorm import RMSNorm

pytest.importorskip("transformers", reason="transformers is not installed")


class Case(NamedTuple):
    folder: str
    prefix: str
    defaults: dict[str, Any]
    extra: dict[str, Any] = {}

    @property
    def modeling(self):
        name = f"transformers.models.{self.folder}.modeling_{self.folder}"
        return pytest.importorskip(name, reason=f"this transformers has no {self.folder}")

    @property
    def norm_name(self) -> str:
        return f"{self.prefix}RMSNorm"


LLAMA, GEMMA = {"casting": "llama"}, {"offset": 1.0}
QWEN3_NEXT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 2,  # all: no rounding changes which
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
RECURRENT_GEMMA = {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 16}
CASES = [
    Case("llama", "Llama", LLAMA),
    Case("qwen3", "Qwen3", LLAMA),
    Case("gemma", "Gemma", GEMMA),
    Case("qwen3_next", "Qwen3Next", GEMMA, QWEN3_NEXT),
    Case("recurrent_gemma", "RecurrentGemma", GEMMA, RECURRENT_GEMMA),
]


def built(case: Case) -> nn.Module:
    modeling = case.modeling
    config = getattr(modeling, f"{case.prefix}Config")(**{**SIZES, "rms_norm_eps": 1e-5, **case.extra})
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        return getattr(modeling, f"{case.prefix}ForCausalLM")(config)


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits, and gradients by name."""
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2))
    logits = model(input_ids=tokens).logits
    nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {
        "logits": logits.detach(),
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.fixture(params=CASES, ids=lambda case: case.folder)
def models(request, monkeypatch):
    """The case, the model as it is, and the model that is built with RMSNorm.configured in its norm's place."""
    case = request.param
    original = built(case)
    monkeypatch.setattr(case.modeling, case.norm_name, RMSNorm.configured(**case.defaults))
    return case, original, built(case)


def test_every_norm_is_replaced_and_is_an_instance_of_the_model_s_class(models):
    case, original, ours = models
    replaced = [name for name, part in ours.named_modules() if isinstance(part, RMSNorm)]
    theirs = [name for name, part in original.named_modules() if type(part).__name__ == case.norm_name]
    assert replaced == theirs and len(replaced) >= 5
    norm_class = getattr(case.modeling, case.norm_name)
    assert all(isinstance(ours.get_submodule(name), norm_class) for name in replaced)
    assert all(ours.get_submodule(name).eps == 1e-5 for name in replaced)


def test_it_is_initialized_as_the_original(models):
    _, original, ours = models
    expected, state = original.state_dict(), ours.state_dict()
    assert list(state) == list(expected)
    for name in expected:
        assert torch.equal(state[name], expected[name]), name


def test_a_norm_is_initialized_again(models):
    """from_pretrained does so with a norm that the checkpoint does not have."""
    _, _, ours = models
    norms = [part for part in ours.modules() if isinstance(part, RMSNorm)]
    starts = [norm.weight.detach().clone() for norm in norms]
    for norm, start in zip(norms, starts, strict=True):
        nn.init.constant_(norm.weight, 7.0)
        ours._init_weights(norm)
        assert torch.equal(norm.weight, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_and_learns_as_the_original(models, dtype):
    _, original, ours = models
    spread(original)
    ours.load_state_dict(original.state_dict())
    expected, result = results(original.to(dtype)), results(ours.to(dtype))
    assert list(result) == list(expected)
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype
        scale = tensor.float().abs().max().item()
        rounding = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            result[name].float(), tensor.float(), rtol=0, atol=rounding * scale, msg=name
        )


def test_state_dicts_go_both_ways(models):
    _, original, ours = models
    spread(original)
    ours.load_state_dict(original.state_dict(), strict=True)
    spread(ours)
    original.load_state_dict(ours.state_dict(), strict=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name])


def test_saved_and_loaded_by_transformers(models, tmp_path):
    _, _, ours = models
    spread(ours)
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name

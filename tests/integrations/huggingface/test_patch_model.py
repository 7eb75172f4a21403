# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""patch_model and unpatch_model: the report, a second call, and what is refused."""

import pytest
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

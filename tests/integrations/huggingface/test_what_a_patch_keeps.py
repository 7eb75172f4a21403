# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Features of a module that a patch keeps: attributes, hooks, state, and being copied, pickled and loaded."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from hf_models import TOKENS
from hf_norms import LLAMA, N, norm_of, rows
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model, unpatch_model


class Replaced(LlamaRMSNorm):
    pass


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


def by(name, **options):
    def copied(model):
        library = pytest.importorskip(name)
        return library.loads(library.dumps(model, **options))

    return copied


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        *(by("pickle", protocol=protocol) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)),
        by("dill"),
        by("dill", recurse=True),  # as datasets makes fingerprints
        by("cloudpickle"),
    ],
    ids=["copy", "pickle 0", "pickle 2", "pickle", "dill", "dill recurse", "cloudpickle"],
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


@pytest.mark.slow
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


def test_a_pickle_of_a_class_that_changed_since_is_loaded_without_the_patch(monkeypatch):
    norm = Replaced(N)
    patch_model(norm)
    saved = pickle.dumps(norm)
    assert type(pickle.loads(saved)) is type(norm)
    monkeypatch.setattr(Replaced, "forward", lambda self, x: 2 * x)
    loaded = pickle.loads(saved)
    assert type(loaded) is Replaced
    assert torch.equal(loaded(rows()), 2 * rows())


def test_pickled_bytes_name_the_original_class():
    norm = norm_of()
    patch_model(norm)
    with io.BytesIO(pickle.dumps(norm)) as file:
        assert b"LlamaRMSNorm" in file.getvalue()
    assert pickle.loads(pickle.dumps(type(norm))) is type(norm)


def test_weights_on_the_meta_device_are_not_read():
    """from_pretrained builds a model so, and loads it afterwards."""
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


def test_initialized_again_by_transformers():
    """from_pretrained does so with a norm that the checkpoint does not have."""
    model = LLAMA.built()
    patch_model(model)
    model._init_weights(model.model.norm)
    assert torch.equal(model.model.norm.weight, torch.ones(N))

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Patched models where models are used: gradient checkpointing, generate, recorded outputs, torch.compile."""

import pytest
import torch
from helpers import skipped_where_fails
from hf_models import TOKENS, results
from hf_norms import LLAMA, norm_of, rows

from tilegym_rmsnorm import patch_model


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

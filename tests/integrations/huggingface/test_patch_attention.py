# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Attention whose norms of q and k run with the rotary embedding: which statements are rewritten, which calls fold, and
that all else computes as before."""

import copy
import dis
import functools
import inspect
import pickle
import textwrap

import pytest
import torch
from attention_classes import D, assert_same, both_of, given
from helpers import skipped_where_fails
from hf_models import ARCHITECTURES, TOKENS, results
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from tilegym_rmsnorm import patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface.attention import norms_of
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

# What llama's rotary function takes between sin and unsqueeze_dim: in transformers 4.57 positions, which it ignores.
POSITIONS = "None, " if "position_ids" in inspect.signature(apply_rotary_pos_emb).parameters else ""
(QWEN3,) = (case for case in ARCHITECTURES if case.name == "Qwen3")


def partly(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate as in GLM-4.5 and Qwen3-Next."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


def with_casts(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate as in OLMo 2."""
    q_type, k_type = q.dtype, k.dtype
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q_type), k_embed.to(k_type)


def backwards(q, k, cos, sin):
    """Rotates the other way round, as in nanochat."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) - (rotate_half(q) * sin), (k * cos) - (rotate_half(k) * sin)


def in_float32(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(q.dtype), k_embed.to(k.dtype)


QWEN = """
def forward(self, x, tables: "tuple", *, is_local=True, has_norms=True):
    shape = (*x.shape[:-1], -1, 8)
    q = self.first(self.q_proj(x).view(shape)).transpose(1, 2)
    k = self.second(self.k_proj(x).view(shape)).transpose(1, 2)
    v = k.shape
    cos, sin = tables
    q, k = rotary(q, k, cos, sin)
    return q, k
"""
QWEN = QWEN.replace("    v = k.shape\n", "    v = self.k_proj(x).view(shape)\n")
GEMMA = """
def forward(self, x, tables: "tuple", *, is_local=True, has_norms=True):
    shape = (*x.shape[:-1], -1, 8)
    q = self.q_proj(x).view(shape).transpose(1, 2)
    k = self.k_proj(x).view(shape).transpose(1, 2)
    q = self.first(q)
    k = self.second(k)
    cos, sin = tables
    q, k = rotary(q, k, cos, sin)
    return q, k
"""
EXAONE = GEMMA.replace(
    "    cos, sin = tables\n    q, k =", "    if is_local:\n        cos, sin = tables\n        q, k ="
)
FLINT = QWEN.replace(
    "    cos, sin = tables\n    q, k =", "    if is_local:\n        cos, sin = tables\n        q, k ="
)
GLM = """
def forward(self, x, tables: "tuple", *, is_local=True, has_norms=True):
    shape = (*x.shape[:-1], -1, 8)
    q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
    if has_norms:
        q = self.first(q)
        k = self.second(k)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    cos, sin = tables
    q, k = rotary(q, k, cos, sin)
    return q, k
"""
NORMS = "    q = self.first(q)\n    k = self.second(k)\n"
IF, INDENTED = "    if is_local:\n", textwrap.indent(NORMS, "    ")
IN_BRANCH = EXAONE.replace(NORMS, "").replace(IF, IF + INDENTED)
FORMS = {"Qwen": QWEN, "Gemma": GEMMA, "EXAONE": EXAONE, "Flint": FLINT, "GLM": GLM, "in branch": IN_BRANCH}
forms = pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotary", [apply_rotary_pos_emb, partly, with_casts])
@forms
def test_what_is_rewritten_computes_the_same(class_of, folded, source, rotary, dtype):
    original, ours = both_of(class_of(source, rotary), dtype)
    for arguments in (given(dtype), given(dtype, batch=1)):
        assert_same(original, ours, arguments)
    assert len(folded) == 2
    if rotary is not partly:
        outputs = [layer(**given(dtype)) for layer in (ours, original)]
        assert [each.stride() for each in outputs[0]] == [each.stride() for each in outputs[1]]
        del folded[2:]
    assert folded[0] == {
        "shape": (2, 5, 4, D),
        "eps": 1e-6,
        "offset": 0.0,
        "rotary_dim": D,
        "casting": "llama",
        "rope_rounding": "each",
        "backend": "torch",
    }
    if rotary is partly:
        assert_same(original, ours, given(dtype, width=4))
        assert len(folded) == 3 and folded[2]["rotary_dim"] == 4
    for options in ({"is_local": False}, {"has_norms": False}):
        del folded[:]
        assert_same(original, ours, given(dtype, **options))
        assert len(folded) == (next(iter(options)) not in source.partition("\n    shape")[2])


@forms
def test_gradients(class_of, folded, source):
    gradients = []
    for layer in both_of(class_of(source)):
        arguments = given()
        arguments["x"].requires_grad_()
        q, k = layer(**arguments)
        (q.sin().sum() + k.square().sum()).backward()
        gradients.append([arguments["x"].grad, *(each.grad for each in layer.parameters())])
    assert len(folded) == 1
    for ours, expected in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


ROTATION = "    q, k = rotary(q, k, cos, sin)\n"


@pytest.mark.parametrize(
    ("source", "old", "new", "reason"),
    [
        (QWEN, ".view(shape)).transpose(1, 2)", ").view(shape).transpose(1, 2)", "rotates q, which no norm returned"),
        (GEMMA, "    q = self.first(q)\n", "", "rotates q, which no norm returned as it is: q = self.q_proj(x)"),
        (GEMMA, "    cos,", "    q = 2 * q\n    cos,", "rotates q, which no norm returned as it is: q = 2 * q"),
        (GEMMA, "    cos,", "    v = q\n    cos,", "rotates q, which no norm returned as it is: v = q"),
        (GEMMA, "    cos,", "    q += 1\n    cos,", "rotates q, which no norm returned as it is: q += 1"),
        (GEMMA, "    cos,", "    for _ in x:\n        q = q.transpose(1, 2)\n    cos,", "rotates q, which no norm"),
        (GEMMA, "    q = self.first(q)", "    q = self.first(q, None)", "rotates q, which no norm returned as it is"),
        (GEMMA, "    q = self.first(q)", "    q = self.first(*(q,))", "rotates q, which no norm returned as it is"),
        (GEMMA, "    k = self.second(k)", "    k = self.second(q)", "rotates q, which no norm returned as it is"),
        (GEMMA, ROTATION, "    q, p = rotary(q, k, cos, sin)\n", "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, ROTATION, "    k, q = rotary(q, k, cos, sin)\n", "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, ROTATION, "    q, k = rotary(q, k, *tables)\n", "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, ROTATION, "    q, k = self.rotary(q, k, cos, sin)\n", "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, ROTATION, "    q, k = rotary(q, k, cos + q, sin)\n", "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, ROTATION, "    seen = lambda: q\n" + ROTATION, "has no statement q, k"),
        (GEMMA, ROTATION, "    for _ in range(2):\n    " + ROTATION, "has no statement q, k = ROTARY(q, k, cos, sin)"),
        (GEMMA, "cos, sin)", "cos, sin, shape)", "calls rotary with arguments that are not read"),
        (GEMMA, "cos, sin)", f"cos, sin, {POSITIONS}3)", "calls rotary, which computes no rotary embedding"),
        (GEMMA, "cos, sin)", "cos, sin, unsqueeze_dim=0)", "calls rotary, which computes no rotary embedding"),
        (GEMMA, "cos, sin)", "cos, *(sin, 1))", "calls rotary with arguments that are not read"),
        (GEMMA, "cos, sin)", "*tables, 1)", "calls rotary with arguments that are not read"),
        (GEMMA, "cos, sin)", "cos, sin, **{'unsqueeze_dim': 1})", "calls rotary with arguments that are not read"),
        (GEMMA, "cos, sin)", "sin, cos)", None),
        (GEMMA, "cos, sin)", "cos, sin, unsqueeze_dim=1)", None),
        (GEMMA, "cos, sin)", f"cos, sin, {POSITIONS}1)", None),
        (GEMMA, "self.second", "self.first", None),
        (GEMMA, "    cos,", "    self.first, self.third = 2 * [self.third]\n    cos,", "may change something"),
        (GEMMA, "    cos,", "    self.second.weight.data.mul_(2)\n    cos,", "may change something between"),
        (GLM, "        k = self.second(k)\n", "    k = self.second(k)\n", "rotates q, which no norm returned as it is"),
        (GLM, "    q = q.t", "    if x.dim():\n        q = q.t", "rotates q, which no norm returned as it is: if"),
        (GLM, "    cos, sin = tables\n    q", "    if is_local:\n        cos, sin = tables\n        q", "normalizes"),
        (EXAONE, "    return", "    else:\n        q = 3 * q\n    return", None),
        (IN_BRANCH, "    return", "    else:\n        q = 3 * q\n    return", None),
        (IN_BRANCH, "        cos,", "        q = q.view(shape)\n        cos,", "rotates q, which no norm returned"),
        (IN_BRANCH, IF + "        q = self.first(q)\n", "    q = self.first(q)\n" + IF, "normalizes and rotates"),
        (IN_BRANCH, IF + INDENTED, "    if has_norms:\n" + INDENTED + IF, "normalizes and rotates q and k"),
        (IN_BRANCH, INDENTED, "        if has_norms:\n" + textwrap.indent(INDENTED, "    "), "normalizes and rotates"),
        (EXAONE, "        cos,", "        q = q.transpose(1, 2)\n        cos,", "normalizes and rotates q and k"),
    ],
)  # fmt: skip
def test_other_statements(class_of, folded, source, old, new, reason):
    assert old in source
    cls = class_of(source.replace(old, new))
    if reason is None:
        original, ours = both_of(cls)
        assert_same(original, ours, given())
        assert len(folded) == 1
        assert_same(original, ours, given(is_local=False))
        return
    layer = cls()
    report = patch_model(layer, patch_layers=True)
    assert not report.attention and type(layer) is cls
    with pytest.raises(Unclear) as caught:
        norms_of(cls)
    assert str(caught.value).startswith(reason)


def test_the_source_of_a_forward_is_read_once(class_of, monkeypatch):
    def getsource(function):
        read.append(function)
        return original(function)

    read, original, cls = [], inspect.getsource, class_of(QWEN)
    monkeypatch.setattr(inspect, "getsource", getsource)
    patch_model(nn.ModuleList(cls() for _ in range(3)), patch_layers=True)
    assert read.count(cls.forward) == 1


def test_a_forward_that_was_replaced_is_read_anew(class_of, folded):
    cls = class_of(QWEN)
    both_of(cls)
    cls.forward = class_of(IN_BRANCH).forward
    original, ours = both_of(cls)
    assert_same(original, ours, given())
    assert_same(original, ours, given(is_local=False))
    assert len(folded) == 1
    assert norms_of(cls) == ("first", "second")  # from the tree that was found, not the rewritten one
    cls.forward.__code__ = class_of(QWEN.replace(ROTATION, "")).forward.__code__
    with pytest.raises(Unclear, match="has no statement q, k"):
        norms_of(cls)


def test_reasons_of_a_layer_and_of_attention_are_both_listed(class_of):
    source = GEMMA.replace("    cos,", "    q = 2 * q\n    x = x + x\n    cos,").replace(
        "rotary", "apply_rotary"
    )
    layer = class_of(source, apply_rotary=apply_rotary_pos_emb)()
    reasons = [each.reason for each in patch_model(layer, patch_layers=True).declined]
    assert reasons == [
        "its forward has no sum that one of its norms follows at once; "
        "its forward rotates q, which no norm returned as it is: q = 2 * q"
    ]


def test_a_reason_of_a_layer_and_of_attention_is_listed_once(class_of):
    layer = class_of(GEMMA.replace("    cos,", "    x = x + x\n    cos,"))()
    layer.forward = lambda x: x
    reasons = [each.reason for each in patch_model(layer, patch_layers=True).declined]
    assert reasons == ["its forward was replaced on the module"]


@pytest.mark.parametrize(
    ("rotary", "reason"),
    [
        (backwards, "computes something that is not read: q * cos - rotate_half(q) * sin"),
        (in_float32, "computes no rotary embedding that is known"),
        (functools.partial(apply_rotary_pos_emb), "is no plain function"),
        (nn.Identity(), "is a module that does more than to call a function"),
        (lambda q, k, cos, sin: (q, k), "has no source that can be read"),
    ],
)
def test_other_rotary_embeddings(class_of, rotary, reason):
    with pytest.raises(Unclear) as caught:
        norms_of(class_of(QWEN, rotary))
    assert str(caught.value) == f"calls rotary, which {reason}"


def test_a_rotary_embedding_that_kernels_may_replace(class_of, folded):
    """transformers marks its own so where `kernels` is installed: a module that calls the function."""
    kernels = pytest.importorskip("kernels")
    marked = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(apply_rotary_pos_emb)
    original, ours = both_of(class_of(QWEN, marked))
    assert_same(original, ours, given())
    assert len(folded) == 1
    marked.forward = backwards  # as kernelize does it
    assert_same(original, ours, given())
    assert len(folded) == 1
    with pytest.raises(Unclear, match="is a module that does more than to call a function"):
        norms_of(class_of(QWEN, marked))


def replaced(name, value):
    def change(layer):
        setattr(layer, name, value)

    return change


def in_module(layer):
    """Another rotary embedding, as Liger puts it in its place."""
    inspect.unwrap(type(layer).forward).__globals__["rotary"] = backwards


def parametrized(layer):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer.first, "weight", Doubled())


@pytest.mark.parametrize(
    ("change", "is_folded"),
    [
        (lambda layer: None, True),
        (lambda layer: layer.first.register_forward_hook(lambda module, given, y: 2 * y), False),
        (lambda layer: layer.second.register_forward_pre_hook(lambda module, given: (2 * given[0],)), False),
        (lambda layer: layer.second.register_full_backward_hook(lambda *given: None), False),
        (lambda layer: setattr(layer.first, "forward", lambda x: 3 * x), False),
        (lambda layer: replaced("first", nn.LayerNorm(D))(layer), False),
        (lambda layer: replaced("first", layer.second)(layer), True),
        (lambda layer: setattr(layer.first, "variance_epsilon", 0.5), False),
        (lambda layer: layer.first.double(), False),
        (lambda layer: layer.first.half(), True),
        (lambda layer: setattr(layer.second, "weight", nn.Parameter(torch.ones(1))), False),
        (in_module, False),
        (parametrized, True),
    ],
)
@pytest.mark.parametrize("source", [QWEN, EXAONE])
def test_changes_after_the_patch(class_of, folded, source, change, is_folded):
    original, ours = both_of(class_of(source))
    for each in (original, ours):
        change(each)
    assert_same(original, ours, given())
    assert bool(folded) == is_folded


def tables_of(change):
    arguments = given()
    arguments["tables"] = tuple(map(change, arguments["tables"]))
    return arguments


@pytest.mark.parametrize(
    "arguments",
    [
        tables_of(lambda table: table.double()),
        tables_of(lambda table: table.bfloat16()),
        tables_of(lambda table: table[0]),
        tables_of(lambda table: table[..., :1]),
        tables_of(lambda table: table[:, :1]),
        tables_of(lambda table: table.requires_grad_()),
        {**given(), "x": given()["x"][:1]},
    ],
)
def test_tensors_that_the_call_does_not_take(class_of, folded, arguments):
    for rotary in (apply_rotary_pos_emb, partly):
        original, ours = both_of(class_of(QWEN, rotary))
        try:
            original(**arguments)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as caught:
                ours(**arguments)
            assert str(caught.value) == str(error)
        else:
            assert_same(original, ours, arguments)
    assert not folded


def test_float64_and_a_weight_that_is_wider(class_of, folded):
    original, ours = both_of(class_of(GEMMA), torch.float64)
    assert_same(original, ours, given(torch.float64))
    original, ours = both_of(class_of(GEMMA), torch.bfloat16)
    for each in (original, ours):
        each.first.float(), each.second.float()
    assert_same(original, ours, given(torch.bfloat16))
    assert not folded


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.first.register_forward_hook(lambda *_: None), "its first has hooks, or a forward of"),
        (lambda layer: layer.second.register_full_backward_hook(lambda *_: None), "its second has hooks, or a forward"),
        (parametrized, "its first, of class ParametrizedLlamaRMSNorm, is not patched"),
        (lambda layer: setattr(layer, "second", nn.LayerNorm(D)), "its second, of class LayerNorm, is not patched"),
        (lambda layer: setattr(layer, "second", nn.RMSNorm(D)), "its first and second compute different norms"),
        (lambda layer: setattr(layer, "first", nn.Sequential(layer.first)), "its first, of class Sequential, is not"),
        (lambda layer: setattr(layer, "forward", lambda x: x), "its forward was replaced on the module"),
    ],
)  # fmt: skip
def test_attention_that_is_left(class_of, folded, change, reason):
    cls = class_of(QWEN)
    original, ours = cls(), cls()
    for each in (original, ours):
        change(each)
    report = patch_model(ours, patch_layers=True)
    assert not report.attention and type(ours) is cls
    assert report.declined[-1].reason.startswith(reason)
    if "replaced" not in reason:
        assert_same(original, ours, given())
    assert not folded


def test_norms_that_peft_trains_whole(folded):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm"])
    model = peft.get_peft_model(QWEN3.built(), config)
    expected, gradients = results(model, {"input_ids": TOKENS})
    report = patch_model(model, patch_layers=True)
    assert {each.reason for each in report.declined} == {
        "its q_norm, of class ModulesToSaveWrapper, is not patched"
    }
    logits, ours = results(model, {"input_ids": TOKENS})
    assert torch.equal(logits, expected) and not folded
    torch.testing.assert_close(ours, gradients, rtol=1e-5, atol=1e-6)


def test_attention_without_its_norms_is_neither_rewritten_nor_listed(class_of):
    layer = class_of(GLM)()
    del layer.first, layer.second
    assert not any(patch_model(layer, patch_layers=True).counts.values())


def test_the_report_and_the_way_back(folded):
    original, model = QWEN3.built(), QWEN3.built()
    assert patch_model(model).counts["attention"] == 0
    report = patch_model(model, patch_layers=True)
    assert report.attention[0] == ("model.layers.0.self_attn", "Qwen3Attention", ("q_norm", "k_norm"))
    assert "attention: 2\n     2 Qwen3Attention (q_norm, k_norm): model.layers.0.self_attn and 1 more" in str(
        report
    )
    again = patch_model(model, patch_layers=True)
    assert again.already == sum(again.counts.values()) == 13
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits) and len(folded) == 2
    assert unpatch_model(model).counts["restored"] == 13
    assert {type(part) for part in model.modules()} == {type(part) for part in original.modules()}
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits) and len(folded) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(copied, folded):
    model = QWEN3.built()
    patch_model(model, patch_layers=True)
    again = copied(model)
    assert [type(part) for part in again.modules()] == [type(part) for part in model.modules()]
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits) and len(folded) == 4


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Qwen3Next", "Glm4Moe", "Exaone4"])
def test_generate_with_a_cache(name, folded):
    (case,) = (each for each in ARCHITECTURES if each.name == name)
    original, model = case.built().eval(), case.built().eval()
    patch_model(model, patch_layers=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(model.generate(TOKENS, **options), original.generate(TOKENS, **options))
    assert len(folded) == 6 * case.attention


def test_gradient_checkpointing(folded):
    plain, model = QWEN3.built(), QWEN3.built()
    for each in (plain, model):
        patch_model(each, patch_layers=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, gradients = results(plain.train(), {"input_ids": TOKENS})
    del folded[:]
    logits, ours = results(model.train(), {"input_ids": TOKENS})
    assert torch.equal(logits, expected) and len(folded) == 4  # it was recomputed
    assert all(torch.equal(ours[name], gradients[name]) for name in gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    # To Inductor a folded call is one op, in each of them.
    [("Qwen3", "aot_eager"), ("Gemma3", "aot_eager"), ("Glm4Moe", "aot_eager"), ("Qwen3", "inductor")],
)
def test_compiled_without_a_graph_break(name, backend):
    torch._dynamo.reset()
    (case,) = (each for each in ARCHITECTURES if each.name == name)
    model = case.built().bfloat16()
    assert patch_model(model, patch_layers=True).counts["attention"] == 2
    eager, _ = results(model, {"input_ids": TOKENS})
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    # Experts of GLM-4.5 in transformers 4.57 break the graph.
    original = torch.compile(case.built().bfloat16(), fullgraph=True, backend="eager")
    with skipped_where_fails(lambda: original(input_ids=TOKENS)):
        logits = compiled(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, eager, rtol=0, atol=2**-6 * eager.abs().max().item())
    model.zero_grad()
    logits.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_errors_and_signatures(class_of):
    original, ours = both_of(class_of(QWEN))
    assert inspect.signature(ours.forward) == inspect.signature(original.forward)
    assert "tilegym_qk_norm_rope" in type(ours).forward.__wrapped__.__code__.co_freevars
    assert "rotary" not in [
        each.argval for each in dis.get_instructions(ours.forward) if each.opname == "CALL"
    ]
    with pytest.raises(ValueError, match="too many values to unpack") as caught:
        ours(given()["x"], (1, 2, 3))
    assert caught.traceback[-1].frame.code.name == "forward"

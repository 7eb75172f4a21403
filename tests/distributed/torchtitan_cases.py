# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the overrides of torchtitan do to configs and modules, each function a case, in one process without a group:
torchtitan_training.py runs them, since titan_on_cpu changes more than a test may."""

import dataclasses
import importlib
import inspect
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import titan_on_cpu
import torch
import torchtitan.models.muse_glimmer.model as muse
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.common.nn_modules import RMSNorm as TitanRMSNorm

from tilegym_rmsnorm.integrations import torchtitan as ours
from tilegym_rmsnorm.integrations import torchtitan_graphs as graphs

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"
RMS_NORM, LAYERS = f"{ours.__name__}.rms_norm", f"{ours.__name__}.layers"


def _overridden(model, *imports):
    """The config of a debug model, by what stands behind --override.imports."""
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    config = getattr(registry, f"{model}_debugmodel")()
    apply_overrides(OverrideConfig(imports=parse_cli_imports(list(imports))), config)
    return config


def _kinds(config, module):
    return [type(cfg) for _, cfg, _, _ in config.traverse(module.Config, recurse=True)]


def arguments_are_given_by_the_command_line():
    for import_ in RMS_NORM, LAYERS:
        config = _overridden("qwen3", f'{import_}={{"backend": "torch"}}')
        norms = [cfg for _, cfg, _, _ in config.traverse(TitanRMSNorm.Config)]
        layers = len(config.model_spec.model.layers)
        assert len(norms) == 3 * layers + 1 and {norm.backend for norm in norms} == {"torch"}
        assert all(isinstance(norm.build(), ours.RMSNorm) for norm in norms)
        with pytest.raises(ValueError, match="backend: expected .*'cutlass'"):
            _overridden("qwen3", f'{import_}={{"backend": "cutlass"}}')
        with pytest.raises(TypeError, match="rows"):
            _overridden("qwen3", f'{import_}={{"rows": 1}}')


def both_are_refused_and_change_nothing():
    registry = importlib.import_module("torchtitan.models.qwen3.config_registry")
    config = registry.qwen3_debugmodel()
    for imports in (LAYERS, RMS_NORM), (RMS_NORM, LAYERS):
        with pytest.raises(
            ValueError, match=r"torchtitan\.layers' claims .*, an ancestor of .*torchtitan\.rms_norm'"
        ):
            apply_overrides(OverrideConfig(imports=list(imports)), config)
    assert set(_kinds(config, TitanRMSNorm)) == {TitanRMSNorm.Config}


def a_norm_of_another_arithmetic_stays():
    for import_ in RMS_NORM, LAYERS:
        before, after = (
            _kinds(_overridden("muse_glimmer", *names), TitanRMSNorm) for names in ([], [import_])
        )
        assert before.count(muse.RMSGainCenterNorm.Config) == after.count(muse.RMSGainCenterNorm.Config) > 0
        assert before.count(TitanRMSNorm.Config) == after.count(ours.RMSNorm.Config) > 0
    blocks = _kinds(_overridden("muse_glimmer", LAYERS), muse.MuseGlimmerTransformerBlock)
    assert set(blocks) == {muse.MuseGlimmerTransformerBlock.Config}
    assert set(_kinds(_overridden("muse_glimmer", LAYERS), GQAttention)) == {muse.Attention.Config}


def commands_of_the_page_are_taken():
    """By torchtitan's own parser. The one of 0.2 is run by torchtitan_converter_training.py."""
    text = PAGE.read_text(encoding="utf-8")
    given = re.findall(r"^    torchrun .* torchtitan\.train (.*)$", text, re.MULTILINE)
    commands = [shlex.split(each) for each in given if "--job.config_file" not in each]
    (imports,) = re.findall(r"((?:^    (?:import|from) .*\n)+)", text, re.MULTILINE)
    sys.modules["my_configs"] = ModuleType("my_configs")
    exec(textwrap.dedent(imports), vars(sys.modules["my_configs"]))
    configs = [ConfigManager().parse_args(command) for command in commands]
    for config in configs:
        apply_overrides(config.override, config)
    first, second, third = configs
    (in_code,) = re.findall(r"^    (config\..* = .*)$", text, re.MULTILINE)
    exec(in_code, {"config": (other := _overridden("qwen3"))})
    assert other.override.imports == second.override.imports
    layers = len(first.model_spec.model.layers)
    assert _kinds(first, TitanRMSNorm) == [ours.RMSNorm.Config] * (2 * layers + 1)
    assert {cfg.backend for _, cfg, _, _ in second.traverse(TitanRMSNorm.Config)} == {"cutile"}
    assert third.compile.pass_pipeline in PASS_PIPELINE_REGISTRY
    names = set(re.findall(r"^\| `(tilegym_rmsnorm_\w+)` \|", text, re.MULTILINE))
    assert names == {name for name in PASS_PIPELINE_REGISTRY if name.startswith("tilegym")}


def which_layers_are_fused():
    for model, attentions in {"llama3": 0, "qwen3": 1, "gpt_oss": 0, "deepseek_v3": 0}.items():
        config = _overridden(model, LAYERS).model_spec.model
        n = len(config.layers)
        assert _kinds(config, ours.RMSNormOfSum) == [ours.RMSNormOfSum.Config] * n, model
        assert _kinds(config, ours.Attention) == [ours.Attention.Config] * n * attentions, model
        blocks = _overridden(model).model_spec.model.layers
        for theirs, block in zip(blocks, config.layers, strict=True):
            assert issubclass(type(block)._owner, type(theirs)._owner)


def kimi_has_the_layers_of_deepseek_v3():
    """Its registry of configs imports libraries of pictures."""
    config = importlib.import_module("torchtitan.models.kimi_k2_7")._debugmodel("flex", "standard")
    ours.layers(config)
    assert TitanRMSNorm.Config not in _kinds(config, TitanRMSNorm)
    assert _kinds(config, ours.RMSNormOfSum) == [ours.RMSNormOfSum.Config] * len(config.layers)
    assert not _kinds(config, ours.Attention)


def a_subclass_of_a_layer_stays():
    """Its forward may be another. Its norms are replaced."""

    def derived(base):
        class Other(base):
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config(base.Config):
                pass

        return Other.Config

    config = _overridden("qwen3")
    block = config.model_spec.model.layers[1]
    attention = ours.derive(block.attention, derived(GQAttention))
    config.model_spec.model.layers[1] = ours.derive(block, derived(type(block)._owner), attention=attention)
    apply_overrides(OverrideConfig(imports=[LAYERS]), config)
    first, other, *_ = config.model_spec.model.layers
    for cfg, name in (first, "Qwen3TransformerBlock"), (other, "Other"):
        assert type(cfg)._owner.__name__ == name
    assert type(first.attention) is ours.Attention.Config and type(other.attention) is type(attention)
    norms = [type(each) for each in (other.attention_norm, other.ffn_norm, other.attention.qk_norm)]
    assert norms == [ours.RMSNorm.Config] * 3


def signatures_and_fields_are_theirs():
    """Shardings are looked up by the names of arguments, and arrive in the fields of configs."""
    parameters = inspect.signature(torch.nn.RMSNorm.forward).parameters
    assert list(inspect.signature(ours.RMSNorm.forward).parameters) == list(parameters)
    assert list(inspect.signature(ours.RMSNormOfSum.forward).parameters) == [*parameters, "residual"]
    for theirs in GQAttention, importlib.import_module("torchtitan.models.qwen3.model").Qwen3TransformerBlock:
        replaced = ours.Attention if theirs is GQAttention else ours._block_class(theirs)
        expected, got = (list(inspect.signature(each.forward).parameters) for each in (theirs, replaced))
        assert got == expected
    cfg = TitanRMSNorm.Config(
        normalized_shape=8,
        eps=3e-4,
        elementwise_affine=False,
        param_init={"weight": 1},
        sharding_config=object(),
    )
    derived = ours.rms_norm(cfg)
    fields = [each.name for each in dataclasses.fields(cfg)]
    assert [getattr(derived, name) for name in fields] == [getattr(cfg, name) for name in fields]
    norm = TitanRMSNorm.Config(normalized_shape=8, eps=3e-4, elementwise_affine=False).build()
    assert ours.rms_norm(cfg).eps == norm.eps and norm.weight is None


def _attentions():
    """theirs and ours of the same weights, in bfloat16, whose attention gives q and k back."""
    config = _overridden("qwen3").model_spec.model.layers[0].attention
    config.inner_attention = ScaledDotProductAttention.Config()
    theirs = config.build().bfloat16()
    config.qk_norm = ours.rms_norm(config.qk_norm)
    replaced = ours.derive(config, ours.Attention.Config).build().bfloat16()
    torch.manual_seed(0)
    for each in theirs, replaced:
        each.init_states(buffer_device=torch.device("cpu"))
        each.inner_attention.forward = lambda q, k, v, **_: (
            torch.cat([q, k, v], 2)[:, :, : q.shape[2]] + k[:, :, :1]
        )
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, 1 if weight.ndim == 1 else 0, 0.2)
    replaced.load_state_dict(theirs.state_dict())
    return theirs, replaced


def norms_and_rotation_have_the_bits_of_theirs():
    """n is rounded, and rotated in float32: rope_rounding "norm"."""
    theirs, replaced = _attentions()
    x = torch.randn(3, 40, theirs.wo.out_features).bfloat16()
    of_rows = torch.randint(0, 60, (3, 40))
    for positions in None, torch.arange(40)[None], of_rows, of_rows[:1]:
        q, k, _ = theirs.qkv_linear(x)
        expected = theirs.rope(theirs.q_norm(q), theirs.k_norm(k), positions)
        got = replaced._normed_and_rotated(q, k, positions)
        for mine, its in zip(got, expected, strict=True):
            # A row whose rstd has another last bit may round otherwise.
            assert (mine == its).float().mean() > 0.999 and mine.dtype == its.dtype
        y, its_y = replaced(x, None, positions), theirs(x, None, positions)
        torch.testing.assert_close(y, its_y, rtol=0.02, atol=0.02 * its_y.detach().abs().max().item())


def hooks_and_autocast_take_the_parts():
    theirs, replaced = _attentions()
    x = torch.randn(2, 16, theirs.wo.out_features).bfloat16()
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaced, "_normed_and_rotated", lambda *args: called.append("fused") or args[:2])
        replaced(x, None)
        handle = replaced.k_norm.register_forward_hook(lambda *_: called.append("hook"))
        replaced(x, None)
        handle.remove()
        with torch.autocast("cpu", torch.bfloat16):
            replaced(x, None)
    assert called == ["fused", "hook"]


def a_block_adds_and_selects_its_mask():
    """gpt_oss selects one of several masks; its block is called here with stand-ins for attention and experts."""
    base = importlib.import_module("torchtitan.models.gpt_oss.model").GptOssTransformerBlock
    seen = []

    class Doubled(torch.nn.Module):
        def forward(self, x, *masks):
            seen.append(masks)
            return 2 * x

    results = []
    for block_class, norm_class in (base, ours.RMSNorm), (ours._block_class(base), ours.RMSNormOfSum):
        block = block_class.__new__(block_class)
        torch.nn.Module.__init__(block)
        block.attn_mask_key, block.moe_enabled = "basic_mask", True
        norm = TitanRMSNorm.Config(normalized_shape=16)
        block.attention_norm = norm.build()
        block.ffn_norm = ours.derive(norm, norm_class.Config).build()
        block.attention, block.moe = Doubled(), Doubled()
        x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = block(x, {"basic_mask": "mine", "other": "another"}, "positions")
        y.square().sum().backward()
        results.append((y, x.grad))
    assert seen == [("mine", "positions"), ()] * 2
    torch.testing.assert_close(*results)


def another_release_is_refused():
    """Its layers may do more than those that are repeated here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.importlib.metadata, "version", lambda name: "0.4.0")
        with pytest.raises(RuntimeError, match=r"expected torchtitan 0\.3, .* got 0\.4\.0"):
            _overridden("qwen3", LAYERS)
        _overridden("qwen3", RMS_NORM)
    assert titan_on_cpu.OURS == ours.__name__


def passes_stand_at_their_places():
    registry = importlib.import_module("torchtitan.experiments.graph_trainer.llama3.config_registry")
    config = registry.graph_trainer_llama3_debugmodel()
    traced = SimpleNamespace(num_static_inputs=0, tensor_input_indices=[], state_fqns=[])

    def names(pipeline):
        return [graphs._name(each) for each in PASS_PIPELINE_REGISTRY[pipeline](traced, config)]

    default = [graphs._name(each) for each in graphs.theirs.construct_default_graph_passes(traced, config)]
    replaced, regional = (f"tilegym_rmsnorm_{name}" for name in ("replace", "regional"))
    config.compile.numerics_changing_optim = True
    marks = "annotate_rmsnorm_for_regional_inductor_pass"
    first, then = "annotate_flex_attention_for_regional_inductor_pass", "regional_inductor_pass"
    assert [each for each in names(regional) if each != marks] == default
    assert names(regional).count(marks) == 1 and names(regional)[names(regional).index(marks) + 1] == then
    (ours_,) = (each for each in graphs.regional_pipeline(traced, config) if graphs._name(each) == marks)
    assert ours_ is graphs.fx.annotate_rmsnorm_for_regional_inductor_pass
    config.compile.numerics_changing_optim = False
    assert [each for each in names(replaced) if each != "replace_rmsnorm_pass"] == default
    assert names(replaced)[names(replaced).index("replace_rmsnorm_pass") + 1] == first

    config.compile.inductor_compilation = "full"
    following = names(replaced)[names(replaced).index("replace_rmsnorm_pass") + 1]
    assert following == "full_inductor_compilation_pass"
    with pytest.raises(ValueError, match=f"expected {then} among torchtitan's passes, got .*full_inductor"):
        names(regional)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Specs of the installed Megatron-Core: each norm is replaced, and nothing else. TransformerEngine needs a GPU: empty
classes with the names of its linear layers stand for them."""

# ruff: noqa: E402

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.mamba.mamba_layer_specs import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from tilegym_rmsnorm.integrations.megatron import RMSNorm, RMSNormWithResidual, SpecProvider, with_rms_norm


def config_of():
    given = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return TransformerConfig(**given, use_cpu_initialization=True)


@pytest.fixture
def first_stage(monkeypatch):
    """Without a process group."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)


def local(**options):
    return get_gpt_layer_local_spec(normalization="RMSNorm", **options)


def norms(spec, path=""):
    """The norms of a spec, by their fields."""
    if isinstance(spec, functools.partial):
        return {
            key: each for name, value in spec.keywords.items() for key, each in norms(value, path).items()
        }
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        if isinstance(spec, ModuleSpec) and spec.submodules is None:
            return norms(spec.module, path)
        fields = [field.name for field in dataclasses.fields(spec)]
        return {
            key: each
            for name in fields
            for key, each in norms(
                getattr(spec, name), path if name == "submodules" else f"{path}.{name}"
            ).items()
        }
    is_norm = isinstance(spec, type) and "Norm" in spec.__name__
    return {path.removeprefix("."): spec} if is_norm else {}


def test_each_norm_of_a_layer():
    spec = local(qk_layernorm=True)
    before = repr(spec)
    found = with_rms_norm(spec)
    assert norms(found) == {
        "input_layernorm": RMSNormWithResidual,
        "self_attention.q_layernorm": RMSNorm,
        "self_attention.k_layernorm": RMSNorm,
        "pre_mlp_layernorm": RMSNormWithResidual,
    }
    assert repr(spec) == before and set(norms(spec).values()) == {WrappedTorchNorm}
    text = repr(found)
    for norm in (RMSNormWithResidual, RMSNorm):
        text = text.replace(repr(norm), repr(WrappedTorchNorm))
    assert text == before  # nothing else differs


def test_absent_norms_and_others_stay():
    assert [*norms(with_rms_norm(local()))] == ["input_layernorm", "pre_mlp_layernorm"]
    found = norms(with_rms_norm(local(qk_l2_norm=True)))
    assert found["self_attention.q_layernorm"] is L2Norm
    indexer = DSAIndexerSubmodules(k_norm=WrappedTorchNorm)  # a LayerNorm
    both = ModuleSpec(
        module=object, submodules=dataclasses.make_dataclass("Both", ["a", "b"])(indexer, WrappedTorchNorm)
    )
    assert norms(with_rms_norm(both)) == {"a.k_norm": WrappedTorchNorm, "b": RMSNorm}


def test_a_block_and_the_norm_behind_it(first_stage):
    config = config_of()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for found in (with_rms_norm(block), with_rms_norm(block, config), with_rms_norm(local(), config)):
        assert isinstance(found, TransformerBlockSubmodules) and found.layer_norm is RMSNorm
        assert len(found.layer_specs) == 3 and norms(found.layer_specs[2]) == norms(with_rms_norm(local()))
    shared = TransformerBlockSubmodules(layer_specs=[local()] * 2, layer_norm=WrappedTorchNorm)
    first, second = with_rms_norm(shared).layer_specs
    assert first is second


def test_a_virtual_stage_has_its_share(monkeypatch):
    from megatron.core.transformer import transformer_block

    asked = []
    monkeypatch.setattr(
        transformer_block, "get_num_layers_to_build", lambda config, **of: [asked.append(of), 2][1]
    )
    assert len(with_rms_norm(local(), config_of(), vp_stage=1).layer_specs) == 2 and asked == [
        {"vp_stage": 1}
    ]


def test_multi_token_prediction():
    spec = get_mtp_layer_spec_for_backend(local(), backends.LocalSpecProvider())
    found = norms(with_rms_norm(spec))
    assert {name.rpartition(".")[2] for name in found} == {
        "enorm",
        "hnorm",
        "layer_norm",
        "input_layernorm",
        "pre_mlp_layernorm",
    }
    assert found.keys() == norms(spec).keys() and all(issubclass(each, RMSNorm) for each in found.values())


def test_a_backend_by_name(first_stage):
    config = config_of()
    found = with_rms_norm(local(qk_layernorm=True), config, backend="torch")
    layer = found.layer_specs[0].submodules
    for builder in (found.layer_norm, layer.input_layernorm, layer.self_attention.submodules.q_layernorm):
        norm = build_module(builder, config=config, hidden_size=16, eps=1e-3)
        assert isinstance(norm, RMSNorm) and (norm.backend, norm.eps) == ("torch", 1e-3)
    assert layer.input_layernorm.module is RMSNormWithResidual
    with pytest.raises(ValueError, match="cuda"):
        with_rms_norm(local(), backend="cuda")
    with pytest.raises(ValueError, match="cuda"):
        SpecProvider(backends.LocalSpecProvider(), backend="cuda")


def test_a_spec_of_a_norm_has_the_role_of_its_place():
    shared = ModuleSpec(module=WrappedTorchNorm)
    layer = dataclasses.replace(local().submodules, input_layernorm=shared, pre_cross_attn_layernorm=shared)
    found = with_rms_norm(layer)
    assert found.input_layernorm.module is RMSNormWithResidual
    assert found.pre_cross_attn_layernorm.module is RMSNorm


def test_a_spec_of_a_norm_keeps_its_params():
    spec = dataclasses.replace(
        local().submodules, input_layernorm=ModuleSpec(module=WrappedTorchNorm, params={"eps": 0.5})
    )
    found = with_rms_norm(spec, backend="torch").input_layernorm
    assert (found.module, found.params) == (RMSNormWithResidual, {"eps": 0.5, "backend": "torch"})


def test_a_partial_of_newer_releases():
    of_layer = dataclasses.replace(
        local().submodules, mlp=functools.partial(MLP, submodules=local().submodules)
    )
    found = with_rms_norm(of_layer)
    assert found.mlp.func is MLP and found.mlp.keywords["submodules"].input_layernorm is RMSNormWithResidual


def test_twice_is_once():
    once = with_rms_norm(local(qk_layernorm=True))
    assert with_rms_norm(once) == once


@pytest.mark.parametrize("spec", [TransformerLayerSubmodules, WrappedTorchNorm, [local], None])
def test_what_is_no_spec(spec):
    with pytest.raises(TypeError, match="spec: expected a ModuleSpec or submodules, got"):
        with_rms_norm(spec)


def test_a_spec_without_norms():
    with pytest.raises(ValueError, match="spec: expected one with norms of Megatron-Core, got none"):
        with_rms_norm(ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear)))


def test_the_error_of_a_build_names_the_config():
    layer_norm = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    builder = with_rms_norm(local()).submodules.input_layernorm
    with pytest.raises(ValueError, match="config.normalization: expected \"RMSNorm\", got 'LayerNorm'"):
        build_module(builder, config=layer_norm, hidden_size=16, eps=1e-5)


# TransformerEngine


class TELayerNormColumnParallelLinear(torch.nn.Module):
    pass


class TEColumnParallelLinear(torch.nn.Module):
    pass


class TENormProvider(backends.LocalSpecProvider):
    """As `TESpecProvider` of 0.16.1, with empty linear layers."""

    def linear(self):
        return TEColumnParallelLinear

    def column_parallel_linear(self):
        return TEColumnParallelLinear

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm=False, for_qk=False):
        return transformer_engine.TENorm


@pytest.fixture
def engine(monkeypatch):
    for each in (TELayerNormColumnParallelLinear, TEColumnParallelLinear):
        monkeypatch.setattr(transformer_engine, each.__name__, each)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", TENormProvider, raising=False)
    return get_gpt_layer_with_transformer_engine_spec


def test_norms_come_out_of_linear_layers(engine):
    spec = engine(qk_layernorm=True)
    before = repr(spec)
    layer = with_rms_norm(spec).submodules
    assert repr(spec) == before and "TELayerNormColumnParallelLinear" in before
    assert norms(layer) == norms(with_rms_norm(local(qk_layernorm=True)))
    assert layer.self_attention.submodules.linear_qkv is TEColumnParallelLinear
    assert layer.mlp.submodules.linear_fc1 is TEColumnParallelLinear
    assert layer.mlp.submodules.linear_fc2 is RowParallelLinear
    of_local = (
        local().submodules.sharded_state_dict_keys_map
    )  # names in checkpoints are those of the old layer
    assert layer.sharded_state_dict_keys_map.items() >= of_local.items()
    assert layer.sharded_state_dict_keys_map.items() >= spec.submodules.sharded_state_dict_keys_map.items()


def test_latent_attention(engine):
    spec = engine(qk_layernorm=True, multi_latent_attention=True)
    layer = with_rms_norm(spec).submodules
    attention = layer.self_attention.submodules
    assert attention.q_layernorm is attention.kv_layernorm is RMSNorm
    assert attention.linear_q_up_proj is attention.linear_kv_up_proj is TEColumnParallelLinear
    assert layer.sharded_state_dict_keys_map == {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        **spec.submodules.sharded_state_dict_keys_map,
    }
    assert norms(with_rms_norm(engine(multi_latent_attention=True))).keys() == {
        "input_layernorm",
        "pre_mlp_layernorm",
    }


def test_experts_have_a_norm_of_their_own(engine):
    spec = engine(num_experts=2, moe_grouped_gemm=False)
    layer = with_rms_norm(spec).submodules
    assert layer.pre_mlp_layernorm is layer.input_layernorm is RMSNormWithResidual
    assert "pre_mlp_layernorm." not in layer.sharded_state_dict_keys_map


def test_a_layer_of_mamba(engine):
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=RowParallelLinear),
    )
    spec = ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer))
    layer = with_rms_norm(spec).submodules
    assert layer.norm is RMSNorm and layer.mixer.submodules.in_proj is TEColumnParallelLinear
    assert layer.sharded_state_dict_keys_map == {"norm.": "mixer.in_proj.layer_norm_"}


def test_layers_that_share_a_part(engine):
    """Each gets its norm: the second layer's part is split already."""
    first = engine().submodules
    second = dataclasses.replace(first, sharded_state_dict_keys_map={})
    block = TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(module=object, submodules=each) for each in (first, second)],
        layer_norm=transformer_engine.TENorm,
    )
    found = with_rms_norm(block).layer_specs
    assert all(norms(each) == norms(with_rms_norm(local())) for each in found)
    assert found[0].submodules.mlp is found[1].submodules.mlp


def test_what_cannot_be_split(engine, monkeypatch):
    alone = engine().submodules.mlp
    with pytest.raises(
        ValueError, match="spec: expected submodules.linear_fc1 to be .*, got TELayerNormColumnParallelLinear"
    ):
        with_rms_norm(alone)  # there is no layer to have the norm
    shared = dataclasses.replace(engine().submodules, cross_attention=alone)  # right as `mlp`, and not here
    with pytest.raises(ValueError, match="spec: expected cross_attention.submodules.linear_fc1 to be"):
        with_rms_norm(shared)
    has_both = dataclasses.replace(engine().submodules, pre_mlp_layernorm=L2Norm)
    with pytest.raises(
        ValueError, match="expected no pre_mlp_layernorm beside mlp.linear_fc1, .*, got .*L2Norm"
    ):
        with_rms_norm(has_both)
    other = type("InferenceLayerNormColumnParallelLinear", (TELayerNormColumnParallelLinear,), {})
    monkeypatch.setattr(TENormProvider, "column_parallel_layer_norm_linear", lambda self: other)
    with pytest.raises(
        ValueError, match="self_attention.submodules.linear_qkv to be .*, got InferenceLayerNorm"
    ):
        with_rms_norm(engine())


def test_a_provider():
    """For functions that take one; all but norms comes from the other provider."""
    provider = SpecProvider(TENormProvider())
    mlp = get_mlp_module_spec_for_backend(backend=provider)
    assert mlp.submodules.linear_fc1 is TEColumnParallelLinear
    assert (
        provider.fuse_layernorm_and_linear() is False and provider.column_parallel_layer_norm_linear() is None
    )
    for call in ({}, {"rms_norm": True, "for_qk": True}):
        assert provider.layer_norm(**call) is RMSNorm
    assert provider.layer_norm(has_residual=True) is RMSNormWithResidual
    assert provider.core_attention() is TENormProvider().core_attention()
    spec = get_mtp_layer_spec_for_backend(local(), provider)
    assert spec.submodules.enorm is RMSNorm and spec.submodules.eh_proj is TEColumnParallelLinear
    norm = build_module(
        SpecProvider(TENormProvider(), backend="torch").layer_norm(), config=config_of(), hidden_size=16
    )
    assert norm.backend == "torch"
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = provider.nothing_of_it
    protocol = {name for name in vars(backends.BackendSpecProvider) if not name.startswith("_")}
    assert all(callable(getattr(provider, name)) for name in protocol)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Megatron-Core's GPT with its norms and with ours: what two processes run. test_megatron_training.py starts them.

python tests/distributed/megatron_training.py FILE    2 processes on a CPU, with gloo; FILE gets the results, as JSON

Each process first trains models of its own: the cases of `ALONE`, which they share. Then both train one model with
tensor and sequence parallelism. Megatron-Core asks for a CUDA device in a few places, where `on_cpu` answers.
"""

import contextlib
import json
import os
import sys
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from tilegym_rmsnorm.integrations.megatron import RMSNorm, with_rms_norm

STEPS, VOCABULARY, LENGTH = 3, 64, 16


def on_cpu() -> None:
    """Answer Megatron-Core where it asks for a CUDA device, or for its random numbers."""
    torch.cuda.current_device = lambda: "cpu"
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        setattr(megatron_random, name, lambda *args, **kwargs: None)

    class NoTracker(megatron_random.CudaRNGStatesTracker):
        def fork(self, name=None):  # dropout asks for it, at a rate of 0 too
            return contextlib.nullcontext()

    # Recomputation of a norm asks TransformerEngine about fp8.
    megatron_random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        setattr(megatron_random, name, lambda **options: contextlib.nullcontext())
    megatron_random._CUDA_RNG_STATE_TRACKER = NoTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def config_of(**more: Any) -> Any:
    """The config of a small GPT. Weights are drawn on the CPU, the same for any tensor parallelism."""
    given = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**given, **more})


def model_of(config: Any, spec: Any) -> Any:
    torch.manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="learned_absolute")
    for name, parameter in model.named_parameters():  # norms begin with 1, where an error would hide
        if "norm" in name:
            generator = torch.Generator().manual_seed(len(name))
            change = torch.randn(parameter.shape, generator=generator) / 4
            parameter.data.add_(change.to(parameter.dtype))
    return model


def loss_of(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()


def trained(model: Any) -> dict[str, Any]:
    """Train some steps: losses, gradients of norms in the first step, and names in checkpoints."""
    sharded = model.sharded_state_dict()
    result: dict[str, Any] = {
        "keys": sorted(name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)),
        "sharded": sorted(
            str([getattr(each, of, None) for of in ("key", "global_shape", "global_offset", "replica_id")])
            for name, each in sharded.items()
            if "_extra_state" not in name
        ),
        "ours": sum(isinstance(each, RMSNorm) for each in model.modules()),
        "dtypes": sorted({str(p.dtype) for name, p in model.named_parameters() if "norm" in name}),
        "losses": [],
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        result.setdefault("gradients", gradients_of(model))
        result["losses"].append(loss.item())
        optimizer.step()
    return result


def gradients_of(model: Any, name: str = "grad") -> dict[str, list[float]]:
    return {
        key.removeprefix("module."): getattr(parameter, name).flatten().tolist()
        for key, parameter in model.named_parameters()
        if "norm" in key
    }


def local_spec(config: Any) -> Any:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")


def both(config: Any) -> dict[str, Any]:
    spec = local_spec(config)
    before = repr(spec)
    ours = trained(model_of(config, with_rms_norm(spec)))
    assert repr(spec) == before  # the way back
    return {"ours": ours, "theirs": trained(model_of(config, spec))}


def plain() -> dict[str, Any]:
    return both(config_of())


def from_a_layer() -> dict[str, Any]:
    """The spec of a layer, and the number of layers from the config."""
    config = config_of()
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return {
        "ours": trained(model_of(config, with_rms_norm(layer, config))),
        "theirs": trained(model_of(config, layer)),
    }


def bfloat16() -> dict[str, Any]:
    """Megatron-Core's local norm ignores params_dtype, and has to be cast."""
    config = config_of(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    ours = trained(model_of(config, with_rms_norm(local_spec(config))))
    return {"ours": ours, "theirs": trained(model_of(config, local_spec(config)).bfloat16())}


def recomputed_in_full() -> dict[str, Any]:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return both(config_of(**recompute))


def recomputed_selectively() -> dict[str, Any]:
    return both(config_of(recompute_granularity="selective", recompute_modules=["layernorm", "core_attn"]))


def zero_centered_gamma() -> dict[str, Any]:
    """Weights are stored minus 1. Megatron-Core's local spec refuses them, so its model has them as they are."""
    config = config_of(layernorm_zero_centered_gamma=True)
    ours = model_of(config, with_rms_norm(local_spec(config)))
    try:
        model_of(config, local_spec(config))
    except AssertionError as error:
        refusal = str(error)
    return {
        "ours": trained(ours),
        "theirs": trained(model_of(config_of(), local_spec(config_of()))),
        "refusal": refusal,
    }


def transformer_engine_apart() -> dict[str, Any]:
    """TransformerEngine's spec with its norms taken out of its linear layers, for which Megatron-Core's own stand."""
    fused = type("TELayerNormColumnParallelLinear", (torch.nn.Module,), {})
    transformer_engine.TELayerNormColumnParallelLinear = fused
    transformer_engine.TEColumnParallelLinear = tensor_parallel.ColumnParallelLinear

    class Provider(backends.LocalSpecProvider):
        def fuse_layernorm_and_linear(self):
            return True

        def column_parallel_layer_norm_linear(self):
            return fused

        def layer_norm(self, **options):
            return transformer_engine.TENorm

    gpt_layer_specs.TESpecProvider = Provider
    config = config_of()
    ours = with_rms_norm(get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True), config)
    return {"ours": trained(model_of(config, ours)), "theirs": trained(model_of(config, local_spec(config)))}


def main_grads() -> dict[str, Any]:
    """main_grad of norms after two microbatches under Megatron's DDP, with and without gradient_accumulation_fusion,
    and whether each backward said that it added. Both processes have the same data. Megatron's own layers run without
    fusion, which is a CUDA extension."""
    found = {}
    layers._grad_accum_fusion_available = True
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, options, in_fp32 in (
        ("float32", {}, True),
        ("recomputed", recompute, True),
        ("bfloat16, float32 main_grad", bf16, True),
        ("bfloat16", bf16, False),
    ):
        for fusion in (False, True):
            config = config_of(gradient_accumulation_fusion=fusion, **options)
            model = model_of(config, with_rms_norm(local_spec(config)))
            for module in model.modules():
                if hasattr(module, "gradient_accumulation_fusion"):
                    module.gradient_accumulation_fusion = False
            how = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32, overlap_grad_reduce=True)
            ddp = DistributedDataParallel(config, how, model)
            for _ in range(2):  # steps
                ddp.zero_grad_buffer()
                with ddp.no_sync():
                    loss_of(ddp).backward()
                loss_of(ddp).backward()
                finalize_model_grads([ddp])
            added = {each.grad_added_to_main_grad for key, each in ddp.named_parameters() if "norm" in key}
            kept = [key for key, each in ddp.named_parameters() if each.grad is not None]
            gradients = gradients_of(ddp, "main_grad")
            found[f"{name}, {fusion}"] = {"added": sorted(added), "kept": kept, "gradients": gradients}
    return found


ALONE = (
    plain,
    from_a_layer,
    bfloat16,
    recomputed_in_full,
    recomputed_selectively,
    zero_centered_gamma,
    transformer_engine_apart,  # the last of its process: it replaces classes
)


def with_sequence_parallelism(zero_centered: bool) -> dict[str, Any]:
    """One step of both processes: the loss, and each norm's gradient as finalize_model_grads leaves it."""
    config = config_of(
        tensor_model_parallel_size=2, sequence_parallel=True, layernorm_zero_centered_gamma=zero_centered
    )
    model = model_of(config, with_rms_norm(local_spec(config)))
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    loss = loss_of(ddp)
    loss.backward()
    before = gradients_of(ddp, "main_grad")
    finalize_model_grads([ddp])
    return {"loss": loss.item(), "before": before, "gradients": gradients_of(ddp, "main_grad")}


def run(rank: int, store: str, out: str) -> None:
    on_cpu()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    results = {"main_grads": main_grads()} | {case.__name__: case() for case in ALONE[rank::2]}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for name, zero_centered in (("sequence_parallel", False), ("sequence_parallel_zero_centered", True)):
        results[name] = with_sequence_parallelism(zero_centered)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, results)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(gathered, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = os.path.join(folder, "store"), sys.argv[1]
        torch.multiprocessing.start_processes(run, given, nprocs=2, start_method="fork")

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan 0.3.0 on CPUs: to be imported before it. Its trainer asks for a GPU, for libraries of data and of logs,
and for files that its wheel lacks; here are the smallest things that take their places.

`train` builds torchtitan's own Trainer of a debug model, and trains a few steps on fixed tokens.
"""

import importlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from titan_imports import TOKENS, VOCABULARY, Monitor, Trained, batches, whole

# isort: split
import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as fsdp
import torchtitan.distributed.utils as distributed
import torchtitan.trainer
from torch.distributed.fsdp import FSDPModule
from torch.utils import _runtime_estimation
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

OURS = "tilegym_rmsnorm.integrations.torchtitan"  # the module


def _take_sums(model, before=fsdp.disable_fsdp_gradient_division):
    before(model)  # sets a factor of 1, for which FSDP2 asks for ReduceOp.PREMUL_SUM: gloo lacks it
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


# Behind the last step it sleeps for 2 s.
torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
metrics.build_device_memory_monitor = Monitor
distributed.set_pg_timeouts = lambda **_: None  # it wants torch.cpu.current_device() to be a number
fsdp.disable_fsdp_gradient_division = _take_sums


class _NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *args, **options):
        return []

    def decode(self, *args, **options):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


class _Fixed(BaseDataLoader):
    """The same random tokens for any number of processes: each takes its part of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, tokenizer, seq_len, local_batch_size, **_):
        rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.batches = batches((dp_world_size * local_batch_size, seq_len + 1), rows)
        self.positions = torch.arange(seq_len).repeat(local_batch_size, 1)

    def __iter__(self):
        for tokens, labels in self.batches:
            yield {"input": tokens, "positions": self.positions}, labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def config_of(
    model: str,
    overrides: list[Any],
    *,
    tp: int = 1,
    sp: bool = True,
    dtype: str = "bfloat16",
    compiled: bool = False,
    spmd: str = "partial_dtensor",
    checks_types: bool = False,
    recompute: bool = False,
    n_layers: int = 2,
    pipeline: str = "",
    inductor: str = "regional",
) -> Any:
    """torchtitan's configuration of a debug model, cut to a few layers, for this process and its WORLD_SIZE. pipeline:
    the passes of its graph trainer, which then trains."""
    if pipeline:
        registry = importlib.import_module(f"torchtitan.experiments.graph_trainer.{model}.config_registry")
        c = getattr(registry, f"graph_trainer_{model}_debugmodel_sdpa_cross_entropy_loss")()
        c.compile.pass_pipeline, c.compile.inductor_compilation = pipeline, inductor
        # It refuses to recompute attention of CPUs, which might draw random numbers.
        c.compile.disable_passes = ["cudagraph_pass", "selective_activation_remat_pass"]
        for name in ("get_device_tflops", "get_gpu_dram_gbps"):  # of which Triton asks a GPU
            setattr(_runtime_estimation, name, lambda *_: 100)
    else:
        registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        c = getattr(registry, f"{model}_debugmodel")()
    c.model_spec.model.layers = c.model_spec.model.layers[:n_layers]
    c.tokenizer, c.dataloader = _NoTokenizer.Config(), _Fixed.Config()
    copies = int(os.environ["WORLD_SIZE"]) // tp
    c.training.local_batch_size, c.training.seq_len, c.training.steps = 4 // copies, TOKENS, 3
    c.training.disable_cuda_graphs = True
    c.training.mixed_precision_param = dtype
    c.validator.enable = c.checkpoint.enable = False
    c.debug.seed, c.debug.deterministic, c.debug.spmd_typechecking = 0, True, checks_types
    c.parallelism.tensor_parallel_degree, c.parallelism.spmd_backend = tp, spmd
    c.parallelism.enable_sequence_parallel = sp
    c.parallelism.pipeline_parallel_schedule = "1F1B"
    if not recompute:
        c.activation_checkpoint = None
    if compiled:
        c.compile.enable, c.compile.components = True, ["model"]
    for _, _, parent, name in list(c.traverse(FlexAttention.Config)):  # it has no backward on a CPU
        setattr(parent, name, ScaledDotProductAttention.Config())
    c.override.imports = overrides
    return c


def train(config: Any) -> Trained:
    """Train in this process, as torchrun would start it."""
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    metrics.MetricsProcessor.log = lambda self, step, loss, *args, **options: losses.append(float(loss))
    trainer = config.build()
    (model,) = trainer.model_parts
    step = trainer.optimizers.step

    def keep_grads(*args, **options):
        grads.update((name, whole(parameter.grad)) for name, parameter in model.named_parameters())
        step(*args, **options)

    trainer.optimizers.step = keep_grads
    try:
        trainer.train()
        state = {name: whole(value) for name, value in model.state_dict().items()}
        # FSDP2 gives a module a subclass.
        of_each = ([c.__name__ for c in type(m).__mro__ if c.__module__ == OURS] for m in model.modules())
        classes = Counter(names[0] for names in of_each if names)
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()
    return Trained(losses, state, grads, classes)

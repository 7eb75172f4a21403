# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan 0.3.0 on CPUs: to be imported before it. Its trainer asks for a GPU, for libraries of data and of logs, and
for files that its wheel lacks; here are the smallest things that take their places.

`train` builds torchtitan's own Trainer of a debug model, and trains a few steps on fixed tokens.
"""

import importlib
import importlib.util
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._utils

VOCABULARY, TOKENS = 2048, 32
OURS = "tilegym_rmsnorm.integrations.torchtitan"  # the module


class _Anything:
    """A name of a library that is not installed: it can be imported, and subscripted in annotations."""

    def __class_getitem__(cls, item):
        return cls


def _stand_in(library: str, **modules: tuple[str, ...]) -> None:
    if importlib.util.find_spec(library) is None:
        for name, names in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(dict.fromkeys(names, _Anything))


if (
    not torch.cuda.is_available()
):  # torchtitan asks once, while it is imported, and says "cuda" where there is nothing
    torch._utils._get_available_device_type = lambda: "cpu"
_stand_in(
    "datasets",
    **{"datasets": ("Dataset", "load_dataset"), "datasets.distributed": ("split_dataset_by_node",)},
)
_stand_in("tensorboard", **{"torch.utils.tensorboard": ("SummaryWriter",)})
_stand_in("triton", **{"triton": (), "triton.language": ()})  # imported without a guard

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.fsdp as fsdp  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402


class _Monitor:
    device_name, device_capacity_gib = "CPU", 1.0

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def _take_sums(model, before=fsdp.disable_fsdp_gradient_division):
    before(model)  # sets a factor of 1, for which FSDP2 asks for ReduceOp.PREMUL_SUM: gloo lacks it
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


torchtitan.trainer.time = SimpleNamespace(
    **{**vars(time), "sleep": lambda seconds: None}
)  # 2 s behind the last step
metrics.build_device_memory_monitor = _Monitor  # torch.cpu has no figures of memory
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
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.shape = dp_world_size * local_batch_size, seq_len + 1
        self.positions = torch.arange(seq_len).repeat(local_batch_size, 1)

    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        while True:
            tokens = torch.randint(0, VOCABULARY, self.shape, generator=generator)[self.rows]
            given = {"input": tokens[:, :-1].contiguous(), "positions": self.positions}
            yield given, tokens[:, 1:].contiguous()

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
    steps: int = 3,
) -> Any:
    """torchtitan's configuration of a debug model, cut to a few layers, for this process and its WORLD_SIZE."""
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    c = getattr(registry, f"{model}_debugmodel")()
    c.model_spec.model.layers = c.model_spec.model.layers[:n_layers]
    c.tokenizer, c.dataloader = _NoTokenizer.Config(), _Fixed.Config()
    copies = int(os.environ["WORLD_SIZE"]) // tp
    c.training.local_batch_size, c.training.seq_len, c.training.steps = 4 // copies, TOKENS, steps
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


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]  # after the last step
    grads: dict[str, torch.Tensor]  # of the last step
    classes: Counter[str]  # how many modules are of a class of ours, by its name


def train(config: Any) -> Trained:
    """Train in this process, as torchrun would start it."""
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    metrics.MetricsProcessor.log = lambda self, step, loss, *args, **options: losses.append(float(loss))
    trainer = config.build()
    (model,) = trainer.model_parts
    step = trainer.optimizers.step

    def keep_grads(*args, **options):
        grads.update((name, _whole(parameter.grad)) for name, parameter in model.named_parameters())
        step(*args, **options)

    trainer.optimizers.step = keep_grads
    try:
        trainer.train()
        state = {name: _whole(value) for name, value in model.state_dict().items()}
        # FSDP2 gives a module a subclass.
        of_each = ([c.__name__ for c in type(m).__mro__ if c.__module__ == OURS] for m in model.modules())
        classes = Counter(names[0] for names in of_each if names)
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()
    return Trained(losses, state, grads, classes)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()

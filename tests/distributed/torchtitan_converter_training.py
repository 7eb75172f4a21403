# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The Trainer of torchtitan 0.2.2 on CPUs, with its norms and with our converter: what test_torchtitan_converter.py
starts.

python tests/distributed/torchtitan_converter_training.py [FOLDER]     with the torchtitan of FOLDER

Prints a line of JSON for each run.
"""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from tilegym_rmsnorm.integrations import unpatch_model

OURS = "--experimental.custom_import", "tilegym_rmsnorm.integrations.torchtitan_converter"
OURS += "--model.converters", "tilegym_rmsnorm"
RUNS: dict[str, tuple[int, str, list[str]]] = {  # processes, model, arguments
    "compiled": (1, "qwen3", ["--compile.enable", "--compile.components", "model"]),
    "FSDP2": (2, "llama3", []),
    "TP and SP": (2, "llama3", ["--parallelism.tensor_parallel_degree", "2"]),
}


def train(model: str, arguments: list[str]) -> Any:
    import titan_imports
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed
    import torchtitan.train
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import ConfigManager
    from torchtitan.models import llama3, qwen3
    from torchtitan.protocols import train_spec

    metrics.build_device_memory_monitor = titan_imports.Monitor
    distributed.set_pg_timeouts = lambda **_: None  # it wants torch.cpu.current_device() to be a number
    torchtitan.train.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    FSDPModule.set_gradient_divide_factor = lambda self, factor: self.set_force_sum_reduction_for_comms(True)
    spec = {"llama3": llama3, "qwen3": qwen3}[model].get_train_spec()
    spec.model_args["debugmodel"].n_layers = 2
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, _Fixed
    train_spec.register_train_spec(model, spec)
    given = {"steps": 3, "seq_len": titan_imports.TOKENS, "local_batch_size": 2}
    config = ConfigManager().parse_args(
        ["--model.name", model, "--model.flavor", "debugmodel", "--activation_checkpoint.mode", "none"]
        + ["--debug.seed", "0", "--debug.deterministic", "--metrics.log_freq", "1"]
        + [word for name, value in given.items() for word in (f"--training.{name}", str(value))]
        + arguments
    )
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    metrics.MetricsProcessor.log = lambda self, step, loss, *args, **options: losses.append(float(loss))
    trainer = torchtitan.train.Trainer(config)
    (module,) = trainer.model_parts
    step = trainer.optimizers.step

    def keep_grads(*args, **options):
        grads.update((name, titan_imports.whole(each.grad)) for name, each in module.named_parameters())
        step(*args, **options)

    trainer.optimizers.step = keep_grads
    trainer.train()
    state = {name: titan_imports.whole(value) for name, value in module.state_dict().items()}
    undone = unpatch_model(module)
    kinds = {"restored": len(undone.restored), "declined": [each.name for each in undone.declined]}
    trainer.close()
    torch.distributed.destroy_process_group()
    return titan_imports.Trained(losses, state, grads, kinds)


class _Fixed:
    def __init__(self, *, dp_world_size, dp_rank, tokenizer, job_config):
        self.part = dp_world_size, dp_rank, job_config.training.local_batch_size, job_config.training.seq_len

    def __iter__(self):
        from titan_imports import batches

        world, rank, batch, seq_len = self.part
        for tokens, labels in batches((world * batch, seq_len + 1), slice(rank * batch, (rank + 1) * batch)):
            yield {"input": tokens}, labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def main(folder: str | None = None) -> None:
    sys.path[:0] = [folder] if folder else []
    from titan_imports import in_processes, report

    # isort: split
    import torchtitan.train  # noqa: F401  before processes are forked

    torch.compile(torch.sin)(torch.ones(1))
    for name, (world, model, arguments) in RUNS.items():
        theirs = in_processes(world, train, model, arguments)
        ours = in_processes(world, train, model, [*arguments, *OURS])
        print("\n" + json.dumps(report(name, "converter", theirs, ours)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

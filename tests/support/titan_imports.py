# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Imported before torchtitan: stand-ins for what any release of it imports, and training in processes of their own."""

import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch._utils

VOCABULARY, TOKENS = 2048, 32


class _Anything:
    """A name of a library that is not installed: it can be imported, and subscripted in annotations."""

    def __class_getitem__(cls, item):
        return cls


def _stand_in(library: str, **modules: tuple[str, ...]) -> None:
    if importlib.util.find_spec(library) is None:
        for name, names in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(dict.fromkeys(names, _Anything))


# torchtitan asks once, while it is imported, and says "cuda" where there is nothing
if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"
_stand_in(
    "datasets",
    **{"datasets": ("Dataset", "load_dataset"), "datasets.distributed": ("split_dataset_by_node",)},
)
_stand_in("tensorboard", **{"torch.utils.tensorboard": ("SummaryWriter",)})
_stand_in("triton", **{"triton": (), "triton.language": ()})  # imported without a guard


class Monitor:
    """torch.cpu has no figures of memory."""

    device_name, device_capacity_gib = "CPU", 1.0

    def get_peak_stats(self):
        from torchtitan.components import metrics

        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def batches(shape: tuple[int, int], rows: slice):
    """The same random tokens and labels for any number of processes: each takes its rows of a batch, without end."""
    generator = torch.Generator().manual_seed(5)
    while True:
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)[rows]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]  # after the last step
    grads: dict[str, torch.Tensor]  # of the last step
    classes: dict[str, int]  # how many modules are of a class of ours, by its name


def whole(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


def _train(
    rank: int, train: Callable[..., Trained], given: tuple[Any, ...], world: int, port: int, path: str
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    trained = train(*given)
    if rank == 0:
        torch.save(tuple(trained), path)


def in_processes(world: int, train: Callable[..., Trained], *given: Any) -> Trained:
    """Call train in as many processes as torchrun starts them. They are forked, so that torchtitan is imported once;
    and each training has its own, since DTensor takes meshes of a process group that ended for those of the next."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        path = os.path.join(folder, "trained")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        of_each = train, given, world, port, path
        torch.multiprocessing.start_processes(_train, of_each, nprocs=world, start_method="fork")
        return Trained(*torch.load(path, weights_only=False))


def report(run: str, override: str, theirs: Trained, ours: Trained) -> dict[str, Any]:
    """For JSON: both losses, and how far the gradients of the last step are apart."""
    apart = {key: float((ours.grads[key] - grad).norm() / grad.norm()) for key, grad in theirs.grads.items()}
    states = [
        {key: (value.dtype, value.shape) for key, value in each.state.items()} for each in (theirs, ours)
    ]
    return {
        "run": run,
        "override": override,
        "losses": [theirs.losses, ours.losses],
        "apart": max((value, key) for key, value in apart.items()),
        "same state dict": list(states[0].items()) == list(states[1].items()),
        "classes": ours.classes,
    }

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The host's time of small calls, ours beside PyTorch's in one run.

Each form of a call, the library ops, modules, DTensors, `override_aten`, a call that is not known yet, and a chain.
"trace" is what torch.compile takes to trace one call: milliseconds in place of microseconds.

    python -m bench.studies.small_calls            every form of a call, and the chain
    python -m bench.studies.small_calls --no-chain without the chain, which torch.compile takes minutes for

The chain is 16 times a matmul and a norm, eager and under torch.compile: microseconds a layer. Calls are timed as in
timer.py, in turn, without synchronisation between them.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch")

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from bench.measure.provenance import choose_tables, describe_run, one_line
from bench.measure.session import this_device
from bench.measure.shapes import DTYPES
from bench.providers.ours import EPS
from bench.studies.host import sample_in_turn, without_grad
from tilegym_rmsnorm import RMSNorm, override_aten, patch_model, qk_norm_rope, rms_norm, settings, use_backend
from tilegym_rmsnorm.commands.options import positive
from tilegym_rmsnorm.routes import known_calls

LAYERS = 16
HEADS, HEAD = (16, 4), 64  # of q and k; elements of each head
Call = Callable[[], Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.small_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=positive, default=16)
    parser.add_argument("--columns", type=positive, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--backend", choices=settings.NAMES, default="auto")
    parser.add_argument("--samples", type=positive, default=400)
    parser.add_argument("--no-chain", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.samples < 2:
        parser.error("--samples: expected at least 2, of which there are percentiles, got 1")
    choose_tables()
    print(one_line(describe_run()))
    device, size = this_device(), (arguments.rows, arguments.columns)
    torch.manual_seed(0)
    dtype = DTYPES[arguments.dtype]
    with use_backend(arguments.backend):
        print_pairs(pairs_of_calls(size, dtype, device), arguments.samples, device)
        print_pairs(pairs_of_modules(size, dtype, device), arguments.samples, device)
        print_pairs(pairs_of_rope(size[0], dtype, device), arguments.samples, device)
        print_pairs(pairs_of_first_calls(size, dtype, device), arguments.samples, device)
        with mesh_of_one(device) as mesh:
            print_pairs(pairs_of_dtensors(size, dtype, mesh), max(2, arguments.samples // 4), device)
        with override_aten(device.type):
            print("\nunder override_aten, beside rms_norm in place of PyTorch")
            print_pairs(pairs_under_override(size, dtype, device), arguments.samples, device)
        print("\ntrace: ms, not us")
        print_pairs(pairs_of_traces(size, dtype, device), max(2, arguments.samples // 40), device, parts=1000)
    if not arguments.no_chain:
        print(f"\na layer of {LAYERS}: matmul and norm")
        chain = Chain(size, dtype, device, arguments.backend)
        print_pairs(chain.pairs(), max(2, arguments.samples // 10), device, LAYERS)
    return 0


def print_pairs(
    pairs: Iterator[tuple[str, Call, Call]], samples: int, device: torch.device, parts: int = 1
) -> None:
    """A line for each pair of calls: the medians in microseconds, divided by parts, and their ratio."""
    print(f"{'us, median':44s}{'ours':>9s}{'PyTorch':>9s}{'ratio':>8s}")
    for label, *calls in pairs:
        ours, theirs = (median / parts for _, median in sample_in_turn(calls, samples, device))
        print(f"{label:44s}{ours:9.1f}{theirs:9.1f}{ours / theirs:8.2f}", flush=True)


def pairs_of_calls(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Call, Call]]:
    """Calls without grad, recorded, and with the backward: ours and PyTorch's."""
    n = size[1]
    x, r, dy = (torch.randn(size, dtype=dtype, device=device) for _ in range(3))
    w, b = (torch.ones(n, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(2, max(1, size[0] // 2), 24, 64, dtype=dtype, device=device)[:, :, :16]
    wide = torch.float32

    def with_residual(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(x, (n,), w, EPS, residual=r)

    def sum_and_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        sum_ = x + r
        return F.rms_norm(sum_, (n,), w, EPS), sum_

    forms: dict[str, tuple[Any, Any, tuple[Tensor, ...]]] = {
        "rms_norm": (
            lambda x, w: (rms_norm(x, (n,), w, EPS),),
            lambda x, w: (F.rms_norm(x, (n,), w, EPS),),
            (x, w),
        ),
        "with a residual": (with_residual, sum_and_norm, (x, r, w)),
        "with a bias": (
            lambda x, w, b: (rms_norm(x, (n,), w, EPS, bias=b),),
            lambda x, w, b: (F.rms_norm(x, (n,), w, EPS) + b,),
            (x, w, b),
        ),
        "y in float32": (
            lambda x, w: (rms_norm(x, (n,), w, EPS, out_dtype=wide),),
            lambda x, w: (F.rms_norm(x, (n,), w, EPS).to(wide),),
            (x, w),
        ),
        "heads, a slice": (
            lambda x, w: (rms_norm(x, (64,), w, EPS),),
            lambda x, w: (F.rms_norm(x, (64,), w, EPS),),
            (q, w[:64].clone() if n >= 64 else torch.ones(64, dtype=dtype, device=device)),
        ),
    }
    for label, (ours, theirs, tensors) in forms.items():
        leaves = [each.clone().requires_grad_() if each is not q else q for each in tensors]
        yield f"{label}, no grad", *(without_grad(bound(each, tensors)) for each in (ours, theirs))
        yield f"{label}, recorded", bound(ours, leaves), bound(theirs, leaves)
        yield f"{label}, both passes", both_passes(ours, leaves), both_passes(theirs, leaves)
    yield from pairs_of_ops(x, r, w, dy)


def pairs_of_ops(x: Tensor, r: Tensor, w: Tensor, dy: Tensor) -> Iterator[tuple[str, Call, Call]]:
    """Our ops as compiled graphs call them, beside aten's."""
    forward = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
    backward = torch.ops.tilegym_rmsnorm.rms_norm_backward.default
    aten, n, dtype = torch.ops.aten, [x.shape[1]], x.dtype
    rstd = forward(x, None, w, None, 1, EPS, 0.0, "once", 1.0, None, None, None)[1]
    calls: dict[str, tuple[Call, Call]] = {
        "op forward": (
            lambda: forward(x, None, w, None, 1, EPS, 0.0, "once", 1.0, None, None, None),
            lambda: aten._fused_rms_norm(x, n, w, EPS),
        ),
        "op forward with a residual": (
            lambda: forward(x, r, w, None, 1, EPS, 0.0, "once", 1.0, dtype, dtype, None),
            lambda: aten._fused_rms_norm(x + r, n, w, EPS),
        ),
    }
    if x.is_cuda:  # aten has no backward of its own for CPUs
        calls["op backward"] = (
            lambda: backward(dy, x, w, rstd, None, 3, 1, 0.0, "once", 1.0, None, None, None, None, None),
            lambda: aten._fused_rms_norm_backward(dy, x, n, rstd, w, [True, True]),
        )
        calls["op backward with a residual"] = (
            lambda: backward(dy, x, w, rstd, dy, 3, 1, 0.0, "once", 1.0, None, None, None, None, None),
            lambda: aten._fused_rms_norm_backward(dy, x, n, rstd, w, [True, True])[0] + dy,
        )
    for label, (ours, theirs) in calls.items():
        yield label, without_grad(ours), without_grad(theirs)


def pairs_of_modules(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Call, Call]]:
    """Our module, and a norm of transformers after patch_model where that is installed, beside torch.nn.RMSNorm."""
    n = size[1]
    modules: dict[str, torch.nn.Module] = {"RMSNorm": RMSNorm(n, EPS, dtype=dtype, device=device)}
    with contextlib.suppress(ImportError):
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        model = torch.nn.Sequential(LlamaRMSNorm(n, EPS)).to(device, dtype)
        patch_model(model)
        modules["a patched LlamaRMSNorm"] = model[0]
    theirs = torch.nn.RMSNorm(n, EPS, dtype=dtype, device=device)
    x = torch.randn(size, dtype=dtype, device=device)
    leaf = x.clone().requires_grad_()
    for label, module in modules.items():
        both = module, theirs
        yield f"{label}, no grad", *(without_grad(bound(each, (x,))) for each in both)
        # As in training the weight's gradient too, which PyTorch leaves out where nobody asks for it.
        of_leaves = [(lambda x, weight, module=each: (module(x),), [leaf, each.weight]) for each in both]
        yield f"{label}, both passes", *(both_passes(*each) for each in of_leaves)


def pairs_of_rope(length: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Call, Call]]:
    """qk_norm_rope of one sequence, beside two norms and a rotation as models write it; our ops, beside the same."""
    tensors = rope_tensors(length, dtype, device)
    leaves = [each.clone().requires_grad_() for each in tensors[:4]] + list(tensors[4:])
    calls = [lambda *given: qk_norm_rope(*given, eps=EPS), norms_and_rotation]
    yield "qk_norm_rope, no grad", *(without_grad(bound(each, tensors)) for each in calls)
    yield "qk_norm_rope, recorded", *(bound(each, leaves) for each in calls)
    yield "qk_norm_rope, both passes", *(both_passes(each, leaves) for each in calls)
    ops = torch.ops.tilegym_rmsnorm
    given = *tensors, None
    numbers = EPS, 0.0, HEAD, False, "once", "end", None
    dq, dk = (torch.randn_like(each) for each in tensors[:2])
    theirs = without_grad(bound(norms_and_rotation, tensors))
    forward = without_grad(lambda: ops.qk_norm_rope_forward.default(*given, *numbers))
    yield "op qk_norm_rope_forward", forward, theirs
    backward = without_grad(lambda: ops.qk_norm_rope_backward.default(dq, dk, *given, 3, *numbers))
    yield "op qk_norm_rope_backward, beside a forward", backward, theirs


def rope_tensors(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, both weights, cos and sin of one sequence."""
    q, k = (torch.randn(1, length, heads, HEAD, dtype=dtype, device=device) for heads in HEADS)
    weights = (torch.ones(HEAD, dtype=dtype, device=device) for _ in range(2))
    angles = torch.randn(length, HEAD // 2, device=device).repeat(1, 2)
    return q, k, *weights, angles.cos().to(dtype), angles.sin().to(dtype)


def norms_and_rotation(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """F.rms_norm and the rotation of pairs (i, i + D / 2), as Hugging Face's models compute it."""

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        x = F.rms_norm(x, (HEAD,), weight, EPS)
        half = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), dim=-1)
        return x * cos[:, None] + half * sin[:, None]

    return rotated(q, q_weight), rotated(k, k_weight)


def pairs_of_first_calls(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Call, Call]]:
    """Calls that pass all checks, as the first one of each shape does."""
    x, w = torch.randn(size, dtype=dtype, device=device), torch.ones(size[1], dtype=dtype, device=device)
    of_rope = rope_tensors(size[0], dtype, device)

    def norm() -> tuple[Tensor, ...]:
        known_calls.forget()
        return (rms_norm(x, w.shape, w, EPS),)

    def rope() -> tuple[Tensor, ...]:
        known_calls.forget()
        return qk_norm_rope(*of_rope, eps=EPS)

    yield "rms_norm, not known", without_grad(norm), without_grad(lambda: (F.rms_norm(x, w.shape, w, EPS),))
    theirs = without_grad(bound(norms_and_rotation, of_rope))
    yield "qk_norm_rope, not known", without_grad(rope), theirs


def pairs_under_override(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Call, Call]]:
    """F.rms_norm as `override_aten` runs it, beside rms_norm."""
    x, w = torch.randn(size, dtype=dtype, device=device), torch.ones(size[1], dtype=dtype, device=device)
    calls = [lambda x, w, f=f: (f(x, w.shape, w, EPS),) for f in (F.rms_norm, rms_norm)]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    yield "F.rms_norm, no grad", *(without_grad(bound(each, (x, w))) for each in calls)
    yield "F.rms_norm, both passes", *(both_passes(each, leaves) for each in calls)


def pairs_of_traces(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Call, Call]]:
    """A first compiled call without a compiler: Dynamo's work for one call of each op."""
    x, w = torch.randn(size, dtype=dtype, device=device), torch.ones(size[1], dtype=dtype, device=device)
    of_norm = [lambda x, w, f=f: (f(x, w.shape, w, EPS),) for f in (rms_norm, F.rms_norm)]
    of_rope = [lambda *given: qk_norm_rope(*given, eps=EPS), norms_and_rotation]
    forms = (("rms_norm", of_norm, (x, w)), ("qk_norm_rope", of_rope, rope_tensors(size[0], dtype, device)))
    for label, functions, tensors in forms:
        yield f"trace of {label}", *(traced(function, tensors) for function in functions)


def traced(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Call:
    def trace() -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="eager", fullgraph=True)(*tensors)

    return trace


def pairs_of_dtensors(
    size: tuple[int, int], dtype: torch.dtype, mesh: DeviceMesh
) -> Iterator[tuple[str, Call, Call]]:
    """rms_norm of DTensors, x sharded by rows, of a mesh of one device: there the call on the local tensors is the
    smaller part."""
    n = size[1]

    def tensors(needs_grad: bool) -> list[Tensor]:
        x, w = torch.randn(size, dtype=dtype), torch.ones(n, dtype=dtype)
        x, w = (each.to(mesh.device_type) for each in (x, w))
        both = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
        return [each.detach().requires_grad_(needs_grad) for each in both]

    norms = [lambda x, w, f=f: (f(x, (n,), w, EPS),) for f in (rms_norm, F.rms_norm)]
    given, leaves = tensors(needs_grad=False), tensors(needs_grad=True)
    yield "DTensors, no grad", *(without_grad(bound(each, given)) for each in norms)
    yield "DTensors, both passes", *(both_passes(each, leaves) for each in norms)


@contextlib.contextmanager
def mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


class Chain:
    """16 layers of matmul and norm, of one size: the sum of a layer and a residual is normalized where one is given."""

    def __init__(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device, backend: str) -> None:
        n = size[1]
        self.backend, self.x = backend, torch.randn(size, dtype=dtype, device=device)
        scale = n**-0.5
        self.matrices = [torch.randn(n, n, dtype=dtype, device=device) * scale for _ in range(LAYERS)]
        self.weights = [torch.ones(n, dtype=dtype, device=device) for _ in range(LAYERS)]

    def ours(self, x: Tensor, matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
        for matrix, weight in zip(matrices, weights, strict=True):
            x = rms_norm(x @ matrix, weight.shape, weight, EPS, backend=self.backend)
        return x

    def theirs(self, x: Tensor, matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
        for matrix, weight in zip(matrices, weights, strict=True):
            x = F.rms_norm(x @ matrix, weight.shape, weight, EPS)
        return x

    def ours_with_residual(self, x: Tensor, matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
        residual = x
        for matrix, weight in zip(matrices, weights, strict=True):
            x, residual = rms_norm(
                x @ matrix, weight.shape, weight, EPS, residual=residual, backend=self.backend
            )
        return x

    def theirs_with_residual(self, x: Tensor, matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
        residual = x
        for matrix, weight in zip(matrices, weights, strict=True):
            residual = x @ matrix + residual
            x = F.rms_norm(residual, weight.shape, weight, EPS)
        return x

    def pairs(self) -> Iterator[tuple[str, Call, Call]]:
        forms = {
            "": (self.ours, self.theirs),
            ", residuals": (self.ours_with_residual, self.theirs_with_residual),
        }
        for kind in ("eager", "compiled"):
            for label, functions in forms.items():
                compiled = kind == "compiled"
                ours, theirs = (
                    torch.compile(each, fullgraph=True) if compiled else each for each in functions
                )
                given = self.x, self.matrices, self.weights
                yield (
                    f"{kind}{label}, no grad",
                    *(without_grad(bound(each, given)) for each in (ours, theirs)),
                )
                leaves = self.x, *([each.clone().requires_grad_() for each in part] for part in given[1:])
                yield f"{kind}{label}, both passes", *(self.steps(each, leaves) for each in (ours, theirs))

    def steps(self, function: Callable[..., Tensor], given: tuple[Any, ...]) -> Call:
        inputs = [*given[1], *given[2]]
        return lambda: torch.autograd.grad(function(*given), inputs, self.x)


def bound(function: Callable[..., Any], tensors: Any) -> Call:
    return lambda: function(*tensors)


def both_passes(function: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor]) -> Call:
    inputs = [each for each in leaves if each.requires_grad]
    gradients = [torch.ones_like(each) for each in function(*leaves)]
    return lambda: torch.autograd.grad(function(*leaves), inputs, gradients)


if __name__ == "__main__":
    sys.exit(main())

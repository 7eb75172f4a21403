# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Time `qk_norm_rope` beside torch.compile of the same expression, PyTorch's operations and Liger's kernels.

    python -m bench.studies.rope                 checks, then times, on a GPU; writes DATE-DTYPE-rope.json
    python -m bench.studies.rope --device cpu    small shapes in interpreters, to see how it works

q and k are slices of one packed projection, and the gradients are (B, H, T, D) transposed, as attention leaves them.
Everyone is compared with float64 before it is timed. Peers that are not installed are left out. The backward of
torch.compile is that of the formulas in rope_reference.py. The share of the copy counts the bytes that must move: q, k
and the results, and in a backward their gradients. A result is the provenance of provenance.py, copy_gb_per_s and
`cells`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from bench.measure.check import poison
from bench.measure.provenance import RESULTS, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import ContextLostError, Session, run_in_interpreters, this_device
from bench.measure.shapes import DTYPES
from bench.providers.ours import EPS
from bench.report import tables
from tilegym_rmsnorm.call.rope_spec import RopeSpec, RopeWanted
from tilegym_rmsnorm.commands import installation, options
from tilegym_rmsnorm.measure.timer import calls_needed, interleave, sets_needed
from tilegym_rmsnorm.rope_reference import rope_forward_torch, rope_gradients_torch

OURS = ("cutile", "triton")
PROVIDERS = (*OURS, "torch.compile", "eager", "liger")
OPS = ("forward", "backward")
PROG = "python -m bench.studies.rope"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm of the difference
Compute = Callable[..., Any]


class Shape(NamedTuple):
    """Of a call: q is (B, T, Hq, D), k is (B, T, Hk, D), and the first R of D elements are rotated."""

    b: int
    t: int
    hq: int
    hk: int
    d: int
    r: int

    def __str__(self) -> str:
        partial = f" R {self.r}" if self.r != self.d else ""
        return f"{self.b}x{self.t}x({self.hq}+{self.hk})x{self.d}{partial}"

    def bytes_of(self, op: str, dtype: torch.dtype) -> int:
        """Bytes that must move: two arrays of a forward, three of a backward."""
        heads = self.b * self.t * (self.hq + self.hk) * self.d
        return (2 if op == "forward" else 3) * heads * dtype.itemsize


SHAPES = (
    Shape(4, 4096, 32, 8, 128, 128),
    Shape(1, 28520, 32, 8, 128, 128),
    Shape(2, 8192, 16, 16, 64, 64),
    Shape(4, 4096, 16, 2, 256, 256),
    Shape(4, 4096, 16, 2, 256, 64),
    Shape(4, 4096, 32, 8, 80, 80),
)
DECODING = tuple(Shape(t, 1, 32, 8, 128, 128) for t in (1, 4, 16, 64))  # a token of each of so many sequences
CPU_SHAPES = (Shape(2, 6, 4, 2, 16, 16), Shape(1, 5, 2, 1, 16, 8))


class Inputs(NamedTuple):
    """One set, in the order of the backward's tensors."""

    dq_out: Tensor
    dk_out: Tensor
    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    b, t, hq, hk, d, r = shape
    normal = functools.partial(torch.randn, device=device, generator=generator)
    packed = normal(b, t, hq + 2 * hk, d).to(dtype)
    gradients = (normal(b, heads, t, d).to(dtype).transpose(1, 2) for heads in (hq, hk))
    weights = ((normal(d) * 0.5 + 1.5).to(dtype) for _ in range(2))
    angles = torch.arange(t, device=device)[:, None] * 1e4 ** (-torch.arange(0, r, 2, device=device) / r)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    return Inputs(*gradients, packed[:, :, :hq], packed[:, :, hq : hq + hk], *weights, cos, sin)


def spec_of(shape: Shape) -> RopeSpec:
    return RopeSpec(shape.d, EPS, 0.0, shape.r, False, "once", "end")


def providers(names: tuple[str, ...], shape: Shape, dtype: torch.dtype) -> dict[str, dict[str, Compute]]:
    """For each of the names that can run, how it computes each op from a set."""
    spec, wanted = spec_of(shape), RopeWanted(dtype, dtype)
    numbers = spec[1:]
    found: dict[str, dict[str, Compute]] = {}
    ops = torch.ops.tilegym_rmsnorm
    for name in (each for each in names if each in OURS):
        found[name] = {
            "forward": lambda s, name=name: ops.qk_norm_rope_forward(*s[2:], None, *numbers, name),
            "backward": lambda s, name=name: ops.qk_norm_rope_backward(*s, None, 3, *numbers, name),
        }

    def forward(s: Inputs) -> Any:
        return rope_forward_torch((*s[2:], None), spec)

    def backward(s: Inputs) -> Any:
        return rope_gradients_torch((*s, None), spec, wanted)

    if "torch.compile" in names:
        torch._dynamo.reset()
        compiled = (torch.compile(each, dynamic=False) for each in (forward, backward))
        found["torch.compile"] = dict(zip(OPS, compiled, strict=True))
    if "eager" in names:
        found["eager"] = {"forward": forward, "backward": backward}
    if "liger" in names and shape.r == shape.d and shape.d & (shape.d - 1) == 0:
        found["liger"] = {"forward": liger_forward()}
    return found


def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def liger_forward() -> Compute:
    """Its norm of q and of k, then its rotary embedding, which writes over both."""
    norm = importlib.import_module("liger_kernel.ops.rms_norm").rms_norm_forward
    rope = importlib.import_module("liger_kernel.ops.rope").rope_forward

    def forward(s: Inputs) -> Any:
        heads = []
        for x, weight in ((s.q, s.q_weight), (s.k, s.k_weight)):
            y = norm(x.reshape(-1, x.shape[-1]), weight, EPS, 0.0, "gemma", None)[0]
            heads.append(y.view(x.shape).transpose(1, 2))
        q_out, k_out, *_ = rope(*heads, s.cos[None].to(s.q.dtype), s.sin[None].to(s.q.dtype))
        return q_out.transpose(1, 2), k_out.transpose(1, 2)

    return forward


def error_of(compute: Compute, op: str, inputs: Inputs, spec: RopeSpec) -> float:
    """The largest error of a result against float64, relative to the norm of that result."""
    poison(inputs.q, copies=4)
    got = compute(inputs)
    wide = [each.double() for each in inputs]
    if op == "forward":
        want = rope_forward_torch((*wide[2:], None), spec)
    else:
        want = rope_gradients_torch((*wide, None), spec, RopeWanted(torch.float64, torch.float64))
    pairs = zip(got, want, strict=True)
    return max(((one.double() - other).norm() / other.norm()).item() for one, other in pairs)


def measure(session: Session, shape: Shape, op: str, dtype: torch.dtype) -> dict[str, Any]:
    """One cell: everyone checked, then those that are right timed in turn. Of names without a figure the reason."""
    sets = sets_needed(shape.bytes_of(op, dtype), session.device)
    generator = torch.Generator(session.device).manual_seed(0)
    made = [make_inputs(shape, dtype, session.device, generator) for _ in range(sets)]
    cell: dict[str, Any] = {"shape": list(shape), "op": op, "us": {}, "errors": {}, "failed": {}}
    samplers = {}
    for name in session.providers:
        with session.contained(name, functools.partial(cell["failed"].__setitem__, name)):
            compute = providers((name,), shape, dtype).get(name, {}).get(op)
            if compute is None:
                continue
            cell["errors"][name] = error = error_of(compute, op, made[0], spec_of(shape))
            if not error <= TOLERANCE[dtype]:
                raise ValueError(f"a relative error of {error:.1e} against float64")
            calls = [functools.partial(compute, each) for each in made]
            if session.copy_bytes_per_second is not None:
                count = calls_needed(sets, shape.bytes_of(op, dtype), session.copy_bytes_per_second)
                calls *= max(1, count // sets)
            samplers[name] = session.timer.sampler(calls)
    cell["us"] = {name: timing.us for name, timing in interleave(samplers, 0.1).items()} if samplers else {}
    session.timer.renew_pool()
    return cell


def section(result: dict[str, Any]) -> str:
    """A line for each cell: microseconds of everyone, and our share of the copy."""
    lines = []
    for cell in result["cells"]:
        shape, us = Shape(*cell["shape"]), cell["us"]
        line = {"B x T x (Hq + Hk) x D": str(shape), "pass": cell["op"]} | us
        if result["copy_gb_per_s"] and "cutile" in us:
            moved = shape.bytes_of(cell["op"], DTYPES[result["dtype"]])
            line["cutile: % of the copy"] = 100 * moved / us["cutile"] / 1e3 / result["copy_gb_per_s"]
        lines.append(line)
    table = tabulate(lines, "keys", "github", floatfmt=".1f", missingval="-")
    return f"**{result['gpu']}**, {result['dtype']}, us.\n\n{table}\n\n{one_line(result)}."


def main(argv: list[str] | None = None) -> int:
    """0 if every cell has a right time of everyone; 1 otherwise; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(PROG, None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--provider", default=",".join(PROVIDERS))
    parser.add_argument("--out", type=options.path, help="folder of the result; default: bench/results/GPU/")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.provider.split(",")) - set(PROVIDERS):
        parser.error(
            f"--provider: expected names of {', '.join(PROVIDERS)}, got {', '.join(sorted(unknown))}"
        )
    if arguments.device == "cpu":
        run_in_interpreters()
    elif not torch.cuda.is_available():
        print("nothing was measured: PyTorch sees no GPU", file=sys.stderr)
        return 2
    choose_tables()
    origin = describe_run()
    folder = arguments.out or RESULTS / gpu_slug(origin["gpu"])
    if reason := installation.why_not_writable(folder):
        sys.exit(f"no results can be kept there: {reason}")
    device = this_device() if arguments.device == "cuda" else torch.device("cpu")
    names = [each for each in arguments.provider.split(",") if each != "liger" or has_liger()]
    session = Session(tuple(names), OPS, device)
    ceiling = session.copy_bytes_per_second
    result = {
        **origin,
        "dtype": arguments.dtype,
        "copy_gb_per_s": ceiling and round(ceiling / 1e9, 1),
        "cells": [],
    }
    path = folder / f"{origin['date'][:10]}-{arguments.dtype}-rope.json"
    if arguments.device == "cuda":
        cells = [*itertools.product(SHAPES, OPS), *((shape, "forward") for shape in DECODING)]
    else:
        cells = list(itertools.product(CPU_SHAPES, OPS))
    lost = []
    for shape, op in tqdm(cells, unit="cell", dynamic_ncols=True):
        try:
            result["cells"].append(measure(session, shape, op, DTYPES[arguments.dtype]))
        except ContextLostError as error:  # nothing more can run in this process
            lost = [f"failed: {shape}: the CUDA context is lost, and the run ends: {error}"]
            break
        finally:  # after each cell: a run may be cut off
            tables.write_json(result, path, "cells")
    failed = [
        f"failed: {Shape(*cell['shape'])} {cell['op']} by {name}: {text}"
        for cell in result["cells"]
        for name, text in cell["failed"].items()
    ]
    print("\n\n".join([section(result), *failed, *lost, f"written: {path}"]))
    return int(bool(lost or failed))


if __name__ == "__main__":
    sys.exit(main())

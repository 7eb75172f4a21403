# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Time `qk_norm_rope` beside torch.compile of the same expression, PyTorch's operations and other libraries.

    python -m bench.studies.rope                        checks, then times, on a GPU; writes DATE-DTYPE-rope.json
    python -m bench.studies.rope --device cpu           small shapes in interpreters, to see how it works

q and k are slices of one packed projection, and the gradients are (B, H, T, D) transposed, as attention leaves them.
Everyone is compared with float64 before it is timed. The backward of torch.compile is that of the formulas in
ops/rope/reference.py. Liger 0.8.5 is called as its users call it, forward alone: its norm of q, that of k, and its
rotation of both in place; cos and sin in x's dtype, which a model makes once, are not timed. The share of the copy
counts the bytes that must move: q, k and the results, and in a backward their gradients. A result is the provenance of
provenance.py, copy_gb_per_s and `cells`. Each of those is

shape, op                    B, T, Hq, Hk, D, R and whether it is as Qwen3 (rope_cases.py); forward or backward
us, errors, failed           by provider: device microseconds, largest relative error of a result, or why there are none
host_us                      of few tokens: microseconds of the host for one eager `qk_norm_rope` without grad by each
                             backend, and for `F.rms_norm` of q alone, contiguous

`python scripts/docs_figures.py` puts the newest of each GPU in bfloat16 into docs/qk-norm-rope.md.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from tqdm import tqdm

from bench.measure.check import poison
from bench.measure.provenance import RESULTS, ROOT, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import ContextLostError, Session, run_in_interpreters, this_device
from bench.measure.shapes import DTYPES
from bench.providers.ours import EPS
from bench.report import readme, tables
from bench.studies.host import sample_in_turn
from bench.studies.rope_cases import CPU_SHAPES, DECODING, SHAPES, Inputs, Shape, make_inputs
from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.commands import installation, options
from tilegym_rmsnorm.measure.timer import calls_needed, interleave, sets_needed
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import RopeSpec, RopeWanted

OURS = ("cutile", "triton")
PROVIDERS = (*OURS, "torch.compile", "eager", "liger")
OPS = ("forward", "backward")
PROG = "python -m bench.studies.rope"
PAGE = ROOT / "docs" / "qk-norm-rope.md"
HOST_SAMPLES = 100
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm of the difference
Compute = Callable[..., Any]


def spec_of(shape: Shape) -> RopeSpec:
    roundings = ("llama", "each") if shape.as_qwen3 else ("once", "end")
    return RopeSpec(shape.d, EPS, 0.0, shape.r, False, *roundings)


def providers(names: tuple[str, ...], shape: Shape, dtype: torch.dtype) -> dict[str, dict[str, Compute]]:
    """Return how each name that can run computes each op from a set."""
    spec, wanted = spec_of(shape), RopeWanted(dtype, dtype)
    numbers = spec[1:-1]
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
    if "liger" in names and (by_liger := liger_forward(shape, dtype)) is not None:
        found["liger"] = {"forward": by_liger}
    return found


def liger_forward(shape: Shape, dtype: torch.dtype) -> Compute | None:
    """Use Liger where all of a head, a power of two, is rotated without Qwen3's roundings, which it lacks."""
    if shape.r != shape.d or shape.d & (shape.d - 1) or shape.as_qwen3:
        return None
    norm = importlib.import_module("liger_kernel.ops.rms_norm").rms_norm_forward
    rope = importlib.import_module("liger_kernel.ops.rope").rope_forward

    @functools.cache
    def tables_of(s: Inputs) -> Any:
        return s.cos[None].to(dtype), s.sin[None].to(dtype)

    def forward(s: Inputs) -> Any:
        heads = []
        for x, weight in ((s.q, s.q_weight), (s.k, s.k_weight)):
            y = norm(x.reshape(-1, x.shape[-1]), weight, EPS, 0.0, "gemma", None)[0]
            heads.append(y.view(x.shape).transpose(1, 2))
        q_out, k_out, *_ = rope(*heads, *tables_of(s))
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
            for call in calls:  # what a peer prepares once for each set is not timed
                call()
            if session.copy_bytes_per_second is not None:
                count = calls_needed(sets, shape.bytes_of(op, dtype), session.copy_bytes_per_second)
                calls *= max(1, count // sets)
            samplers[name] = session.timer.sampler(calls)
    cell["us"] = {name: timing.us for name, timing in interleave(samplers, 0.1).items()} if samplers else {}
    session.timer.renew_pool()
    if shape in DECODING:
        cell["host_us"] = host_times([name for name in samplers if name in OURS], shape, made[0])
    return cell


def host_times(backends: list[str], shape: Shape, inputs: Inputs) -> dict[str, float]:
    """Time the public function by each backend, and F.rms_norm of q alone, which need not copy q."""
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(qk_norm_rope, *inputs[2:], eps=EPS, rotary_dim=shape.r, backend=name)
        for name in backends
    }
    q = inputs.q.contiguous()
    calls["F.rms_norm of q"] = functools.partial(F.rms_norm, q, (shape.d,), inputs.q_weight, EPS)
    with torch.no_grad():
        taken = sample_in_turn(list(calls.values()), HOST_SAMPLES, q.device)
    return {name: round(median, 2) for name, (_, median) in zip(calls, taken, strict=True)}


def section(result: dict[str, Any]) -> str:
    """A line for each cell: our share of the copy, and microseconds of everyone. Then those of the host."""
    lines, of_host = [], []
    for cell in result["cells"]:
        shape, us = Shape(*cell["shape"]), cell["us"]
        line = {"B x T x (Hq + Hk) x D": str(shape)}
        if "host_us" in cell:
            of_host.append(line | cell["host_us"])
        line |= {"pass": cell["op"]}
        if result["copy_gb_per_s"] and "cutile" in us:
            moved = shape.bytes_of(cell["op"], DTYPES[result["dtype"]])
            share = 100 * moved / us["cutile"] / 1e3 / result["copy_gb_per_s"]
            line |= {"cutile": us["cutile"], "% of the copy": share}
        lines.append(line | us)
    parts = [f"**{result['gpu']}**, {result['dtype']}, us.", _table(lines)]
    if of_host:
        parts += ["The host, us for one eager call without grad:", _table(of_host)]
    return "\n\n".join([*parts, f"{one_line(result)}."])


def _table(lines: list[dict[str, Any]]) -> str:
    return tabulate(lines, "keys", "github", floatfmt=".1f", missingval="-")


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    return readme.refresh_study(page, "rope", results, "-bfloat16-rope.json", section)


def main(argv: list[str] | None = None) -> int:
    """0 if every cell has a right time of everyone; 1 otherwise; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(PROG, None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--provider", default=",".join(PROVIDERS))
    parser.add_argument("--out", type=options.path, help="folder of the result; default: bench/results/GPU/")
    arguments = parser.parse_args(argv)
    names = arguments.provider.split(",")
    if unknown := set(names) - set(PROVIDERS):
        parser.error(
            f"--provider: expected names of {', '.join(PROVIDERS)}, got {', '.join(sorted(unknown))}"
        )
    if "liger" in names and importlib.util.find_spec("liger_kernel") is None:
        print("left out: liger: no module liger_kernel", file=sys.stderr)
        names.remove("liger")
    if not names:
        return 2
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

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One RMSNorm by itself, forward and backward: eager, traced to a graph, and that graph by each pass of
integrations/fx.py.

    python -m bench.studies.traced                 x of 4x8192x4096 on a GPU; writes bench/results/GPU/DATE-traced.json
    python -m bench.studies.traced --out FILE.json
    python -m bench.studies.traced --device cpu --shape 2x3x64 --out FILE.json    how it works; no GPU figures

x, weight and dy are bfloat16. Each variant returns y, dx and dw of the same inputs, is compared with float64, and is
then timed as all else here, the variants in turn. GB/s counts the bytes of `both` (measure/shapes.py).

Where nothing stands between the two passes of a norm, Inductor compiles them as one region and may read x once. In the
graph of a model something does stand there. So that graph is also traced apart, as one graph for each pass.

A result is the provenance of provenance.py, copy_gb_per_s, note, shape, dtype, bytes, inductor_timer (whether Inductor
was given inductor.py's timer), and `variants`. Each of those is

variant                             its name
us, us_p10, us_p90, samples         device microseconds of both passes: median, spread, number of samples
gb_per_s, copy_fraction             rate, and its share of that of a copy of 256 MiB in the same run
times_eager                         the time of eager F.rms_norm over that of this variant
errors                              largest relative error of y, dx and dw against float64, see check.py
error                               why there are no figures, None where there are
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import tilegym_rmsnorm as tr
from bench.measure import inductor
from bench.measure.cell import figures, rounded
from bench.measure.check import Inputs, poison
from bench.measure.check import make_inputs as make_rows
from bench.measure.provenance import RESULTS, ROOT, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import ContextLostError, Session, run_in_interpreters, this_device
from bench.measure.shapes import Result, compulsory_bytes
from bench.providers.ours import EPS, aten_backward, aten_norm, aten_ops_forward, remove_overrides
from bench.report import readme
from bench.report.tables import CPU_NOTE, write_json
from bench.report.text import figure_text, table_text
from tilegym_rmsnorm import settings
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable
from tilegym_rmsnorm.measure.accuracy import Errors, Outputs, errors_of, why_wrong
from tilegym_rmsnorm.measure.timer import Timing, calls_needed, interleave, sets_needed

BACKEND = "cutile"  # of this package
SHAPE, DTYPE = (4, 8192, 4096), torch.bfloat16
SECONDS = 0.3  # of the samples of each variant
EAGER = "eager F.rms_norm"
# The options that torchtitan gives Inductor, but for how it wraps.
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
PAGE = ROOT / "docs" / "traced-graphs.md"

Gradients = tuple[Tensor, Tensor, Tensor]  # y, dx, dw
Graph = Callable[..., Any]
Run = Callable[[Inputs], Gradients]


def main(argv: list[str] | None = None) -> int:
    """0 if every variant is right and timed; 1 otherwise; 2 where there is nothing to measure on."""
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    if device.type == "cpu":
        run_in_interpreters()
    elif not torch.cuda.is_available():
        print("nothing was measured: PyTorch sees no GPU; --device cpu shows how it works", file=sys.stderr)
        return 2
    else:
        device = this_device()
    choose_tables()
    origin = describe_run()
    print(one_line(origin))
    path = arguments.out or RESULTS / gpu_slug(origin["gpu"]) / f"{origin['date'][:10]}-traced.json"
    if reason := why_not_writable(path.parent):
        print(f"no results can be kept there: {reason}", file=sys.stderr)
        return 1
    result = measure(origin, arguments.shape, device)
    write_json(result, path, "variants")
    print("\n".join([f"\nwritten: {path}", *failures(result), "", page_section(result)]))
    return 1 if failures(result) else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.traced",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = "default: bench/results/GPU/DATE-traced.json"
    parser.add_argument("--out", type=options.path, metavar="FILE.json", help=where)
    parser.add_argument("--shape", type=shape_of, default=SHAPE, help="of x; default: 4x8192x4096")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(argv)


def shape_of(text: str) -> tuple[int, ...]:
    """A parser of --shape."""
    sizes = tuple(options.positive(size) for size in text.split("x"))
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"expected at least two sizes, as 16x1024, got {text!r}")
    return sizes


# Who computes them


def eager(norm: Callable[[Tensor, Tensor], Tensor], inputs: Inputs) -> Gradients:
    y = norm(inputs.x_leaf, inputs.weight_leaf)
    dx, dw = torch.autograd.grad(y, (inputs.x_leaf, inputs.weight_leaf), inputs.dy)
    return y.detach(), dx, dw  # with y's graph, what autograd keeps of this call would meet the next one


def own_norm(x: Tensor, weight: Tensor) -> Tensor:
    return tr.rms_norm(x, weight.shape, weight, EPS, backend=BACKEND)


def overridden(inputs: Inputs) -> Gradients:
    """Eager F.rms_norm on the kernels of this package. Raises where these did not take both calls."""
    with default_backend(BACKEND), tr.override_aten(inputs.x.device.type) as override:
        gradients = eager(aten_norm, inputs)
        stats = override.stats
    if any(counts != {"taken": 1} | dict.fromkeys(counts.keys() - {"taken"}, 0) for counts in stats.values()):
        raise RuntimeError(f"the override did not take both calls: {stats}")
    return gradients


@contextlib.contextmanager
def default_backend(name: str) -> Iterator[None]:
    """Set a default for all threads, unlike `use_backend`: autograd's backward has its own."""
    before = settings._process_backend
    tr.set_backend(name)
    try:
        yield
    finally:
        tr.set_backend(before)


def step(x: Tensor, weight: Tensor, dy: Tensor) -> Gradients:
    y = aten_norm(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    return y, dx, dw


def trace(function: Callable[..., Any], *tensors: Tensor) -> tuple[GraphModule, FakeTensorMode]:
    """A graph of the function, of fake tensors, in which the fused norms stand, and their mode."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gm = make_fx(function)(*(mode.from_tensor(each) for each in tensors))
    if not fused_norms(gm):
        raise RuntimeError(f"this torch, {torch.__version__}, traces no fused norm")
    return gm, mode


def fused_norms(gm: GraphModule) -> int:
    fused = torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default
    return sum(node.target in fused for node in gm.graph.nodes)


def as_it_is(gm: GraphModule, mode: FakeTensorMode) -> Graph:
    return gm


def by_inductor(settings: dict[str, Any] | None, gm: GraphModule, mode: FakeTensorMode) -> Graph:
    from torch.fx.passes.regional_inductor import regional_inductor

    from tilegym_rmsnorm.integrations.fx import annotate_rmsnorm_for_regional_inductor_pass

    gm = annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config=settings)
    with tracing(TracingContext(mode)):
        compiled = regional_inductor(gm)
    if fused_norms(compiled):
        raise RuntimeError("fused norms are left in the graph")
    return lambda *tensors: compiled(list(tensors))


def replaced(gm: GraphModule, mode: FakeTensorMode) -> Graph:
    from tilegym_rmsnorm.integrations.fx import replace_rmsnorm_pass

    count = fused_norms(gm)
    gm = replace_rmsnorm_pass(gm, backend=BACKEND)
    if gm.meta["tilegym_rmsnorm_replaced"] != count:
        raise RuntimeError(f"{fused_norms(gm)} of {count} fused norms are left in the graph")
    return gm


def traced(change: Callable[[GraphModule, FakeTensorMode], Graph], inputs: Inputs) -> Run:
    """Both passes in one graph, by what the change makes of it."""
    run = change(*trace(step, inputs.x_leaf, inputs.weight_leaf, inputs.dy))
    return lambda inputs: run(inputs.x, inputs.weight, inputs.dy)


def traced_apart(change: Callable[[GraphModule, FakeTensorMode], Graph], inputs: Inputs) -> Run:
    """A graph for each pass, by what the change makes of it."""
    x, weight, dy = inputs.x, inputs.weight, inputs.dy
    run_forward = change(*trace(aten_ops_forward, x, weight))
    run_backward = change(*trace(aten_backward, x, dy, weight, aten_ops_forward(x, weight)[1]))

    def run(inputs: Inputs) -> Gradients:
        y, rstd = run_forward(inputs.x, inputs.weight)
        dx, dw = run_backward(inputs.x, inputs.dy, inputs.weight, rstd)
        return y, dx, dw

    return run


def at_once(run: Run) -> Callable[[Inputs], Run]:
    return lambda inputs: run


TUNED_NAME = ", ".join(TUNED)
regional, tuned = (functools.partial(by_inductor, settings) for settings in (None, TUNED))
VARIANTS: dict[str, Callable[[Inputs], Run]] = {
    EAGER: at_once(functools.partial(eager, aten_norm)),
    "eager tilegym_rmsnorm.rms_norm": at_once(functools.partial(eager, own_norm)),
    "eager F.rms_norm under override_aten()": at_once(overridden),
    "traced": functools.partial(traced, as_it_is),
    "regional Inductor": functools.partial(traced, regional),
    f"regional Inductor, {TUNED_NAME}": functools.partial(traced, tuned),
    "regional Inductor, passes apart": functools.partial(traced_apart, regional),
    f"regional Inductor, passes apart, {TUNED_NAME}": functools.partial(traced_apart, tuned),
    "replaced": functools.partial(traced, replaced),
}


# Measuring


def make_inputs(shape: tuple[int, ...], device: torch.device) -> list[Inputs]:
    """Make, as check.py does, as many sets as overflow the L2."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    sets = sets_needed(DTYPE.itemsize * (rows + 1) * cols, device)
    return [
        dataclasses.replace(
            each, x=each.x.view(shape), dy=each.dy.view(shape), x_leaf=each.x.view(shape).requires_grad_()
        )
        for each in make_rows((rows, cols), DTYPE, device, sets)
    ]


def measure(origin: Result, shape: tuple[int, ...], device: torch.device) -> Result:
    is_cuda = device.type == "cuda"
    if is_cuda:
        inductor.time_by_device()
        remove_overrides()
    session = Session((), (), device)
    rate = session.copy_bytes_per_second
    inputs = make_inputs(shape, device)
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if not is_cuda:
            # It gives the CPU kernels of the fused norms, so that they are traced as on a GPU. All calls are declined
            # but those of `overridden`.
            stack.enter_context(default_backend("torch"))
            stack.enter_context(tr.override_aten("cpu"))
        try:
            runs, errors = check(session, inputs[0], failed)
            timings = time_in_turn(session, shape, runs, inputs, failed)
        except ContextLostError as lost:  # nothing more can run in this process
            failed |= {name: f"the CUDA context is lost: {lost}" for name in VARIANTS if name not in failed}
            errors, timings = {}, {}
    moved = bytes_moved(shape)
    return {
        **origin,
        "copy_gb_per_s": None if rate is None else round(rate / 1e9, 1),
        "note": None if is_cuda else CPU_NOTE,
        "shape": list(shape),
        "dtype": str(DTYPE).removeprefix("torch."),
        "bytes": moved,
        "inductor_timer": is_cuda,
        "variants": [
            {"variant": name, **figures(timings.get(name), moved, rate)}
            | {
                "times_eager": round(timings[EAGER].us / timings[name].us, 3)
                if {EAGER, name} <= timings.keys()
                else None
            }
            | {"errors": rounded(errors.get(name, {})), "error": failed.get(name)}
            for name in VARIANTS
        ],
    }


def bytes_moved(shape: tuple[int, ...]) -> int:
    return compulsory_bytes("both", (math.prod(shape[:-1]), shape[-1]), DTYPE)


def check(
    session: Session, inputs: Inputs, failed: dict[str, str]
) -> tuple[dict[str, Run], dict[str, Errors]]:
    """Makes every variant, runs it on one set, and compares what it computes with float64. Those that are right, and
    the errors of all."""
    runs: dict[str, Run] = {}
    outputs: dict[str, Outputs] = {}
    for name, make in tqdm(VARIANTS.items(), unit="variant", desc="check"):
        with session.contained(name, functools.partial(failed.__setitem__, name)):
            run = make(inputs)
            poison(inputs.x, copies=3)
            outputs[name] = dict(zip(("y", "dx", "dw"), run(inputs), strict=True))
            if session.is_cuda:  # what goes wrong on the GPU must not surface in another's call
                torch.cuda.synchronize(session.device)
            runs[name] = run
    rows = [each.reshape(-1, each.shape[-1]) for each in (inputs.x, inputs.dy)]
    errors, allowed = errors_of(outputs, *rows, inputs.weight, EPS)
    for name, found in errors.items():
        if text := why_wrong(found, allowed):
            failed.setdefault(name, text)
    return {name: run for name, run in runs.items() if name not in failed}, errors


def time_in_turn(
    session: Session,
    shape: tuple[int, ...],
    runs: dict[str, Run],
    inputs: list[Inputs],
    failed: dict[str, str],
) -> dict[str, Timing]:
    sets, rate = len(inputs), session.copy_bytes_per_second
    count = 1 if rate is None else calls_needed(sets, bytes_moved(shape), rate)
    session.timer.renew_pool()
    samplers = {}
    for name, run in runs.items():
        calls = [functools.partial(run, inputs[i % sets]) for i in range(count)]
        with session.contained(name, functools.partial(failed.__setitem__, name)):
            samplers[name] = session.timer.sampler(calls)
    return interleave(samplers, SECONDS)


# Tables


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    return readme.refresh_study(page, "traced", results, "-traced.json", page_section)


def page_section(result: Result) -> str:
    """The result as Markdown."""
    size = "x".join(map(str, result["shape"]))
    what = f"x of {size}, weight and gradient in {result['dtype']}: {result['bytes'] / 1e6:.0f} MB."
    notes = [result["note"]] if result["note"] else []
    title = f"**{result['gpu'] or 'CPU'}.** {what}"
    return "\n\n".join([title, table(result), *notes, f"{one_line(result)}."])


def table(result: Result) -> str:
    lines = []
    for each in result["variants"]:
        line = [each["variant"]]
        if each["us"] is None:
            line += ["failed", "", "", ""]
        else:
            line += [f"{each['us'] / 1e3:.3f}", f"{each['gb_per_s']:.0f}"]
            line += [figure_text(each["copy_fraction"]), figure_text(each["times_eager"], ".2f")]
        lines.append(line)
    return table_text(lines, ["", "ms", "GB/s", "of the copy", f"x {EAGER}"], "github")


def failures(result: Result) -> list[str]:
    """One line for each variant without a time."""
    return [f"failed: {each['variant']}: {each['error']}" for each in result["variants"] if each["error"]]


if __name__ == "__main__":
    sys.exit(main())

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Train models with each way to compute their norms: tokens/s, device time by kind of kernel, memory, loss curves.

    python -m bench.train                                      all models, eager and compiled; one after the other
    python -m bench.train --model qwen3-1.7b --compile         one model under torch.compile
    python -m bench.train --model decoder-4096 --norm F.rms_norm,rms_norm
    torchrun --nproc-per-node 2 -m bench.train --model decoder-2048-qk --fsdp 2 --eager
    torchrun --nproc-per-node 2 -m bench.train --model decoder-2048-qk --tp 2 --compile
    torchrun --nproc-per-node 8 -m bench.train --model llama-8b --fsdp 4 --tp 2 --compile
    python -m bench.train --model llama-8b --fsdp 4 --tp 2 --compile --one-rank

Without a GPU, and with --tiny, models are tiny: that shows how it works. docs/training.md says what is measured.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import LIBRARIES, require

    require(*LIBRARIES, "transformers")

import argparse
import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bench.measure.provenance import RESULTS, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import this_device
from bench.report import training
from bench.report.tables import CPU_NOTE, write_json
from bench.train.models import HUGGING_FACE, MODELS, USUAL, tiny
from tilegym_rmsnorm import get_reproducible, set_sm_margin
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable

STEPS, TINY_STEPS, LEAST_STEPS = 60, 12, 6
WHERE = "bench/results/GPU/, with --tiny, --norm or a level of reproducibility bench/results/partial/GPU/"
SMOOTHED = 10  # steps of a moving average, at most half of all


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = f"some of {', '.join(MODELS)}; default: all but llama-8b"
    add("--model", type=options.some_of(tuple(MODELS)), default=USUAL, metavar="NAME,...", help=usual)
    add("--norm", type=names, metavar="NAME,...", help="ways to compute the norms; default: all of the model")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--eager", action="store_true", help="eager alone; default: eager and compiled")
    modes.add_argument("--compile", action="store_true", help="under torch.compile alone")
    for name, what in (("--fsdp", "FSDP2"), ("--tp", "tensor and sequence parallelism")):
        add(name, type=options.positive, default=1, metavar="N", help=f"{what} over N processes of torchrun")
    add("--one-rank", action="store_true", help="rank 0 of --fsdp x --tp alone, which communicates nothing")
    add("--sm-margin", type=options.positive, metavar="N", help="SMs that backwards leave to communication")
    add("--steps", type=steps, help=f"of a loss curve; default: {STEPS}, of a tiny model {TINY_STEPS}")
    add("--seconds", type=options.positive, default=60, help="at most, of the turns of one model and mode")
    add("--tiny", action="store_true", help="a model of the same form that trains in seconds")
    add("--out", type=options.path, metavar="FOLDER", help=f"of the results; default: {WHERE}")
    return parser


def names(text: str) -> tuple[str, ...]:
    """A parser of --norm. Which names there are depends on the model."""
    found = tuple(text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected names, got {text!r}")
    return found


def steps(text: str) -> int:
    """A parser of --steps."""
    if not text.isdecimal() or int(text) < LEAST_STEPS:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {LEAST_STEPS}, got {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """0 if all was measured and every loss curve agrees with the first one's; 1 otherwise."""
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    choose_tables()
    # Without it cuBLAS refuses deterministic runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    folder = arguments.out
    if folder is None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        is_other = arguments.norm is not None or get_reproducible() != "run"
        is_part = gpu is not None and (arguments.tiny or is_other)
        folder = RESULTS / ("partial" if is_part else "") / gpu_slug(gpu)
    # Other processes would meet the folder that this one makes and removes, to try it.
    if os.environ.get("RANK", "0") == "0" and (reason := why_not_writable(folder)):
        parser.error(f"--out: no results can be kept there: {reason}")
    modes = [False] if arguments.eager else [True] if arguments.compile else [False, True]
    pairs = list(itertools.product(arguments.model, modes))
    spread = arguments.fsdp * arguments.tp > 1
    if spread and (refused := [name for name in arguments.model if name in HUGGING_FACE]):
        parser.error(f"--model: expected decoders beside --fsdp and --tp, got {', '.join(refused)}")
    if arguments.one_rank and not spread:
        parser.error("--one-rank: expected --fsdp or --tp beside it")
    if len(pairs) == 1:
        ((model, compiled),) = pairs
        return train(model, compiled, arguments, folder, parser.error)
    if spread:
        parser.error("--fsdp, --tp: expected one --model, and --eager or --compile")
    statuses = [in_a_process(model, compiled, argv) for model, compiled in pairs]
    print("\n" + training.table(training.read(folder)))
    return int(any(statuses))  # a signal that ends a process has a negative one


def in_a_process(model: str, compiled: bool, argv: list[str]) -> int:
    """Measure one model and mode in a process of its own: compiled models stay in memory."""
    mode = "--compile" if compiled else "--eager"
    others = [each for each in argv if each not in ("--eager", "--compile")]
    # The last --model counts.
    command = [sys.executable, "-m", "bench.train", *others, "--model", model, mode]
    return subprocess.run(command, cwd=Path(__file__).resolve().parents[2]).returncode


def train(
    model: str, compiled: bool, arguments: argparse.Namespace, folder: Path, refuse: Callable[[str], NoReturn]
) -> int:
    """Measure one model and mode, and write its result. refuse: ends the command with why it takes no such options."""
    from bench.train import parallel, text
    from bench.train.measure import Plan, measure
    from bench.train.norms import ways_of

    try:
        if arguments.one_rank:
            from bench.train import one_rank  # imports a module of PyTorch's tests

            meshes: parallel.Meshes | None = one_rank.start(arguments.fsdp, arguments.tp)
        else:
            meshes = parallel.start(arguments.fsdp, arguments.tp)
    except ValueError as error:
        refuse(str(error))
    with contextlib.ExitStack() as stack:
        if meshes is not None:
            stack.callback(dist.destroy_process_group)
        is_first = meshes is None or dist.get_rank() == 0
        device = this_device()
        is_tiny = arguments.tiny or device.type == "cpu"
        sizes = tiny(MODELS[model]) if is_tiny else MODELS[model]
        ways = {
            name: way
            for name, way in ways_of(model).items()
            # Trainers of several GPUs compile layers, or trace the step to a graph: these are compared.
            if way.compiles or compiled == (meshes is not None and way.change is not None)
        }
        chosen = tuple(ways) if arguments.norm is None else arguments.norm
        if unknown := [name for name in chosen if name not in ways]:
            refuse(f"--norm: expected some of {', '.join(ways)}, got {unknown[0]}")
        count = arguments.steps or (TINY_STEPS if is_tiny else STEPS)
        alone = meshes is None
        plan = Plan(sizes, compiled, count, device, meshes, alone, arguments.seconds, arguments.one_rank)
        set_sm_margin(arguments.sm_margin)
        origin = describe_run()
        origin["versions"]["transformers"] = version_of_transformers()
        if is_first:
            print(f"{one_line(origin)}\n{model}, {'compiled' if compiled else 'eager'}", flush=True)
        texts = tuple(each.to(device) for each in text.load_corpus())
        tell = (lambda line: print(line, flush=True)) if is_first else (lambda line: None)
        records = measure({name: ways[name] for name in chosen}, plan, texts, tell)
        result: dict[str, Any] = {
            **origin,
            "note": CPU_NOTE if device.type == "cpu" else None,
            "model": model,
            "compiled": compiled,
            "is_tiny": is_tiny,
            "fsdp": arguments.fsdp,
            "tp": arguments.tp,
            "one_rank": arguments.one_rank,
            "sm_margin": arguments.sm_margin,
            "sizes": dataclasses.asdict(sizes),
            "norms_in_model": sizes.norms,
            "flops_per_token": sizes.flops_per_token,
            "steps": count,
            "smoothed": min(SMOOTHED, count // 2),
            "corpus_bytes": [len(each) for each in texts],
            "trained": records,
        }
        if meshes is not None:
            dist.barrier()  # no rank ends while another's threads still talk to it
        if not is_first:
            return 0
        path = folder / f"{training.stem_of(result)}.json"
        write_json(result, path, "trained")
        print(f"\n{training.section(result)}\n\nwritten: {path}")
        return 1 if training.failures(result) else 0


def version_of_transformers() -> str:
    import transformers

    return transformers.__version__


if __name__ == "__main__":
    status = main()
    if dist.is_torchelastic_launched():
        from bench.train.parallel import leave

        leave(status)
    sys.exit(status)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Train in torchtitan 0.2.2's own Trainer on one GPU, with its norms and with the converter: tokens/s and losses.

    python -m bench.studies.torchtitan      both models, parameters of both dtypes, eager and compiled
    python -m bench.studies.torchtitan --model qwen3 --mode eager --dtype bfloat16

Both trainers of a case start from one seed, read the same text and take turns. --dtype is torchtitan's training.dtype:
it trains one GPU under autocast. With float32 the residual stream is float32; with bfloat16, up to PyTorch 2.11, norms
see what FSDP2 gives them on several GPUs. Nothing is recomputed. Without a GPU, and with --tiny, models are tiny: that
shows how it works.

A result is the provenance of provenance.py, and `cases`: each as bench/report/training.py says, with `dtype`, and in
`trained` also patched: the number of norms that the converter changed. Kinds of kernel are those of whole steps.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import LIBRARIES, require

    require(*LIBRARIES, "torchtitan")

import argparse
import contextlib
import dataclasses
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed

from bench.measure.provenance import (
    RESULTS,
    ROOT,
    choose_tables,
    describe_run,
    gpu_slug,
    one_line,
    package_version,
)
from bench.measure.session import describe, this_device
from bench.measure.shapes import Result
from bench.report import curves, readme, training
from bench.report.tables import CPU_NOTE, write_json
from bench.train import kernels, measure, text
from bench.train.models import MODELS, Sizes, tiny
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable

SIZES = {"llama3": MODELS["llama-1b"], "qwen3": MODELS["qwen3-1.7b"]}
MODES, DTYPES = ("eager", "compiled"), ("float32", "bfloat16")
CONVERTER = ["--experimental.custom_import", "tilegym_rmsnorm.integrations.torchtitan_converter"]
WAYS = {"original": [], "converter": [*CONVERTER, "--model.converters", "tilegym_rmsnorm"]}
STEPS, TINY_STEPS = 16, 6
NEAR = 1e-3  # of both first losses, which differ by rounding alone
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PAGE = ROOT / "docs" / "torchtitan.md"


def main(argv: list[str] | None = None) -> int:
    """0 if every case trained, and its losses begin alike; 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.torchtitan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, known in (("--model", tuple(SIZES)), ("--dtype", DTYPES), ("--mode", MODES)):
        some = f"some of {', '.join(known)}; default: all"
        add(name, type=options.some_of(known), default=known, metavar="NAME,...", help=some)
    add("--seconds", type=options.positive, default=15, help="at most, of the turns of a case; default: 15")
    add("--tiny", action="store_true", help="models of the same form that train in seconds")
    where = "default: bench/results/GPU/DATE-torchtitan.json"
    add("--out", type=options.path, metavar="FILE.json", help=where)
    arguments = parser.parse_args(argv)
    release = package_version("torchtitan")
    if not (release or "").startswith("0.2."):
        parser.error(f"expected torchtitan 0.2, which has model converters, got {release}")
    os.environ.update(ALONE)
    choose_tables()
    origin = describe_run()
    origin["versions"]["torchtitan"] = release
    print(one_line(origin), flush=True)
    path = arguments.out or RESULTS / gpu_slug(origin["gpu"]) / f"{origin['date'][:10]}-torchtitan.json"
    if reason := why_not_writable(path.parent):
        parser.error(f"--out: no results can be kept there: {reason}")
    device = this_device()
    is_tiny = arguments.tiny or device.type == "cpu"
    if device.type == "cpu":
        stand_in_for_a_gpu()
    sizes = {name: tiny(SIZES[name]) if is_tiny else SIZES[name] for name in arguments.model}
    for name in sizes:
        register(name, sizes[name])
    result: Result = {**origin, "cases": []}
    steps = TINY_STEPS if is_tiny else STEPS
    of_all = {"fsdp": 1, "tp": 1, "sm_margin": None, "is_tiny": is_tiny, "steps": steps, "smoothed": 1}
    of_all |= {"note": CPU_NOTE if device.type == "cpu" else None}
    for dtype, name, mode in itertools.product(arguments.dtype, sizes, arguments.mode):
        plan = measure.Plan(sizes[name], mode == "compiled", steps, device, None, False, arguments.seconds)
        case = {"model": f"{name}, {dtype}", "dtype": dtype, "compiled": plan.compiled, **of_all}
        case |= {"sizes": dataclasses.asdict(plan.sizes), "norms_in_model": plan.sizes.norms}
        case |= {"flops_per_token": plan.sizes.flops_per_token}
        result["cases"].append(case | {"trained": train(name, dtype, plan)})
        write_json(result, path, "cases")  # after each: a run may be cut off
        print(f"\n{training.section({**origin, **result['cases'][-1]})}\n", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print(f"{page_section(result)}\n\nwritten: {path}")
    return int(any(training.failures(case) for case in result["cases"]))


def stand_in_for_a_gpu() -> None:
    """Let torchtitan train on a CPU: torch.cpu has neither the name of a device nor figures of its memory."""
    torch._utils._get_available_device_type = lambda: "cpu"  # asked once, while torchtitan is imported
    from torchtitan.components import metrics

    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    given = {"device_name": "CPU", "get_peak_stats": lambda: stats, "reset_peak_stats": lambda: None}
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(**given)


def register(name: str, sizes: Sizes) -> None:
    """Give torchtitan a model of these sizes with the text of bench.train: "bench-" and its own name."""
    from torchtitan.models import llama3, qwen3
    from torchtitan.protocols.train_spec import register_train_spec

    given: dict[str, Any] = {"dim": sizes.width, "n_layers": sizes.layers, "n_heads": sizes.heads}
    given |= {"n_kv_heads": sizes.kv_heads, "vocab_size": sizes.vocabulary, "norm_eps": sizes.eps}
    if name == "qwen3":
        given |= {"head_dim": sizes.head, "hidden_dim": sizes.inner_width, "enable_weight_tying": True}
    else:  # of 8 / 3 of the width, rounded up
        given |= {"ffn_dim_multiplier": sizes.inner_width / (sizes.width * 8 / 3)}
        given |= {"multiple_of": sizes.inner_width}
    make = {"llama3": llama3.TransformerModelArgs, "qwen3": qwen3.Qwen3ModelArgs}[name]
    spec = {"llama3": llama3, "qwen3": qwen3}[name].get_train_spec()
    spec.model_args = {"bench": make(**given)}
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, batches
    register_train_spec(f"bench-{name}", spec)


def batches(*, job_config: Any, **_: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    given = job_config.training
    corpus, _validation = text.load_corpus()
    for tokens in text.batches(corpus, given.local_batch_size, given.seq_len, measure.SEED):
        yield {"input": tokens[:, :-1]}, tokens[:, 1:]


class Trainee:
    """A Trainer of torchtitan as those of bench/train/measure.py: made, stepped, and asked what it keeps."""

    way = SimpleNamespace(around=contextlib.nullcontext)

    def __init__(self, arguments: list[str], plan: measure.Plan):
        from torchtitan.config import ConfigManager
        from torchtitan.train import Trainer

        self.plan, self.trainer = plan, Trainer(ConfigManager().parse_args(arguments))
        (self.model,) = self.trainer.model_parts
        self.parameters = list(self.model.parameters())
        self.optimizer = SimpleNamespace(masters=[], adamw=self.trainer.optimizers.optimizers[0])
        self.source = itertools.repeat(self.trainer.batch_generator(self.trainer.dataloader))
        self.compute, self.trainer.forward_backward_step = self.trainer.forward_backward_step, self.keep_loss

    def keep_loss(self, **given: Any) -> torch.Tensor:
        self.loss = self.compute(**given).detach()
        return self.loss

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield where a step takes its batch from. The text goes on, whatever the seed."""
        return self.source

    def step(self, source: Any) -> torch.Tensor:
        """Take a step as Trainer.train does."""
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(source)
        return self.loss

    def profiled_steps(self) -> None:
        for _ in range(measure.PROFILED_STEPS):
            self.step(next(self.source))

    def patched(self) -> int:
        """Count the norms to which patch_model gave a class of their own."""
        kinds = [type(each) for each in self.model.modules() if isinstance(each, torch.nn.RMSNorm)]
        return sum(kind is not torch.nn.RMSNorm for kind in kinds)


def train(name: str, dtype: str, plan: measure.Plan) -> list[dict[str, Any]]:
    """Return `trained` of a case: of one that fails the error in the place of figures."""
    given = ["--model.name", f"bench-{name}", "--model.flavor", "bench", "--training.dtype", dtype]
    for option, value in (("local_batch_size", plan.sizes.batch), ("seq_len", plan.sizes.length)):
        given += [f"--training.{option}", str(value)]
    given += ["--activation_checkpoint.mode", "none", "--debug.seed", str(measure.SEED)]
    given += ["--metrics.log_freq", "1000000", "--comm.trace_buf_size", "0"]
    given += ["--compile.enable"] if plan.compiled else []
    trainees: dict[str, Trainee] = {}
    try:
        return list(records(given, plan, trainees))
    except Exception as error:
        return [{"norm": "all", "error": describe(error)}]
    finally:
        for each in trainees.values():
            each.trainer.close()
        trainees.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def records(given: list[str], plan: measure.Plan, trainees: dict[str, Trainee]) -> Iterator[dict[str, Any]]:
    """Make the trainees, and yield a record of each."""
    found: dict[str, dict[str, Any]] = {}
    for name, more in WAYS.items():
        trainees[name] = each = Trainee([*given, *more], plan)
        found[name] = {"norm": name, "error": None, "patched": each.patched(), **measure.first_step(each)}
    counts = [each["patched"] for each in found.values()]
    if counts != [0, plan.sizes.norms]:
        raise RuntimeError(f"expected 0 and {plan.sizes.norms} patched norms, got {counts}")
    first = [each["losses"][0] for each in found.values()]
    if not abs(first[1] / first[0] - 1) < NEAR:
        raise RuntimeError(f"the first losses are {first}")
    seconds = measure.take_turns(trainees, plan, print)
    for name, each in trainees.items():
        each.trainer.optimizers.zero_grad()  # a step frees the gradients of the one before: not of its own memory
        found[name] |= measure.peak_memory(each)
        if plan.is_cuda:
            taken = kernels.profiled(each.profiled_steps)
            found[name] |= kernels.by_kind(taken, kernels.our_names(), measure.PROFILED_STEPS)
        yield found[name] | {"step_s": [round(each, 6) for each in seconds[name]]}


def page_section(result: Result) -> str:
    """The result as Markdown."""
    cases = [{**result, **case} for case in result["cases"]]
    far = [
        f"{training.title(case)}: {max(curves.distances_of(case).values()):.4f}"
        for case in cases
        if not training.failures(case)
    ]
    losses = f"Losses of the first {cases[0]['steps']} steps are at most this far apart: {'; '.join(far)}."
    failed = [f"{training.title(case)}: {line}." for case in cases for line in training.failures(case)]
    return "\n\n".join([training.table(cases), losses, *failed, training.measured_with(cases)])


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    return readme.refresh_study(page, "torchtitan", results, "-torchtitan.json", page_section)


if __name__ == "__main__":
    sys.exit(main())

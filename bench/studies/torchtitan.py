# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Train in torchtitan 0.2.2's own Trainer, with its norms and with the converter: tokens/s and losses.

    python -m bench.studies.torchtitan      two models on one GPU, parameters of both dtypes, eager and compiled
    python -m bench.studies.torchtitan --model qwen3 --mode eager --dtype bfloat16
    torchrun --nproc-per-node 8 -m bench.studies.torchtitan --model llama3-8b --mode compiled --fsdp 4 --tp 2
    python -m bench.studies.torchtitan --model llama3-8b --mode compiled --fsdp 4 --tp 2 --one-rank

Both trainers of a case start from one seed, read the same text and take turns. --dtype is torchtitan's training.dtype.
One GPU trains under autocast: with float32 the residual stream is float32; with bfloat16, up to PyTorch 2.11, norms see
what FSDP2 gives them on several GPUs. There FSDP2 gives layers bfloat16 parameters and sums gradients in float32.
Nothing is recomputed. Without a GPU, and with --tiny, models are tiny: that shows how it works.

--one-rank computes on one GPU what rank 0 of --fsdp x --tp does, with PyTorch's fake process group. Nothing is
communicated: a gather copies the rank's own shard, a sum is the rank's own part. So losses mean nothing, but begin
alike with both norms. Its tokens are those of the one batch that its tensor-parallel group has.

A result is the provenance of provenance.py, and `cases`: each as bench/report/training.py says, with `dtype` and
one_rank, and in `trained` also patched: the number of norms that the converter changed. Kinds of kernel are those of
whole steps. Of several processes same_bits says whether two deterministic runs of a model of two layers have the same
losses and parameters on all ranks.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bench.measure.provenance import (
    RESULTS,
    ROOT,
    choose_tables,
    describe_run,
    gpu_slug,
    kept_in,
    one_line,
    package_version,
)
from bench.measure.session import describe, this_device
from bench.measure.shapes import Result
from bench.report import readme, training
from bench.report.tables import CPU_NOTE, folded, write_json
from bench.train import kernels, measure, one_rank, parallel, text
from bench.train.models import MODELS, Sizes, tiny
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable

LARGE = "llama3-8b"  # one GPU has not the memory to train it
SIZES = {"llama3": MODELS["llama-1b"], "qwen3": MODELS["qwen3-1.7b"], LARGE: MODELS["llama-8b"]}
MODES, DTYPES = ("eager", "compiled"), ("float32", "bfloat16")
CONVERTER = ["--experimental.custom_import", "tilegym_rmsnorm.integrations.torchtitan_converter"]
WAYS = {"original": [], "converter": [*CONVERTER, "--model.converters", "tilegym_rmsnorm"]}
STEPS, TINY_STEPS = 16, 6
NEAR = 1e-3  # of both first losses, which differ by rounding alone
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PLAIN = torch.nn.RMSNorm.__mro__
PAGE = ROOT / "docs" / "torchtitan.md"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.torchtitan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = tuple(name for name in SIZES if name != LARGE)
    known = f"some of {', '.join(SIZES)}; default: all but {LARGE}"
    add("--model", type=options.some_of(SIZES), default=usual, metavar="NAME,...", help=known)
    known = f"some of {', '.join(DTYPES)}; default: all, with --fsdp and --tp float32"
    add("--dtype", type=options.some_of(DTYPES), metavar="NAME,...", help=known)
    known = f"some of {', '.join(MODES)}; default: all"
    add("--mode", type=options.some_of(MODES), default=MODES, metavar="NAME,...", help=known)
    for name, what in (("--fsdp", "FSDP2"), ("--tp", "tensor and sequence parallelism")):
        add(name, type=options.positive, default=1, metavar="N", help=f"{what} over N processes of torchrun")
    add("--one-rank", action="store_true", help="rank 0 of --fsdp x --tp alone, in one process")
    add("--seconds", type=options.positive, default=15, help="at most, of the turns of a case; default: 15")
    add("--tiny", action="store_true", help="models of the same form that train in seconds")
    where = "default: bench/results/GPU/DATE-torchtitan.json, with --fsdp, --tp and --one-rank in its name"
    add("--out", type=options.path, metavar="FILE.json", help=where)
    return parser


def main(argv: list[str] | None = None) -> int:
    """0 if every case trained, and its losses begin alike; 1 otherwise."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    release = package_version("torchtitan")
    if not (release or "").startswith("0.2."):
        parser.error(f"expected torchtitan 0.2, which has model converters, got {release}")
    is_tiny = arguments.tiny or not torch.cuda.is_available()
    is_spread = arguments.fsdp * arguments.tp > 1
    if LARGE in arguments.model and not (is_spread or is_tiny):
        parser.error(f"--model: {LARGE} needs --fsdp or --tp, one GPU has not the memory to train it")
    try:
        meshes = join(arguments)
    except ValueError as error:
        parser.error(str(error))
    choose_tables()
    device = this_device()
    origin = describe_run()
    origin["versions"]["torchtitan"] = release
    path = arguments.out or RESULTS / gpu_slug(origin["gpu"]) / f"{origin['date'][:10]}{ending(arguments)}"
    is_first = meshes is None or dist.get_rank() == 0
    # Other processes would meet the folder that this one makes and removes, to try it.
    if is_first and (reason := why_not_writable(path.parent)):
        parser.error(f"--out: no results can be kept there: {reason}")

    def tell(line: str) -> None:
        if is_first:
            print(line, flush=True)

    tell(one_line(origin))
    if device.type == "cpu":
        stand_in_for_a_gpu()
    if arguments.one_rank:
        one_rank.fill_outputs(device)
    sizes = {name: tiny(SIZES[name]) if is_tiny else SIZES[name] for name in arguments.model}
    for name in sizes:
        register(name, sizes[name])
    result: Result = {**origin, "cases": []}
    steps = TINY_STEPS if is_tiny else STEPS
    of_all = {"fsdp": arguments.fsdp, "tp": arguments.tp, "one_rank": arguments.one_rank, "sm_margin": None}
    of_all |= {"is_tiny": is_tiny, "steps": steps, "smoothed": 1}
    of_all |= {"note": CPU_NOTE if device.type == "cpu" else None}
    dtypes = arguments.dtype or (DTYPES[:1] if is_spread else DTYPES)
    for dtype, name, mode in itertools.product(dtypes, sizes, arguments.mode):
        plan = measure.Plan(sizes[name], mode == "compiled", steps, device, meshes, False, arguments.seconds)
        case = {"model": f"{name}, {dtype}", "dtype": dtype, "compiled": plan.compiled, **of_all}
        case |= {"sizes": dataclasses.asdict(plan.sizes), "norms_in_model": plan.sizes.norms}
        case |= {"flops_per_token": plan.sizes.flops_per_token}
        given = [*of_a_job(plan, arguments), "--model.name", f"bench-{name}", "--training.dtype", dtype]
        result["cases"].append(case | {"trained": train(given, plan, tell)})
        if is_first:
            write_json(result, path, "cases")  # after each: a run may be cut off
        if meshes is not None:
            for each in result["cases"][-1]["trained"]:
                each["same_bits"] = same_bits([*given, *WAYS[each["norm"]]], plan)
                tell(f"bits: {each['norm']}")
            if is_first:
                write_json(result, path, "cases")
        tell(f"\n{training.section({**origin, **result['cases'][-1]})}\n")
    if dist.is_initialized():
        if meshes is not None:
            dist.barrier()  # no rank ends while another's threads still talk to it
        dist.destroy_process_group()
    tell(f"{page_section(result)}\n\nwritten: {path}")
    return int(any(training.failures(case) for case in result["cases"]))


def join(arguments: argparse.Namespace) -> parallel.Meshes | None:
    """Join torchrun's processes. torchtitan makes the group of one process and that of one rank by itself.

    Raises ValueError where there is another number of processes.
    """
    ranks = arguments.fsdp * arguments.tp
    if not arguments.one_rank:
        meshes = parallel.start(arguments.fsdp, arguments.tp)
        os.environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if meshes else ALONE)  # same_bits needs it
        return meshes
    one_rank.check(ranks)
    parallel.compile_anew()
    os.environ.update(ALONE | {"WORLD_SIZE": str(ranks), "NGPU": str(ranks)})
    return None


def ending(arguments: argparse.Namespace) -> str:
    """Return what follows the date in a result's name."""
    return "-".join(["", "torchtitan", *training.degrees(vars(arguments))]) + ".json"


def of_a_job(plan: measure.Plan, arguments: argparse.Namespace) -> list[str]:
    """Return torchtitan's arguments of all models."""
    given = {"model.flavor": "bench", "debug.seed": measure.SEED}
    given |= {"training.local_batch_size": plan.sizes.batch, "training.seq_len": plan.sizes.length}
    given |= {"parallelism.data_parallel_shard_degree": arguments.fsdp}
    given |= {"parallelism.tensor_parallel_degree": arguments.tp}
    given |= {"activation_checkpoint.mode": "none", "metrics.log_freq": 1000000}
    given |= {"comm.trace_buf_size": 0}
    given |= {"comm.mode": "fake_backend"} if arguments.one_rank else {}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, "--compile.enable"] if plan.compiled else words


def stand_in_for_a_gpu() -> None:
    """Let torchtitan train on a CPU: torch.cpu has neither the name of a device nor figures of its memory, and gloo has
    no sums that it multiplies."""
    torch._utils._get_available_device_type = lambda: "cpu"  # asked once, while torchtitan is imported
    from torchtitan.components import metrics

    divide = FSDPModule.set_gradient_divide_factor

    def divide_apart(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_apart
    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    given = {"device_name": "CPU", "get_peak_stats": lambda: stats, "reset_peak_stats": lambda: None}
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(**given)


def register(name: str, sizes: Sizes) -> None:
    """Give torchtitan a model of these sizes with the text of bench.train: "bench-" and its own name. Its flavors are
    "bench", and "bits" of a few layers."""
    from torchtitan.models import llama3, qwen3
    from torchtitan.protocols.train_spec import register_train_spec

    given: dict[str, Any] = {"dim": sizes.width, "n_layers": sizes.layers, "n_heads": sizes.heads}
    given |= {"n_kv_heads": sizes.kv_heads, "vocab_size": sizes.vocabulary, "norm_eps": sizes.eps}
    if name == "qwen3":
        given |= {"head_dim": sizes.head, "hidden_dim": sizes.inner_width, "enable_weight_tying": True}
    else:  # of 8 / 3 of the width, rounded up
        given |= {"ffn_dim_multiplier": sizes.inner_width / (sizes.width * 8 / 3)}
        given |= {"multiple_of": sizes.inner_width}
    make = qwen3.Qwen3ModelArgs if name == "qwen3" else llama3.TransformerModelArgs
    spec = (qwen3 if name == "qwen3" else llama3).get_train_spec()
    spec.model_args = {"bench": make(**given), "bits": make(**given | {"n_layers": measure.SAME_LAYERS})}
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, batches
    register_train_spec(f"bench-{name}", spec)


def batches(*, job_config: Any, dp_rank: int, **_: Any) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield batches of this rank: the ranks of one tensor-parallel group have the same."""
    given = job_config.training
    corpus, _validation = text.load_corpus()
    seed = measure.SEED + 1000 * dp_rank
    for tokens in text.batches(corpus, given.local_batch_size, given.seq_len, seed):
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

    def keep_loss(self, **given: Any) -> Tensor:
        """Compute as torchtitan does, which divides by the tokens of all ranks. Keep the mean of this rank's tokens."""
        loss = self.compute(**given)
        found = measure.local(loss.detach())
        self.loss = found * (given["global_valid_tokens"] / given["labels"].numel())
        return loss

    def restart(self) -> None:
        """Do nothing: who compares two runs makes a Trainer for each."""

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield where a step takes its batch from. The text goes on, whatever the seed."""
        return self.source

    def step(self, source: Any) -> Tensor:
        """Take a step as Trainer.train does."""
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(source)
        return self.loss

    def profiled_steps(self) -> None:
        for _ in range(measure.PROFILED_STEPS):
            self.step(next(self.source))

    def patched(self) -> int:
        """Count the norms to which patch_model gave a class of their own, from which FSDP2 may derive another."""
        norms = [each for each in self.model.modules() if isinstance(each, torch.nn.RMSNorm)]
        return sum(
            any(kind not in PLAIN and not issubclass(kind, FSDPModule) for kind in type(each).__mro__)
            for each in norms
        )


@contextlib.contextmanager
def room() -> Iterator[dict[str, Trainee]]:
    """Yield a place for trainees. Close them at the end, and forget what they compiled."""
    trainees: dict[str, Trainee] = {}
    try:
        yield trainees
    finally:
        for each in trainees.values():
            each.trainer.close()
        trainees.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def train(given: list[str], plan: measure.Plan, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return `trained` of a case: of one that fails the error in the place of figures."""
    with room() as trainees:
        try:
            return list(records(given, plan, trainees, tell))
        except Exception as error:
            if plan.meshes is not None:  # the other ranks would wait for this one
                raise
            return [{"norm": "all", "error": describe(error)}]


def records(
    given: list[str], plan: measure.Plan, trainees: dict[str, Trainee], tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
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
    seconds = measure.take_turns(trainees, plan, tell)
    for name, each in trainees.items():
        each.trainer.optimizers.zero_grad()  # a step frees the gradients of the one before: not of its own memory
        found[name] |= measure.peak_memory(each)
        if plan.is_cuda:
            taken = measure.together(each.profiled_steps, plan)
            found[name] |= kernels.by_kind(taken, kernels.our_names(), measure.PROFILED_STEPS)
        yield found[name] | {"step_s": [round(each, 6) for each in seconds[name]]}


def same_bits(given: list[str], plan: measure.Plan) -> bool:
    """Compare two deterministic runs of a few layers bit by bit, on all ranks."""
    runs = []
    for _ in range(2):
        with room() as trainees:
            trainees["bits"] = each = Trainee(
                [*given, "--model.flavor", "bits", "--debug.deterministic"], plan
            )
            runs.append(measure.bits(each))
    torch.backends.cudnn.deterministic = False  # torchtitan has set it, and later cases are timed
    return measure.on_all_ranks(all(map(torch.equal, *runs)), plan)


def page_section(result: Result) -> str:
    """The result as Markdown."""
    cases = [{**result, **case} for case in result["cases"]]
    failed = [f"{training.title(case)}: {line}." for case in cases for line in training.failures(case)]
    far = [
        f"{training.title(case)}: {max(distances.values()):.4f}"
        for case in cases
        if (distances := training.distances(case)) and not training.failures(case)
    ]
    is_spread = cases[0]["fsdp"] * cases[0]["tp"] > 1
    parts = [" ".join(training.notes(cases[0]))] if is_spread and training.notes(cases[0]) else []
    parts += [training.table(cases)]
    if far:
        steps = cases[0]["steps"]
        parts += [f"Losses of the first {steps} steps are at most this far apart: {'; '.join(far)}."]
    parts += [*failed, training.measured_with(cases)]
    for case in cases if is_spread else []:
        parts += folded(training.title(case), [training.section(case)])
    return "\n\n".join(parts)


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    """Put the newest kept result of each GPU and kind into the page: one process, several, one rank; how many."""
    names = {path.name[len("2026-12-01") :] for path, _ in kept_in(results, "*/*-torchtitan*.json")}
    kinds = sorted(names, key=lambda name: ("one-rank" in name, len(name), name))
    kept = [each for name in kinds for each in readme.newest_by_gpu(results, name)]
    readme.refresh(page, "torchtitan", "\n\n".join(map(page_section, kept)))
    return len(kept)


if __name__ == "__main__":
    status = main()
    if dist.is_torchelastic_launched():
        parallel.leave(status)
    sys.exit(status)

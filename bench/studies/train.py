# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Trains a small Llama on real text with each backend's RMSNorm and compares the loss curves.

    python -m bench.studies.train [--backend cutile,baseline] [--steps 300] [--out DIR]

The model is transformers' LlamaForCausalLM, about 100M parameters, random weights, byte vocabulary. `baseline` is the
model as it is; `F.rms_norm` has torch.nn.RMSNorm and every other name this package's RMSNorm(casting="llama") in the
place of each LlamaRMSNorm, with its weight and eps. All runs start from the same seed and see the same batches.

Precision: parameters and activations are bfloat16, and AdamW updates float32 copies of the parameters, as FSDP2's
mixed precision and Megatron do. So bfloat16 x and bfloat16 weight reach the norm, and norm weights do train (an update
of 6e-4 is lost when it is added to a bfloat16 1.0). Under autocast with float32 parameters, x would be float32.

Do the curves agree? See report/curves.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require()

import argparse
import gc
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from bench import require
from bench.measure.provenance import RESULTS, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import run_in_interpreters
from bench.report import curves
from bench.report.tables import CPU_NOTE, write_json
from tilegym_rmsnorm import RMSNorm
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable

NAMES = ("baseline", "F.rms_norm", "cutile", "triton", "torch")
SEED, OTHER_SEED, VALIDATION_SEED = 0, 1, 2
VOCABULARY = 256
VALIDATION_EVERY = 20  # of the files, the first of each 20 is kept from training
THIRD_PARTY = {"site-packages", "dist-packages"}
VALIDATION_BATCHES = 16


@dataclass(frozen=True)
class Setup:
    """Model and its training. `skipped` steps at the start do not count for tokens/s: kernels compile there. The curves
    of at least `smoothed` others are compared."""

    layers: int = 8
    width: int = 1024
    inner_width: int = 2816
    heads: int = 16
    batch: int = 16
    length: int = 1024
    steps: int = 300
    skipped: int = 20
    smoothed: int = 25
    learning_rate: float = 6e-4

    @property
    def least(self) -> int:
        return self.skipped + self.smoothed


CPU_SETUP = Setup(2, 64, 128, 4, batch=2, length=24, steps=12, skipped=2, smoothed=4, learning_rate=3e-3)


class MasterAdamW:
    """AdamW on float32 copies of half-precision parameters, which are rounded from them after each step."""

    def __init__(self, parameters: list[nn.Parameter], setup: Setup):
        self.parameters = parameters
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        decayed = [master for master in self.masters if master.ndim > 1]
        others = [master for master in self.masters if master.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        is_fused = parameters[0].is_cuda
        self.adamw = torch.optim.AdamW(groups, setup.learning_rate, betas=(0.9, 0.95), fused=is_fused)
        warmup = max(1, setup.steps // 10)

        def factor(step: int) -> float:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / setup.steps)
            return min((step + 1) / warmup, cosine)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, factor)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def build_model(name: str, setup: Setup, seed: int, device: torch.device) -> nn.Module:
    """The model with the norms that `name` stands for; the same seed gives all names the same parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setup.width,
        intermediate_size=setup.inner_width,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        max_position_embeddings=setup.length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(device)
    for parameter in model.parameters():  # not model.to(bfloat16), which rounds the frequencies of RoPE too
        parameter.data = parameter.data.bfloat16()
    if name != "baseline":
        replace_norms(model, name)
    return model.train()


def replace_norms(model: nn.Module, name: str) -> None:
    """Puts the norm that `name` stands for in the place of every LlamaRMSNorm, with its weight and eps."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    found = [(path, module) for path, module in model.named_modules() if isinstance(module, LlamaRMSNorm)]
    for path, old in found:
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        if name == "F.rms_norm":
            new = nn.RMSNorm(old.weight.shape, old.variance_epsilon, **like)
        else:
            new = RMSNorm(old.weight.shape, old.variance_epsilon, casting="llama", backend=name, **like)
        new.load_state_dict(old.state_dict())
        model.set_submodule(path, new)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(name: str, seed: int, setup: Setup, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One run: its losses, tokens/s, peak memory, validation loss, and the dtypes that reached the norm."""
    training, validation = texts
    device = training.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build_model(name, setup, seed, device)
    seen: set[str] = set()
    hook = model.model.norm.register_forward_pre_hook(
        lambda norm, inputs: seen.add(f"x {inputs[0].dtype}, weight {norm.weight.dtype}")
    )
    optimizer = MasterAdamW(list(model.parameters()), setup)
    source = batches(training, setup.batch, setup.length, seed)
    losses = []
    start = 0.0
    for step in trange(setup.steps, desc=f"{name}, seed {seed}", dynamic_ncols=True):
        if step == setup.skipped:
            hook.remove()
            start = _now(device)
        loss = loss_of(model, next(source))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # read at the end: asking for it now would make the host wait
    seconds = _now(device) - start
    peak = torch.cuda.max_memory_allocated() if is_cuda else None
    with torch.no_grad():
        held_out = batches(validation, setup.batch, setup.length, VALIDATION_SEED)
        validation_loss = sum(loss_of(model, next(held_out)).item() for _ in range(VALIDATION_BATCHES))
    return {
        "name": name,
        "seed": seed,
        "losses": torch.stack(losses).tolist(),
        "validation_loss": validation_loss / VALIDATION_BATCHES,
        "tokens_per_s": round((setup.steps - setup.skipped) * setup.batch * setup.length / seconds, 1),
        "peak_bytes": peak,
        "norm_inputs": sorted(seen),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def steps_of(setup: Setup) -> Callable[[str], int]:
    """A parser of --steps."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < setup.least:
            expected = f"expected a whole number of at least {setup.least}"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return int(text)

    return parse


def make_parser(setup: Setup) -> argparse.ArgumentParser:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.studies.train", description=about)
    add, names = parser.add_argument, ", ".join(NAMES)
    add("--backend", type=options.some_of(NAMES), default=("cutile", "baseline"), help=names)
    usual, small = (f"{each.steps}, at least {each.least}" for each in (Setup(), CPU_SETUP))
    add("--steps", type=steps_of(setup), help=f"default: {usual}; without a GPU {small}")
    add("--out", type=options.path, help="folder of the results; default: bench/results/GPU/")
    return parser


def load_corpus() -> tuple[Tensor, Tensor]:
    """The training and the validation text, uint8: the Python standard library's own sources as bytes, which every
    machine has, in the order of their paths, the same on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not THIRD_PARTY & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    validation = b"".join(texts[::VALIDATION_EVERY])
    training = b"".join(text for i, text in enumerate(texts) if i % VALIDATION_EVERY)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, validation))


def batches(text: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless (batch, length + 1) int64 pieces of the text from random places, on the text's device."""
    generator = torch.Generator(text.device).manual_seed(seed)
    window = torch.arange(length + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator, device=text.device)
        yield text[starts + window].long()


def main(argv: list[str] | None = None) -> int:
    """0 if every curve agrees with the baseline's; 1 otherwise."""
    has_gpu = torch.cuda.is_available()
    setup = Setup() if has_gpu else CPU_SETUP
    parser = make_parser(setup)
    arguments = parser.parse_args(argv)
    require("transformers")
    import transformers

    if not has_gpu:
        run_in_interpreters()
        print(CPU_NOTE)
    if arguments.steps is not None:
        setup = replace(setup, steps=arguments.steps)
    choose_tables()
    origin = describe_run()
    folder = RESULTS / gpu_slug(origin["gpu"]) if arguments.out is None else arguments.out
    if reason := why_not_writable(folder):
        parser.error(f"--out: no results can be kept there: {reason}")
    texts = tuple(text.to("cuda" if has_gpu else "cpu") for text in load_corpus())
    origin["versions"]["transformers"] = transformers.__version__
    print(one_line(origin))

    others = [(name, SEED) for name in arguments.backend if name != "baseline"]
    runs = [
        train(name, seed, setup, texts)
        for name, seed in (("baseline", SEED), ("baseline", OTHER_SEED), *others)
    ]
    result = {
        **origin,
        "note": None if has_gpu else CPU_NOTE,
        "setup": asdict(setup),
        "corpus_bytes": [len(text) for text in texts],
        "runs": runs,
    }
    result |= curves.compare(runs, setup.smoothed)
    stem = folder / "train"
    write_json(result, stem.with_suffix(".json"), "runs")
    curves.plot(result, stem.with_suffix(".png"))
    print(f"\n{curves.loss_table(result)}\n\n{curves.summary_table(result)}\n\n{curves.verdict(result)}")
    print(f"\nwritten: {stem}.json and .png")
    return 0 if all(result["agrees"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Trains a model of Hugging Face's as it is, then again after `patch_model`: the same losses, faster on a GPU.

    python examples/finetune_hf.py                  on a GPU in bfloat16, without one on the CPU in float32
    python examples/finetune_hf.py --steps 300 --hidden 1024 --layers 12 --length 1024 --plot finetune.png

It needs transformers (pip install transformers). A CPU takes minutes. The text is the source of Python's standard
library, byte by byte. The model is a small Qwen3 with random weights, the same in both runs. It prints what was
patched, the losses of both runs and, on a GPU, their tokens per second; `--plot` draws them, by matplotlib. On a CPU
the patched norms are plain PyTorch, and a speed would be that of idle or busy cores.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers

from tilegym_rmsnorm import patch_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
Run = tuple[list[float], float]  # losses, tokens per second


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    hidden, heads = options.hidden, {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": hidden // 8}
    config = transformers.Qwen3Config(vocab_size=256, num_hidden_layers=options.layers, **sizes, **heads)
    return transformers.Qwen3ForCausalLM(config).to(DEVICE, DTYPE)


def train(model: torch.nn.Module, data: torch.Tensor, options: argparse.Namespace) -> Run:
    """The loss before each step, and tokens per second by the median step. All models get the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(options.steps):
        starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator).tolist()
        tokens = torch.stack([data[start : start + options.length] for start in starts]).to(DEVICE).long()
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step
        seconds.append(time.perf_counter() - begin)
    return losses, options.batch * options.length / sorted(seconds)[len(seconds) // 2]


def draw(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for style, (name, (losses, speed)) in zip(("-", "--"), runs.items(), strict=True):
        axes.plot(losses, style, label=f"{name}, {speed:,.0f} tokens/s" if DEVICE == "cuda" else name)
    axes.set(xlabel="step", ylabel=f"loss, {DTYPE}")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("steps", 60), ("hidden", 64), ("layers", 2), ("length", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(Path(argparse.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model, runs = make_model(options), {"as it is": train(make_model(options), data, options)}
    print(patch_model(model, patch_layers=True))
    runs["patched"] = train(model, data, options)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(where, DTYPE, f"torch {torch.__version__}, transformers {transformers.__version__}", sep=", ")
    print("step        as it is      patched")
    for step in sorted({*range(0, options.steps, 10), options.steps - 1}):
        print(f"{step:4}     " + "   ".join(f"{losses[step]:10.4f}" for losses, _ in runs.values()))
    if DEVICE == "cuda":
        print("tokens/s " + "   ".join(f"{speed:10,.0f}" for _, speed in runs.values()))
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()

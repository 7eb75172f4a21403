# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Trains a small Llama of Hugging Face's twice: with its own norm, then with this package's in the same place.

    python examples/train_llama.py                  on a GPU in bfloat16, without one on the CPU in float32
    python examples/train_llama.py --steps 200 --hidden 512 --layers 8

It needs transformers (pip install transformers). A CPU takes minutes. The text is this file, byte by byte. It prints
the loss of both runs side by side. They begin alike, and stay close: `casting="llama"` rounds where Hugging Face's code
does.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tilegym_rmsnorm import RMSNorm

TEXT = Path(__file__).read_bytes()
LENGTH, BATCH = 64, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def make_model(norm: type, hidden: int, layers: int) -> torch.nn.Module:
    """A Llama whose norms are of the class `norm`, with the same random weights each time."""
    modeling_llama.LlamaRMSNorm = norm  # before the model is built: it looks this name up
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).to(DEVICE, DTYPE)


def losses(model: torch.nn.Module, steps: int) -> Iterator[float]:
    """The loss before each step, and after the last. The batches are the same for every model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    data = torch.tensor(list(TEXT))
    for step in range(steps + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([data[start : start + LENGTH] for start in starts]).to(DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        yield loss.item()
        if step < steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()

    theirs = make_model(modeling_llama.LlamaRMSNorm, options.hidden, options.layers)
    ours = make_model(RMSNorm.configured(casting="llama"), options.hidden, options.layers)
    norms = sum(isinstance(part, RMSNorm) for part in ours.modules())
    print(f"{DEVICE}, {DTYPE}; norms that this package runs: {norms}")

    print("step   LlamaRMSNorm   tilegym_rmsnorm")
    both = zip(losses(theirs, options.steps), losses(ours, options.steps), strict=True)
    for step, (their_loss, our_loss) in enumerate(both):
        if step % 10 == 0 or step == options.steps:
            print(f"{step:4}   {their_loss:12.4f}   {our_loss:15.4f}")


if __name__ == "__main__":
    main()

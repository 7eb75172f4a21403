# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in a transformer block of your own: before attention, on queries and keys, and, with an add, before the MLP.

    python examples/own_model.py             the norms run on the backend that suits the machine
    python examples/own_model.py --compile   the same under torch.compile, as one graph

It learns to count in steps of three. It prints the number of its norms, and the loss at the start and at the end.

With --compile the norms have backend="torch", plain PyTorch, which torch.compile compiles with its neighbours, and
fullgraph=True raises an error if a graph breaks. On a CPU it takes a C++ compiler, and a minute.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm

TOKENS, WIDTH, HEADS, LENGTH = 32, 64, 4, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(WIDTH, eps=1e-6, backend=backend)
        self.query_norm = RMSNorm(WIDTH // HEADS, eps=1e-6, backend=backend)
        self.key_norm = RMSNorm(WIDTH // HEADS, eps=1e-6, backend=backend)
        self.mlp_norm = RMSNorm(WIDTH, eps=1e-6, backend=backend)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # views, which the norms take as they are
        mixed = F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v, is_causal=True)
        branch = self.out(mixed.transpose(1, 2).reshape(x.shape))
        y, x = self.mlp_norm(branch, x)  # the norm of branch + x, and that sum
        return x + self.mlp(y)


def make_model(backend: str | None) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(backend) for _ in range(2)]
    ends = RMSNorm(WIDTH, eps=1e-6, backend=backend), nn.Linear(WIDTH, TOKENS)
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, *ends).to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    compiler = "torch.compile's own backend, such as aot_eager; inductor unless named"
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="COMPILER", help=compiler)
    options = parser.parse_args()

    model = make_model("torch" if options.compile else None)
    print("norms:", sum(isinstance(part, RMSNorm) for part in model.modules()))
    run = torch.compile(model, backend=options.compile, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        first = torch.randint(TOKENS, (32, 1), device=DEVICE)
        tokens = (first + 3 * torch.arange(LENGTH + 1, device=DEVICE)) % TOKENS
        loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

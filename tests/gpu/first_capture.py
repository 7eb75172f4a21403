# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A process that captures forward and backward after exactly one step, as torchtitan's trainer does: its second step is
captured, then replayed, and all later ones are replayed. In the first one everything has to be compiled and prepared.

    python first_capture.py KIND BACKEND

The steps are `CUDAGraphWrapper` of torchtitan 0.3.0, in distributed/cudagraph.py.
"""

import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm, qk_norm_rope, rms_norm, set_backend

KINDS = "eager", "recomputed", "compiled"
HEADS, HEAD_DIM, TOKENS, STEPS = 16, 128, 256, 5
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """A norm, the norms of q and k with their rotation, and a norm behind a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm, self.k_norm = RMSNorm(WIDTH), RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.of_sum = RMSNorm(WIDTH)
        self.bfloat16()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        q, k = qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            eps=1e-6,
            position_ids=positions,
            rope_rounding="norm",
        )
        branch = (q * k.sigmoid() + v).flatten(-2)
        y, x = rms_norm(branch, WIDTH, self.of_sum.weight, 1e-6, residual=x)
        return x + self.up(y)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.norm, self.kind = (
            nn.ModuleList([Block(), Block()]),
            RMSNorm(WIDTH, dtype=torch.bfloat16),
            kind,
        )
        angles = torch.outer(torch.arange(TOKENS), torch.logspace(0, -4, HEAD_DIM // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        if kind == "compiled":
            for block in self.blocks:
                block.compile(fullgraph=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for block in self.blocks:
            given = x, self.cos, self.sin, positions
            if self.kind == "recomputed":
                x = torch.utils.checkpoint.checkpoint(
                    block, *given, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(*given)
        return self.norm(x).float().pow(4).mean()  # of squares the mean is 1


def train(model: Model, batches: list[Tensor], call: Callable[..., Tensor]) -> list[tuple[Tensor, ...]]:
    """Loss and gradients of a step for each batch, made by `call`, which gets what is to run and its inputs."""

    def forward_backward(x: Tensor, positions: Tensor) -> Tensor:
        loss = model(x, positions)
        loss.backward()
        return loss.detach()

    results = []
    for x in batches:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        positions = torch.arange(TOKENS, device=x.device).repeat(len(x), 1)
        loss = call(forward_backward, x, positions)
        grads = [parameter.grad for parameter in model.parameters()]
        results.append(tuple(each.clone() for each in (loss, *grads)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.5)
    return results


class Captured:
    """The first call runs, on a stream of its own; the second captures and replays; the others replay."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.calls, self.graph = 0, torch.cuda.CUDAGraph()
        self.unused = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True), self.capture(self.unused):
            pass

    def capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        return torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")

    def __call__(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                output = function(*given)
            current.wait_stream(self.stream)
            return output
        if self.calls == 2:
            self.given = given
            with self.capture(self.graph):
                self.output = function(*given)
        for static, new in zip(self.given, given, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.output


def main(kind: str, backend: str) -> None:
    set_backend(backend)
    torch.manual_seed(0)
    # no copy: it would hold the compiled blocks of the first
    model, plain = (Model(kind).cuda() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    batches = [torch.randn(2, TOKENS, WIDTH, device="cuda").bfloat16() for _ in range(STEPS)]
    # the second batch is where replays find those behind it
    captured = train(model, [batch.clone() for batch in batches], Captured())
    for step, (got, expected) in enumerate(
        zip(captured, train(plain, batches, lambda f, *g: f(*g)), strict=True)
    ):
        for mine, its in zip(got, expected, strict=True):
            apart = (mine.float() - its.float()).norm() / its.float().norm()
            assert apart < 1e-2, f"step {step}: a tensor of shape {tuple(its.shape)} is {apart:.1e} apart"
    losses = [float(loss) for loss, *_ in captured]
    assert len(set(losses)) == STEPS, losses  # replays see new inputs and weights


if __name__ == "__main__":
    main(*sys.argv[1:])

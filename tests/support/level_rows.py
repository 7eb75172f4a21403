# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Rows in public calls under levels of reproducibility: alone and in batches, wherever they lie in memory, in compiled,
captured and exported calls."""

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from helpers import BF16, DEVICE, FP32
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tilegym_rmsnorm import reproducible, rms_norm, rms_norm_forward
from tilegym_rmsnorm.reproducibility import LevelName

EPS, HEADS = 1e-6, 6
INTEGERS = {2: torch.int16, 4: torch.int32}
FORMS = (
    *("plain", "float32 weight", "no weight", "llama", "residual", "bias", "broadcast dy"),
    *("heads", "one weight for heads"),
)


class Case(NamedTuple):
    n: int
    dtype: torch.dtype = BF16
    form: str = "plain"

    def __str__(self) -> str:
        return f"{self.n}-{str(self.dtype)[6:]}-{self.form.replace(' ', '-')}"


class Placement(NamedTuple):
    """How tensors lie in memory, and which do: "all", or those of a name. The others are packed."""

    memory: str
    whose: str


PACKED = Placement("packed", "all")
MEMORIES = ("gaps", "odd gaps", "unaligned", "transposed")
_NAMES = ("all", "x", "dy", "residual", "vectors")
PLACEMENTS = [Placement(*each) for each in itertools.product(MEMORIES, _NAMES)]


def placed(tensor: Tensor, memory: str) -> Tensor:
    """Copy a tensor to memory of this kind. What lies between its elements is not initialized."""
    if memory == "packed":
        return tensor
    if memory == "unaligned":
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if tensor.ndim == 1:
        return tensor.new_empty(2 * len(tensor))[::2].copy_(tensor)
    if memory == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    *lead, n = tensor.shape
    return tensor.new_empty(*lead, n + (16 if memory == "gaps" else 5))[..., :n].copy_(tensor)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


class Pool:
    """Rows, what stands beside them, and the results that each has alone, packed, under a level. With heads a row is
    all heads of a token."""

    def __init__(self, case: Case, backend: str, count: int, level: LevelName = "batch") -> None:
        n, dtype, form = case
        self.case, self.backend, self.level = case, backend, level
        size = (HEADS, n) if "heads" in form else (n,)
        self.x, self.dy, self.residual = (
            torch.randn(count, *size, device=DEVICE).to(dtype) for _ in range(3)
        )
        vector = size if form == "heads" else (n,)
        self.weight = torch.randn(vector, device=DEVICE).to(FP32 if form == "float32 weight" else dtype)
        self.bias = torch.randn(n, device=DEVICE).to(dtype)
        if form == "broadcast dy":
            self.dy = self.dy[:1].expand_as(self.dy)
        with reproducible(level):
            alone = [self.run(torch.tensor([i], device=DEVICE)) for i in range(count)]
        self.expected = {name: torch.cat([each[name] for each in alone]) for name in alone[0]}
        assert all(bool(each.isfinite().all()) for each in self.expected.values()), "all of it is written"

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Any:
        return rms_norm(x, self.case.n, weight, residual=residual, **self._options(bias))

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        casting = "llama" if self.case.form == "llama" else "once"
        return {"eps": EPS, "bias": bias, "casting": casting, "backend": self.backend}

    def run(
        self,
        index: Tensor,
        placement: Placement = PACKED,
        norm: Callable[..., Any] | None = None,
        is_frozen: bool = False,
    ) -> dict[str, Tensor]:
        """Run the rows at these indices as one batch. The first word of a name is the result's, the others say how it
        came about. norm: what is called in the place of `Pool.norm`."""
        form, call = self.case.form, norm or self.norm

        def given(name: str, tensor: Tensor, needs_grad: bool = True) -> Tensor:
            memory = placement.memory if placement.whose in ("all", name) else "packed"
            return placed(tensor, memory).detach().requires_grad_(needs_grad)

        rows, dys = [given("x", self.x[index])], [given("dy", self.dy[index], False)]
        if form == "broadcast dy" and placement != PACKED:
            dys = [self.dy[0].expand_as(rows[0])]
        if form == "residual":
            rows.append(given("residual", self.residual[index]))
            dys.append(given("dy", self.dy[index].flip(-1), False))
        weight = None if form == "no weight" else given("vectors", self.weight, not is_frozen)
        bias = given("vectors", self.bias) if form == "bias" else None
        tensors = rows[0], weight, bias, rows[1] if len(rows) == 2 else None

        names, gradients = (each[: len(rows)] for each in (("y", "residual_out"), ("dx", "d_residual")))
        outs = _as_tuple(call(*tensors))
        leaves = [*rows, *(each for each in tensors[1:3] if each is not None and each.requires_grad)]
        found = dict(zip(names, outs, strict=True))
        found |= zip(gradients, torch.autograd.grad(outs, leaves, dys)[: len(rows)], strict=True)
        with torch.no_grad():
            outs = _as_tuple(call(*tensors))
        found |= zip([f"{name} without autograd" for name in names], outs, strict=True)
        *outs, rstd = rms_norm_forward(*tensors[:2], residual=tensors[3], **self._options(bias))
        found |= zip([f"{name} of rms_norm_forward" for name in names], outs, strict=True)
        found["rstd"] = rstd.view(*rows[0].shape[:-1], 1)
        return {name: each.detach() for name, each in found.items()}

    def differing(self, index: Tensor, results: dict[str, Tensor]) -> list[str]:
        """Name results of the rows at these indices that have other bits than those rows have alone."""
        lines = []
        for name, each in results.items():
            differs = bits(each) != bits(self.expected[name.split()[0]])[index]
            if count := int(differs.flatten(1).any(1).sum()):
                lines.append(f"{count} of {len(index)} rows of {name}")
        return lines

    def index(self, m: int) -> Tensor:
        return torch.randint(len(self.x), (m,), device=DEVICE)


def _as_tuple(outs: Any) -> tuple[Tensor, ...]:
    return outs if isinstance(outs, tuple) else (outs,)


def differing(pool: Pool, counts: Iterable[int], placed_count: int) -> list[str]:
    """Run batches under the pool's level, each laid out in one of PLACEMENTS or packed, and one of `placed_count` rows
    in each of them. Name the results that have other bits than their rows alone."""
    drawn = random.Random(str(pool.case))
    batches = [(m, drawn.choice([PACKED, *PLACEMENTS])) for m in counts]
    lines = []
    with reproducible(pool.level):
        for m, placement in batches + [(placed_count, each) for each in (PACKED, *PLACEMENTS)]:
            index = pool.index(m)
            found = pool.differing(index, pool.run(index, placement))
            lines += [f"{line}, {placement.whose} {placement.memory}" for line in found]
    return lines


# Ways to call: each returns a function like `pool.run`, which is called under no level


def compiled(pool: Pool) -> Callable[[Tensor], dict[str, Tensor]]:
    counter = CompileCounterWithBackend("inductor")
    norm = torch.compile(pool.norm, backend=counter, fullgraph=True)

    def run(index: Tensor) -> dict[str, Tensor]:
        with reproducible(pool.level):
            results = pool.run(index, norm=norm)
        assert counter.graphs and all(map(_has_op, counter.graphs))
        return results

    return run


class _Exported(nn.Module):
    def __init__(self, norm: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *tensors: Tensor | None) -> Any:
        return self.norm(*tensors)


def exported(pool: Pool) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph runs under no level, and keeps its own."""

    def norm(*tensors: Tensor | None) -> Any:
        with reproducible(pool.level):
            program = torch.export.export(_Exported(pool.norm), tensors)
        assert _has_op(program)
        with reproducible("run"):
            return program.module()(*tensors)

    def run(index: Tensor) -> dict[str, Tensor]:
        with reproducible(pool.level):
            return pool.run(index, norm=norm)

    return run


def captured(pool: Pool) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph is captured with other rows than it is replayed with."""

    def run(index: Tensor) -> dict[str, Tensor]:
        static, stream, graph = torch.zeros_like(index), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with reproducible(pool.level):
            with torch.cuda.stream(stream):
                pool.run(static)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                results = pool.run(static)
        static.copy_(index)
        graph.replay()
        torch.cuda.synchronize()
        return {name: each.clone() for name, each in results.items()}

    return run


def _has_op(graph: Any) -> bool:
    return any("tilegym_rmsnorm.rms_norm_forward" in str(node.target) for node in graph.graph.nodes)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The tile kernels in the interpreter, with all that they take: `forward_tiles` and `backward_tiles` by the names of
their parameters, on rows and on heads."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from variants import Variant, VariantInputs, arranged, wanted_of

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.kernels.backward import backward_tiles
from tilegym_rmsnorm.backends.cutile.kernels.forward import forward_tiles

NO_WEIGHT, NO_PARTIALS = torch.empty(2, 64).unbind()
GUARD = 40  # elements on each side of an output


class Tile(NamedTuple):
    """Extents of a tile, and how it is loaded. heads: 0 for rows (M, N)."""

    rows: int = 2
    heads: int = 0
    pieces: int = 1
    tma: bool = False
    weight_load: str = "late"
    gathers: bool = False  # as for views whose rows begin elsewhere than packed ones: by no divisor

    def width(self, n: int) -> int:
        return 1 << (-(-n // self.pieces) - 1).bit_length()

    def count(self, size: tuple[int, ...]) -> int:
        """Count tiles of an array of this size."""
        if not self.heads:
            return -(-size[0] // self.rows)
        return size[0] * -(-size[1] // self.rows) * -(-size[2] // self.heads)

    def constants(self, variant: Variant) -> dict[str, Any]:
        width, n = self.width(variant.n), variant.n
        return {
            "ROWS": self.rows,
            "HEADS": self.heads,
            "WIDTH": width,
            "PIECES": self.pieces,
            "LATENCY": 2,
            "TMA": self.tma,
            "DIVISOR": 1 if self.gathers else math.gcd(n, 16),
            "EVEN": width * self.pieces == n,
            "HAS_WEIGHT": variant.weight != "none",
            "HAS_DW": variant.weight != "none",
            "PER_HEAD": variant.weight == "heads",
            "ROUND_XHAT": variant.casting == "llama",
            "WARPS": 4,
            "IN_ORDER": False,
            "EARLY_WEIGHT": self.weight_load == "early",
            "JOINT_WEIGHT": self.weight_load == "joint",
            "DEPENDENT": True,
        }


class Outputs(dict[str, Tensor]):
    """New arrays by their names, full of NaN and between others that are."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[str, Tensor] = {}

    def empty(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.buffers[name] = torch.full((math.prod(size) + 2 * GUARD,), math.nan, dtype=dtype)
        self[name] = self.buffers[name][GUARD:-GUARD].view(size)
        return self[name]

    def check(self) -> None:
        """All of each is written, and nothing around it."""
        for name, buffer in self.buffers.items():
            assert not self[name].isnan().any(), f"some of {name} is not written"
            assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all(), (
                f"{name}: its end is passed"
            )


class Call(NamedTuple):
    """A launch that is not made yet: arguments and compile-time constants by name."""

    kernel: Callable[..., None]
    blocks: int
    named: dict[str, Any]

    def arguments(self, constants: bool) -> tuple[Any, ...]:
        """Return the constants, or the others, in the kernel's order."""
        names = inspect.signature(self.kernel).parameters
        return tuple(self.named[name] for name in names if name.isupper() is constants)

    def run(self, seed: int) -> None:
        """Blocks in a random order."""
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        arguments = self.arguments(False) + self.arguments(True)
        interpreter.launch(self.kernel, (self.blocks,), arguments, order=order, dependent=True)


def forward_call(variant: Variant, inputs: VariantInputs, tile: Tile, outputs: Outputs) -> Call:
    size, residual = variant.size, ()
    if inputs.residual is not None:
        residual_out = outputs.empty("residual_out", size, variant.normalized_dtype)
        residual = inputs.residual, residual_out, variant.alpha
    arguments = {
        "y": outputs.empty("y", size, variant.y_dtype),
        "rstd": outputs.empty("rstd", (math.prod(size[:-1]),), torch.float32),
        "x": inputs.x,
        "weight": NO_WEIGHT if inputs.weight is None else inputs.weight,
        "residual": residual,
        "bias": () if inputs.bias is None else (inputs.bias,),
        "inv_n": 1 / variant.n,
        "eps": variant.eps,
        "offset": variant.offset,
    }
    return Call(forward_tiles, tile.count(size), arguments | tile.constants(variant))


def backward_call(
    variant: Variant, inputs: VariantInputs, x: Tensor, tile: Tile, walks: int, outputs: Outputs
) -> Call:
    """x: the forward's x, or residual_out. walks: P; 1 writes dw itself. Partial rows are outputs named dw and db."""
    size, wanted, columns = variant.size, wanted_of(variant), math.prod(variant.vector_shape)
    d_residual, partial = (), {}
    if inputs.residual is not None and wanted.d_residual is not None:
        d_residual = outputs.empty("d_residual", size, wanted.d_residual), variant.alpha
    for name, dtype in (("dw", wanted.dw), ("db", wanted.db)):
        if dtype is not None:
            partial[name] = outputs.empty(name, (walks, columns), torch.float32 if walks > 1 else dtype)
    arguments = {
        "dx": outputs.empty("dx", size, wanted.dx),
        "dw_partial": partial.get("dw", NO_PARTIALS),
        "dy": inputs.dy,
        "x": x,
        "weight": NO_WEIGHT if inputs.weight is None else inputs.weight,
        "rstd": (x.double().square().mean(-1) + variant.eps).rsqrt().float().flatten(),
        "d_residual_out": () if inputs.d_residual_out is None else (inputs.d_residual_out,),
        "d_residual": d_residual,
        "db_partial": (partial["db"],) if "db" in partial else (),
        "inv_n": 1 / variant.n,
        "offset": variant.offset,
    }
    blocks = walks * (-(-size[2] // tile.heads) if variant.weight == "heads" else 1)
    return Call(backward_tiles, blocks, arguments | tile.constants(variant))


def run_forward(variant: Variant, inputs: VariantInputs, tile: Tile, seed: int = 0) -> dict[str, Tensor]:
    """y, rstd and, with a residual, residual_out."""
    outputs = Outputs()
    forward_call(variant, inputs, tile, outputs).run(seed)
    outputs.check()
    return dict(outputs)


def run_backward(
    variant: Variant, inputs: VariantInputs, x: Tensor, tile: Tile, walks: int, seed: int = 0
) -> dict[str, Tensor]:
    """dx, and what else there is of d_residual, dw and db, the last two summed by PyTorch."""
    outputs, wanted = Outputs(), wanted_of(variant)
    backward_call(variant, inputs, x, tile, walks, outputs).run(seed)
    outputs.check()
    found = dict(outputs)
    for name, dtype in (("dw", wanted.dw), ("db", wanted.db)):
        if name in found:
            found[name] = found[name].sum(0).to(dtype).view(variant.vector_shape)
    return found


def normalized(variant: Variant, inputs: VariantInputs) -> Tensor:
    """Return the backward's x: that of the forward, or residual_out, between other rows."""
    if inputs.residual is None:
        return inputs.x
    total = variant.alpha * inputs.x.float() + inputs.residual.float()
    return arranged(total.to(variant.normalized_dtype), "slice")

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""A problem: the numbers and names that decide which kernels serve a call."""

from __future__ import annotations

import math
from typing import NamedTuple

OPS = ("forward", "backward", "dx")  # "dx": a backward without dw, for a frozen weight or none
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
LAUNCHES_AT_ONCE = 8  # that teams of blocks are safe in, even where an SM holds one block (kernels/team.py)
# The forms that records serve: plain rows, or rows with the one feature of Form that has this name.
PLAIN_ROWS, RESIDUAL, D_RESIDUAL, BIAS = FORMS = ("plain", "residual", "d_residual", "bias")
SAME, FLOAT32 = WEIGHTS = ("same", "float32")  # of x's dtype, or none; float32 beside x of 2 bytes


class Target(NamedTuple):
    """The GPU and the toolkit with which a variant was measured."""

    gpu: str  # as the driver names it
    architecture: int
    cuda_tile: str
    tileiras: str

    def __str__(self) -> str:
        return f"{self.gpu} with cuda-tile {self.cuda_tile} and tileiras {self.tileiras}"


class Device(NamedTuple):
    """The numbers of a GPU. most_members: of how many blocks a team may be, for all must find room (kernels/team.py).
    target: finds the records that ship, by the model alone, and the user's, by all of it; None where none apply."""

    architecture: int
    sm_count: int
    most_members: int
    target: Target | None = None


class Policy(NamedTuple):
    """The user's limits on plans. teams: allow kernels whose blocks wait for each other. sm_margin: SMs that walks
    leave free, fewer than the device has. is_batch_invariant: neither M nor the GPU's SMs decide how a row is added.
    is_device_invariant: nor how many blocks share the rows (reproducibility.py)."""

    teams: bool = True
    sm_margin: int = 0
    is_batch_invariant: bool = False
    is_device_invariant: bool = False


class Form(NamedTuple):
    """Features of a call beyond rows of one dtype and a weight of N elements."""

    # The forward adds a residual; the backward adds d_residual_out, or writes d_residual.
    residual: bool = False
    # The forward adds a bias; the backward sums db.
    bias: bool = False
    # Where the arrays of rows are (B, T, H, N), each with its own strides: H of weights of heads, else how many heads a
    # tile may have (rules.heads_of_form). 0: they are (M, N).
    heads: int = 0
    # Weight and bias are (H, N).
    per_head: bool = False
    # Bytes of an element of the narrowest array of rows, where they differ; 0: they do not.
    narrowest: int = 0
    # Rows of (B, T, H, N) begin elsewhere than packed ones, where TMA cannot load them.
    is_scattered: bool = False
    # The backward writes d_residual, a second array of rows beside dx. (Then residual is True as well.)
    d_residual: bool = False

    def __str__(self) -> str:
        had = [
            name if value is True else f"{name}={value}" for name, value in self._asdict().items() if value
        ]
        return ", ".join(had) or PLAIN_ROWS


PLAIN = Form()


def form_named(name: str) -> Form:
    """Return the Form for a name in FORMS, with that feature alone. All but plain rows are named like a field."""
    if name == PLAIN_ROWS:
        return PLAIN
    return Form(**{name: True})._replace(residual=name in (RESIDUAL, D_RESIDUAL))


class Bucket(NamedTuple):
    """The problems that share a record of one N."""

    op: str  # of OPS
    n: int
    dtype: str  # of ITEMSIZE
    size: str  # of sizes.SIZES
    weight: str = SAME  # of WEIGHTS
    form: str = PLAIN_ROWS  # of FORMS

    @property
    def has_calls(self) -> bool:
        """Whether there are calls of its op and form: a forward writes no d_residual, and dx alone has no db beside."""
        return (self.op, self.form) not in (("forward", D_RESIDUAL), ("dx", BIAS))

    def problem(self, device: Device, policy: Policy | None = None) -> Problem:
        """Its problem on a device, with a weight, of calls that have its form and no more."""
        weight = FLOAT32 if self.weight == FLOAT32 else self.dtype
        asked = self.op, self.n, self.dtype, weight, self.size, device
        return Problem(*asked, policy=policy or Policy(), form=form_named(self.form))


class Problem(NamedTuple):
    op: str  # of OPS
    n: int  # elements of a row
    dtype: str  # of ITEMSIZE: of x, dy, y, dx; where they differ (form.narrowest) the widest of them
    weight: str | None  # its dtype, None without one
    size: str  # of sizes.SIZES, which stands for M, the number of rows
    device: Device
    casting: str = "once"
    policy: Policy = Policy()
    # "shared": a row of dw_partial for each block or slab; "own": for each row of x, 14 bytes of traffic a bf16 element
    # instead of 6, by the kernels that are easiest to understand (bench/run.sh --p-rows)
    partials: str = "shared"
    form: Form = PLAIN

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def narrowest_itemsize(self) -> int:
        """Bytes of an element of the narrowest array of rows."""
        return self.form.narrowest or self.itemsize

    @property
    def vectors(self) -> set[int]:
        """How many neighbours of a packed row a thread may load at a time (`order_of` in kernels/tiles.py): by 16 bytes
        of the widest rows, and of a weight."""
        return {math.gcd(self.n, 16 // each) for each in (self.itemsize, ITEMSIZE[self.weight or self.dtype])}

    @property
    def is_beside_float32(self) -> bool:
        """Whether a float32 weight stands beside x of 2 bytes."""
        return self.weight == FLOAT32 and self.itemsize == 2

    @property
    def has_narrower_arrays(self) -> bool:
        """Whether other rows, or the weight, have fewer bytes an element than the widest rows."""
        return self.form.narrowest > 0 or ITEMSIZE[self.weight or self.dtype] < self.itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether every row of a contiguous array begins at a multiple of 16 bytes."""
        return self.n * self.narrowest_itemsize % 16 == 0

    @property
    def sm_count(self) -> int:
        """SMs that blocks may fill."""
        return self.device.sm_count - self.policy.sm_margin

    @property
    def most_members(self) -> int:
        if not self.policy.teams:
            return 1
        most = self.device.most_members
        return min(most, max(1, self.sm_count // LAUNCHES_AT_ONCE)) if self.policy.sm_margin else most

    @property
    def bucket(self) -> Bucket:
        weight = FLOAT32 if self.is_beside_float32 else SAME
        form = next((name for name in (D_RESIDUAL, RESIDUAL, BIAS) if getattr(self.form, name)), PLAIN_ROWS)
        return Bucket(self.op, self.n, self.dtype, self.size, weight, form)

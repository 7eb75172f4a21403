# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The arrays that cutile's kernels of qk_norm_rope get under a level: like packed ones at a multiple of 16 bytes,
however the caller's lie, and the steps of one sequence in the place of sequences of one step."""

from typing import Any

import pytest
import torch
from helpers import BF16, FP32
from rope_cases import RopeCase, make

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile.host.arrange_rope import bind_arranged_rope  # noqa: E402
from tilegym_rmsnorm.call.layout import packed  # noqa: E402

CASES = {
    "packed": RopeCase(BF16),
    "between 16 bytes": RopeCase(BF16, layout="offset", dy_layout="offset", table_layout="offset"),
    "gaps": RopeCase(BF16, layout="gaps", dy_layout="gaps", table_layout="gaps"),
    "transposed": RopeCase(BF16, layout="transposed"),
    "half tables": RopeCase(BF16, tables="half", table_dtype=BF16),
    "rows of each batch": RopeCase(BF16, has_rows_of_batch=True),
    "positions of each batch": RopeCase(BF16, positions="each"),
    "one row of positions": RopeCase(BF16, positions="one", position_dtype=torch.int32),
    "without k": RopeCase(FP32, heads=(3, 0), weight=("heads", "none")),
}


class Kernel:
    """Stands for kernels: keeps what it gets, and returns each array of q and of k."""

    def __init__(self) -> None:
        self.got: tuple[Any, ...] = ()

    def __call__(self, spec: Any, tensors: Any, *wanted: Any) -> tuple[Any, ...]:
        self.got = tensors
        made = tuple(None if each is None else packed(each) for each in tensors[:2])
        return (*made, *("gradient of a weight",) * 2) if wanted else made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("batch", "length"), [(3, 5), (3, 1), (1, 4), (1, 1)])
def test_kernels_get_arrays_that_are_like_packed_ones(name, batch, length):
    call = make(CASES[name]._replace(batch=batch, length=length))
    for tensors, wanted in ((call.tensors, ()), (call.backward_tensors, (call.wanted,))):
        kernel = Kernel()
        results = bind_arranged_rope(kernel, call.spec, tensors, *wanted)(tensors)
        rows = len(tensors) - 5
        is_one_step = length == 1 < batch
        for place, (got, given) in enumerate(zip(kernel.got, tensors, strict=True)):
            if given is None:
                assert got is None
                continue
            assert got.data_ptr() % 16 == 0 and got.stride(-1) == 1
            assert (
                all(stride * got.itemsize % 16 == 0 for stride in got.stride()[:-1])
                or place == len(tensors) - 1
            )
            if place < rows:
                assert got.shape == ((1, batch, *given.shape[2:]) if is_one_step else given.shape)
                assert torch.equal(got.flatten(0, 1), given.flatten(0, 1))
        *_, cos, sin, positions = kernel.got
        steps = kernel.got[0].shape[:2]
        for got, given in zip((cos, sin), tensors[-3:-1], strict=True):
            if positions is None:  # a row for each step, of one sequence or of all
                assert got.shape[0] in (steps[1], steps[0] * steps[1])
                expected = given.expand(batch, -1) if is_one_step and given.shape[0] == 1 else given
                assert torch.equal(got, expected)
            else:
                assert torch.equal(got, given)
                assert positions.shape[1] == steps[1] and positions.shape[0] in (1, steps[0])
                assert torch.equal(
                    positions.flatten(), tensors[-1].expand(batch, length).flatten()[: positions.numel()]
                )
        for got, given in zip(results[:2], tensors[:2], strict=True):
            assert given is None or (
                got.shape == given.shape and got.is_contiguous() and torch.equal(got, given)
            )
        assert not wanted or results[2:] == ("gradient of a weight",) * 2


def test_strides_that_kernels_do_not_count_in_are_copied():
    """A view of (1, 2, 1, 64) with a stride of batches of 2^31: one batch alone is in memory."""
    call = make(RopeCase(BF16, batch=1, length=2, heads=(1, 0)))
    q, *others = call.tensors
    far = q.as_strided(q.shape, (2**31, *q.stride()[1:]))
    kernel = Kernel()
    bind_arranged_rope(kernel, call.spec, (far, *others))((far, *others))
    assert kernel.got[0].stride(0) < 2**31 and torch.equal(kernel.got[0], q)

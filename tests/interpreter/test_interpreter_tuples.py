# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter: tuples as arguments, whose arrays are watched like others, and arrays of four dimensions.

interpreter_cases_of_tuples.py has what the compiler accepts and refuses of them.
"""

from collections import namedtuple

import cuda.tile as ct
import pytest
import torch

from tilegym_rmsnorm.backends.cutile.interpreter import empty, launch, unwritten

Pair = namedtuple("Pair", "array scale")


def scaled(y, x, extra):
    """y is x, or x * scale + other, where (other, scale) is given."""
    tile = ct.load(x, (0,), (4,))
    if len(extra) > 0:
        other, scale = extra
        tile = tile * scale + ct.load(other, (0,), (4,))
    ct.store(y, (0,), tile)


def test_a_kernel_unpacks_its_tuples():
    x, other = torch.randn(4), torch.randn(4)
    for extra, expected in (((), x), ((other, 2.5), x * 2.5 + other)):
        y = empty((4,), torch.float32)
        launch(scaled, (1,), (y, x, extra))
        assert torch.equal(y, expected)


def test_numbers_in_tuples_arrive_as_they_do_outside():
    def kernel(out, numbers, SIZES: ct.Constant):
        eps, (n,) = numbers
        ct.store(out, (0,), eps)
        ct.store(out, (1,), n + 1)
        ct.static_assert(SIZES[0] + SIZES[1][0] == 7)

    out = empty((2,), torch.float64)
    launch(kernel, (1,), (out, (1e-6, (2**31 - 1,)), (3, (4,))))
    assert out.tolist() == [torch.tensor(1e-6).item(), -(2.0**31)]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            Pair(torch.zeros(4), 1.0),
            TypeError,
            "x: 'Pair' is a subclass of 'tuple'. Only plain tuples are accepted.",
        ),
        ((1.0, Pair(torch.zeros(4), 1.0)), TypeError, r"x\[1\]: 'Pair' .* Only plain tuples are accepted."),
        ([torch.zeros(4)], NotImplementedError, "x: a list argument"),
        ((torch.zeros(4), [torch.zeros(4)]), NotImplementedError, r"x\[1\]: a list argument"),
        ((1, (None,)), TypeError, r"x\[1\]\[0\]: expected a tensor or a number, got NoneType"),
        ((2**31,), OverflowError, r"x\[0\]: 2147483648 is out of range"),
    ],
)
def test_tuples_that_cannot_be_launched_with(value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        launch(lambda x: None, (1,), (value,))


def test_a_constant_tuple_has_numbers_only():
    def kernel(SIZES: ct.Constant):
        pass

    with pytest.raises(TypeError, match=r"SIZES\[1\]: expected a number"):
        launch(kernel, (1,), ((1, torch.zeros(4)),))


def test_arrays_in_tuples_may_not_overlap_what_is_written():
    buffer = torch.ones(8)
    with pytest.raises(RuntimeError, match=r"y and extra\[0\] overlap in memory"):
        launch(scaled, (1,), (buffer[:4], torch.ones(4), (buffer[2:6], 1.0)))

    def writes_inner(x, outputs):
        for i in ct.static_iter(range(2)):
            ct.store(outputs[i][0], (0,), ct.load(x, (0,), (4,)))

    with pytest.raises(RuntimeError, match=r"outputs\[1\]\[0\] and outputs\[0\]\[0\] overlap in memory"):
        launch(writes_inner, (1,), (torch.ones(4), ((buffer[:4],), (buffer[3:7],))))
    launch(writes_inner, (1,), (torch.zeros(4), ((buffer[:4],), (buffer[4:],))))
    assert buffer.tolist() == [0.0] * 8


def test_arrays_in_tuples_are_watched():
    out = empty((8,), torch.float32)
    with pytest.raises(RuntimeError, match=r"extra\[0\]\[0\] is read, but no kernel has written it"):
        launch(scaled, (1,), (torch.ones(4), torch.ones(4), (out, 1.0)))

    def writes(outputs):
        ct.store(outputs[0], (0,), ct.zeros((4,), ct.float32))

    with pytest.raises(
        RuntimeError, match=r"outputs\[0\]\[0\] is written here and written by block number 0"
    ):
        launch(writes, (2,), ((out,),))
    assert unwritten(out) == 4


def heads(t: int, h: int, d: int) -> torch.Tensor:
    """The second slice of (2, t, 3, h, d): a view of four dimensions that do not collapse."""
    return torch.randn(2, t, 3, h, d)[:, :, 1]


def test_tiles_of_four_dimensions():
    """Over 2 x 5 x 3 heads of 12, by tiles of 1 x 2 x 4 x 16: all but the first dimension reach beyond the array."""

    def kernel(y, total, x):
        b, t, h = ct.bid(2), ct.bid(0), ct.bid(1)
        tile = ct.load(x, (b, t, h, 0), (1, 2, 4, 16), padding_mode=ct.PaddingMode.ZERO)
        sums = ct.sum(tile * tile, axis=-1, keepdims=True)
        rows = ct.reshape(tile, (8, 16)) * ct.reshape(sums, (8, 1))
        ct.store(y, (b, t, h, 0), ct.reshape(rows, (1, 2, 4, 16)))
        ct.store(total, (b, t, h), ct.sum(tile, axis=3))

    x = heads(5, 3, 12)
    y, total = empty((2, 5, 3, 12), torch.float32), empty((2, 5, 3), torch.float32)
    launch(kernel, (3, 1, 2), (y, total, x))
    expected = x.double() * x.double().square().sum(-1, keepdim=True)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    assert unwritten(y) == unwritten(total) == 0


def test_gathers_of_four_dimensions():
    def kernel(y, x):
        t = ct.bid(0) * 2 + ct.arange(2, dtype=ct.int32)[None, :, None, None]
        h = ct.arange(4, dtype=ct.int32)[None, None, :, None]
        n = ct.arange(16, dtype=ct.int32)[None, None, None, :]
        where = (ct.bid(1), t, h, n)
        ct.scatter(y, where, ct.gather(x, where, padding_value=0) + 1)

    x, guarded = heads(5, 3, 12), torch.full((2, 6, 3, 14), 7.0)
    launch(kernel, (3, 2), (guarded[:, :5, :, 1:13], x))
    assert torch.equal(guarded[:, :5, :, 1:13], x + 1)
    assert (guarded[..., 0] == 7).all() and (guarded[..., 13] == 7).all() and (guarded[:, 5] == 7).all()


def test_an_element_outside_four_dimensions_is_named():
    def kernel(x):
        ct.store(x, (0, ct.bid(0), 0, 0), ct.zeros((1, 1, 4, 16), ct.float32), check_bounds=False)

    with pytest.raises(IndexError, match="check_bounds=False, reaches outside x of shape"):
        launch(kernel, (1,), (heads(5, 3, 12),))

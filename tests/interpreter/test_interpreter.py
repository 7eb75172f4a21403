# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter: what kernels compute in it, their arguments and grids, and stepping through their source.

test_interpreter_compiler.py compares with the compiler, test_interpreter_memory.py has bounds, races, unwritten memory,
test_interpreter_tuples.py tuples and four dimensions.
"""

import inspect
import io
import math
import pdb
import random
from collections.abc import Callable

import cuda.tile as ct
import pytest
import torch
from planning import plan

from tilegym_rmsnorm.backends.cutile.interpreter import arrays, atomics, empty, launch, ops, unwritten
from tilegym_rmsnorm.backends.cutile.kernels import backward, forward, reduce
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows, ForwardRows

FP16, FP32, FP64, INT32, BOOL = torch.float16, torch.float32, torch.float64, torch.int32, torch.bool


def stored(expression: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an array of exactly this shape and dtype, in which a kernel stored `expression()`."""
    out = empty(shape, dtype)

    def kernel(out):
        tile = expression()
        ct.static_assert(tile.dtype == out.dtype, f"expected {out.dtype}, got {tile.dtype}")
        ct.static_assert(tile.shape == (shape or ()), f"expected {shape}, got {tile.shape}")
        ct.store(out, (0,) * len(shape), tile)

    launch(kernel, (1,), (out,))
    assert unwritten(out) == 0
    return out


def tile(*values: float, dtype: ct.DType = ct.float32):
    """Make a one-dimensional tile of the values, in a kernel."""
    made = ct.zeros((len(values),), dtype)
    for i in ct.static_iter(range(len(values))):
        made = ct.where(ct.arange(len(values), dtype=ct.int32) == i, ct.astype(values[i], dtype), made)
    return made


def ints(*values: int):
    return tile(*values, dtype=ct.int32)


def square():
    return ct.reshape(ct.arange(4, dtype=ct.int32), (2, 2))


VALUES = {
    "add": (lambda: ct.add(ints(1, 2), 3), INT32, [4, 5]),
    "sub reflected": (lambda: 3 - ints(1, 2), INT32, [2, 1]),
    "mul broadcasts": (lambda: ints(1, 2)[:, None] * ints(3, 4), INT32, [[3, 4], [6, 8]]),
    "truediv of integers": (lambda: ints(1, 3) / 2, FP32, [0.5, 1.5]),
    "floordiv": (lambda: ints(7, -7) // 2, INT32, [3, -4]),
    "floordiv of floats": (lambda: tile(7.0, -7.0) // 2, FP32, [3.0, -4.0]),
    "mod": (lambda: ints(7, -7) % 3, INT32, [1, 2]),
    "cdiv": (lambda: ct.cdiv(ints(7, 8), 4), INT32, [2, 2]),
    "cdiv of unsigned": (lambda: ct.cdiv(tile(200, 201, dtype=ct.uint8), 2), torch.uint8, [100, 101]),
    "overflow wraps": (lambda: ints(2**31 - 1, 0) + 1, INT32, [-(2**31), 1]),
    "negative": (lambda: -ints(1, -2), INT32, [-1, 2]),
    "abs": (lambda: abs(tile(-1.5, 2.0)), FP32, [1.5, 2.0]),
    "sqrt": (lambda: ct.sqrt(tile(4.0, 9.0)), FP32, [2.0, 3.0]),
    "rsqrt of integers": (lambda: ct.rsqrt(ints(4, 16)), FP32, [0.5, 0.25]),
    "exp": (lambda: ct.exp(tile(0.0, 1.0)), FP32, [1.0, math.e]),
    "less": (lambda: ints(1, 2) < 2, BOOL, [True, False]),
    "greater_equal reflected": (lambda: 2 >= ints(1, 3), BOOL, [True, False]),
    "equal": (lambda: ct.equal(ints(1, 2), 1), BOOL, [True, False]),
    "not": (lambda: ~(ints(1, 2) == 1), BOOL, [False, True]),
    "bits": (lambda: (ints(5, 6) & 3) | 8, INT32, [9, 10]),
    "xor": (lambda: ints(5, 6) ^ 1, INT32, [4, 7]),
    "shifts": (lambda: (ints(5, -6) << 2) >> 1, INT32, [10, -12]),
    "where": (lambda: ct.where(ints(0, 1) == 0, 1.5, ints(7, 8)), FP32, [1.5, 8.0]),
    "where of constants": (lambda: ct.where(ints(0, 1) == 0, 1.5, 2), FP32, [1.5, 2.0]),
    "bitcast": (lambda: ct.bitcast(ct.full((1,), -0.0, ct.float16), ct.int16), torch.int16, [-(2**15)]),
    "bytes": (lambda: ct.pack_to_bytes(tile(1, -2, dtype=ct.int16)), torch.uint8, [1, 0, 254, 255]),
    "pairs": (
        lambda: ct.unpack_from_bytes(ct.pack_to_bytes(tile(1, 2, dtype=ct.int16)[:, None]), ct.int32),
        INT32,
        [2 * 2**16 + 1],
    ),
    "astype of a constant": (lambda: ct.reshape(ct.astype(0.1, ct.float64), (1,)), FP64, [0.1]),
    "minimum passes over NaN": (lambda: ct.minimum(tile(math.nan, 1.0), 2.0), FP32, [2.0, 1.0]),
    "minimum propagates NaN": (
        lambda: ct.minimum(tile(math.nan, 1.0), 2.0, propagate_nan=True),
        FP32,
        [math.nan, 1.0],
    ),
    "max of builtins": (lambda: max(ints(1, 5), 3), INT32, [3, 5]),
    "arange": (lambda: ct.arange(4, start=7, step=-2, dtype=ct.int32), INT32, [7, 5, 3, 1]),
    "ones": (lambda: ct.ones((2, 1), ct.float16), FP16, [[1.0], [1.0]]),
    "astype truncates": (lambda: ct.astype(tile(1.9, -1.9), ct.int32), INT32, [1, -1]),
    "astype to bool": (lambda: tile(0.5, 0.0).astype(ct.bool_), BOOL, [True, False]),
    "transpose": (lambda: ct.transpose(square()), INT32, [[0, 2], [1, 3]]),
    "permute": (lambda: square().permute((1, 0)), INT32, [[0, 2], [1, 3]]),
    "expand_dims": (lambda: ct.expand_dims(ints(1, 2), -1), INT32, [[1], [2]]),
    "broadcast_to": (lambda: ct.broadcast_to(ints(1, 2), (2, 2)), INT32, [[1, 2], [1, 2]]),
    "cat": (lambda: ct.cat((square(), square()), 1), INT32, [[0, 1, 0, 1], [2, 3, 2, 3]]),
    "extract": (lambda: square().extract((1, 0), (1, 2)), INT32, [[2, 3]]),
    "sum of an axis": (lambda: ct.sum(square(), 0), INT32, [2, 4]),
    "sum keeps axes": (lambda: ct.sum(square(), (0, 1), keepdims=True), INT32, [[6]]),
    "sum counts a mask": (lambda: ct.sum(square() > 0, axis=-1), INT32, [1, 2]),
    "max": (lambda: ct.max(square(), axis=1, keepdims=True), INT32, [[1], [3]]),
    "min passes over NaN": (lambda: ct.min(tile(math.nan, 2.0), keepdims=True), FP32, [2.0]),
    "max propagates NaN": (
        lambda: ct.max(tile(math.nan, 2.0), keepdims=True, propagate_nan=True),
        FP32,
        [math.nan],
    ),
    # 0.1 becomes float16 before it is multiplied, and the product is rounded before it is added to.
    "float16 rounds each step": (
        lambda: tile(3.0, 7.0, dtype=ct.float16) * 0.1 + 100.0,
        FP16,
        [100.3125, 100.6875],
    ),
    # In float32 the sum is 2051, which rounds to 2052.
    "float16 sums in float16": (
        lambda: ct.sum(tile(2048.0, 1.0, 1.0, 1.0, dtype=ct.float16), keepdims=True),
        FP16,
        [2050.0],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    expression, dtype, expected = VALUES[name]
    expected = torch.tensor(expected, dtype=dtype)
    result = stored(expression, tuple(expected.shape), dtype)
    torch.testing.assert_close(result, expected, rtol=1e-7 if dtype == FP32 else 0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in (ops, arrays, atomics) for name in module.__all__]
)
def test_signatures_are_those_of_cuda_tile(module, name):
    def parameters(module):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()
        ]

    assert parameters(module) == parameters(ct)


def test_numbers_arrive_as_float32_and_int32_and_constants_as_they_are():
    def kernel(out, eps, n, EPS: ct.Constant):
        ct.store(out, (0,), eps)
        ct.store(out, (1,), n + 1)
        ct.store(out, (2,), EPS)

    out = empty((3,), FP64)
    launch(kernel, (1,), (out, 1e-6, 2**31 - 1, 1e-6))
    # The store into float64 rounds a constant once; ct.Constant is no detour through float32.
    assert out.tolist() == [torch.tensor(1e-6).item(), -(2.0**31), 1e-6]


def test_blocks_are_numbered_along_three_axes():
    def kernel(out):
        x, y, z = ct.bid(0), ct.bid(1), ct.bid(2)
        ct.scatter(out, (z, y, x), 100 * z + 10 * y + x + 1000 * ct.num_blocks(0))

    out = empty((2, 3, 4), INT32)
    launch(kernel, (4, 3, 2), (out,))
    assert out[1, 2, 3] == 4123 and out.unique().numel() == 24 and unwritten(out) == 0


@pytest.mark.parametrize("grid", [(), (0,), (2, -1), (2**24,), (1, 2**16), (1, 1, 2**16), (1, 1, 1, 1)])
def test_grids_that_cannot_be_launched(grid):
    with pytest.raises(ValueError, match="grid: expected"):
        launch(lambda: None, grid, ())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, TypeError),
        ("text", TypeError),
        (torch.zeros(2, dtype=torch.complex64), TypeError),
        (torch.zeros(2, device="meta"), TypeError),
        (2**31, OverflowError),
        ([1, 2], NotImplementedError),
    ],
)
def test_arguments_that_cannot_be_launched_with(value, error):
    with pytest.raises(error, match="^x: "):
        launch(lambda x: None, (1,), (value,))


def test_argument_count_and_constants():
    def kernel(x, N: ct.Constant[int]):
        pass

    with pytest.raises(TypeError, match="kernel takes 2 arguments, got 1"):
        launch(kernel, (1,), (torch.zeros(1),))
    with pytest.raises(TypeError, match="N: expected a number"):
        launch(kernel, (1,), (torch.zeros(1), torch.zeros(1)))


def test_arguments_that_require_grad_are_seen_as_memory():
    def kernel(y, x):
        ct.store(y, (0,), ct.load(x, (0,), (2,)) * 2)

    y = empty((2,), FP32)
    launch(kernel, (1,), (y, torch.nn.Parameter(torch.ones(2))))
    assert y.tolist() == [2, 2] and not y.requires_grad


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (lambda: ct.cumsum(square()), "ct.cumsum"),
        (lambda: ct.add(square(), 1, rounding_mode=ct.RoundingMode.RZ), "add.*RZ"),
        (lambda: square() ** 2, r"\*\*"),
        (lambda: square() @ square(), "@"),
        (lambda: square().insert((0, 0), 1), "Tile.insert"),
        (lambda: ct.zeros((2,), ct.float8_e5m2), "ct.float8_e5m2"),
    ],
)
def test_what_is_not_covered_says_so(expression, name):
    with pytest.raises(NotImplementedError, match=name):
        stored(expression, (2, 2), INT32)


def test_assertions_and_printing(capsys):
    def kernel(x):
        tile = ct.load(x, (0,), (2,))
        print(f"tile {tile:.1f}", ct.bid(0))
        ct.printf("%d of %d\n", ct.bid(0), ct.num_blocks(0))
        ct.assert_(tile > 0, "not positive")

    with pytest.raises(AssertionError, match=r"not positive \[block \(1, 0, 0\) of kernel\]"):
        launch(kernel, (2,), (torch.tensor([1.0, 0.0]),), order=[1, 0])
    assert capsys.readouterr().out == "tile [1.0, 0.0] 1\n1 of 2\n"


def broken(x):
    row = ct.bid(0)
    return x.shape[row]


def test_traceback_shows_the_line_of_the_kernel_itself():
    with pytest.raises(TypeError, match=r"\[block \(0, 0, 0\) of broken\]") as caught:
        launch(broken, (1,), (torch.zeros(1),))
    frame = next(entry for entry in caught.traceback if entry.name == "broken")
    assert frame.frame.code.raw is broken.__code__
    assert frame.lineno + 1 == broken.__code__.co_firstlineno + 2


def test_pdb_stops_in_the_kernel():
    line = broken.__code__.co_firstlineno + 2
    commands = io.StringIO(f"break {__file__}:{line}\ncontinue\np row\np x.shape\nquit\n")
    answers = io.StringIO()
    debugger = pdb.Pdb(stdin=commands, stdout=answers, nosigint=True, readrc=False)
    debugger.runcall(launch, broken, (1,), (torch.zeros(5),))
    assert f"Breakpoint 1 at {__file__}:{line}" in answers.getvalue()
    assert "Tile[int32,()] 0\n" in answers.getvalue() and "(Tile[int32,()] 5,)\n" in answers.getvalue()


def test_a_tile_prints_what_one_can_read():
    seen = []

    def seeing(x):
        seen.append(repr(ct.load(x, (0, 0), (64, 512))))

    launch(seeing, (1,), (torch.full((64, 512), 0.5),))
    [text] = seen
    assert text.startswith("Tile[float32,(64, 512)] [[0.5, 0.5,") and "..." in text and len(text) < 600


def test_cuda_tile_is_left_as_it_was():
    before = {name: getattr(ct, name) for name in ct.__all__}
    stored(square, (2, 2), INT32)
    assert all(getattr(ct, name) is value for name, value in before.items())
    assert square.__globals__["ct"] is ct


def test_results_do_not_depend_on_the_order_of_blocks():
    torch.manual_seed(0)
    m, n, blocks = 23, 80, 5
    x, dy, weight = torch.randn(m, n), torch.randn(m, n), torch.randn(n)
    settings = {"width": 32, "warps": 4, "occupancy": 1, "latency": 4, "rest": 16, "pieces": 2}
    plans = (
        plan(ForwardRows(**settings), "forward", n, FP32),
        plan(BackwardRows(**settings), "backward", n, FP32),
    )

    def constants_of(kernel, each):
        constants = each.constants(each.first)
        return [constants[name] for name in inspect.signature(kernel).parameters if name.isupper()]

    def run(order_of):
        y, dx, rstd = empty((m, n), FP32), empty((m, n), FP32), empty((m,), FP32)
        dw_partial, dw = empty((blocks, n), FP32), empty((n,), FP32)
        arguments = (
            y,
            rstd,
            x,
            weight,
            (),
            (),
            1 / n,
            1e-6,
            0.0,
            *constants_of(forward.forward_rows, plans[0]),
        )
        launch(forward.forward_rows, (m,), arguments, order=order_of(m))
        constants = constants_of(backward.backward_rows, plans[1])
        arguments = (dx, dw_partial, dy, x, weight, rstd, (), (), (), 1 / n, 0.0, *constants)
        launch(backward.backward_rows, (blocks,), arguments, order=order_of(blocks))
        launch(reduce.sum_partials, (5,), (dw, dw_partial, (), 4, 16, 16, True, 0), order=order_of(5))
        return y, rstd, dx, dw

    for one, other in zip(run(range), run(lambda count: random.sample(range(count), count)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="order"):
        launch(broken, (2,), (torch.zeros(1),), order=[0, 0])

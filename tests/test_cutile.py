# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cuTile kernels, run as Python by the interpreter: every config that the selector can pick, on every plan."""

import pytest
import torch
from helpers import BF16, FP16, FP32, Inputs, assert_within, expected_results, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from tilegym_rmsnorm.backends.cutile import interpreter, launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.config import (  # noqa: E402
    backward_config,
    forward_config,
    row_partials_config,
)
from tilegym_rmsnorm.backends.cutile.launch import Backward, Forward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.machine import InterpretedMachine  # noqa: E402

CPU = torch.device("cpu")


def one_width_per_config(configure, itemsize: int) -> list[int]:
    """An odd width where a config serves one, so that lanes past the row are there to go wrong."""
    widths = {}
    for n in range(1, 33100):
        config = configure(n, itemsize, 90)
        if n % 2 or config not in widths:
            widths[config] = n
    return sorted(widths.values())


def run_forward(inputs: Inputs, config=None, **machine):
    x, _, weight, eps, offset, casting = inputs
    config = config or forward_config(x.shape[1], x.dtype.itemsize, 90)
    forward = Forward(ShuffledMachine(**machine), config, x.shape[1], weight is not None, casting == "llama")
    y, rstd = forward(x, weight, eps, offset)
    assert interpreter.unwritten(y) == interpreter.unwritten(rstd) == 0
    return {"y": y, "rstd": rstd}


def run_backward(inputs: Inputs, config=None, has_dw=True, shares_partials=True, **machine):
    x, dy, weight, eps, offset, casting = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    config = config or backward_config(x.shape[1], x.dtype.itemsize, 90)
    has_dw = has_dw and weight is not None
    machine = ShuffledMachine(**machine)
    run = Backward(
        machine, config, x.shape[1], weight is not None, has_dw, casting == "llama", shares_partials
    )
    dx, dw = run(x, dy, weight, rstd, offset)
    assert interpreter.unwritten(dx) == 0
    if not has_dw:
        assert dw is None
        return {"dx": dx}
    assert interpreter.unwritten(dw) == 0
    return {"dx": dx, "dw": dw}


class ShuffledMachine(InterpretedMachine):
    """Runs blocks in a random order, as a GPU may, and each launch in the order given."""

    def __init__(self, seed: int = 0, sm_count: int = 3) -> None:
        super().__init__()
        self.sm_count = sm_count
        self.generator = torch.Generator().manual_seed(seed)
        self.grids: list[tuple[int, ...]] = []

    def bind(self, function, config, constants):
        def run(grid, arguments, dependent=False):
            self.grids.append(grid)
            blocks = torch.Size(grid).numel()
            order = torch.randperm(blocks, generator=self.generator).tolist()
            interpreter.launch(function, grid, arguments + constants, order=order)

        return run


@pytest.mark.parametrize("n", one_width_per_config(forward_config, 2))
def test_forward_of_every_config(n):
    inputs = make_inputs(5, n, BF16, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs))


@pytest.mark.parametrize("n", one_width_per_config(backward_config, 2))
def test_backward_of_every_config(n):
    config = backward_config(n, 2, 90)
    m = (
        2 * config.rows * 3 * config.occupancy + config.rows // 2 + 1
    )  # some blocks take a tile more, one is partial
    inputs = make_inputs(min(m, 300), n, BF16, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [100, 1000, 3000, 5000, 18500, 33000])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_other_dtypes(n, dtype):
    inputs = make_inputs(7, n, dtype, dtype, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 2048, 5000, 18500, 33000])
def test_llama_casting(n):
    inputs = make_inputs(7, n, BF16, FP32, casting="llama", device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 2048, 5000, 18500, 33000])
def test_no_weight(n):
    inputs = make_inputs(7, n, BF16, None, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 2048, 5000, 18500])
def test_frozen_weight_gives_the_same_dx(n):
    inputs = make_inputs(7, n, BF16, FP32, device=CPU)
    assert torch.equal(run_backward(inputs, has_dw=False)["dx"], run_backward(inputs)["dx"])


@pytest.mark.parametrize("n", [1, 64, 1000, 4096, 18500])
def test_one_partial_row_per_row(n):
    inputs = make_inputs(19, n, BF16, FP32, device=CPU)
    config = row_partials_config(n, 2, 90)
    assert_within(expected_results(inputs), **run_backward(inputs, config, shares_partials=False))


@pytest.mark.parametrize(
    ("m", "n"),
    [(m, 64) for m in (1, 2, 127, 128, 129)] + [(m, n) for m in (1, 2, 5) for n in (4096, 18500)],
)
def test_batch_sizes_around_the_rows_of_a_tile(m, n):
    inputs = make_inputs(m, n, BF16, FP32, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 4096, 5000, 18500])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_only_partial_row_is_dw(n, dtype):
    """With one block there is nothing to add: dw, of weight's dtype, takes the place of dw_partial."""
    inputs = make_inputs(1, n, dtype, dtype, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 3000, 18500])
def test_row_strides_are_honoured_without_a_copy(n):
    inputs = make_inputs(9, n, BF16, FP32, device=CPU)
    wide_x, wide_dy = (
        torch.full((9, n + 3), torch.nan, dtype=BF16),
        torch.full((2, 9, n), torch.nan, dtype=BF16),
    )
    strided = inputs._replace(x=wide_x[:, 1 : n + 1], dy=wide_dy.permute(1, 0, 2)[:, 1])
    strided.x.copy_(inputs.x)
    strided.dy.copy_(inputs.dy)
    for name, value in (run_forward(strided) | run_backward(strided)).items():
        assert torch.equal(value, (run_forward(inputs) | run_backward(inputs))[name])


@pytest.mark.parametrize("n", [64, 1000, 4096, 5000, 18500])
def test_no_bit_depends_on_the_order_of_blocks(n):
    inputs = make_inputs(150 if n <= 1024 else 20, n, BF16, FP32, device=CPU)
    first = run_backward(inputs, seed=1)
    for seed in (2, 3):
        again = run_backward(inputs, seed=seed)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("n", [64, 4096, 18500])
def test_a_row_of_y_and_dx_does_not_depend_on_the_batch(n):
    inputs = make_inputs(70 if n == 64 else 12, n, BF16, FP32, device=CPU)
    few = inputs._replace(x=inputs.x[7:10], dy=inputs.dy[7:10])
    assert torch.equal(run_forward(few)["y"], run_forward(inputs)["y"][7:10])
    assert torch.equal(run_backward(few)["dx"], run_backward(inputs)["dx"][7:10])


def test_more_rows_than_one_launch_takes(monkeypatch):
    """Rows past cuda-tile's limits go into further launches, whose partial rows lie behind those of the first."""
    inputs = make_inputs(90, 64, BF16, FP32, device=CPU)
    monkeypatch.setattr(launch, "MOST_ROWS", 40)
    monkeypatch.setattr(launch, "LARGEST_GRID", 17)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))
    config = row_partials_config(64, 2, 90)
    assert_within(expected_results(inputs), **run_backward(inputs, config, shares_partials=False))


@pytest.mark.parametrize("m", [1, 5])
def test_a_row_stride_beyond_int32_is_copied_away(m, monkeypatch):
    """A single row too: contiguous() would return it with its stride."""
    inputs = make_inputs(m, 64, BF16, FP32, device=CPU)
    far = torch.full((m, 200), torch.nan, dtype=BF16)[:, :64].copy_(inputs.x)
    monkeypatch.setattr(launch, "LARGEST_ROW_STRIDE", 199)
    assert launch._with_int32_stride(far).stride() == (64, 1)
    assert_within(expected_results(inputs), **run_forward(inputs._replace(x=far)))


@pytest.mark.parametrize("sm_count", [1, 2, 5, 40])
def test_the_number_of_sms_changes_no_more_than_rounding(sm_count):
    inputs = make_inputs(70, 1000, BF16, FP32, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, sm_count=sm_count))


def test_an_unknown_plan_is_refused():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="plan: expected None or 'row_partials', got 'other'"):
        launch.rms_norm_backward(x, x, torch.ones(8), torch.ones(2), 0.0, "once", True, plan="other")


class Sabotage(ShuffledMachine):
    """Launches grids that are wrong in one dimension."""

    change = 0

    def bind(self, function, config, constants):
        run = super().bind(function, config, constants)

        def launch_changed(grid, arguments, dependent=False):
            if function.__name__ == self.victim:
                grid = (grid[0] + self.change, *grid[1:])
            run(grid, arguments, dependent)

        return launch_changed


@pytest.mark.parametrize(
    ("victim", "n", "change"),
    [
        ("forward_rows", 2048, -1),
        ("forward_rows", 2048, 1),
        ("forward_tiles", 64, -1),
        ("forward_tiles", 64, 1),
        ("backward_rows", 4096, 1),
        ("backward_rows", 4096, -1),
        ("backward_tiles", 64, 1),
        ("backward_means", 18500, -1),
        ("sum_partials", 4096, -1),
        ("sum_partials", 4096, 1),
    ],
)
def test_a_wrong_grid_is_noticed(victim, n, change, monkeypatch):
    """A block too few leaves rows or columns unwritten, one too many reaches outside: none of it passes in silence."""
    monkeypatch.setattr(Sabotage, "victim", victim, raising=False)
    monkeypatch.setattr(Sabotage, "change", change)
    monkeypatch.setitem(globals(), "ShuffledMachine", Sabotage)
    inputs = (
        make_inputs(200, n, BF16, FP32, device=CPU) if n == 64 else make_inputs(9, n, BF16, FP32, device=CPU)
    )
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        run_forward(inputs) if victim.startswith("forward") else run_backward(inputs)

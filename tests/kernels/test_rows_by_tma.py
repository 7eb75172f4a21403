# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backwards whose rows, or parts of rows, come and go by TMA, in the interpreter: the same bits as by gathers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import BF16, FP32, assert_llama_rounds, assert_within, expected_results, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from cutile_runs import run_backward  # noqa: E402

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.select import chosen_config, serves_dx_alone  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime import toolchain  # noqa: E402

CPU = torch.device("cpu")
# A row's columns, and a config without TMA that holds it. Of a team three blocks an SM load no rstd ahead.
CONFIGS = {
    "rows of one tile": (84, Config("rows", 128, 4, 2, 2)),
    "rows": (96, Config("rows", 32, 4, 1, 2, pieces=3)),
    "rows, the last tile partial": (84, Config("rows", 32, 4, 1, 2, pieces=3)),
    "teams": (96, Config("teams", 16, 4, 2, 2, pieces=3, members=2)),
    "teams, the last tile partial": (84, Config("teams", 16, 4, 2, 2, pieces=3, members=2)),
    "teams, three blocks an SM": (84, Config("teams", 32, 4, 3, 2, members=3)),
    "packed rows": (84, Config("rows", 32, 8, 1, 2, pieces=3, packed=True)),
    "packed teams": (84, Config("teams", 16, 8, 1, 2, pieces=3, members=2, packed=True)),
}
every_config = pytest.mark.parametrize(("n", "config"), CONFIGS.values(), ids=CONFIGS)


def by_tma(config: Config) -> Config:
    return dataclasses.replace(config, tma=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@every_config
def test_the_same_bits_as_by_gathers(n, config, weight_dtype, dtype):
    if config.packed and dtype is FP32:
        pytest.skip("nothing to pack")
    inputs = make_inputs(11, n, dtype, weight_dtype, offset=1.0, device=CPU)
    expected = run_backward(inputs, dataclasses.replace(config, packed=False))
    assert_within(expected_results(inputs), **expected)
    got = run_backward(inputs, by_tma(config), seed=1)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    alone = run_backward(inputs, by_tma(config), has_dw=False)
    assert torch.equal(alone["dx"], expected["dx"])


@every_config
def test_fewer_rows_than_blocks(n, config):
    for m in (1, 2):
        inputs = make_inputs(m, n, BF16, BF16, device=CPU)
        assert_within(expected_results(inputs), **run_backward(inputs, by_tma(config)))


@every_config
def test_other_layouts(n, config):
    """Rows farther apart than they are long, at an offset, and one row that is all rows of dy."""
    inputs = make_inputs(11, n, BF16, BF16, device=CPU)
    x, dy = (torch.full((11, n + 3), torch.nan, dtype=BF16) for _ in range(2))
    x[:, :n], dy[:, 3:] = inputs.x, inputs.dy
    strided = inputs._replace(x=x[:, :n], dy=dy[:, 3:])
    assert_within(expected_results(inputs), **run_backward(strided, by_tma(config)))
    expanded = inputs._replace(dy=inputs.dy[4:5].expand(11, n))
    assert_within(expected_results(expanded), **run_backward(expanded, by_tma(config)))


@every_config
def test_casting_like_llama_rounds_what_dw_sums(n, config):
    inputs = make_inputs(7, n, BF16, FP32, casting="llama", device=CPU)
    found = run_backward(inputs, by_tma(config))
    assert_within(expected_results(inputs), **found)
    assert_llama_rounds(inputs, found, run_backward(inputs._replace(casting="once"), by_tma(config)))


@pytest.mark.parametrize(("n", "members"), [(18432, 3), (24576, 4), (66000, 11)])
def test_rules_take_it_for_teams_of_many_rows_of_16_bits(n, members):
    config = backward_config(n, 2, 90)
    assert (config.width, config.pieces, config.members, config.tma) == (2048, 3, members, True)


def test_dx_alone_takes_no_teams_by_tma_of_a_backward():
    """On an H100: with a float32 weight they spill. The rules have others, the tables entries of dx."""
    if toolchain.find_tileiras() is None:
        pytest.skip("no tileiras: tables are for one release of it")
    machine = SimpleNamespace(
        target=toolchain.target_of("NVIDIA H100 80GB HBM3", 90), architecture=90, most_members=16
    )
    for n in (18432, 24576, 32768, 65536):
        with_dw = chosen_config("backward", machine, n, BF16, "large")
        assert with_dw.kernel == "teams" and with_dw.tma and not serves_dx_alone(with_dw)
        alone = chosen_config("dx", machine, n, BF16, "large")
        assert alone != with_dw and alone.reason.startswith("tuned") == (n != 24576)

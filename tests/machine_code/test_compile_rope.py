# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The kernels of qk_norm_rope by what is reasoned for them, compiled by tileiras: no registers spill, and no warp waits
for some."""

import itertools
import re
from collections import Counter

import helpers
import pytest
import torch
from compiling import (
    CompilingMachine,
    assert_sound,
    disassembled,
    skip_without_compiler,
    skip_without_disassembler,
)
from helpers import BF16, FP16, FP32, in_turn
from pipelines import overwritten
from rope_cases import RopeCase, make

from tilegym_rmsnorm.backends.cutile.host import rope
from tilegym_rmsnorm.backends.cutile.host.launcher import bind
from tilegym_rmsnorm.backends.cutile.plans.rope import WIDEST_ROTATED_HEAD
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES

skip_without_compiler()

PLAIN = RopeCase(BF16, 2, 64, (32, 8), n=128, rotary_dim=128, layout="packed")
CASES = {
    "128": PLAIN,
    "128, half tables": PLAIN._replace(tables="half", table_dtype=BF16),
    "128, interleaved": PLAIN._replace(interleaved=True),
    "128, weights of heads": PLAIN._replace(weight=("heads", "heads"), weight_dtype=FP32),
    "128, positions": PLAIN._replace(positions="each", table_dtype=BF16, casting="llama", rounding="each"),
    "64, without k": PLAIN._replace(heads=(16, 0), n=64, rotary_dim=64),
    "64, one step": PLAIN._replace(batch=64, length=1, n=64, rotary_dim=32, layout="contiguous"),
    "96, 28 heads": PLAIN._replace(heads=(28, 4), n=96, rotary_dim=96, has_rows_of_batch=True),
    "80": PLAIN._replace(dtype=FP16, n=80, rotary_dim=80, table_dtype=FP16),
    "128, a half": PLAIN._replace(rotary_dim=64, interleaved=True, positions="one"),
    "256": PLAIN._replace(heads=(4, 1), n=256, rotary_dim=256, weight_dtype=FP32),
    "160, five heads": PLAIN._replace(heads=(5, 1), n=160, rotary_dim=160, positions="each"),
    "256, a quarter": PLAIN._replace(heads=(16, 2), n=256, rotary_dim=64, layout="gate"),
    "128, five heads": PLAIN._replace(heads=(5, 1)),
    "64, six heads": PLAIN._replace(heads=(6, 2), n=64, rotary_dim=64),
    "96, twelve heads": PLAIN._replace(
        heads=(12, 3), n=96, rotary_dim=32, positions="each", weight=("heads", "vector")
    ),
    "512": PLAIN._replace(n=512, rotary_dim=512),
    "128, one step": PLAIN._replace(batch=64, length=1),
    "256, a quarter, one step": PLAIN._replace(batch=64, length=1, heads=(16, 2), n=256, rotary_dim=64),
    "6": PLAIN._replace(heads=(5, 1), n=6, rotary_dim=6),
    "66": PLAIN._replace(n=66, rotary_dim=66),
    "128, begun elsewhere": PLAIN._replace(layout="offset"),
    "256, interleaved": PLAIN._replace(heads=(16, 2), n=256, rotary_dim=256, interleaved=True, tables="half"),
    "256, weights of heads": PLAIN._replace(heads=(16, 2), n=256, rotary_dim=256, weight=("heads", "heads")),
    "128, a quarter": PLAIN._replace(rotary_dim=32),
    "256, a quarter, llama": PLAIN._replace(heads=(16, 2), n=256, rotary_dim=64, casting="llama"),
    "256, a quarter, norm": PLAIN._replace(
        heads=(16, 2),
        n=256,
        rotary_dim=64,
        layout="gate",
        tables="half",
        positions="each",
        position_dtype=torch.int32,
        rounding="norm",
    ),
    "128, norm": PLAIN._replace(casting="llama", rounding="norm", weight_dtype=FP32),
    "64, llama": PLAIN._replace(n=64, rotary_dim=64, casting="llama", rounding="each", table_dtype=BF16),
}


KERNELS = {"forward": ("forward_rope",), "backward": ("backward_rope", "sum_partials")}


def compile_calls(case, machine, passes=tuple(KERNELS)):
    """The launches of a forward and of a backward, or of one of them."""
    call = make(case, "meta")
    if "forward" in passes:
        bind(rope.FORWARD, machine, call.spec, call.tensors)(call.tensors)
    if "backward" in passes:
        bind(rope.BACKWARD, machine, call.spec, call.backward_tensors, call.wanted)(call.backward_tensors)


DTYPES = ("16 bits", "float32")


OF_GATHERS = (
    "64, one step",
    "128, one step",
    "256, a quarter, one step",
    "6",
    "66",
    "128, begun elsewhere",
    "128, a quarter",
    "256, weights of heads",
    "96, twelve heads",
)


def case_of(case, dtype):
    return CASES[case]._replace(dtype=FP32) if dtype == "float32" else CASES[case]


def passes_of(case):
    """One pass of each case, four forwards and four backwards in turn; with --every-config both."""
    return [*KERNELS] if helpers.every_config else [[*KERNELS][[*CASES].index(case) // 4 % 2]]


# Without --every-config Hopper compiles every second case, in 16 bits or in float32 in turn. One pass of each of the
# rest is for one of those architectures for which the same is reasoned, or sm_120 with its shared memory.
ON_HOPPER = in_turn(CASES, DTYPES, of=4)
REST = [case for case in CASES if helpers.every_config or case not in dict(ON_HOPPER)]
REASONED = [each for each in ARCHITECTURES if helpers.every_config or each in (80, 100, 120)]


@pytest.mark.parametrize(("case", "call"), in_turn(REST, itertools.product(REASONED, DTYPES), of=6), ids=str)
def test_what_is_reasoned_compiles(case, call):
    architecture, dtype = call
    machine, passes = CompilingMachine(architecture), passes_of(case)
    compile_calls(case_of(case, dtype), machine, passes)
    assert {each.name for each in machine.results} == {name for each in passes for name in KERNELS[each]}
    assert_sound(machine)


@pytest.mark.parametrize("case", ["128", "80", "256, a quarter"])
def test_heads_come_and_go_by_tma(case, tmp_path):
    """Also of 80 columns, whose halves of 40 are no powers of two."""
    skip_without_disassembler(is_module=False)
    compile_calls(CASES[case], CompilingMachine(90, keep=tmp_path))
    found = {
        name: Counter(
            re.findall(
                r"\b(UTMALDG|UTMASTG|STG\.E(?:\.\w+)?)", " ".join(disassembled(tmp_path / f"{name}.cubin"))
            )
        )
        for name in ("forward_rope", "backward_rope")
    }
    for instructions in found.values():
        assert instructions["UTMALDG"] and instructions["UTMASTG"], found
        assert not {"STG.E.U16", "STG.E.64"} & set(instructions), found


@pytest.mark.parametrize(("case", "dtype"), ON_HOPPER)
def test_no_walk_overwrites_tiles_in_use(case, dtype, tmp_path):
    """Tiles come by TMA, tables without. Nor do registers spill. Of gathers without --every-config one pass alone."""
    skip_without_disassembler(is_module=False)
    machine = CompilingMachine(90, keep=tmp_path)
    passes = passes_of(case) if case in OF_GATHERS else [*KERNELS]
    compile_calls(case_of(case, dtype), machine, passes)
    assert_sound(machine)
    for name in (f"{each}_rope" for each in passes):
        code = disassembled(tmp_path / f"{name}.cubin")
        has_tma = any("UTMALDG" in line for line in code)
        assert has_tma is (case not in OF_GATHERS)
        assert not (has_tma and overwritten(code)), name


# Without --every-config one beside those of CASES
@pytest.mark.parametrize(
    "n", range(16, WIDEST_ROTATED_HEAD + 1, 16) if helpers.every_config else [WIDEST_ROTATED_HEAD * 3 // 4]
)
def test_no_width_overwrites_tiles_in_use(n, tmp_path):
    skip_without_disassembler(is_module=False)
    compile_calls(PLAIN._replace(n=n, rotary_dim=n), CompilingMachine(90, keep=tmp_path))
    for name in ("forward_rope", "backward_rope"):
        assert not overwritten(disassembled(tmp_path / f"{name}.cubin")), name


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (28, 4), (8, 1)], ids=str)
def test_lengths_do_not_make_kernels_of_their_own(heads):
    """cuda-tile compiles extents that are multiples of 16 apart: so the numbers of partial rows, of q and of k, never
    are where every block has a tile."""
    machine = CompilingMachine(90, compiles=False)
    for batch, length in ((2, 2048), (3, 4096), (7, 4096), (5, 8000), (2, 32768), (3, 6400)):
        case = CASES["128"]._replace(heads=heads, batch=batch, length=length, layout="contiguous")
        compile_calls(case, machine)
    assert len(machine.symbols["forward_rope"]) == len(machine.symbols["backward_rope"]) == 1


@pytest.mark.parametrize("case", ["128, positions", "80"])
def test_rows_of_tables_are_loaded_without_branches(case, tmp_path):
    """Loads behind a branch each, and their conversions to float32, would wait one for another."""
    skip_without_disassembler(is_module=False)
    compile_calls(CASES[case], CompilingMachine(90, keep=tmp_path))
    for name in ("forward_rope", "backward_rope"):
        code = " ".join(disassembled(tmp_path / f"{name}.cubin"))
        in_a_row = [len(re.findall(r"\bLDG\.", part)) for part in re.split(r"\bBRA\b", code)]
        assert max(in_a_row) >= 4, f"{name}: cos and sin of first and of second elements"

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope of cuTile under `reproducible("batch")`, in the machine code of sm_90: kernels add each head in one
order, whatever B, T and H are, load no tile over one that is still read, and spill next to no registers."""

import helpers
import pytest
from compiling import CompilingMachine, disassembled, skip_without_disassembler
from orders import Sum, differing, sums_of_rows
from pipelines import overwritten
from rope_cases import make
from test_compile_rope import CASES, DTYPES, case_of

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host.launcher import find
from tilegym_rmsnorm.backends.cutile.host.rope import FORWARD
from tilegym_rmsnorm.reproducibility import BATCH

skip_without_disassembler()

LITTLE = 16  # bytes of stack a thread
# B and T: 1, 16 divides them, or neither; 1 of them more than one way
FEW_LEADS, LEADS = [(1, 1), (3, 5)], [(1, 1), (1, 2), (3, 1), (3, 5), (1, 4096), (16, 16)]
HEADS = (5, 1), (32, 8)


def sums_of(case, folder, monkeypatch) -> dict[str, list[set[Sum]]]:
    """Return the sums of heads of each kernel, by its name, for each B and T."""
    found: dict[str, list[set[Sum]]] = {}
    machine = CompilingMachine(90, keep=folder)
    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    for batch, length in LEADS if helpers.every_config else FEW_LEADS:
        call = make(case._replace(batch=batch, length=length), "meta")
        spec = call.spec._replace(reproducible=BATCH)
        launch.qk_norm_rope_forward(spec, call.tensors)
        launch.qk_norm_rope_backward(spec, call.backward_tensors, call.wanted)
        for name in ("forward_rope", "backward_rope"):
            code = disassembled(folder / f"{name}.cubin")
            found.setdefault(name, []).append(sums_of_rows(code))
            assert not (any("UTMALDG" in line for line in code) and overwritten(code)), name
    assert not [each for each in machine.results if each.stack > LITTLE]
    return found


def is_composed(case) -> bool:
    call = make(case, "meta")
    return (
        find(
            FORWARD,
            CompilingMachine(90, compiles=False),
            call.spec._replace(reproducible=BATCH),
            call.tensors,
        )
        is None
    )


# What is not rotated has as many terms as the pairs, and is fused in another way: `differing` cannot tell them apart.
OF_EQUAL_PARTS = {"64, one step", "96, twelve heads"}
ALL = [(name, dtype) for name in CASES for dtype in DTYPES if not is_composed(case_of(name, dtype))]
# Those of which some loop's copy added in another order before heads were added pair by pair, and one of each kind
FEW = [
    ("128, positions", "16 bits"),
    ("128, weights of heads", "16 bits"),
    ("128, interleaved", "float32"),
    ("256, a quarter", "16 bits"),
]


@pytest.mark.parametrize(("name", "dtype"), ALL if helpers.every_config else FEW)
def test_a_head_is_added_in_one_order(name, dtype, tmp_path, monkeypatch):
    for sums in sums_of(case_of(name, dtype), tmp_path, monkeypatch).values():
        if name in OF_EQUAL_PARTS:
            assert all(each == sums[0] for each in sums), sums
        else:
            assert not differing(set().union(*sums)), sums


def test_the_number_of_heads_decides_no_order(tmp_path, monkeypatch):
    one, other = (
        sums_of(case_of("128", "16 bits")._replace(heads=heads), tmp_path, monkeypatch) for heads in HEADS
    )
    assert one == other

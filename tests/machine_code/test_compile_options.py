# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Each two options of a call together, compiled by tileiras as the backend's own functions launch it: kernels that take
all of it, or simpler ones between PyTorch's operations. Without --every-config a third of the cases, with each value of
each option, becomes machine code and the rest bytecode: names that are not bound and types that do not fit show in
both."""

import helpers
import pytest
import rope_cases
import variants
from compiling import CompilingMachine, assert_ends, skip_without_compiler
from option_cases import NORM_OPTIONS, ROPE_OPTIONS, norm_cases, run_norm
from option_cases import rope_cases as cases_of_rope

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES

skip_without_compiler()
pytestmark = [pytest.mark.usefixtures("fresh_plans"), pytest.mark.parametrize("architecture", ARCHITECTURES)]
NARROW = (64, 100, 1024)
# More rows than one block of each SM holds, and strides that do not fit into 32 bits
MANY_ROWS, LAYOUTS = (3, 4096), ("contiguous", "heads", "mixed", "offset", "gaps", "far")


@pytest.fixture
def machine(architecture, monkeypatch):
    """Set the machine that launches go to; of one architecture without --every-config."""
    helpers.skip_without_every_config(architecture != 90)
    machine = CompilingMachine(architecture, traces=True)
    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    return machine


def compile_norm(case):
    inputs = variants.make(case.variant, dy_dtype=case.dy_dtype, device="meta")
    run_norm(case, inputs, launch.rms_norm_forward, launch.rms_norm_backward)


def compile_rope(case):
    call = rope_cases.make(case, "meta")
    launch.qk_norm_rope_forward(call.spec, call.tensors)
    launch.qk_norm_rope_backward(call.spec, call.backward_tensors, call.wanted)


def compile_all(machine, compile_one, cases):
    for number, case in enumerate(cases):
        machine.compiles = helpers.every_config or number % 3 == 1
        try:
            compile_one(case)
        except Exception as error:
            raise AssertionError(f"does not compile: {case}") from error
    assert_ends(machine)


def test_each_two_options_of_a_norm_compile(machine):
    """Rows are narrow."""
    layouts = (*NORM_OPTIONS["layout"], "far") if helpers.every_config else LAYOUTS
    compile_all(machine, compile_norm, norm_cases(n=NARROW, length=MANY_ROWS, layout=layouts))


def test_each_two_options_of_wide_rows_compile(machine):
    helpers.skip_without_every_config()
    compile_all(
        machine, compile_norm, norm_cases(n=(1, 3001, 4096, 8192, 16384, 32768, 65536), length=MANY_ROWS)
    )


def test_each_two_options_of_rope_compile(machine):
    """Kernels of rope take these heads: others launch a norm's kernels."""

    def is_taken(case):
        """Rows begin at multiples of 16 bytes where neighbours are pairs."""
        is_aligned = case["n"] % 16 == 0 and "offset" not in (case["layout"], case["dy_layout"])
        return is_aligned or not case["interleaved"]

    compile_all(machine, compile_rope, cases_of_rope(is_taken, n=(64, 99, 256), rotary_dim=(64, 256)))
    assert set(machine.symbols) == {"forward_rope", "backward_rope", "sum_partials"}


def test_each_two_options_of_any_rope_compile(machine):
    helpers.skip_without_every_config()
    layouts = {name: (*ROPE_OPTIONS[name], "far") for name in ("layout", "dy_layout")}
    compile_all(machine, compile_rope, cases_of_rope(n=(6, 64, 99, 256, 520), **layouts))

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rare mixes of options that take the most registers, compiled by tileiras as the backend's own functions launch them:
no registers spill, and no warp waits for some. By the rules of usual calls each mix of a norm spilled on Hopper and on
sm_100, and each step on all three architectures: without --every-config it is compiled for one of those, in turn."""

import helpers
import pytest
import rope_cases
import torch
import variants
from compiling import CompilingMachine, assert_sound, skip_without_compiler
from helpers import BF16, FP16, FP32, in_turn
from option_cases import NormCase, run_norm
from rope_cases import RopeCase
from variants import Variant

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import rope
from tilegym_rmsnorm.backends.cutile.host.launcher import bind

skip_without_compiler()

ARCHITECTURES = (80, 90, 100)

HALVES = {"residual_dtype": FP16, "residual_out_dtype": FP16, "alpha": 0.5, "casting": "llama"}
NORMS = {
    "heads of 100": Variant(FP16, (2, 9, 4, 100), weight_dtype=FP16, bias_dtype=FP16, **HALVES),
    "weights of heads": Variant(FP16, (2, 9, 4, 128), "heads", FP16, **HALVES),
    "weights and biases of heads": Variant(
        FP16, (2, 9, 4, 64), "heads", FP16, FP16, layout="offset", **HALVES
    ),
    "wide weights and biases of heads": Variant(FP16, (2, 9, 4, 1024), "heads", FP32, FP16, **HALVES),
    "begun anywhere": Variant(FP16, (2, 9, 4, 1024), weight_dtype=FP16, layout="offset", **HALVES),
}
STEP = RopeCase(FP16, length=1, heads=(4, 2), n=64, rotary_dim=64, weight_dtype=FP16)
STEPS = {
    "of two heads": STEP,
    "weight of k alone": STEP._replace(
        weight=("none", "heads"),
        k_weight_dtype=BF16,
        positions="each",
        position_dtype=torch.int32,
        rounding="norm",
        dy_layout="offset",
    ),
    "interleaved": STEP._replace(
        interleaved=True, weight=("heads", "vector"), positions="one", casting="llama", wanted=(True, False)
    ),
    "a half, interleaved": STEP._replace(n=96, interleaved=True, weight=("heads", "heads")),
}


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(
    ("mix", "architecture"), in_turn(NORMS, ARCHITECTURES if helpers.every_config else (90, 100), of=2)
)
def test_heads_beside_a_residual_spill_nothing(mix, architecture, monkeypatch):
    machine, variant = CompilingMachine(architecture), NORMS[mix]
    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    inputs = variants.make(variant, device="meta")
    case = NormCase(variant, FP16, has_d_residual_out=True, needs=(True, True, True, True))
    run_norm(case, inputs, launch.rms_norm_forward, launch.rms_norm_backward)
    assert {"forward_tiles", "backward_tiles"} <= {each.name for each in machine.results}
    assert_sound(machine)


@pytest.mark.parametrize(("mix", "architecture"), in_turn(STEPS, ARCHITECTURES, of=3))
def test_one_step_of_few_heads_spills_nothing(mix, architecture):
    machine, call = CompilingMachine(architecture), rope_cases.make(STEPS[mix], "meta")
    bind(rope.FORWARD, machine, call.spec, call.tensors)(call.tensors)
    bind(rope.BACKWARD, machine, call.spec, call.backward_tensors, call.wanted)(call.backward_tensors)
    assert {"forward_rope", "backward_rope"} <= {each.name for each in machine.results}
    assert_sound(machine)

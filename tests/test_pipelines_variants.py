# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What test_pipelines.py reads, with another weight than x's dtype, none, and casting "llama": each is machine code of
its own. One block of 18432 bfloat16 columns was right with a bfloat16 weight, and with a float32 weight asked for the
next x while its workers still read this one."""

import helpers
import pytest
import torch

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from compiling import CompilingMachine, disassembled, run_backward, run_forward, skip_without_disassembler  # noqa: E402
from pipelines import overwritten  # noqa: E402
from test_pipelines import configs_with_tma  # noqa: E402

skip_without_disassembler()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VARIANTS = {
    "another weight": {"round_xhat": False, "m": 4096},
    "no weight": {"round_xhat": False, "m": 4096},
    "llama": {"round_xhat": True, "m": 4097},
}


def weight_dtype_of(variant: str, dtype: torch.dtype) -> torch.dtype | None:
    if variant == "no weight":
        return None
    return BF16 if dtype is FP32 and variant == "another weight" else FP32


@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_overwrites_tiles_in_use(variant, dtype, op, tmp_path):
    """Without --every-config those that have the most tiles under way, rows and teams, of 16 bits beside a float32
    weight."""
    if variant == "no weight" and op == "backward":
        pytest.skip("without a weight there is no dw")
    if not helpers.every_config and (variant != "another weight" or dtype is FP32 or op == "forward"):
        pytest.skip("read with --every-config")
    weight_dtype = weight_dtype_of(variant, dtype)
    checked = 0
    for config, n in configs_with_tma(op, dtype):
        if not helpers.every_config and config.kernel not in ("rows", "teams"):
            continue
        machine = CompilingMachine(90, keep=tmp_path)
        if op == "forward":
            run_forward(machine, config, n, dtype, weight_dtype, **VARIANTS[variant])
        else:
            run_backward(
                machine, config, n, dtype, weight_dtype, has_dw=op == "backward", **VARIANTS[variant]
            )
        for path in tmp_path.glob("*.cubin"):
            code = disassembled(path)
            assert not overwritten(code), (path.stem, config, n)
            checked += any("UTMALDG" in line for line in code)
            path.unlink()
    assert checked

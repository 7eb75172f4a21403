# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""warmup under a level of reproducibility: after it no number of rows compiles anything under that level, beside a
frozen weight neither."""

import pytest
import torch
from helpers import BF16, FP32

from tilegym_rmsnorm import reproducible
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.reproducibility import LEVELS

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from counting import META, counted_calls  # noqa: E402

from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import warm  # noqa: E402


@pytest.mark.parametrize("level", ["batch", "device"])
@pytest.mark.parametrize("n", [64, 4096, 5120, 18432])
@pytest.mark.parametrize("heads", [0, 3])
def test_no_number_of_rows_compiles_after_it(n, level, heads, monkeypatch):
    counts = {*range(1, 70), 256, 257, 1000, 1024, 4096, 4099, 65536, 65537, 2**20}
    with counted_calls(monkeypatch) as machine, reproducible(level):
        for calls in (
            warm.Calls(n, BF16, BF16, heads=heads),
            warm.Calls(n, BF16, BF16, residual=BF16, residual_out=BF16),
        ):
            warm.warm(META, calls)
        warmed, spec = set(machine.kernels), Spec(n, 1e-6, 0.0, "once", reproducible=LEVELS[level])
        assert warmed
        for m in sorted(counts):
            lead = (1, m, heads) if heads else (m,)
            x, rstd = (
                torch.empty((*lead, n), dtype=BF16, device=META),
                torch.empty(m * (heads or 1), device=META),
            )
            weight = torch.empty(n, dtype=BF16, device=META)
            launch.rms_norm_forward(spec, (x, weight, None, None))
            for wanted in (Wanted(BF16, dw=BF16), Wanted(BF16)):
                launch.rms_norm_backward(spec, (x, x, weight, rstd.to(FP32), None), wanted)
            assert machine.kernels == warmed, f"M = {m} needs {machine.kernels - warmed}"

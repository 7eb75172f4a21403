# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The first use of a process inside of a capture or a pool of memory, with nothing compiled before."""

from pathlib import Path

import pytest
from first_use import SURROUNDINGS, VARIANTS
from helpers import why_skip
from processes import run_script

SCRIPT = Path(__file__).with_name("first_use.py")


@pytest.mark.parametrize("backend", ["cutile", "triton"])
@pytest.mark.parametrize("columns", [512, 3001, 32768])  # of 32768 blocks wait for each other
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_first_use(surrounding, variant, columns, backend, tmp_path):
    if reason := why_skip(backend):
        pytest.skip(reason)
    caches = {
        "CUDA_TILE_CACHE_DIR": str(tmp_path / "cutile"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    ran = run_script(SCRIPT, surrounding, variant, str(columns), backend, **caches)
    assert ran.returncode == 0, ran.stderr[-3000:]

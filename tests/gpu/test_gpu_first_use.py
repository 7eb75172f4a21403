# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The first use of a process inside of a capture or a pool of memory, with nothing compiled before."""

from pathlib import Path

import first_capture
import first_use
import first_use_main_grad
import first_use_rope
import pytest
from processes import run_script

pytestmark = pytest.mark.parametrize("backend", ["cutile", "triton"], indirect=True)


@pytest.fixture
def run_anew(tmp_path):
    """Run a script of this folder, with empty caches."""

    def run(script, *arguments, **environment):
        caches = {
            "CUDA_TILE_CACHE_DIR": str(tmp_path / "cutile"),
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        }
        ran = run_script(Path(__file__).with_name(script), *arguments, **caches, **environment)
        assert ran.returncode == 0, ran.stderr[-3000:]

    return run


@pytest.mark.parametrize("columns", [512, 3001, 32768])  # of 32768 blocks wait for each other
@pytest.mark.parametrize("variant", first_use.VARIANTS)
@pytest.mark.parametrize("surrounding", first_use.SURROUNDINGS)
def test_first_use(surrounding, variant, columns, backend, run_anew):
    run_anew("first_use.py", surrounding, variant, str(columns), backend)


@pytest.mark.parametrize("columns", [512, 3001])
@pytest.mark.parametrize("variant", first_use.VARIANTS)
@pytest.mark.parametrize("surrounding", first_use.SURROUNDINGS)
def test_first_use_under_a_level(surrounding, variant, columns, backend, run_anew):
    """Rows may be copied, and a lone one that ends between 16 bytes gets zeros beside it, in the capture too."""
    is_summed_by_pytorch = backend == "cutile" and variant == "weights of heads" and columns == 3001
    level = "batch" if is_summed_by_pytorch else "device"
    run_anew("first_use.py", surrounding, variant, str(columns), backend, TILEGYM_RMSNORM_REPRODUCIBLE=level)


@pytest.mark.parametrize("form", first_use_rope.FORMS)
@pytest.mark.parametrize("surrounding", first_use_rope.SURROUNDINGS)
def test_first_use_of_rope(surrounding, form, backend, run_anew):
    run_anew("first_use_rope.py", surrounding, form, backend)


@pytest.mark.parametrize("form", first_use_rope.FORMS)
@pytest.mark.parametrize("surrounding", first_use_rope.SURROUNDINGS)
def test_first_use_of_rope_under_a_level(surrounding, form, backend, run_anew):
    run_anew("first_use_rope.py", surrounding, form, backend, TILEGYM_RMSNORM_REPRODUCIBLE="device")


@pytest.mark.parametrize("flag", first_use_main_grad.FLAGS)
@pytest.mark.parametrize("surrounding", first_use_main_grad.SURROUNDINGS)
def test_first_use_of_main_grad(surrounding, flag, backend, run_anew):
    run_anew("first_use_main_grad.py", surrounding, flag, backend)


@pytest.mark.parametrize("kind", first_capture.KINDS)
def test_capture_after_one_step(kind, backend, run_anew):
    run_anew("first_capture.py", kind, backend)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan 0.2.2's own Trainer with our converter, on CPUs: against its norms. scripts/environment.sh installs that
release into a folder of its own, beside the newer one."""

import json
from pathlib import Path

import pytest
import torch
from processes import run_once, run_script
from titan_release import FOLDER, MISSING
from torch.torch_version import TorchVersion
from torchtitan_converter_training import OURS, RUNS

SCRIPT = Path(__file__).with_name("torchtitan_converter_training.py")
if TorchVersion(torch.__version__) < "2.12":  # FSDP2 of two processes by gloo, with its own norms too
    MISSING = [*MISSING, "PyTorch 2.12, with 2.11 torchtitan's own training of two processes does not end"]
needs_it = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run_once(tmp_path_factory, SCRIPT, str(FOLDER), CUDA_VISIBLE_DEVICES="")


def test_the_page_has_these_arguments():
    page = Path(__file__).parents[2] / "docs" / "torchtitan.md"
    assert " ".join(OURS) in page.read_text(encoding="utf-8")


@needs_it
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_as_with_its_own_norms(name, done):
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert name in [each["run"] for each in results], done.stderr[-4000:]
    (result,) = (each for each in results if each["run"] == name)
    norms = 9 if RUNS[name][1] == "qwen3" else 5
    kept = ["norm"] if name == "FSDP2" else []  # FSDP2 has given the last one a class of its own
    assert result["classes"] == {"restored": norms - len(kept), "declined": kept}
    assert result["same state dict"]
    is_wide = name == "TP and SP"  # torchtitan 0.2 casts only where FSDP or one process does
    theirs, ours = result["losses"]
    assert len(theirs) == 3 and ours == pytest.approx(theirs, rel=3e-7 if is_wide else 3e-4)
    apart, weight = result["apart"]
    assert apart < (2e-5 if is_wide else 5e-2), weight


@pytest.mark.parametrize(("module", "other"), [("torchtitan", "0.3"), ("torchtitan_converter", "0.2")])
def test_the_other_release_is_refused(module, other, tmp_path):
    """Where torchtitan has neither overrides nor converters: the error names the module for other releases."""
    for folder in ("torchtitan", "torchtitan/config", "torchtitan/protocols"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tilegym_rmsnorm.integrations.{module}"
    done = run_script("-c", code)
    names = {"0.3": "torchtitan_converter", "0.2": r"torchtitan.rms_norm"}
    assert f"ImportError: expected torchtitan {other}" in done.stderr and names[other] in done.stderr

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The installed Megatron-Core's GPT trains with our norms as with its own, on CPUs, with gloo."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import run_script

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("megatron_training.py")
NORMS = 2 * 4 + 1  # of each layer two, and those of q and k; and the last


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found."""
    out = tmp_path_factory.mktemp("megatron") / "results.json"
    more = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    done = run_script(SCRIPT, out, **more)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return json.loads(out.read_text())


def assert_near(found: dict, wanted: dict, tolerance: float) -> None:
    """Gradients of norms are within a part of the largest of each weight's."""
    assert found.keys() == wanted.keys() and len(found) == NORMS
    for name, gradient in wanted.items():
        gradient, other = torch.tensor(gradient), torch.tensor(found[name])
        assert (other - gradient).abs().max() < tolerance * gradient.abs().max(), name


def check(results: list, loss_tolerance: float, gradient_tolerance: float) -> None:
    for name, ours, theirs in ((name, each["ours"], each["theirs"]) for name, each in results):
        assert (ours["ours"], theirs["ours"]) == (NORMS, 0), name
        assert theirs["losses"][-1] < theirs["losses"][0] - 0.1, name
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=loss_tolerance), name
        assert_near(ours["gradients"], theirs["gradients"], gradient_tolerance)
        assert ours["keys"] == theirs["keys"], name
        assert ours["sharded"] == theirs["sharded"] and len(ours["sharded"]) > NORMS, name


def test_one_process(results):
    """Compare losses, gradients and names in checkpoints: of both specs, recomputed, and with zero-centred gamma."""
    found = [each for of_rank in results for each in of_rank.items() if "ours" in each[1]]
    assert len(found) == 7
    check([each for each in found if each[0] != "bfloat16"], 1e-6, 2e-6)


def test_bfloat16(results):
    found = [each for of_rank in results for each in of_rank.items() if each[0] == "bfloat16"]
    check(found, 2e-3, 0.1)
    assert found[0][1]["ours"]["dtypes"] == ["torch.bfloat16"]  # by params_dtype


def test_its_own_norm_refuses_zero_centered_gamma(results):
    (refusal,) = [each["zero_centered_gamma"]["refusal"] for each in results if "zero_centered_gamma" in each]
    assert "zero_centered_gamma not supported" in refusal


@pytest.mark.parametrize("name", ["sequence_parallel", "sequence_parallel_zero_centered"])
def test_tensor_parallel_with_sequence_parallel(results, name):
    """Each process has half of the tokens, or of the heads. finalize_model_grads sums the gradients of weights that are
    marked, which then are those of one process."""
    first, second = (each[name] for each in results)
    (plain,) = [each["plain"]["theirs"] for each in results if "plain" in each]
    assert first["loss"] == second["loss"] == pytest.approx(plain["losses"][0], rel=1e-6)
    assert all(first["before"][each] != second["before"][each] for each in first["before"])
    assert first["gradients"] == second["gradients"]
    assert_near(first["gradients"], plain["gradients"], 2e-6)


@pytest.mark.parametrize("name", ["float32", "recomputed", "bfloat16, float32 main_grad", "bfloat16"])
def test_gradient_accumulation_fusion(results, name):
    """main_grads are those without it, but for the rounding of dw to bfloat16; Megatron's hooks ran, and left no
    gradient. Its hook adds to a main_grad of bfloat16."""
    found, other = (each["main_grads"] for each in results)
    assert found == other
    without, fused = (found[f"{name}, {fusion}"] for fusion in (False, True))
    assert (without["added"], fused["added"]) == ([False], [name != "bfloat16"])
    assert not without["kept"] and not fused["kept"]
    tolerance = {"bfloat16, float32 main_grad": 2**-7, "bfloat16": 1e-9}.get(name, 2e-6)
    assert_near(fused["gradients"], without["gradients"], tolerance)
    if "main_grad" in name:
        assert fused["gradients"] != without["gradients"]

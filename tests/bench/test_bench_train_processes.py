# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""bench.train over several processes on a CPU: FSDP2, tensor parallelism, and both, beside one process; and the command
as torchrun starts it."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from helpers import HAS_GPU
from processes import run_script
from training_steps import sizes_of

from bench.report import curves, training
from bench.train import traced
from bench.train.norms import ways_of

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU")]
MODELS = ("decoder-4096", "decoder-2048-qk")
SCRIPT = Path(__file__).with_name("spread_steps.py")


def spread(count, *command):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return run_script(*launcher, *command, GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("fsdp", "tp", "models"),
    [(2, 1, MODELS), (1, 2, MODELS), (2, 2, MODELS), (4, 2, MODELS[1:])],  # eight processes take minutes
)
def test_spread_models_train_as_one_process_does(fsdp, tp, models):
    """Also two ranks of a tensor-parallel group: they see one batch, and sum what each has of a weight's gradient. Also
    graphs of the whole step, which gather parameters themselves."""
    done = spread(fsdp * tp, SCRIPT, str(fsdp), str(tp), *models)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    passed = re.findall(r"passed (\S+) (\S+)", done.stdout)
    assert passed == [(model, name) for model in models for name in ways_of(model)]


def test_the_command_on_eight_processes(tmp_path):
    """FSDP2 and tensor parallelism, as docs and bench/README.md have it for llama-8b on eight GPUs."""
    options = ["--model", "llama-8b", "--tiny", "--eager", "--fsdp", "4", "--tp", "2", "--steps", "6"]
    done = spread(
        8, "-m", "bench.train", *options, "--norm", "F.rms_norm,residual", "--out", tmp_path / "new"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "train-llama-8b-eager-fsdp4-tp2.json", "the first rank alone writes"
    result = json.loads(path.read_text())
    first, second = result["trained"]
    assert (first["norm"], second["norm"], result["fsdp"], result["tp"]) == ("F.rms_norm", "residual", 4, 2)
    for each in result["trained"]:
        assert each["error"] is None and each["same_bits"] is True and len(each["losses"]) == 6
        assert each["losses"][0] == pytest.approx(5.55, abs=0.1), "256 letters, none of which is known"
    assert curves.distances_of(result)["residual"] < 2e-3 < first["losses"][0] - first["losses"][-1]
    sizes = sizes_of("llama-8b")
    seconds = sorted(first["step_s"])[len(first["step_s"]) // 2]
    rate = training.tokens_per_s(result, first)
    assert rate == pytest.approx(4 * sizes.tokens / seconds, rel=0.3), "of four batches, not of eight"
    assert done.stdout.count("written:") == 1 and done.stdout.count("first step: residual") == 1


def test_one_rank_of_eight_alone(tmp_path):
    """Compiled layers beside graphs, in one process: PyTorch's fake process group stands in for the other seven."""
    options = ["--model", "llama-8b", "--tiny", "--compile", "--fsdp", "4", "--tp", "2", "--one-rank"]
    given = ["--steps", "6", "--out", tmp_path / "new"]
    done = run_script("-m", "bench.train", *options, *given, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "train-llama-8b-compiled-fsdp4-tp2-one-rank.json"
    result = json.loads(path.read_text())
    names = [each["norm"] for each in result["trained"]]
    assert names == ["F.rms_norm", "rms_norm", "residual", *traced.CHANGES]
    first = result["trained"][0]
    for each in result["trained"]:
        assert each["same_bits"] is True and each["error"] is None
        assert each["losses"] == pytest.approx(first["losses"], abs=2e-3), (
            "rank 0 computes the same by each way"
        )
    assert len({*first["losses"]}) == 6 and first["losses"][0] == pytest.approx(5.55, abs=0.1)
    sizes = sizes_of("llama-8b")
    seconds = statistics.median(first["step_s"])
    assert training.tokens_per_s(result, first) == pytest.approx(sizes.tokens / seconds), (
        "its own batch alone"
    )
    of_all = training.mfu({**result, "gpu": "NVIDIA H200", "one_rank": False}, first)
    assert training.mfu({**result, "gpu": "NVIDIA H200"}, first) == pytest.approx(of_all), (
        "of the two of its group"
    )
    text = training.section(result)
    assert "rank 0 of FSDP2 4, TP 2" in text and "nothing is communicated" in text
    assert text in done.stdout

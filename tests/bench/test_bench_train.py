# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Training with each norm: the model that is trained, its precision, and when curves agree."""

from __future__ import annotations

import dataclasses
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from bench.report import curves
from bench.studies import train

CPU = torch.device("cpu")
PROVENANCE = {"gpu": None, "driver": None, "cuda": None, "tileiras": None, "versions": {"torch": "2.13.0"}}
PROVENANCE |= {
    "commit": "unknown",
    "dirty": None,
    "date": "2026-11-21T10:00:00+00:00",
    "note": "Not GPU figures.",
}


def make_run(name: str, losses: list[float], seed: int = 0) -> dict[str, Any]:
    run = {"name": name, "seed": seed, "losses": losses, "validation_loss": 2.0, "tokens_per_s": 1e5}
    return run | {"peak_bytes": 2**30, "norm_inputs": ["x torch.bfloat16"], "parameters": 10**8}


def test_curves_agree_within_the_distance_of_the_baseline_seeds(tmp_path):
    falling = [4.0 - 0.1 * step for step in range(20)]
    runs = [make_run("baseline", falling), make_run("baseline", [loss + 0.1 for loss in falling], seed=1)]
    runs += [
        make_run("cutile", [loss + 0.02 for loss in falling]),
        make_run("triton", [loss - 0.2 for loss in falling]),
    ]
    runs += [make_run("torch", [*falling[:-1], float("nan")])]
    setup = {"smoothed": 5, "steps": 20, "batch": 2, "length": 8}
    result = PROVENANCE | {"setup": setup, "runs": runs} | curves.compare(runs, window=5)
    assert result["noise"] == pytest.approx(0.1)
    assert result["agrees"] == {"cutile": True, "triton": False, "torch": False}
    assert "cutile agrees" in curves.verdict(result) and "triton DOES NOT AGREE" in curves.verdict(result)
    assert "100,000" in curves.readme_section(result, "train.png")
    curves.plot(result, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_moving_average():
    assert curves.smooth([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]


def test_replaced_norms_compute_the_same_model():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    tokens = torch.arange(24).reshape(2, 12) % 256
    logits = {}
    for name in ("baseline", "torch", "F.rms_norm"):
        model = train.build_model("baseline", train.CPU_SETUP, 0, CPU)
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                module.weight.data = torch.linspace(0.2, 3.0, train.CPU_SETUP.width).bfloat16()
                module.variance_epsilon = 0.5
        if name != "baseline":
            train.replace_norms(model, name)
            assert not any(isinstance(module, LlamaRMSNorm) for module in model.modules())
        logits[name] = model(input_ids=tokens).logits
    for name in ("torch", "F.rms_norm"):
        torch.testing.assert_close(logits[name], logits["baseline"], rtol=0.05, atol=0.02)


def test_master_parameters_keep_updates_that_bfloat16_would_lose():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = train.MasterAdamW(
        [weight], dataclasses.replace(train.CPU_SETUP, learning_rate=6e-4, steps=100)
    )
    for _ in range(30):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16 and (weight < 1).all()


def fake_transformers(monkeypatch):
    fake = types.ModuleType("transformers")
    fake.__version__, fake.__spec__ = "5", ModuleSpec("transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", fake)


def test_results_that_cannot_be_kept_are_refused_before_training(monkeypatch, tmp_path, capsys):
    fake_transformers(monkeypatch)
    monkeypatch.setattr(train, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(train, "load_corpus", lambda: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        train.main(["--out", str(tmp_path / "file")])
    assert "--out: no results can be kept there: " in capsys.readouterr().err


class EndedError(Exception):
    """Error in place of training."""


@pytest.fixture
def without_training(monkeypatch):
    """`main` as far as the first step, which ends it."""

    def end(*_):
        raise EndedError

    fake_transformers(monkeypatch)
    monkeypatch.setattr(train, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "load_corpus", lambda: (torch.zeros(9, dtype=torch.uint8),) * 2)
    monkeypatch.setattr(train, "train", end)


def test_training_that_ends_early_leaves_no_folder(without_training, monkeypatch, tmp_path):
    """An empty bench/results/cpu was left by each such run."""
    monkeypatch.setattr(train, "RESULTS", tmp_path / "results")
    with pytest.raises(EndedError):
        train.main([])
    assert list(tmp_path.iterdir()) == []


def test_training_without_transformers_says_what_to_install(without_training, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=r"needs transformers\. To install .* -m pip install '.*\[bench\]'"):
        train.main([])


@pytest.mark.parametrize("steps", ["0", "-3", "1.5", "", "2", "5"])
def test_too_few_steps_are_refused_by_one_rule(without_training, steps, capsys):
    """0 trained the 12 steps of the default. Then 0 was told of a minimum of 1, and 2 of one of 6."""
    with pytest.raises(SystemExit, match="2"):
        train.main(["--steps", steps])
    error = capsys.readouterr().err
    assert f"argument --steps: expected a whole number of at least 6, got {steps!r}" in error


def test_the_fewest_steps_are_trained(without_training, tmp_path):
    with pytest.raises(EndedError):
        train.main(["--steps", "6", "--out", str(tmp_path)])

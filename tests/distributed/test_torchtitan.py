# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan's own Trainer with our overrides, on CPUs: against its norms. torchtitan_training.py runs it."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from processes import run_once
from torch.torch_version import TorchVersion
from torchtitan_training import GRAPHS, OVERRIDES, RUNS, SPMD_RUNS

FOLDER = Path(__file__).parent
RELEASE = TorchVersion(torch.__version__)
if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if RELEASE < "2.12":
    pytest.skip("torchtitan 0.3 needs PyTorch 2.12", allow_module_level=True)

BLOCKS = {"llama3": "Llama3", "qwen3": "Qwen3", "deepseek_v3": "DeepSeekV3"}
NAMES = [*RUNS, *(SPMD_RUNS if RELEASE >= "2.14" else ())]


def cases() -> list[str]:
    """By the source: to import it here would change what PyTorch says of this machine."""
    tree = ast.parse((FOLDER / "torchtitan_cases.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [each.name for each in functions if not each.args.args and not each.name.startswith("_")]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    script = FOLDER / "torchtitan_training.py"
    return run_once(tmp_path_factory, script, *RUNS, GRAPHS, *cases(), CUDA_VISIBLE_DEVICES="", timeout=900)


@pytest.fixture(scope="module")
def done_by_spmd_types(tmp_path_factory):
    script = FOLDER / "torchtitan_training.py"
    return run_once(tmp_path_factory, script, *SPMD_RUNS, CUDA_VISIBLE_DEVICES="", timeout=900)


def result_of(done, name, override):
    lines = (line for line in done.stdout.splitlines() if line.startswith("{"))
    results = {(each["run"], each["override"]): each for each in map(json.loads, lines)}
    assert (name, override) in results, done.stderr[-4000:]
    return results[name, override]


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_with_its_own_norms(name, override, request):
    done = request.getfixturevalue("done" if name in RUNS else "done_by_spmd_types")
    result = result_of(done, name, override)
    model, options = (RUNS | SPMD_RUNS)[name][1:]
    layers = options.get("n_layers", 2)
    of_layer = {"llama3": 2, "deepseek_v3": 3, "qwen3": 4}[model]
    expected = {"RMSNorm": of_layer * layers + 1}
    if override == "layers":
        expected = {"RMSNorm": (of_layer - 1) * layers + 1, "RMSNormOfSum": layers}
        expected[f"{BLOCKS[model]}TransformerBlock"] = layers
        expected |= {"Attention": layers} if model == "qwen3" else {}
    assert result["classes"] == expected
    assert result["same state dict"]

    is_wide = options.get("dtype") == "float32"
    limit = 3e-7 if is_wide else 3e-4 if options.get("compiled") else 1e-4
    theirs, ours = result["losses"]
    assert len(theirs) == 3 and ours == pytest.approx(theirs, rel=limit)
    apart, weight = result["apart"]  # of a gradient, by its norm
    limit = 2e-5 if is_wide else 5e-2
    assert apart < (2e-3 if "expert" in weight else limit), weight  # experts compute in bfloat16 in any case


@pytest.mark.parametrize(
    ("name", "found"),
    {
        "tilegym_rmsnorm_replace": {"replace_rmsnorm_pass": 6},
        "tilegym_rmsnorm_regional": {
            "annotate_rmsnorm_for_regional_inductor_pass": 6 * 3
        },  # and getitem nodes
        "rms_norm": {"RMSNorm": 3},
        "layers": {"RMSNorm": 2, "RMSNormOfSum": 1, "Llama3TransformerBlock": 1},
    }.items(),
)
def test_graph_trainer(name, found, done):
    """Of a layer: two norms in it and one behind it, each forward and backward."""
    result = result_of(done, GRAPHS, name)
    assert result["classes"] == found
    theirs, ours = result["losses"]
    assert len(theirs) == 3 and ours == pytest.approx(theirs, rel=3e-7)
    assert result["apart"][0] < 2e-5 and result["same state dict"]


@pytest.mark.parametrize("case", cases())
def test_overrides(case, done):
    assert f"passed {case} " in done.stdout, done.stderr[-4000:]

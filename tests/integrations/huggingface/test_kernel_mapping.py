# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The mapping for `kernelize`. Where the library `kernels` is not installed, a stand-in has what its
`kernels/layer/layer.py` of 0.17 asks of a layer and does to a module."""

import copy
import importlib
import importlib.metadata
import inspect
import re
import types
from pathlib import Path

import pytest
import torch
import transformers
from processes import run_script
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from tilegym_rmsnorm.integrations.huggingface import kernel_mapping, mapping
from tilegym_rmsnorm.integrations.huggingface.arithmetic import match_of
from tilegym_rmsnorm.integrations.huggingface.mapping import Repository

N = 32
NORMS = {
    LlamaRMSNorm: "RMSNorm",
    GptOssRMSNorm: "RMSNorm",
    HeliumRMSNorm: "RMSNorm",
    Qwen3NextRMSNorm: "RMSNormZeroCentered",
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(mapping, "version", lambda name: "0.18.2")


def kernelize(model, kernels, device_type="cpu"):
    """Put layers in by the contract: loaded and checked once for equal repositories."""
    loaded = {}
    for module in model.modules():
        name = NORMS.get(type(module))
        repository = copy.deepcopy(kernels).get(name, {}).get(device_type)
        if repository is None:
            continue
        if repository not in loaded:
            loaded[repository] = checked(repository.load(), type(module))
        layer = loaded[repository]
        assert layer.can_torch_compile and layer.has_backward
        module.forward = types.MethodType(layer.forward, module)
    assert len(loaded) <= 1
    return model


def checked(layer, replaced):
    assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
    members = {name for name, _ in inspect.getmembers(layer)}
    allowed = {name for name, _ in inspect.getmembers(nn.Module)} | {"can_torch_compile", "has_backward"}
    assert members <= allowed
    ours, theirs = (inspect.signature(cls.forward).parameters.values() for cls in (layer, replaced))
    assert [p.kind for p in ours] == [p.kind for p in theirs]
    return layer


def built(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.ModuleList([cls(N) for cls in NORMS]).to(dtype)
    for norm in model:
        nn.init.normal_(norm.weight, 0.5, 0.3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_class_keeps_its_arithmetic(dtype, monkeypatch):
    ran = []
    monkeypatch.setattr(mapping, "run", lambda *given, run=mapping.run: ran.append(given) or run(*given))
    original, model = built(dtype), kernelize(built(dtype), kernel_mapping("cpu"))
    x = torch.randn(3, N).to(dtype)
    for before, after in zip(original, model, strict=True):
        assert torch.equal(after(x), before(x))
        assert torch.equal(after(hidden_states=x), before(x))
    assert len(ran) == 2 * len(NORMS)


def test_what_is_not_known_and_what_no_kernel_reads_runs_as_before():
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    norm = modeling.Qwen4ExpTextRMSNorm(N)
    expected = norm(torch.ones(2, N))
    norm.forward = types.MethodType(mapping.TileGymRMSNorm.forward, norm)
    assert torch.equal(norm(torch.ones(2, N)), expected)
    model = kernelize(built(torch.float64), kernel_mapping("cpu"))
    x = torch.randn(3, N, dtype=torch.float64)
    for before, after in zip(built(torch.float64), model, strict=True):
        assert torch.equal(after(x), before(x))


def test_other_devices_are_left():
    model = kernelize(built(), kernel_mapping())
    assert not any("forward" in norm.__dict__ for norm in model)
    assert all(list(of_layer) == ["cuda"] for of_layer in kernel_mapping().values())


def test_repositories_are_equal():
    assert Repository() == copy.deepcopy(Repository()) and len({Repository(), Repository()}) == 1
    assert str(Repository()) == "tilegym_rmsnorm, layer TileGymRMSNorm"
    assert Repository() != object()


@pytest.mark.slow
def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    model = kernelize(built(), kernel_mapping("cpu"))
    x = torch.randn(3, N)
    for norm in model:
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), norm(x))


def test_without_the_library(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mapping, "version", missing)
    with pytest.raises(
        ImportError, match=r'^kernel_mapping needs the library kernels, 0.17 or later: pip install "'
    ):
        kernel_mapping()
    monkeypatch.setattr(mapping, "version", lambda name: "0.16.1")
    with pytest.raises(ImportError, match="^kernel_mapping needs kernels 0.17 or later, not 0.16.1$"):
        kernel_mapping()


def test_the_library_itself():
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the library kernels is not installed")
    kernels = importlib.import_module("kernels")
    for cls, name in NORMS.items():
        kernels.replace_kernel_forward_from_hub(cls, name)
    original, model = built(), built()
    with kernels.use_kernel_mapping(kernel_mapping("cpu")):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    x = torch.randn(3, N)
    for before, after in zip(original, model, strict=True):
        assert after.forward.__func__ is mapping.TileGymRMSNorm.forward
        assert torch.equal(after(x), before(x))


def marked():
    """Names of layers that the installed transformers asks for, the names of the classes, and the modules of these."""
    root = Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        found = re.findall(
            r'@use_kernel_forward_from_hub\("(\w*RMSNorm\w*)"\)\s+class (\w+)', path.read_text()
        )
        yield from (
            (layer, name, f"transformers.models.{path.parent.name}.{path.stem}") for layer, name in found
        )


def test_each_name_that_transformers_asks_for():
    """Gated norms take a second tensor, and are left to their own kernels."""
    names = {layer for layer, _, _ in marked()}
    assert "RMSNorm" in names and names - set(mapping.LAYER_NAMES) <= {"RMSNormGated"}
    models = [each for each in marked() if each[0] == "RMSNormZeroCentered"]
    for _, name, module in models:
        assert match_of(getattr(importlib.import_module(module), name)).offset == 1.0


def test_transformers_calls_kernelize():
    """`use_kernels=True` puts the mapping of transformers in effect, so that is where ours has to be."""
    pytest.importorskip("kernels", reason="the library kernels is not installed")
    done = run_script(Path(__file__).with_name("use_kernels.py"))
    if done.returncode and done.stderr.startswith("this transformers"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["passed", "Llama", "passed", "Qwen3_5"]

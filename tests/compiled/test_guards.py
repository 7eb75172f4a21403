# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Dynamo evaluates its guards before each call of a compiled function: a call of ours leaves few of them, and none that
keeps its graph from being saved and loaded (`caching_precompile`)."""

import pytest
import torch
from helpers import BF16, FP32
from llama_like import LlamaLikeNorm
from processes import run_script
from torch import nn
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import RMSNorm, patch_model, qk_norm_rope, rms_norm, rms_norm_rope, use_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="guards are counted with 2.13"),
]

N, MOST = 8, 67
X, R, W = torch.randn(3, 4, N), torch.randn(3, 4, N), torch.rand(N)
TABLE = torch.randn(4, N)


def in_a_block(x):
    with use_backend("auto"):
        return rms_norm(x, N, W, 1e-6)


def of_module(**options):
    norm = RMSNorm(N, **options)
    return lambda x: norm(x)


def of_module_with_residual(**options):
    norm = RMSNorm(N, **options)
    return lambda x: norm(x, R)


def of_patched(norm):
    assert len(patch_model(nn.Sequential(norm)).patched) == 1
    return lambda x: norm(x.bfloat16())


CALLS = {
    "rms_norm": lambda x: rms_norm(x, (N,), W, 1e-6),
    "no eps": lambda x: rms_norm(x, x.shape[-1:], W),
    "an int, a bias, a backend": lambda x: rms_norm(x, N, W, 1e-6, bias=W, backend="auto"),
    "out_dtype, llama": lambda x: rms_norm(x, [N], W, 1e-6, out_dtype=BF16, casting="llama", offset=1.0),
    "weights of heads": lambda x: rms_norm(x, N, torch.ones(4, N), 1e-6),
    "residual": lambda x: rms_norm(x, (N,), W, 1e-6, residual=R),
    "residual, dtypes": lambda x: rms_norm(
        x, (N,), W, residual=R, residual_alpha=0.5, residual_dtype=FP32, out_dtype=BF16
    ),
    "use_backend": in_a_block,
    "RMSNorm": of_module(),
    "RMSNorm, bias": of_module(bias=True, eps=1e-6),
    "RMSNorm, residual": of_module_with_residual(residual_alpha=0.5),
    "a patched norm": of_patched(LlamaLikeNorm(N, BF16)),
    "a patched norm, a weight of another dtype": of_patched(LlamaLikeNorm(N, FP32)),
    "a patched nn.RMSNorm": of_patched(nn.RMSNorm(N, dtype=BF16)),
    "qk_norm_rope": lambda x: qk_norm_rope(x[None], R[None], W, None, TABLE[:3], TABLE[:3]),
    "qk_norm_rope, positions": lambda x: qk_norm_rope(
        x[None], R[None], W, W, TABLE, TABLE, position_ids=torch.arange(3), rotary_dim=N, eps=1e-6
    ),
    "rms_norm_rope": lambda x: rms_norm_rope(x, W, TABLE[:3], TABLE[:3], interleaved=True),
}


def guards_of(call, *inputs):
    """The names of the guards of one compiled frame, and what it returns."""
    found = []

    def keep(entries):
        found.extend(f"{each.guard_type} {each.name}" for each in entries)
        return [True] * len(entries)

    compiled = torch.compile(call, backend="eager", fullgraph=True, options={"guard_filter_fn": keep})
    return found, compiled(*inputs)


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_has_few_guards(name):
    found, result = guards_of(CALLS[name], X)
    torch.testing.assert_close(result, CALLS[name](X))
    assert 0 < len(found) <= MOST, "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_no_guard_is_on_a_class_or_on_what_has_no_name(name):
    """Such a guard cannot be kept on disk: the class of a Parameter, the namespace of a NamedTuple's constructor."""
    found, _ = guards_of(CALLS[name], X)
    assert not [each for each in found if each.startswith("CLASS_MATCH type(") or "unnamed_scope" in each]


SCRIPT = """
import sys

import torch
from torch import nn
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import RMSNorm, qk_norm_rope, rms_norm

torch._dynamo.config.caching_precompile = True
torch.manual_seed(0)
W, TABLE, X, R = torch.rand(8), torch.randn(4, 8), torch.randn(3, 4, 8), torch.randn(3, 4, 8)


# Ops and a matrix product, of which Inductor makes no C++: to compile it takes longer than all the rest.
def functions(x):
    y, total = rms_norm(x, (8,), W, residual=R)
    return qk_norm_rope(y, total, W, None, TABLE[:3], TABLE[:3], eps=1e-6)


model = nn.Sequential(nn.Linear(8, 8, bias=False), RMSNorm(8, bias=True))
for name, call in dict(functions=functions, model=model).items():
    x = X.clone().requires_grad_()
    y, expected = torch.compile(call, fullgraph=True)(x), call(x)
    torch.testing.assert_close(y, expected)
    both = [each if isinstance(each, tuple) else (each,) for each in (y, expected)]
    dx, other = (torch.autograd.grad([t.sin().sum() for t in each], x)[0] for each in both)
    torch.testing.assert_close(dx, other)
    print("compiled" if torch._dynamo.utils.counters["stats"]["unique_graphs"] else "loaded", name)
    torch._dynamo.utils.counters.clear()
torch.compiler.save_cache_artifacts()  # writes the folder of the cache, too
"""


def test_a_graph_is_saved_and_loaded_by_another_process(tmp_path):
    """The second process traces nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    results = [run_script(script, **kept) for _ in range(2)]
    for expected, result in zip(("compiled", "loaded"), results, strict=True):
        assert result.returncode == 0, result.stderr[-3000:]
        lines = result.stdout.splitlines()
        assert len(lines) == 2 and {line.split()[0] for line in lines} == {expected}, result.stdout

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rules for all adapters of other libraries' names."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BF16, FP16, FP32, assert_within, expected_results, make_inputs, why_skip
from peer_signatures import installed_signature, signature

from tilegym_rmsnorm import use_backend
from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm

SCRIPT = Path(__file__).parents[2] / "scripts" / "peers_tests.sh"

# By the libraries' own names: in TileGym 1.5.1, quack 0.6.5, apex in July 2026, flashinfer 0.7.2, vLLM 0.33,
# TransformerEngine 2.20, where **kwargs are KEYWORDS, and liger-kernel 0.8.5.
RMSNORM = (
    "(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-06, prenorm=False, "
    "weight_offset=0.0)"
)
AFFINE = "(input, weight, normalized_shape, eps=1e-06, memory_efficient=False)"
PLAIN = "(input, weight, eps=1e-06, out=None, enable_pdl=None)"
ADD = "(input, residual, weight, eps=1e-06, enable_pdl=None)"
OF_LIGER = "(X, W, eps, offset=0.0, casting_mode='llama', in_place=True)"
OF_A_MODEL = "(hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=True, row_mode=None)"
OF_GEMMA3 = OF_A_MODEL.replace("hidden_size", "dim").replace("True, row_mode=None", "False")
OF_OLMO = OF_A_MODEL.replace("1.0", "0.0").replace("gemma", "llama").replace("zeros", "ones")
SIGNATURES = {
    tilegym: {
        "rms_norm": "(input, normalized_shape, weight, eps, bias=None, mode=None, offset=0.0, **kwargs)",
        "rms_norm_backward": "(x, dy, weight, rstd)",
        "rms_norm_backward_torch": "(x, dy, weight, rstd)",
        "compute_rms_norm_rstd_torch": "(x, eps)",
        "rms_norm_backward_workspace_bytes": "(M, N)",
        "get_rms_norm_module": "(model='llama')",
        "_TileRMSNorm": "(hidden_size, eps=1e-06, offset=0.0)",
        "_RMSNormForGemma3": "(dim, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False)",
    },
    quack: {
        "rmsnorm": RMSNORM,
        "rmsnorm_fwd": RMSNORM.replace("prenorm", "store_rstd"),
        "rmsnorm_bwd": "(x, weight, dout, rstd, dresidual_out=None, has_bias=False, has_residual=False, "
        "weight_offset=0.0)",
        "QuackRMSNorm": "(dim, eps=1e-06, elementwise_affine=True, device=None, dtype=None)",
    },
    apex: {
        "fused_rms_norm_affine": AFFINE,
        "mixed_dtype_fused_rms_norm_affine": AFFINE,
        "fused_rms_norm": AFFINE.replace("weight, ", ""),
        "FusedRMSNorm": "(normalized_shape, eps=1e-05, elementwise_affine=True, memory_efficient=False)",
        "MixedFusedRMSNorm": "(normalized_shape, eps=1e-05, *, memory_efficient=False, **kwargs)",
    },
    flashinfer: dict.fromkeys(("rmsnorm", "gemma_rmsnorm"), PLAIN)
    | dict.fromkeys(("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"), ADD),
    vllm: {"rms_norm": "(x, weight, epsilon, variance_size=None)"},
    transformer_engine: {
        "RMSNorm": "(normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, "
        "zero_centered_gamma=False, hidden_size=None, **kwargs)"
    },
    liger: {
        "liger_rms_norm": OF_LIGER,
        "liger_fused_add_rms_norm": OF_LIGER.replace("X, W", "X, R, W"),
        "LigerRMSNorm": OF_OLMO.replace("row_mode=None", "row_mode=None, elementwise_affine=True"),
        "LigerFusedAddRMSNorm": OF_OLMO.replace("True, row_mode=None", "False"),
        "LigerRMSNormForGemma": OF_A_MODEL,
        "LigerRMSNormForGemma2": OF_A_MODEL.replace("True", "False"),
        "LigerRMSNormForGemma3": OF_GEMMA3,
        "LigerRMSNormForGemma4": "(dim, eps=1e-06, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, "
        "with_scale=True)",
        "LigerRMSNormForOlmo2": OF_OLMO.replace("True", "False"),
        "LigerRMSNormForGlm4": OF_OLMO.replace("True", "False"),
        "LigerRMSNormForQwen3Next": OF_A_MODEL.replace("True", "False"),
    },
}
FILES = {
    **{tilegym: "ops/cutile/rms_norm.py", quack: "rmsnorm.py", apex: "normalization/fused_layer_norm.py"},
    **{flashinfer: "norm/__init__.py", vllm: "ir/ops/layernorm.py", liger: "transformers/rms_norm.py"},
    **{transformer_engine: "pytorch/module/rmsnorm.py", "liger_rms_norm": "transformers/functional.py"},
    "liger_fused_add_rms_norm": "transformers/functional.py",
    "LigerFusedAddRMSNorm": "transformers/fused_add_rms_norm.py",
}
OURS = {"_TileRMSNorm": "TileRMSNorm", "_RMSNormForGemma3": "TileRMSNormForGemma3"}
KEYWORDS = {
    "rms_norm_backward_workspace_bytes": ("dtype", "device"),
    "RMSNorm": ("device", "dtype", "sm_margin"),
}
each_name = pytest.mark.parametrize(
    ("adapter", "name"), [(adapter, name) for adapter, names in SIGNATURES.items() for name in names]
)


@each_name
def test_signature(adapter, name):
    expected = SIGNATURES[adapter][name]
    if name == "liger_rms_norm":  # row_mode is their autograd function's last argument
        expected = expected[:-1] + ", row_mode=None)"
    if name == "RMSNorm":
        expected = expected.replace(", **kwargs", "")
    found = signature(getattr(adapter, OURS.get(name, name)), without=KEYWORDS.get(name, ()))
    assert found == expected
    assert adapter is not vllm or signature(vllm.supports_args) == expected


@each_name
def test_signature_of_the_installed_library(adapter, name):
    package = adapter.__name__.rpartition(".")[2]
    if adapter is liger:
        package = "liger_kernel"
        release = importlib.metadata.version("liger-kernel") if importlib.util.find_spec(package) else ""
        if not release.startswith("0.8."):
            pytest.skip(f"the adapter was written against liger-kernel 0.8, installed is {release or 'none'}")
    found = installed_signature(package, FILES.get(name) or FILES[adapter], name)
    assert (found.replace(", /", "") if adapter is tilegym else found) == SIGNATURES[adapter][name]


CALLS = {
    "tilegym": lambda x, w: tilegym.rms_norm(x, None, w, 1e-6),
    "quack": lambda x, w: quack.rmsnorm(x, w),
    "liger": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, 0.0, "gemma"),
    "vllm": lambda x, w: vllm.rms_norm(x, w, 1e-6),
    "flashinfer": lambda x, w: flashinfer.rmsnorm(x, w),
    "apex": lambda x, w: apex.fused_rms_norm_affine(x, w, 8),
    "transformer_engine": lambda x, w: transformer_engine.RMSNorm(8, 1e-6, device=x.device)(x),
}


@pytest.mark.parametrize("library", CALLS)
def test_they_run_on_the_backend_in_effect(library, backend):
    x, weight = torch.randn(3, 8), torch.ones(8)
    if torch.cuda.is_available():
        x, weight = x.cuda(), weight.cuda()
    with use_backend(backend):
        y = CALLS[library](x, weight)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), None, 1e-6))


def by_transformer_engine(x, weight, eps, offset):
    options = {"zero_centered_gamma": bool(offset), "device": x.device, "dtype": weight.dtype}
    norm = transformer_engine.RMSNorm(x.shape[-1], eps, **options)
    return torch.func.functional_call(norm, {"weight": weight}, x)


def by_liger(mode):
    return lambda x, weight, eps, offset: liger.liger_rms_norm(x, weight, eps, offset, mode)


def by_tilegym(mode):
    return lambda x, weight, eps, offset: tilegym.rms_norm(x, None, weight, eps, mode=mode, offset=offset)


EXACT = {  # of x, weight, eps and offset, and by which casting
    "quack": (lambda x, weight, eps, offset: quack.rmsnorm(x, weight, eps=eps, weight_offset=offset), "once"),
    "apex": (lambda x, weight, eps, _: apex.fused_rms_norm_affine(x, weight, (96,), eps), "llama"),
    "transformer_engine": (by_transformer_engine, "once"),
    **{f"tilegym, {mode}": (by_tilegym(mode), "once") for mode in tilegym.MODES},
    "liger, llama": (by_liger("llama"), "llama"),
    **{f"liger, {mode}": (by_liger(mode), "once") for mode in ("gemma", "none")},
    "quack without a weight": (lambda x, _, eps, __: quack.rmsnorm(x, eps=eps), "once"),
    "apex without a weight": (lambda x, _, eps, __: apex.fused_rms_norm(x, 96, eps), "llama"),
}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (FP16, FP32), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("name", EXACT)
def test_they_agree_with_float64(name, dtype, weight_dtype, offset):
    call, casting = EXACT[name]
    if offset and (name == "apex" or "without" in name):
        pytest.skip("it has no offset")
    if name == "transformer_engine":
        weight_dtype = dtype  # to which it casts x
    weight_dtype = None if "without" in name else weight_dtype
    inputs = make_inputs(37, 96, dtype, weight_dtype, offset=offset, casting=casting)
    leaves = [t if t is None else t.clone().requires_grad_() for t in (inputs.x, inputs.weight)]
    y = call(*leaves, inputs.eps, offset)
    gradients = torch.autograd.grad(y, leaves if weight_dtype else leaves[:1], inputs.dy)
    assert_within(expected_results(inputs), y=y, **dict(zip(("dx", "dw"), gradients, strict=False)))


def test_none_falls_back_where_a_backend_was_named():
    """float64, which no kernel takes."""
    if reason := why_skip("triton"):
        pytest.skip(reason)
    x = torch.randn(3, 8, dtype=torch.float64)
    for library, call in CALLS.items():
        if library == "transformer_engine":  # takes x in its weight's dtype
            continue
        with use_backend("triton"), pytest.raises(RuntimeError, match="backend 'triton' was asked for"):
            call(x, torch.ones(8, dtype=torch.float64))


@pytest.mark.slow
def test_the_script_of_their_tests_puts_adapters_in(tmp_path):
    """The checkout holds nothing but the module that the script looks for, and a test."""
    find = "from quack.rmsnorm import rmsnorm as found\n\ndef test_it():\n"
    for name, text in {
        "quack/__init__.py": "from quack.rmsnorm import rmsnorm\n",
        "quack/rmsnorm.py": "rmsnorm = rmsnorm_fwd = rmsnorm_bwd = None\n",
        "tests/test_rmsnorm.py": find
        + "    assert found.__module__ == 'tilegym_rmsnorm.integrations.quack'\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = ["bash", SCRIPT, "quack", tmp_path, "--rootdir", tmp_path, "--import-mode=importlib"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr

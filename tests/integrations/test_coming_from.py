# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Table rows of docs/coming-from.md whose cells begin with a call: both calls give the same bits."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import BF16, DEVICE, FP32

import tilegym_rmsnorm
from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
B, S, H, D = 2, 3, 4, 16
n = 64


def test_veomni(monkeypatch):
    """The page's own lines, beside the registry's published signatures."""
    found = {}
    stand_in = SimpleNamespace(
        KERNEL_REGISTRY=SimpleNamespace(
            register=lambda spec: found.update({(spec.op_name, spec.variant): spec})
        ),
        HardwareRequirement=lambda device_type, min_compute_capability=None: device_type,
        KernelSpec=lambda name, op_name, variant, factory, hardware, description="": SimpleNamespace(
            **locals()
        ),
    )
    for name in ("veomni", "veomni.ops", "veomni.ops.kernel_registry"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    section = PAGE.read_text(encoding="utf-8").split("## VeOmni", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("    ") or not line]
    exec(compile(textwrap.dedent("\n".join(lines)), "docs/coming-from.md", "exec"), {})
    x, weight = torch.randn(3, n, device=DEVICE, dtype=BF16), torch.randn(n, device=DEVICE, dtype=BF16)
    for variant, offset in (("standard", 0.0), ("qwen3_5", 1.0)):
        spec = found["rms_norm", variant]
        assert (spec.name, spec.hardware) == ("tilegym_rmsnorm", "gpu")
        expected = tilegym_rmsnorm.rms_norm(x, n, weight, 1e-5, offset=offset)
        assert torch.equal(spec.factory()(x, weight, 1e-5), expected)


def names_of_libraries():
    """Map the libraries' own paths, which the left cells call."""
    names = {}
    for adapter in (tilegym, quack, liger, apex):
        names |= vars(adapter)
    names["tilegym"] = SimpleNamespace(ops=tilegym)
    names["te"] = SimpleNamespace(RMSNorm=transformer_engine.RMSNorm, ops=transformer_engine)
    names["flashinfer"] = SimpleNamespace(norm=flashinfer)
    names["vllm"] = SimpleNamespace(ir=SimpleNamespace(ops=vllm))
    return names


def values(of_heads):
    torch.manual_seed(0)
    x, r, dy = (torch.randn(2, 16, n, device=DEVICE).to(BF16) for _ in range(3))
    w, b = torch.randn(n, device=DEVICE).to(BF16), torch.randn(n, device=DEVICE).to(BF16)
    if of_heads:
        w = torch.randn(H, D, device=DEVICE).to(BF16)
    rstd = tilegym_rmsnorm.rms_norm_forward(x, None, 1e-6)[1]
    eps = epsilon = 1e-5
    q, bias, d, dout = torch.randn(B, S, H, D, device=DEVICE).to(BF16), b, FP32, dy
    return {**locals(), "D": D, "n": n, "torch": torch}


def first_code(cell):
    """The expression in backticks that a cell begins with, or None."""
    found = re.match(r"`([^`]+)`", cell)
    if found is None:
        return None
    try:
        is_call = isinstance(ast.parse(found[1], mode="eval").body, (ast.Call, ast.Subscript))
    except SyntaxError:  # an argument, such as `offset=1.0`
        return None
    return found[1] if is_call else None


def rows():
    section = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and all(map(first_code, cells)) and "set_" not in line:
            yield pytest.param(*map(first_code, cells), id=f"{section}: {first_code(cells[0])}")


ROWS = list(rows())
assert len(ROWS) >= 30


def result(code, names, given):
    found = eval(code, {**names, **given})
    if isinstance(found, torch.nn.Module):
        found = found.to(DEVICE)(given["x"])
    found = found if isinstance(found, tuple) else (found,)
    if code.startswith("rmsnorm_fwd"):
        found = found[0], found[2].flatten()  # without x
    return tuple(each for each in found if each is not None)


@pytest.mark.parametrize(("left", "right"), ROWS)
def test_both_cells_of_a_row_give_the_same(left, right):
    given = values(of_heads="(q" in left)
    if left.startswith("mixed_"):
        given["w"] = given["w"].float()
    if left.startswith("rmsnorm_bwd"):
        given["rstd"] = given["rstd"].view(given["x"].shape[:-1])
    got, expected = result(left, names_of_libraries(), given), result(right, vars(tilegym_rmsnorm), given)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("casting", ["once", "llama"])
def test_a_float32_sum_is_normalized_before_it_is_rounded(dtype, casting):
    """quack, vLLM and flashinfer do so."""
    x, residual = (torch.randn(64, 512, device=DEVICE).mul(2).to(dtype) for _ in range(2))
    weight = torch.rand(512, device=DEVICE).add(0.5).to(dtype)
    total = x.double() + residual.double()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    options = {"residual": residual, "casting": casting}
    y, found = tilegym_rmsnorm.rms_norm(x, 512, weight, 1e-6, residual_dtype=torch.float32, **options)
    rounded, _ = tilegym_rmsnorm.rms_norm(x, 512, weight, 1e-6, **options)
    differing = [(each != exact.to(dtype)).float().mean().item() for each in (y, rounded)]
    assert torch.equal(found.to(dtype), total.float().to(dtype)) and differing[0] < 0.01 < 0.1 < differing[1]

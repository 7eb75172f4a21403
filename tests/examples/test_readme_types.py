# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What a type checker says of the public functions, since the package says that it is typed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")
pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 is not installed")

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("readme_types", ROOT / "scripts" / "readme_types.py")
readme_types = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme_types)

CALLS = """
import torch
from tilegym_rmsnorm import (
    Override, PatchReport, RMSNorm, override_aten, patch_model, rms_norm, use_backend, warmup
)
x = torch.randn(2, 4)
bf16 = torch.bfloat16
rms_norm(x, 4, None, 1e-6, backend="torch")
RMSNorm(4, offset=1.0, casting="llama")
RMSNorm((4, 8))
RMSNorm([4, 8])
RMSNorm("8")  # wrong
warmup((4096, bf16))
warmup([(4096, bf16), (64, bf16, None)])
warmup((n, bf16) for n in (64, 128))
rms_norm(x, "a")  # wrong
rms_norm(x, 4, casting="gemma")  # wrong
RMSNorm(4, casting="Llama")  # wrong
warmup((64, bf16), casting="none")  # wrong
report: PatchReport = patch_model(torch.nn.Linear(4, 4))
override: Override = override_aten("cpu")
rms_norm(x, (4,), eps="small")  # wrong
RMSNorm(4, offset="1")  # wrong
use_backend(None)  # wrong
warmup(4096)  # wrong
warmup([4096])  # wrong
"""


def test_readme_and_examples_pass_and_wrong_calls_are_reported():
    blocks = readme_types.python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 2 and all("tilegym_rmsnorm import" in block for block in blocks)
    assert len(readme_types.EXAMPLES) >= 4
    # one run: mypy reads all of torch for each
    status, text = readme_types.check([*blocks, CALLS], readme_types.EXAMPLES)
    expected = {
        f"README_example_{len(blocks) + 1}.py:{number}"
        for number, line in enumerate(CALLS.splitlines(), 1)
        if "# wrong" in line
    }
    assert status == 1 and set(re.findall(r"^(\S+:\d+): error", text, re.MULTILINE)) == expected, text


def test_blocks_keep_the_lines_of_their_text():
    text = (
        "# Title\n\n```python\nx = 1\n```\n\n    y = 2\n\n```sh\nls\n```\n\n```python\nz = 3\n\nw = 4\n```\n"
    )
    assert readme_types.python_blocks(text) == ["\n\n\nx = 1\n", "\n" * 13 + "z = 3\n\nw = 4\n"]

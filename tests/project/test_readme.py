# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""README.md: its commands exist, and its sentences say what its tables do."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_figures_in_sentences_are_those_of_the_tables():
    """bench/report/readme.py writes the tables."""
    (level,) = re.findall(r"^\| NVIDIA H100.*, bfloat16 .*\| +(\d+) of 29 \|$", TEXT, re.MULTILINE)
    assert f"({29 - int(level)} of 29 on an H100)" in TEXT


def test_commands_exist():
    assert all(
        f"`{path}`" in TEXT and os.access(ROOT / path, os.X_OK) for path in ("tests/run.sh", "bench/run.sh")
    )
    lines = [line.partition(" #")[0].split() for block in COMMANDS for line in block.splitlines()]
    for words in lines:
        if words[:3] == ["python", "-m", "tilegym_rmsnorm"]:
            assert (ROOT / "tilegym_rmsnorm" / "commands" / f"{words[3]}.py").exists()
        else:
            assert words[:2] == ["pip", "install"], words
            extra = re.search(r"\[(\w+)\]", words[-1])
            assert extra is None or f"\n{extra[1]} = [" in PROJECT


def test_pytorch_for_a_gpu_is_the_one_of_the_figures():
    """pip by itself would bring the newest."""
    measured = re.search(r"^Measured .* torch ([\d.]+)\+cu\d+, triton ([\d.]+),", TEXT, re.MULTILINE)
    pytorch, triton = measured.groups()
    limits, index = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("limits.md", "index.md"))
    for page in (TEXT, limits, index):
        assert f'pip install "torch=={pytorch}" -e ".[cutile]"' in page
    assert f"PyTorch {pytorch}, with the Triton {triton} that it brings" in TEXT
    assert f"{pytorch} and its\n  Triton {triton}" in limits

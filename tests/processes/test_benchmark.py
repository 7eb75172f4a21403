# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Processes that the benchmark starts: what they are told, and what they leave behind. tests/bench has the rest."""

import torch

from bench.block.families import Section
from bench.measure import processes, warm

CPU = torch.device("cpu")


def test_a_part_of_a_run_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = processes.measure_apart(("torch",), ((3, 8),), "float32", ("forward",), tmp_path)
    assert [(each["provider"], each["op"], each["rows"]) for each in result["records"]] == [
        ("torch", "forward", 3)
    ]
    assert result["records"][0]["us"] > 0 and result["gpu"] is None


def test_a_part_of_a_block_is_found_by_its_name(tmp_path, monkeypatch):
    """Results of these ops end in -block, but for those of parts, which are looked for by their dtype."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = processes.measure_apart(("torch",), ((3, 8),), "float32", ("bias_forward",), tmp_path)
    assert [(each["op"], each["error"]) for each in result["records"]] == [("bias_forward", None)]


def test_compiling_ahead_fills_the_caches_from_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Or Inductor asks the C++ compiler which vectors the CPU has, for seconds.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # A plain one, and of a block.
    sections = [Section((op,), ((4, 8),)) for op in ("forward", "bias_forward")]
    assert warm.warm(("torch.compile",), sections, [torch.float32], CPU, processes=1) == 2
    assert list(tmp_path.rglob("*.py"))

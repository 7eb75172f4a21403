# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The study of qk_norm_rope: who is right is timed, who is wrong is named."""

from __future__ import annotations

import json

import pytest
import torch
from bench_records import make_result

from bench.measure.session import Session
from bench.studies import rope as study

CPU = torch.device("cpu")


def test_the_whole_command_on_a_cpu(tmp_path, monkeypatch, capsys):
    """With kernels in interpreters."""
    monkeypatch.setattr(study, "describe_run", make_result)
    monkeypatch.setattr(study, "CPU_SHAPES", (study.CPU_SHAPES[1],))
    arguments = ["--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)]
    assert study.main([*arguments, "--provider", "cutile,triton,eager"]) == 0
    [path] = tmp_path.iterdir()
    cells = json.loads(path.read_text())["cells"]
    assert [cell["op"] for cell in cells] == ["forward", "backward"]
    for cell in cells:
        assert set(cell["us"]) == {"cutile", "triton", "eager"} and not cell["failed"]
        assert max(cell["errors"].values()) < 1e-5
    assert "1x5x(2+1)x16 R 8" in capsys.readouterr().out


def test_who_is_wrong_is_not_timed(monkeypatch):
    def wrong(names, shape, dtype):
        def forward(s):
            q_out, k_out = study.rope_forward_torch((*s[2:], None), study.spec_of(shape))
            return q_out, 1.1 * k_out

        return {"eager": {"forward": forward}}

    monkeypatch.setattr(study, "providers", wrong)
    cell = study.measure(Session(("eager",), study.OPS, CPU), study.CPU_SHAPES[0], "forward", torch.float32)
    assert not cell["us"] and "a relative error of 1.0e-01" in cell["failed"]["eager"]


def test_an_unknown_provider_is_refused(capsys):
    with pytest.raises(SystemExit):
        study.main(["--device", "cpu", "--provider", "tritn"])
    assert "expected names of cutile, triton" in capsys.readouterr().err


def test_bytes_that_must_move_and_the_share_of_the_copy():
    shape = study.SHAPES[0]
    assert shape.bytes_of("backward", torch.bfloat16) == 3 * 2 * 4 * 4096 * 40 * 128
    cell = {"shape": list(shape), "op": "forward", "us": {"cutile": 168.0}, "errors": {}, "failed": {}}
    text = study.section(make_result(dtype="bfloat16", copy_gb_per_s=4000.0, cells=[cell]))
    assert "49.9" in text and "4x4096x(32+8)x128" in text

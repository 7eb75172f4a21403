# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The study of qk_norm_rope: who is right is timed, who is wrong is named."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_records import make_result

from bench.measure.session import Session
from bench.studies import rope as study

CPU = torch.device("cpu")


def test_the_whole_command_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Interpreters run the kernels."""
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


@pytest.mark.parametrize("op", study.OPS)
def test_as_qwen3(op):
    """Everyone rounds as it does, so that results differ from float64 by more, and from each other by nothing."""
    shape = next(each for each in study.CPU_SHAPES if each.as_qwen3)
    inputs = study.make_inputs(shape, torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    assert inputs.cos.shape == (shape.b, shape.t, shape.r) and inputs.cos.dtype == torch.bfloat16
    spec = study.spec_of(shape)
    found = study.providers(("cutile", "eager"), shape, torch.bfloat16)
    errors = [study.error_of(each[op], op, inputs, spec) for each in found.values()]
    assert all(1e-3 < each < study.TOLERANCE[torch.bfloat16] for each in errors)
    if op == "forward":
        ours, theirs = (each[op](inputs) for each in found.values())
        assert all(map(torch.equal, ours, theirs))


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


def test_host_times_of_few_tokens(monkeypatch):
    monkeypatch.setattr(study, "DECODING", (study.CPU_SHAPES[1],))
    monkeypatch.setattr(study, "HOST_SAMPLES", 2)
    session = Session(("eager", "triton"), study.OPS, CPU)
    cells = [study.measure(session, shape, "forward", torch.bfloat16) for shape in study.CPU_SHAPES]
    assert "host_us" not in cells[0] and list(cells[1]["host_us"]) == ["triton", "F.rms_norm of q"]
    assert min(cells[1]["host_us"].values()) > 0
    text = study.section(make_result(dtype="bfloat16", copy_gb_per_s=None, cells=cells))
    assert text.count("1x5x(2+1)x16 R 8") == 2 and text.count("2x6x(4+2)x16") == 1


def test_few_tokens_are_few_cells():
    """A token of each of many sequences, and as many of one; a run must stay below three minutes."""
    assert len(study.DECODING) <= 8
    few = [shape for shape in study.DECODING if (shape.hq, shape.hk) == (32, 8)]
    assert (
        {shape.b for shape in few if shape.t == 1}
        == {shape.t for shape in few if shape.b == 1}
        == {1, 4, 16, 64}
    )


# Liger, by a stand-in that reads the arguments as it documents them


def norm_forward(x, weight, eps, offset, casting_mode, row_mode):
    assert (offset, casting_mode) == (0.0, "gemma") and x.dim() == 2
    return (torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype),)


def rotate(q, k, cos, sin):
    assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and cos.dtype == q.dtype

    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotated(q), rotated(k), cos, sin


@pytest.fixture
def liger(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "liger_kernel.ops.rms_norm", SimpleNamespace(rms_norm_forward=norm_forward)
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", SimpleNamespace(rope_forward=rotate))


def test_liger_gets_the_arguments_that_it_asks_for(liger):
    session, shape = Session(("liger",), study.OPS, CPU), study.Shape(2, 5, 4, 2, 64, 64)
    cell = study.measure(session, shape, "forward", torch.bfloat16)
    assert list(cell["us"]) == ["liger"] and not cell["failed"]
    cell = study.measure(session, shape, "backward", torch.bfloat16)
    assert not cell["us"] and not cell["failed"]


@pytest.mark.parametrize("sizes", [(64, 32), (80, 80), (64, 64, True)], ids=["partial", "80", "as Qwen3"])
def test_liger_has_no_kernels_for_a_shape(sizes, liger):
    assert study.liger_forward(study.Shape(1, 2, 2, 1, *sizes), torch.bfloat16) is None


def test_liger_is_left_out_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(study.importlib.util, "find_spec", lambda name: None)
    assert study.main(["--device", "cpu", "--provider", "liger"]) == 2
    assert "left out: liger: no module liger_kernel" in capsys.readouterr().err

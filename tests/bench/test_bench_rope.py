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

from bench.measure.provenance import RESULTS, gpu_slug
from bench.measure.session import Session
from bench.report.tables import write_json
from bench.studies import rope as study
from bench.studies import rope_peers

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


# Peers, by stand-ins that read the arguments as the libraries document them


def rotated(x, cos, sin):
    """(..., D) by tables (..., D / 2), in the wider dtype."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert is_neox and cos_sin_cache.dtype == torch.float32
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for flat in (query, key):
        heads = flat.view(len(positions), -1, head_size)
        part = heads[..., : cos_sin_cache.shape[1]]
        part.copy_(rotated(part, cos, sin))


def norm_rotate_append(
    qkv, cos_sin, seq_lens, q_indptr, pages, keys, values, *, num_q_heads, num_kv_heads, qk_norm_policy,
    q_norm_weight, k_norm_weight, eps, out_k, out_v, clear_unused_last_page_rows,
):  # fmt: skip
    assert qkv.is_contiguous() and qk_norm_policy == 2 and not clear_unused_last_page_rows
    assert {seq_lens.dtype, q_indptr.dtype, pages.dtype} == {torch.int32}
    assert {cos_sin.dtype, q_norm_weight.dtype, k_norm_weight.dtype} == {torch.float32}
    assert pages.shape[1] * keys.shape[1] >= seq_lens.max() and keys.shape[2:] == out_k.shape[1:]
    heads = qkv.view(len(qkv), -1, 128)
    positions = torch.cat([torch.arange(last) for last in seq_lens])
    assert q_indptr[-1] == len(positions) == len(qkv)
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    out_k.copy_(rotated(normed(k, k_norm_weight, eps), cos, sin))
    out_v.copy_(v)
    return rotated(normed(q, q_norm_weight, eps), cos, sin).to(q.dtype)


def norm_and_rotate(q_norm, k_norm, Q, K, cos, sin, position_ids=None):
    assert cos.dtype == sin.dtype == Q.dtype and cos.shape == (Q.shape[1], Q.shape[3])
    half = cos.shape[-1] // 2
    tables = cos[:, None, :half], sin[:, None, :half]
    pairs = ((Q, q_norm), (K, k_norm))
    return [
        rotated(normed(x, norm.weight, norm.variance_epsilon), *tables).transpose(1, 2) for x, norm in pairs
    ]


MODULES = {
    "flashinfer.norm": {"rmsnorm": normed},
    "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": rotate_in_place},
    "flashinfer.cake_fused_qk_rope_append": {
        "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache": norm_rotate_append
    },
    "unsloth.kernels.qk_norm_rope": {"fast_qk_norm_rope": norm_and_rotate},
}


@pytest.fixture
def stand_ins(monkeypatch):
    for name, functions in MODULES.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flashinfer", study.Shape(2, 5, 4, 2, 64, 64)),
        ("flashinfer", study.Shape(2, 5, 4, 2, 256, 64)),
        ("flashinfer", study.Shape(3, 20, 8, 1, 128, 128)),
        ("unsloth", study.Shape(2, 5, 4, 2, 64, 64)),
    ],
    ids=str,
)
def test_peers_get_the_arguments_that_they_ask_for(name, shape, stand_ins):
    cell = study.measure(Session((name,), study.OPS, CPU), shape, "forward", torch.bfloat16)
    assert list(cell["us"]) == [name] and not cell["failed"]


def test_peers_without_kernels_for_a_shape(stand_ins):
    partial, odd = study.Shape(1, 2, 2, 1, 64, 32), study.Shape(1, 2, 2, 1, 80, 80)
    for name, shape, dtype in (
        ("liger", partial, torch.bfloat16),
        ("unsloth", odd, torch.bfloat16),
        ("flashinfer", odd, torch.bfloat16),
        ("flashinfer", partial, torch.float32),
    ):
        assert rope_peers.forward_of(name, shape, dtype) is None
    cell = study.measure(
        Session(("unsloth",), study.OPS, CPU), study.CPU_SHAPES[0], "backward", torch.float32
    )
    assert not cell["us"] and not cell["failed"]


def test_peers_that_are_not_installed_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(rope_peers.importlib.util, "find_spec", lambda name: None)
    assert study.main(["--device", "cpu", "--provider", "liger,flashinfer"]) == 2
    assert "left out: flashinfer: no module flashinfer" in capsys.readouterr().err


def test_who_changes_the_others_is_measured_alone(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["--device", "cpu", "--provider", "eager,unsloth"])
    assert "expected unsloth by itself" in capsys.readouterr().err
    monkeypatch.setattr(study, "describe_run", make_result)
    monkeypatch.setattr(rope_peers, "why_missing", lambda name: None)
    monkeypatch.setattr(
        study, "measure", lambda session, shape, op, dtype: {"shape": shape, "op": op, "us": {}, "failed": {}}
    )
    assert study.main(["--device", "cpu", "--provider", "unsloth", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    assert path.name[10:] == "-bfloat16-rope-unsloth.json"
    assert "unsloth" in json.loads(path.read_text())["versions"]


# The page


def test_the_newest_result_of_each_gpu_is_put_into_the_page(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text("before\n<!-- rope:begin -->\nold\n<!-- rope:end -->\nafter\n")
    assert study.refresh_page(page, results) == 0
    assert page.read_text() == "before\n<!-- rope:begin -->\n<!-- rope:end -->\nafter\n"
    for day, us in (("2026-11-28", 500.0), ("2026-11-29", 168.0)):
        cell = {"shape": study.SHAPES[0], "op": "forward", "us": {"cutile": us, "eager": 900.0}, "failed": {}}
        result = make_result(dtype="bfloat16", cells=[cell], date=f"{day}T10:00:00+00:00")
        write_json(result, results / gpu_slug(result["gpu"]) / f"{day}-bfloat16-rope.json", "cells")
    assert study.refresh_page(page, results) == 1
    text = page.read_text()
    assert "| 4x4096x(32+8)x128" in text and "168.0" in text and "900.0" in text
    assert "500.0" not in text and "old" not in text and text.endswith("<!-- rope:end -->\nafter\n")


def test_the_page_shows_what_is_kept(tmp_path):
    """Figures are never typed by hand: `python scripts/docs_figures.py` writes them."""
    copy = tmp_path / "page.md"
    copy.write_text(study.PAGE.read_text())
    study.refresh_page(copy, RESULTS)
    assert copy.read_text() == study.PAGE.read_text()

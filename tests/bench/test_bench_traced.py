# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark of one norm, eager, traced and by each pass over its graph."""

import json
import re

import bench_records
import pytest
import torch
from helpers import needs_inductor, why_skip
from traced_norms import KEEPS_FORWARDS

from bench.measure.provenance import RESULTS, gpu_slug
from bench.report import readme
from bench.studies import traced
from tilegym_rmsnorm import get_current_backend
from tilegym_rmsnorm.integrations import aten

CPU = torch.device("cpu")
SHAPE = (2, 3, 64)

pytestmark = [
    pytest.mark.skipif(not KEEPS_FORWARDS, reason="this torch decomposes forwards when it traces"),
    pytest.mark.skipif(why_skip("cutile", CPU) is not None, reason=str(why_skip("cutile", CPU))),
]


@pytest.fixture
def no_tables(monkeypatch):
    monkeypatch.setattr(traced, "choose_tables", lambda: None)  # which would write to the environment


def of(result, name):
    return next(each for each in result["variants"] if each["variant"] == name)


def run(tmp_path, *options):
    path = tmp_path / "traced.json"
    status = traced.main(["--device", "cpu", "--shape", "2x3x64", "--out", str(path), *options])
    return status, json.loads(path.read_text())


@needs_inductor
def test_every_variant_is_right_and_timed(tmp_path, no_tables, capsys):
    pytest.importorskip("torch.fx.passes.regional_inductor", reason="this torch has no regional_inductor")
    before = get_current_backend()
    status, result = run(tmp_path)
    assert status == 0, traced.failures(result)
    assert result["shape"] == list(SHAPE) and result["gpu"] is None and "Not GPU figures" in result["note"]
    assert {"versions", "commit", "sources", "date"} < result.keys()
    assert [each["variant"] for each in result["variants"]] == list(traced.VARIANTS)
    for each in result["variants"]:
        assert each["us"] > 0 and each["error"] is None and each["errors"].keys() == {"y", "dx", "dw"}
        assert each["gb_per_s"] == pytest.approx(result["bytes"] / each["us"] / 1e3, rel=1e-3)
    eager = of(result, traced.EAGER)
    assert eager["times_eager"] == 1
    replaced = of(result, "replaced")
    assert replaced["times_eager"] == pytest.approx(eager["us"] / replaced["us"], rel=1e-2, abs=1e-3)
    out = capsys.readouterr().out
    assert out.endswith(f"{traced.page_section(result)}\n") and traced.table(result) in out
    assert get_current_backend() == before and not any(aten._patches.values())


def test_what_is_wrong_or_raises_is_not_timed(tmp_path, no_tables, monkeypatch, capsys):
    right = traced.at_once(lambda inputs: traced.eager(traced.aten_norm, inputs))

    def wrong(inputs):
        y, dx, dw = traced.eager(traced.aten_norm, inputs)
        return y, dx, dw * 1.1

    def broken(inputs):
        raise RuntimeError("no such kernel")

    variants = {traced.EAGER: right, "wrong": traced.at_once(wrong), "broken": broken}
    monkeypatch.setattr(traced, "VARIANTS", variants)
    status, result = run(tmp_path)
    assert status == 1 and of(result, traced.EAGER)["us"] > 0
    assert "dw has a relative error" in of(result, "wrong")["error"]
    assert of(result, "broken")["error"] == "RuntimeError: no such kernel"
    assert of(result, "wrong")["us"] is None is of(result, "broken")["us"]
    out = capsys.readouterr().out
    assert "failed: broken: RuntimeError: no such kernel" in out and "| wrong " in out


@pytest.mark.parametrize("change", [traced.as_it_is, traced.replaced])
def test_graphs_hold_what_their_names_say(change):
    with traced.default_backend("torch"), traced.tr.override_aten("cpu"):
        [inputs] = traced.make_inputs(SHAPE, CPU)
        gm, mode = traced.trace(traced.step, inputs.x_leaf, inputs.weight_leaf, inputs.dy)
        assert traced.fused_norms(gm) == 2
        assert traced.fused_norms(change(gm, mode)) == (2 if change is traced.as_it_is else 0)


def test_an_override_that_declines_is_an_error():
    """PyTorch's kernel would be timed under this package's name."""
    [inputs] = traced.make_inputs(SHAPE, CPU)
    [of_floats] = [
        traced.Inputs(
            *(each.double().detach().requires_grad_(each.requires_grad) for each in vars(inputs).values())
        )
    ]
    with (
        traced.default_backend("torch"),
        traced.tr.override_aten("cpu"),
        pytest.raises(RuntimeError, match="the override did not take both calls: .*'dtype': 1"),
    ):
        traced.overridden(of_floats)


@pytest.mark.parametrize(
    ("text", "message"),
    [("4096", "at least two sizes"), ("2x0", "whole number of at least 1"), ("2xx3", "whole number")],
)
def test_shapes_that_are_none_are_refused(text, message, capsys):
    with pytest.raises(SystemExit):
        traced.main(["--shape", text])
    assert message in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert traced.main([]) == 2
    assert "PyTorch sees no GPU; --device cpu shows how it works" in capsys.readouterr().err


# The table

ORIGIN = bench_records.make_result(versions={"torch": "2.13.0"})


def make_result(us, **changes):
    """us: of eager F.rms_norm and of what replaces it, which moves 1 GB."""
    variants = [
        {"variant": name, "us": each, "gb_per_s": each and 1e6 / each, "copy_fraction": 0.5, "error": None}
        | {"times_eager": each and us[0] / each}
        for name, each in zip((traced.EAGER, "replaced"), us, strict=True)
    ]
    result = {**ORIGIN, "shape": [4, 8192, 4096], "dtype": "bfloat16", "bytes": 10**9, "variants": variants}
    return result | changes


def test_the_table_has_a_line_for_each_variant():
    assert re.search(
        r"\| replaced +\| +0.450 \| +2222 \| +50% \| +2.00 \|", traced.table(make_result((900.0, 450.0)))
    )
    assert re.search(r"\| replaced +\| failed \|", traced.table(make_result((900.0, None))))


@pytest.mark.parametrize(
    "result", readme.newest_by_gpu(RESULTS, "-traced.json"), ids=lambda result: gpu_slug(result["gpu"])
)
def test_kept_results_are_whole(result):
    assert result["shape"] == list(traced.SHAPE) and not traced.failures(result)
    assert [each["variant"] for each in result["variants"]] == list(traced.VARIANTS)

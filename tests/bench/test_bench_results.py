# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's results, the gate that compares them with kept ones, and cutile against its peers. What the kept ones
say again passes, and a tenth more of any cell fails."""

import csv
import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from bench_records import make_record, make_result

from bench import gate
from bench.measure import cell, shapes
from bench.measure.provenance import RESULTS, ROOT, gpu_slug, kept_in
from bench.measure.run_shape import Bench
from bench.providers.ours import make_provider
from bench.report import compare, readme, tables
from bench.report.pictures import MOST_BYTES
from tilegym_rmsnorm import is_backend_available

# Tables, files


def test_result_is_written_and_read_back(tmp_path):
    result = make_result(make_record(), make_record(None, provider="triton"))
    tables.write_json(result, tmp_path / "new" / "result.json")
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == result

    tables.write_csv(result, tmp_path / "result.csv")
    first, second = csv.DictReader((tmp_path / "result.csv").open())
    assert (first["us"], first["dx_error"], first["dw_error"]) == ("100.0", "0.004", "")
    assert second["error"] == "ValueError: broken"


def test_tables_show_figures_failures_and_what_was_not_measured():
    result = make_result(
        make_record(), make_record(None, provider="triton"), unavailable={"cutile": "no GPU. To mend it: pip"}
    )
    text = tables.by_op(result)
    assert "2000  66%" in text and "100.0 ±0% / 30" in text
    assert "failed: triton (backward 4096x1024): ValueError: broken" in text
    assert "not measured: cutile: no GPU. To mend it: pip" in text


def test_readme_section_is_replaced_and_nothing_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n")
    for _ in range(2):
        readme.refresh(path, "bench", "new")
    assert path.read_text() == "before\n<!-- bench:begin -->\n\nnew\n\n<!-- bench:end -->\nafter\n"


def test_readme_without_markers_is_left_alone(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("no markers")
    with pytest.raises(ValueError, match="<!-- bench:begin -->"):
        readme.refresh(path, "bench", "text")
    assert path.read_text() == "no markers"


# The gate


@pytest.mark.parametrize(("us", "failures"), [(110.0, 1), (104.0, 0), (80.0, 0)])
def test_gate_trips_on_slowdowns_of_more_than_five_percent(us, failures, tmp_path, capsys):
    kept = make_result(make_record(100.0), make_record(50.0, op="forward"))
    new = make_result(make_record(us), make_record(50.0, op="forward"))
    verdict = gate.compare(new, [kept])
    assert (verdict.compared, len(verdict.failed)) == (2, failures)

    tables.write_json(kept, tmp_path / "results" / gpu_slug(kept["gpu"]) / "2026-11-20-bfloat16.json")
    tables.write_json(new, tmp_path / "new.json")
    # What ci.yaml's benchmark job ends with.
    assert gate.main([str(tmp_path / "new.json"), "--results", str(tmp_path / "results")]) == failures
    slower = "gate: slower: cutile backward 4096x1024 bfloat16: 100.0 us before, 110.0 us now (+10.0%)"
    assert (slower in capsys.readouterr().out) is bool(failures)


def test_gate_does_not_ask_for_the_cells_of_heat_maps(tmp_path):
    folder = tmp_path / gpu_slug("NVIDIA H100 80GB HBM3")
    tables.write_json(make_result(make_record(), is_grid=True), folder / "2026-11-21-bfloat16-grid.json")
    assert gate.load_kept("NVIDIA H100 80GB HBM3", tmp_path) == []


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_that_takes_a_tenth_longer_trips_the_gate(monkeypatch):
    """A provider, and the same with a copy behind it that takes a tenth of its time, through timer and gate."""
    device, shape = torch.device("cuda", torch.cuda.current_device()), (16384, 4096)
    right = make_provider(
        "cutile" if is_backend_available("cutile") else "triton", shape, torch.bfloat16, device
    )

    def backward_us(backward):
        changed = dataclasses.replace(right, backward=backward)
        monkeypatch.setattr(cell, "make_providers", lambda *_: [changed])
        bench = Bench((right.name,), ("backward",), device)
        return bench.measure(shape, torch.bfloat16, lambda step: None)

    (before,), rate = backward_us(right.backward), Bench((), (), device).copy_bytes_per_second
    extra = torch.ones(int(0.1 * before["us"] * 1e-6 * rate / 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(extra)

    def slower(*arguments):
        target.copy_(extra)
        return right.backward(*arguments)

    assert gate.compare(make_result(*backward_us(slower)), [make_result(before)]).failed
    assert not gate.compare(make_result(*backward_us(right.backward)), [make_result(before)]).failed


def test_gate_takes_the_newest_kept_figure_whatever_the_toolkit():
    """A kernel of another may have been faster for reasons of its own."""
    old = [make_result(make_record(50.0), tileiras="13.3.0")]
    old.append(make_result(make_record(50.0), versions={"torch": "2.11.0", "cuda-tile": "1.6.0"}))
    newest = make_result(make_record(100.0), tileiras="13.3.0")
    assert len(gate.compare(make_result(make_record(102.0), tileiras="13.3.0"), [*old, newest]).failed) == 1
    assert gate.compare(make_result(make_record(102.0)), [*old, newest]).failed == []
    assert len(gate.compare(make_result(make_record(106.0)), [*old, newest]).failed) == 1


def test_gate_takes_the_fastest_kept_figure_too():
    """Three times 4 % are within the threshold of the newest each time."""
    kept = [make_result(make_record(us)) for us in (104.0, 100.0, 104.0)]
    assert gate.compare(make_result(make_record(104.9)), kept).failed == []
    assert gate.compare(make_result(make_record(108.0)), kept).failed == [
        "cutile backward 4096x1024 bfloat16: 100.0 us in the fastest kept result, 108.0 us now (+8.0%)"
    ]
    assert "104.0 us before, 110.0" in gate.compare(make_result(make_record(110.0)), kept).failed[0]


def test_gate_lets_a_slowdown_pass_that_is_accepted_with_a_reason(tmp_path, monkeypatch, capsys):
    kept = make_result(make_record(100.0))
    tables.write_json(kept, tmp_path / "results" / gpu_slug(kept["gpu"]) / "2026-11-20-bfloat16.json")
    slowdown = gate.Slowdown(kept["gpu"], "backward", 4096, 1024, "bfloat16", "cutile", 120.0, "it was wrong")

    def status(us, **changes):
        monkeypatch.setattr(gate, "ACCEPTED", (dataclasses.replace(slowdown, **changes),))
        tables.write_json(make_result(make_record(us)), tmp_path / "new.json")
        return gate.main([str(tmp_path / "new.json"), "--results", str(tmp_path / "results")])

    assert status(125.0) == 0
    assert (
        "gate: accepted: cutile backward 4096x1024 bfloat16: 100.0 us before, 125.0 us now (+25.0%): up to 120.0 us: "
        "it was wrong"
    ) in capsys.readouterr().out
    assert status(127.0) == 1, "more than was accepted"
    for change in ({"gpu": "NVIDIA H200"}, {"op": "forward"}, {"cols": 2048}, {"dtype": "float16"}):
        assert status(125.0, **change) == 1, "of another cell"
    with pytest.raises(ValueError, match="reason: expected why cutile backward may take 120.0 us"):
        dataclasses.replace(slowdown, reason=" ")


def test_gate_names_a_provider_that_was_not_run_instead_of_its_cells():
    kept = [
        make_result(make_record(), make_record(provider="triton"), make_record(provider="triton", rows=8))
    ]
    new = make_result(make_record())
    text = gate.explain(new, kept, gate.compare(new, kept))
    assert "gate: not run: triton\n" in text and "kept cells" not in text


def test_gate_reports_cells_not_run_and_fails_new_errors():
    kept = [make_result(make_record(), make_record(op="forward"))]
    verdict = gate.compare(make_result(make_record(None)), kept)
    assert verdict.failed == [
        "cutile backward 4096x1024 bfloat16: had 100.0 us, now fails: ValueError: broken"
    ]
    assert verdict.missing == [("forward", 4096, 1024, "bfloat16", "cutile")]
    assert "not run: 1 kept cells, of 4096x1024" in gate.explain(
        make_result(make_record(None)), kept, verdict
    )


def test_gate_fails_a_run_without_the_product(tmp_path, capsys):
    """One whose cells of triton were all compared, and whose cutile was left out, has passed."""
    kept = make_result(make_record(), make_record(provider="triton"))
    assert gate.compare(make_result(make_record(provider="triton")), [kept]).failed == [
        "cutile backward 4096x1024 bfloat16: had 100.0 us, now only other providers were run"
    ]
    assert gate.compare(make_result(make_record()), [kept]).failed == []

    tables.write_json(kept, tmp_path / "results" / gpu_slug(kept["gpu"]) / "2026-11-20-bfloat16.json")
    tables.write_json(make_result(make_record(provider="quack", rows=8)), tmp_path / "new.json")
    assert gate.main([str(tmp_path / "new.json"), "--results", str(tmp_path / "results")]) == 1
    assert "nothing compared: the run has no cell" in capsys.readouterr().out


def test_gate_takes_parts_of_a_run_together_and_none_without_records(tmp_path, capsys):
    kept = make_result(make_record(), make_record(provider="triton"))
    tables.write_json(kept, tmp_path / "results" / gpu_slug(kept["gpu"]) / "2026-11-20-bfloat16.json")
    for provider in ("cutile", "triton"):
        tables.write_json(make_result(make_record(provider=provider)), tmp_path / "new" / f"{provider}.json")
    assert gate.main([str(tmp_path / "new"), "--results", str(tmp_path / "results")]) == 0
    assert "gate: 2 cells compared" in capsys.readouterr().out
    # of a cell that two files have the slow one counts, whichever comes first
    for name in ("a", "z"):
        tables.write_json(make_result(make_record(150.0)), tmp_path / "new" / f"{name}.json")
        assert gate.main([str(tmp_path / "new"), "--results", str(tmp_path / "results")]) == 1
        (tmp_path / "new" / f"{name}.json").unlink()
    tables.write_json(make_result(), tmp_path / "empty.json")
    assert gate.main([str(tmp_path / "empty.json"), "--results", str(tmp_path / "results")]) == 1
    assert "the run has no records" in capsys.readouterr().out


def test_gate_takes_a_folder_with_results_of_training_too(tmp_path):
    folder = tmp_path / "results" / gpu_slug("NVIDIA H100 80GB HBM3")
    tables.write_json(make_result(make_record()), folder / "2026-11-20-bfloat16.json")
    new = tmp_path / "new"
    tables.write_json(make_result(make_record(104.0)), new / "2026-11-21-bfloat16.json")
    (new / "train-llama-1b-eager.json").write_text("{}")
    assert gate.main([str(new), "--results", str(tmp_path / "results")]) == 0


def test_gate_ignores_baselines_and_dtypes_that_were_not_run():
    kept = [make_result(make_record(provider="torch.compile"), make_record(dtype="float32"))]
    verdict = gate.compare(make_result(make_record(200.0, provider="torch.compile")), kept)
    assert verdict == gate.Verdict(0, [], [])


def test_gate_compares_with_the_same_gpu_only_and_never_with_itself(tmp_path, capsys):
    new = tmp_path / "new.json"
    tables.write_json(make_result(make_record(150.0)), new)
    other = make_result(make_record(100.0), gpu="NVIDIA H200")
    tables.write_json(other, tmp_path / "results" / gpu_slug(other["gpu"]) / "2026-11-20-bfloat16.json")
    arguments = [str(new), "--results", str(tmp_path / "results")]
    assert gate.main(arguments) == 0
    assert "nothing compared: no kept results of NVIDIA H100 80GB HBM3" in capsys.readouterr().out

    same = tmp_path / "results" / "nvidia-h100-80gb-hbm3"
    tables.write_json(make_result(make_record(100.0)), same / "2026-11-20-bfloat16.json")
    (same / "train-llama-1b-eager.json").write_text('{"trained": []}')
    partial = tmp_path / "results" / "partial" / same.name / "2026-11-21-bfloat16.json"
    tables.write_json(make_result(make_record(150.0), date="2026-11-21T11:00:00+00:00"), partial)
    assert gate.main(arguments) == 1
    assert "100.0 us before, 150.0 us now (+50.0%)" in capsys.readouterr().out
    assert gate.main([str(same / "2026-11-20-bfloat16.json"), *arguments[1:]]) == 0


GPUS = list(dict.fromkeys(result["gpu"] for _, result in kept_in()))
KINDS = [(gpu, kind) for gpu in GPUS for kind in dict.fromkeys(map(shapes.kind_of, gate.load_kept(gpu)))]
EVERY_KIND = pytest.mark.parametrize(
    ("gpu", "kind"), KINDS, ids=[f"{gpu_slug(gpu)}-{kind}" for gpu, kind in KINDS]
)
SHIPPED = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]  # of which README shows figures


def newest(gpu, kind="models"):
    """One result of this GPU model and kind, with the newest kept figure of each cell of this package's kernels."""
    kept = [each for each in gate.load_kept(gpu) if shapes.kind_of(each) == kind]
    records = {shapes.cell_of(each): each for result in kept for each in result["records"] if each["us"]}
    ours = [each for cell, each in records.items() if cell[-1] in gate.GATED_PROVIDERS]
    return {**kept[-1], "records": ours}


def slowed(result, cells, factor):
    """The result, were these cells slower by a factor."""
    records = [
        {**each, "us": each["us"] * (factor if shapes.cell_of(each) in cells else 1)}
        for each in result["records"]
    ]
    return {**result, "records": records}


@pytest.mark.parametrize("gpu", SHIPPED)
def test_every_shape_op_and_dtype_is_kept(gpu):
    assert len({shapes.cell_of(each) for each in newest(gpu)["records"]}) >= 29 * 2 * 3


def test_kept_results_pass_and_a_tenth_more_fails(tmp_path, capsys):
    """CI's benchmark job ends with this command."""
    result, path = newest(SHIPPED[0]), tmp_path / "new.json"
    cells = {shapes.cell_of(each) for each in result["records"]}
    for factor, failed in ((1.0, 0), (1.1, len(cells))):
        tables.write_json(slowed(result, cells, factor), path)
        assert gate.main([str(path)]) == (1 if failed else 0)
        text = f"{len(cells)} cells compared on {result['gpu']}, {failed} failed, 0 not run"
        assert text in capsys.readouterr().out


@EVERY_KIND
def test_one_cell_that_takes_a_tenth_more_is_found(gpu, kind):
    result = newest(gpu, kind)
    kept = [each for each in gate.load_kept(gpu) if shapes.kind_of(each) == kind]
    for record in result["records"]:
        cell = shapes.cell_of(record)
        [line] = gate.compare(slowed(result, {cell}, 1.1), kept, accepted=gate.ACCEPTED).failed
        assert "{4} {0} {1}x{2} {3}".format(*cell) in line and "+10.0%" in line


# What counts as kept


def test_only_what_is_kept_counts(tmp_path):
    """Files that git ignores do not count: each of these folders was taken for a GPU's."""
    h100, h200 = SHIPPED
    for name, result in {
        f"{gpu_slug(h100)}/2026-11-20-float32": make_result(make_record()),
        "cpu/2026-11-20-bfloat16": make_result(make_record(), gpu=None),
        "ci/2026-11-20-bfloat16": make_result(make_record(), gpu=h200),
        f"partial/{gpu_slug(h200)}/2026-11-20-bfloat16": make_result(make_record(), gpu=h200),
        f"{gpu_slug(h200)}/2026-11-20-bfloat16-grid": make_result(make_record(), gpu=h200, is_grid=True),
    }.items():
        tables.write_json(result, tmp_path / f"{name}.json")
    for name, text in {"train-llama-1b-eager": '{"gpu": "NVIDIA H200", "trained": []}', "list": "[]"}.items():
        (tmp_path / gpu_slug(h200) / f"{name}.json").write_text(text)
    (tmp_path / "ci" / "cut.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("")
    assert len(gate.load_kept(h100, tmp_path)) == 1 and gate.load_kept(h200, tmp_path) == []
    assert gate.load_kept(h100, tmp_path / "none") == []
    tables.write_json(make_result(make_record(), gpu=h200), tmp_path / gpu_slug(h200) / "2026-11-21.json")
    assert len(gate.load_kept(h200, tmp_path)) == 1


def test_a_damaged_kept_result_is_an_error(tmp_path):
    """Leaving it out made the gate pass whatever was run."""
    new = tmp_path / "new.json"
    path = tmp_path / gpu_slug(SHIPPED[0]) / "2026-11-20-split.json"
    for each in (new, path):
        tables.write_json(make_result(make_record()), each)
    path.write_text(path.read_text()[:200])
    for read in (
        lambda: gate.main([str(new), "--results", str(tmp_path)]),
        lambda: readme.newest_by_gpu(tmp_path, "-split.json"),
    ):
        with pytest.raises(ValueError, match=f"{path}: expected a result in JSON, got "):
            read()


# What is kept


def kind_of(path, result):
    """The shapes of models, a grid, ops of a transformer block, and the dtype; of a study its file's name without the
    date."""
    if "records" not in result:
        return path.stem.lstrip("0123456789-"), None
    return shapes.kind_of(result), result["records"][0]["dtype"]


def pictures_shown():
    """The pictures that README.md, the pages of docs/ and those of kept results show."""
    of_results = (path.with_suffix(".md") for path in readme.kept_results(RESULTS))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *of_results):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8")):
            yield Path(os.path.normpath(page.parent / target))


def test_the_newest_of_each_kind_and_what_pages_show_is_kept_and_nothing_else():
    """Old results and pictures that no page shows made a clone large. What a run has just written is not kept yet."""
    listed = subprocess.run(["git", "ls-files", "."], cwd=RESULTS, capture_output=True, text=True)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    there = {RESULTS / name for name in listed.stdout.splitlines()}
    newest: dict[tuple[object, ...], tuple[str, Path]] = {}
    for path in there:
        if path.suffix == ".json":
            result = json.loads(path.read_text())
            key = path.parent, kind_of(path, result)
            newest[key] = max(newest.get(key, ("", path)), (result["date"], path))
    kept = {path for _, path in newest.values()}
    of_runs = [path for path in kept if "records" in json.loads(path.read_text())]
    kept |= {path.with_suffix(suffix) for path in of_runs for suffix in (".csv", ".md")}
    kept |= {path for path in pictures_shown() if path.is_relative_to(RESULTS)}
    assert there == kept | {RESULTS / "README.md"}
    large = [path.name for path in there if path.suffix == ".png" and path.stat().st_size > MOST_BYTES]
    assert not large


def make_cell(ours: float | None, *peers: tuple[str, float | None], **cell):
    """The records of one cell: cutile's time and those of peers."""
    times = [("cutile", ours), *peers]
    return [make_record(us, provider=name, **cell) for name, us in times]


def test_the_best_peer_is_the_fastest_that_is_none_of_ours():
    peers = (
        ("quack", 130.0),
        ("torch.compile", 120.0),
        ("triton", 90.0),
        ("cutile[P=M]", 80.0),
        ("broken", None),
    )
    (cell,) = compare.compare(make_result(*make_cell(100.0, *peers)), "backward")
    assert (cell.peer["provider"], cell.ratio) == ("torch.compile", 1.2)


def test_cells_without_both_sides_are_left_out():
    records = make_cell(None, ("quack", 100.0)) + make_cell(100.0, ("quack", None), rows=8)
    assert compare.compare(make_result(*records), "backward") == []
    assert compare.compare(make_result(*make_cell(100.0, ("quack", 100.0))), "forward") == []


def test_the_mean_is_geometric():
    records = make_cell(100.0, ("quack", 200.0)) + make_cell(100.0, ("quack", 50.0), rows=8)
    assert compare.mean_ratio(compare.compare(make_result(*records), "backward")) == pytest.approx(1.0)
    assert compare.mean_ratio([]) is None


def test_the_table_names_the_peer_and_its_settings():
    peer = make_record(125.0, provider="quack", settings="its heuristic", gb_per_s=1600.0)
    text = compare.table(make_result(make_record(100.0), peer), "backward", "github")
    (line,) = [line for line in text.splitlines() if "4096 x 1024" in line]
    assert [each.strip() for each in line.strip("|").split("|")] == [
        *("4096 x 1024", "2000", "1600", "quack (its heuristic)", "1.25", "66%")
    ]


@pytest.mark.parametrize(("gb_per_s", "cost"), [(1000.0, "+3.1%"), (900.0, "")])
def test_the_cost_of_dw_is_that_of_large_calls(gb_per_s, cost):
    """103 MB and 93 MB."""
    records = make_record(103.1, gb_per_s=gb_per_s), make_record(100.0, op="dx")
    *_, line = compare.workspace_table(make_result(*records, sms=132), "pipe").splitlines()
    assert line.split("|")[-2].strip() == cost


def test_the_summary_has_means_and_workspace():
    records = make_cell(100.0, ("quack", 120.0)) + make_cell(100.0, ("quack", 90.0), rows=8)
    records[0] |= {"workspace_bytes": 4 * 1024 * 264}
    text = compare.summary(make_result(*records, make_record(99.0, op="dx"), sms=132))
    assert "geometric mean of 2 ratios: 1.039" in text
    line = next(line for line in text.splitlines() if "1081344" in line)
    assert line.split() == ["4096", "x", "1024", "1081344", "264", "2.00", "+1.0%"]


def test_there_is_no_summary_without_a_gpu_or_peers():
    assert compare.summary(make_result(*make_cell(100.0, ("quack", 120.0)), gpu=None)) == ""
    assert compare.summary(make_result()) == ""
    assert compare.compare(make_result(make_record(100.0)), "backward") == []

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The studies beside the benchmark: of the host, of small calls beside PyTorch's, of one launch or two, and of
qk_norm_rope."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_records import make_result

from bench.measure.check import make_inputs
from bench.measure.provenance import RESULTS
from bench.measure.session import ContextLostError, Session, this_device
from bench.report import readme
from bench.studies import host, small_calls
from bench.studies import one_launch_or_two as launches
from bench.studies import rope as of_rope
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE


def test_every_call_and_slice_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(CACHE_VARIABLE)
    assert host.main(["--backend", "torch", "--rows", "4", "--columns", "16", "--samples", "3"]) == 0
    assert os.environ[CACHE_VARIABLE] == "off", "what somebody tuned is not what this package is"
    out = capsys.readouterr().out
    for line in ("forward", "forward, no_grad", "backward", "backward, the node alone", "both"):
        found = re.findall(rf"^{line}(?: +\d+\.\d \( *\d+\.\d\)){{3}}$", out, re.MULTILINE)
        assert len(found) == 2, f"{line}: {out}"
    for line in ("find a known call", "forward below autograd", "backward below autograd"):
        assert re.search(rf"^{line} +\d+\.\d", out, re.MULTILINE), out


def test_a_node_of_several_outputs_runs_alone():
    """F.rms_norm's on a GPU has y and rstd."""
    x = torch.randn(1, 3, 8, requires_grad=True)
    y = torch.native_group_norm(x, None, None, 1, 3, 8, 1, 1e-5)[0]
    dx = host.node_alone(y, torch.ones_like(y))()[0]
    assert torch.equal(dx, torch.autograd.grad(y, x, torch.ones_like(y))[0])


def test_a_backend_that_cannot_run_here_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TILEGYM_RMSNORM_INTERPRET", raising=False)
    assert host.main([]) == 1
    assert re.match("cutile: it runs on CUDA tensors.*To mend it: ", capsys.readouterr().err)


def test_first_calls_are_timed_twice_with_one_cache(capsys, monkeypatch):
    """Both processes are this one here: the second finds what the first has compiled."""
    caches, start = [], subprocess.run

    def run(command, **options):
        if list(command[:3]) != [sys.executable, "-m", "bench.studies.host"]:  # git
            return start(command, **options)
        caches.append(options["env"]["CUDA_TILE_CACHE_DIR"])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = host.main(command[3:])
        return subprocess.CompletedProcess(command, status, out.getvalue(), "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.main(["--backend", "torch", "--first-call", "64"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"N = +64 .* forward +\d+\.\d\d s   backward +\d+\.\d\d s", out)) == 2
    assert len(caches) == 2 and caches[0] == caches[1]


def test_without_launches_puts_ct_launch_back():
    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine")
    launch, seen = machine.launch_kernel, []

    def call():
        seen.append(machine.launch_kernel)
        raise KeyError

    with pytest.raises(KeyError):
        host.without_launches(call)()
    assert seen == [host._launch_nothing] and machine.launch_kernel is launch


CPU = torch.device("cpu")


def test_every_pair_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes minutes
    assert small_calls.main(["--backend", "torch", "--rows", "4", "--columns", "64", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    for form in ("rms_norm", "with a residual", "with a bias", "y in float32", "heads, a slice"):
        for label in ("no grad", "recorded", "both passes"):
            assert re.search(rf"^{form}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    for form in ("RMSNorm", "a patched LlamaRMSNorm", "DTensors"):
        for label in ("no grad", "both passes"):
            assert re.search(rf"^{form}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    labels = "qk_norm_rope, both passes", "op qk_norm_rope_backward, beside a forward", "rms_norm, not known"
    for label in (*labels, "F.rms_norm, both passes", "trace of rms_norm", "trace of qk_norm_rope"):
        assert re.search(rf"^{label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    for kind in ("eager", "compiled"):
        for label in ("no grad", "both passes", "residuals, no grad", "residuals, both passes"):
            assert re.search(rf"^{kind}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out


@pytest.mark.parametrize("has_residual", [False, True])
def test_both_chains_compute_the_same(has_residual):
    chain = small_calls.Chain((4, 64), torch.float64, CPU, "torch")
    ours, theirs = (
        (chain.ours, chain.theirs)
        if not has_residual
        else (chain.ours_with_residual, chain.theirs_with_residual)
    )
    given = chain.x, chain.matrices, chain.weights
    torch.testing.assert_close(ours(*given), theirs(*given))


def test_pairs_compute_the_same():
    """Calls that return tensors are compared as they are timed."""
    size, dtype = (4, 64), torch.float32
    with small_calls.mesh_of_one(CPU) as mesh:
        pairs = (
            *small_calls.pairs_of_calls(size, dtype, CPU),
            *small_calls.pairs_of_modules(size, dtype, CPU),
            *small_calls.pairs_of_rope(4, dtype, CPU),
            *small_calls.pairs_of_first_calls(size, dtype, CPU),
            *small_calls.pairs_under_override(size, dtype, CPU),
            *small_calls.pairs_of_traces(size, dtype, CPU),
            *small_calls.pairs_of_dtensors(size, dtype, mesh),
        )
        for label, ours, theirs in pairs:
            if not label.startswith("op"):
                for a, b in zip(ours(), theirs(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=label)


def test_every_shape_is_kept():
    for result in readme.newest_by_gpu(RESULTS, "-split.json"):
        assert [(cell["rows"], cell["cols"]) for cell in result["cells"]] == launches.SHAPES


def test_a_wrong_plan_is_found_and_not_timed(tmp_path, monkeypatch, capsys):
    """The whole command and the kernels, without a GPU in the interpreter: of a cell's rows they get four."""
    norm = pytest.importorskip("tilegym_rmsnorm.backends.cutile.host.norm", exc_type=ImportError)
    from cutile_runs import set_launcher

    class WrongWhereSlabsHave512Rows(norm.Launcher):
        def __call__(self, *arguments):
            dx, d_residual, dw, db = super().__call__(*arguments)
            return dx, d_residual, dw * 1.1 if getattr(self.plan.first, "slab", 0) == 512 else dw, db

    set_launcher(monkeypatch, "Backward", WrongWhereSlabsHave512Rows)
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(registry, "why_unusable", lambda backend: None)
        monkeypatch.setattr(launches, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(launches, "make_inputs", lambda shape, *rest: make_inputs((4, shape[1]), *rest))
    monkeypatch.setattr(launches, "describe_run", make_result)
    monkeypatch.setattr(launches, "SHAPES", [(1040, 16)])
    assert launches.main(["--out", str(tmp_path / "new")]) == 1
    [path] = (tmp_path / "new").iterdir()
    [cell] = json.loads(path.read_text())["cells"]
    [split], selected = cell["splits"], cell["selected"]
    wrong = {plan: us for plan, us in split["tried_us"].items() if "slab=512" in plan}
    assert len(split["tried_us"]) == 6 and len(wrong) == 2 and set(split["errors"]) == {"dx", "dw"}
    assert all(us.startswith("dw has a relative error of") for us in wrong.values())
    assert split["us"] == min(us for plan, us in split["tried_us"].items() if plan not in wrong)
    assert (
        selected["settings"].startswith("backward_tiles")
        and launches.ratio(cell) == selected["us"] / split["us"]
    )
    out = capsys.readouterr().out
    assert out.count("failed: 1040x16 by backward_split") == 2 and f"written: {path}" in out


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launches.main(["--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == "nothing was measured: PyTorch sees no GPU\n" and not list(
        tmp_path.iterdir()
    )


class Losing:
    """Plans that lose the CUDA context at the second shape."""

    def __init__(self, session, shape, *_):
        self.shape = shape

    def measure(self, op):
        if self.shape == (1040, 32):
            raise ContextLostError("split", "illegal address")
        record = {"provider": "selected", "tried_us": None, "error": None}
        return record | {"us": 9.0}, record | {"us": None, "tried_us": {"a": 9.0, "b": "dw is wrong"}}


def test_a_lost_context_ends_the_run_with_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "why_unusable", lambda backend: None)
    monkeypatch.setattr(launches, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(launches, "choose_tables", lambda: None)  # which would write to the environment
    monkeypatch.setattr(launches, "describe_run", make_result)
    monkeypatch.setattr(launches, "Plans", Losing)
    monkeypatch.setattr(launches, "SHAPES", [(1040, 16), (1040, 32), (1040, 64)])
    assert launches.main(["--out", str(tmp_path)]) == 1
    [path] = tmp_path.iterdir()
    assert [cell["cols"] for cell in json.loads(path.read_text())["cells"]] == [16]
    out = capsys.readouterr().out
    assert "No cell has both times." in out and "failed: 1040x16 by b: dw is wrong" in out
    assert "failed: 1040x32: the CUDA context is lost, and the run ends: split: illegal address" in out


def test_a_cell_without_a_time_is_a_dash():
    cells = [
        {"rows": 8, "cols": cols, "selected": {"us": us}, "splits": [{"us": 10.0}]}
        for cols, us in ((16, 9.0), (32, None))
    ]
    text = launches.section(make_result(cells=cells))
    assert re.search(r"\| 8 +\| +0.90 \| +- +\|", text) and "faster in 1 of 1 cells" in text


def test_a_split_by_the_users_tables_is_nothing_to_compare_with(monkeypatch):
    norm = pytest.importorskip("tilegym_rmsnorm.backends.cutile.host.norm", exc_type=ImportError)
    cell = launches.Plans.__new__(launches.Plans)
    cell.shape, cell.bench = (1040, 16), SimpleNamespace(device=this_device())
    few = cell.make_providers("split")[0].backward.args[0].plan
    monkeypatch.setattr(norm, "plan_for", lambda problem: few)
    with pytest.raises(
        ValueError, match="selected: expected two kernels to compare with, got backward_split"
    ):
        cell.make_providers("selected")


def test_the_whole_command_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Interpreters run the kernels."""
    monkeypatch.setattr(of_rope, "describe_run", make_result)
    monkeypatch.setattr(of_rope, "CPU_SHAPES", (of_rope.CPU_SHAPES[1],))
    arguments = ["--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)]
    assert of_rope.main([*arguments, "--provider", "cutile,triton,eager"]) == 0
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
            q_out, k_out = of_rope.rope_forward_torch((*s[2:], None), of_rope.spec_of(shape))
            return q_out, 1.1 * k_out

        return {"eager": {"forward": forward}}

    monkeypatch.setattr(of_rope, "providers", wrong)
    cell = of_rope.measure(
        Session(("eager",), of_rope.OPS, CPU), of_rope.CPU_SHAPES[0], "forward", torch.float32
    )
    assert not cell["us"] and "a relative error of 1.0e-01" in cell["failed"]["eager"]


@pytest.mark.parametrize("op", of_rope.OPS)
def test_as_qwen3(op):
    """Everyone rounds as it does, so that results differ from float64 by more, and from each other by nothing."""
    shape = next(each for each in of_rope.CPU_SHAPES if each.as_qwen3)
    inputs = of_rope.make_inputs(shape, torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    assert inputs.cos.shape == (shape.b, shape.t, shape.r) and inputs.cos.dtype == torch.bfloat16
    spec = of_rope.spec_of(shape)
    found = of_rope.providers(("cutile", "eager"), shape, torch.bfloat16)
    errors = [of_rope.error_of(each[op], op, inputs, spec) for each in found.values()]
    assert all(1e-3 < each < of_rope.TOLERANCE[torch.bfloat16] for each in errors)
    if op == "forward":
        ours, theirs = (each[op](inputs) for each in found.values())
        assert all(map(torch.equal, ours, theirs))


def test_an_unknown_provider_is_refused(capsys):
    with pytest.raises(SystemExit):
        of_rope.main(["--device", "cpu", "--provider", "tritn"])
    assert "expected names of cutile, triton" in capsys.readouterr().err


def test_bytes_that_must_move_and_the_share_of_the_copy():
    shape = of_rope.SHAPES[0]
    assert shape.bytes_of("backward", torch.bfloat16) == 3 * 2 * 4 * 4096 * 40 * 128
    cell = {"shape": list(shape), "op": "forward", "us": {"cutile": 168.0}, "errors": {}, "failed": {}}
    text = of_rope.section(make_result(dtype="bfloat16", copy_gb_per_s=4000.0, cells=[cell]))
    assert "49.9" in text and "4x4096x(32+8)x128" in text


def test_host_times_of_few_tokens(monkeypatch):
    monkeypatch.setattr(of_rope, "DECODING", (of_rope.CPU_SHAPES[1],))
    monkeypatch.setattr(of_rope, "HOST_SAMPLES", 2)
    session = Session(("eager", "triton"), of_rope.OPS, CPU)
    cells = [of_rope.measure(session, shape, "forward", torch.bfloat16) for shape in of_rope.CPU_SHAPES]
    assert "host_us" not in cells[0] and list(cells[1]["host_us"]) == ["triton", "F.rms_norm of q"]
    assert min(cells[1]["host_us"].values()) > 0
    text = of_rope.section(make_result(dtype="bfloat16", copy_gb_per_s=None, cells=cells))
    assert text.count("1x5x(2+1)x16 R 8") == 2 and text.count("2x6x(4+2)x16") == 1


def test_few_tokens_are_few_cells():
    """A token of each of many sequences, and as many of one; a run must stay below three minutes."""
    assert len(of_rope.DECODING) <= 8
    few = [shape for shape in of_rope.DECODING if (shape.hq, shape.hk) == (32, 8)]
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
    session, shape = Session(("liger",), of_rope.OPS, CPU), of_rope.Shape(2, 5, 4, 2, 64, 64)
    cell = of_rope.measure(session, shape, "forward", torch.bfloat16)
    assert list(cell["us"]) == ["liger"] and not cell["failed"]
    cell = of_rope.measure(session, shape, "backward", torch.bfloat16)
    assert not cell["us"] and not cell["failed"]


@pytest.mark.parametrize("sizes", [(64, 32), (80, 80), (64, 64, True)], ids=["partial", "80", "as Qwen3"])
def test_liger_has_no_kernels_for_a_shape(sizes, liger):
    assert of_rope.liger_forward(of_rope.Shape(1, 2, 2, 1, *sizes), torch.bfloat16) is None


def test_liger_is_left_out_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(of_rope.importlib.util, "find_spec", lambda name: None)
    assert of_rope.main(["--device", "cpu", "--provider", "liger"]) == 2
    assert "left out: liger: no module liger_kernel" in capsys.readouterr().err

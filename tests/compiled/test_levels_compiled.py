# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A level of reproducibility under torch.compile, in exported graphs, and in caches that another process filled."""

import copy
import io
import json
import logging
import zipfile

import pytest
import torch
from helpers import DEVICE
from levels import LEVELS, NotedLevels
from processes import run_script
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import export
from torch.torch_version import TorchVersion

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import reproducibility

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]

N = 8
W, TABLE = torch.rand(N, device=DEVICE), torch.randn(4, N, device=DEVICE)


@pytest.fixture
def noted(monkeypatch):
    return NotedLevels(monkeypatch)


def both(x, weight):
    """Usual calls, which Dynamo traces past the checks; a call that it traces with them."""
    y, total = tr.rms_norm(x, (N,), weight, 1e-6, residual=x)
    y = tr.rms_norm_rope(y[None], weight, TABLE[:3], TABLE[:3])[0]
    return y + tr.rms_norm(total, (N,), weight, residual_alpha=1)  # an int


def given():
    x = torch.randn(3, 4, N, device=DEVICE, requires_grad=True)
    return x, W.clone().requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_change_compiles_again_and_a_backward_keeps_its_level(noted, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(both, backend=counter, fullgraph=True)
    for _ in range(2):
        for name, flags in LEVELS:
            with tr.reproducible(name):
                result = compiled(*given())
            assert set(noted.take()[0]) == {flags}
            with tr.reproducible("run"):
                result.sum().backward()
            forwards, backwards = noted.take()
            assert len(backwards) == 3 and set(backwards) == {flags} and not forwards
    assert counter.frame_count == len(LEVELS)


def test_without_a_level_there_is_one_graph_that_blocks_come_back_to(noted, monkeypatch):
    """The environment is read while Dynamo traces, and again after `set_reproducible(None)`."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(both, backend=counter, fullgraph=True)
    for value, flags in (("", 0), ("device", 3), ("run", 0), ("vllm", 5)):
        monkeypatch.setenv(reproducibility.REPRODUCIBLE_VARIABLE, value)
        tr.set_reproducible(None)
        before = counter.frame_count
        compiled(*given())
        with tr.reproducible("batch"):
            compiled(*given())
        compiled(*given())
        assert counter.frame_count - before == (2 if value == "" else 1)
        forwards, _ = noted.take()
        assert [set(forwards[3 * i : 3 * i + 3]) for i in range(3)] == [{flags}, {1}, {flags}]


def test_a_misspelt_level_of_the_environment_raises_in_a_compiled_call(monkeypatch):
    monkeypatch.setenv(reproducibility.REPRODUCIBLE_VARIABLE, "batches")
    tr.set_reproducible(None)
    with pytest.raises(Exception, match="TILEGYM_RMSNORM_REPRODUCIBLE: expected one of 'run'"):
        torch.compile(both, backend="eager")(*given())


def test_a_block_inside_a_compiled_function(noted):
    def inside(x, weight):
        with tr.reproducible("device"):
            y = tr.rms_norm(x, (N,), weight, 1e-6)
            with tr.reproducible("run"):
                y = tr.rms_norm(y, (N,), weight, 1e-6)
            with tr.reproducible("batch", order="vllm"):
                y = y + tr.rms_norm(y, (N,), weight, residual_alpha=1)
            assert tr.get_reproducible() == "device"
        return tr.rms_norm(y, (N,), weight, 1e-6)

    inside(*given())
    eager = noted.take()[0]
    result = torch.compile(inside, backend="aot_eager", fullgraph=True)(*given())
    assert noted.take()[0] == eager == [3, 0, 5, 0]
    result.sum().backward()
    assert noted.take()[1] == eager[::-1]
    assert not reproducibility.traced_levels


def test_a_decorated_function_is_compiled(noted):
    @tr.reproducible("device")
    def decorated(x, weight):
        return tr.rms_norm(x, (N,), weight, 1e-6)

    for function in (decorated, lambda *tensors: decorated(*tensors) * 2):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*given()).sum().backward()
        assert noted.take() == ([3], [3])


def test_a_graph_that_breaks_inside_a_block_runs_under_its_level(noted):
    def broken(x, weight):
        with tr.reproducible("device"):
            y = tr.rms_norm(x, (N,), weight, 1e-6)
            torch._dynamo.graph_break()
            y = tr.rms_norm(y, (N,), weight, 1e-6)
        return tr.rms_norm(y, (N,), weight, 1e-6)

    compiled = torch.compile(broken, backend="eager")
    for _ in range(2):
        compiled(*given())
        assert noted.take()[0] == [3, 3, 0]
    assert tr.get_reproducible() == "run" and not reproducibility.traced_levels


def test_inductor_keeps_the_level(noted):
    compiled = torch.compile(both, fullgraph=True)
    for name, flags in LEVELS[:3]:
        with tr.reproducible(name):
            result = compiled(*given())
        result.sum().backward()
        forwards, backwards = noted.take()
        assert set(forwards) == set(backwards) == {flags} and len(forwards) == len(backwards) == 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = tr.RMSNorm(N, device=DEVICE)
        self.register_buffer("table", TABLE[:3].clone())  # PyTorch 2.9 exports no global tensor

    def forward(self, x):
        y, total = self.norm(x, x)
        return tr.rms_norm_rope((y + total)[None], self.norm.weight, self.table, self.table)[0]


def ops_of(program):
    return [node for node in program.graph.nodes if "tilegym" in str(node.target)]


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_keeps_its_level_and_follows_the_one_in_effect(noted, strict):
    x = torch.randn(3, 4, N, device=DEVICE)
    for name, flags in LEVELS:
        with tr.reproducible(name):
            program = export(Model(), (x,), strict=strict)
        assert len(ops_of(program)) == 2
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        noted.take()
        for around, more in LEVELS:
            with tr.reproducible(around):
                loaded(x)
            assert noted.take()[0] == [flags | more] * 2


def test_an_export_of_the_release_before_runs(noted):
    """Its ops end with the backend: nothing names the level, neither in the graph nor in the file."""
    x = torch.randn(3, 4, N, device=DEVICE)
    with tr.reproducible("device"):
        program = export(Model(), (x,))
    expected = program.module()(x)
    file = io.BytesIO()
    torch.export.save(program, file)
    old = io.BytesIO()
    removed = 0

    def without_level(entry):
        nonlocal removed
        if isinstance(entry, dict):
            for node in entry.get("nodes", ()):
                kept = [each for each in node["inputs"] if each["name"] != "reproducible"]
                removed += len(node["inputs"]) - len(kept)
                node["inputs"] = kept
            for each in entry.values():
                without_level(each)
        elif isinstance(entry, list):
            for each in entry:
                without_level(each)

    with zipfile.ZipFile(file) as source, zipfile.ZipFile(old, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith(".json") and b'"nodes"' in content:
                graph = json.loads(content)
                without_level(graph)
                content = json.dumps(graph).encode()
            target.writestr(info, content)
    assert removed == 2
    old.seek(0)
    loaded = torch.export.load(old)
    for node in ops_of(loaded):
        assert len(node.args) + len(node.kwargs) == len(node.target._schema.arguments) - 1
    noted.take()
    for name, flags in LEVELS:
        with tr.reproducible(name):
            torch.testing.assert_close(loaded.module()(x), expected)
        assert noted.take()[0] == [flags] * 2
    result = loaded.module()(x.clone().requires_grad_())
    with tr.reproducible("batch"):
        result.sum().backward()
    assert set(noted.take()[1]) == {1}, "its forward's and the one in effect, as of all ops that run"


def test_graphs_of_older_releases_are_traced_further(noted):
    """AOTAutograd takes a graph whose nodes lack the level, from make_fx or Dynamo of another release."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    forward = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
    arguments = x, None, None, None, 1, 1e-6, 0.0, "once", 1.0, None, None, None
    y = graph.call_function(forward, arguments)
    graph.output(graph.call_function(lambda results: results[0], (y,)))
    module = torch.fx.GraphModule({}, graph)
    for backend in ("eager", "aot_eager", "inductor"):
        compiled = torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True)
        result = compiled(torch.randn(3, N, device=DEVICE, requires_grad=True))
        result.sum().backward()
        assert noted.take() == ([0], [0])


def test_aotinductor_keeps_the_level(noted, tmp_path):
    """C++ calls the ops, with the arguments of the graph."""
    if DEVICE.type != "cpu":
        pytest.skip("some builds of torch for CUDA cannot load a package of any model")
    x = torch.randn(3, 4, N)
    for name, flags in (LEVELS[0], LEVELS[2]):
        with tr.reproducible(name):
            program = export(Model().requires_grad_(False), (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / f"{flags}.pt2"))
        run = torch._inductor.aoti_load_package(path)
        noted.take()
        for around, more in LEVELS[:3]:
            with tr.reproducible(around):
                run(x)
            assert noted.take()[0] == [flags | more] * 2


def test_operations_in_a_graph_are_told_as_it_is_traced(caplog, monkeypatch):
    monkeypatch.setattr(reproducibility, "_told", set())

    def by_operations(x, weight):
        return tr.rms_norm(x, (N,), weight, 1e-6, backend="torch")

    compiled = torch.compile(by_operations, backend="eager", fullgraph=True)
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"), tr.reproducible("batch"):
        compiled(*given())
        compiled(*given())
    assert len([each for each in caplog.messages if "promises nothing" in each]) == 1


CACHED = """
import json, sys

import pytest, torch

from levels import NotedLevels
from torch._dynamo.utils import counters

import tilegym_rmsnorm as tr

noted = NotedLevels(pytest.MonkeyPatch())
torch._dynamo.config.caching_precompile = PRECOMPILES
torch.manual_seed(0)
W, X = torch.rand(8), torch.randn(3, 8)


def step(x, weight):
    y, total = tr.rms_norm(x, (8,), weight, 1e-6, residual=x)
    return y * total


for level in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    with tr.reproducible(level):
        y = torch.compile(step, fullgraph=True)(X.clone().requires_grad_(), W.clone().requires_grad_())
    y.sum().backward()
    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
    print(json.dumps([level, noted.take(), hits, counters["stats"]["unique_graphs"]]))
if PRECOMPILES:
    torch.compiler.save_cache_artifacts()  # writes the folder of the cache, too
"""


def test_caches_that_another_process_filled_tell_levels_apart(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CACHED.replace("PRECOMPILES", "False"))
    kept = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    found = []
    for levels in (("run",), ("batch", "run"), ("device", "batch", "run")):
        result = run_script(script, *levels, **kept)
        assert result.returncode == 0, result.stderr[-3000:]
        found += map(json.loads, result.stdout.splitlines())
    flags = dict(LEVELS)
    for level, (forwards, backwards), *_ in found:
        assert forwards == backwards == [flags[level]]
    hits = [any(each) for _, _, each, _ in found]
    assert hits == [False, False, True, False, True, True], "the caches are in use"


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="guards are kept from 2.13 on")
def test_graphs_that_another_process_saved_promise_no_less(tmp_path):
    """PyTorch compares numbers of modules with those of the process that loads a graph, when it loads it."""
    script = tmp_path / "script.py"
    script.write_text(CACHED.replace("PRECOMPILES", "True"))
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    found = []
    for level in ("run", "run", "batch"):
        result = run_script(script, level, **kept)
        assert result.returncode == 0, result.stderr[-3000:]
        found += map(json.loads, result.stdout.splitlines())
    assert [forwards for _, (forwards, _), *_ in found] == [[0], [0], [1]]
    assert [bool(graphs) for *_, graphs in found][:2] == [True, False], "traced"

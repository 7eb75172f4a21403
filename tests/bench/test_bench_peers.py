# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of other libraries by the benchmark, by way of the modules in fake_peers.py."""

import dataclasses
import sys

import pytest
import torch
from bench_records import run_all
from fake_peers import FAKES, BwdConfig, FwdConfig, module
from torch import _inductor
from torch._inductor import list_mode_options
from torch.torch_version import TorchVersion

from bench.measure import warm
from bench.measure.check import errors_of, make_inputs
from bench.measure.provenance import PEERS, ROOT
from bench.providers import ours, peers
from bench.providers.ours import MAX_AUTOTUNE, PDL
from bench.providers.quack_configs import quack_grids, quack_neighbours
from tilegym_rmsnorm.measure.accuracy import why_wrong

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name, made in FAKES[library]().items():
        monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("library", peers.LIBRARIES)
def test_every_setting_of_a_library_is_called_right(library, dtype, monkeypatch):
    install(monkeypatch, library)
    shape = (5, 64)
    inputs = make_inputs(shape, dtype, CPU, sets=1)[0]
    providers = peers.make_providers(library, shape, dtype, CPU)
    labels = [provider.label for provider in providers]
    assert len(set(labels)) == len(labels) and {provider.name for provider in providers} == {library}
    assert providers[0].ops == ("forward", "backward", "both")
    for provider in providers:
        outputs = run_all(provider, inputs)
        errors, allowed = errors_of({"it": outputs}, inputs)
        assert outputs and why_wrong(errors["it"], allowed) is None


def test_names_that_are_no_library_are_providers():
    (provider,) = peers.make_providers("torch", (4, 8), torch.float32, CPU)
    assert provider.name == "torch" and peers.why_missing("torch") is None


@pytest.mark.parametrize("cols", [64, 4096, 8192, 65536])
@pytest.mark.parametrize("config", [FwdConfig(), BwdConfig(), BwdConfig(cluster_n=1, threads_per_row=128)])
def test_neighbours_of_a_quack_config_say_how_they_differ_and_fit(config, cols):
    found = quack_neighbours(config, cols, 2)
    assert len({each for _, each in found}) == len(found) and config not in [each for _, each in found]
    for text, each in found:
        before, after = dataclasses.asdict(config), dataclasses.asdict(each)
        changed = {f"{key}={after[key]}" for key in before if before[key] != after[key]}
        assert set(text.split()) == changed
        assert each.threads_per_row <= each.num_threads <= 256 and each.cluster_n <= 16
        assert each.threads_per_row * each.cluster_n <= cols


def settings(config, cols, itemsize=2):
    return {frozenset(text.split()) for text, _ in quack_neighbours(config, cols, itemsize)}


def test_what_wins_alone_in_quack_is_tried_together():
    """TMA and another cluster take a quarter less each at 8192x12288; 256 threads won 31 cells, TMA 93."""
    wide = settings(BwdConfig(), 12288)
    assert {"cluster_n=1", "reload_wdy=None", "use_tma=True"} in wide and {
        "cluster_n=4",
        "use_tma=True",
    } in wide
    assert {"reload_x=smem", "use_tma=True"} in wide and {"use_tma=True", "smem_stages=3"} in wide
    assert {"cluster_n=1", "use_tma=True"} in settings(BwdConfig(cluster_n=4), 18432)
    narrow = settings(BwdConfig(num_threads=128, threads_per_row=128, cluster_n=1), 4096)
    assert {"num_threads=256", "use_tma=True"} in narrow
    assert {"num_threads=256", "threads_per_row=256"} in narrow
    forward = settings(FwdConfig(num_threads=128, threads_per_row=128), 12288)
    assert {"cluster_n=2", "reload_from=gmem"} in forward and {
        "num_threads=256",
        "threads_per_row=256",
    } in forward


def test_tma_of_quack_copies_multiples_of_16_bytes():
    for itemsize, has_tma in ((2, False), (4, True)):
        by_tma = [each for each in settings(BwdConfig(), 9000, itemsize) if "use_tma=True" in each]
        assert any(not any("cluster_n" in knob for knob in each) for each in by_tma) is has_tma


def test_every_cluster_of_quack_may_fill_the_gpu():
    """quack's heuristic leaves 66 partial rows of 12288 columns on 132 SMs: by cluster_n=1 half of them would idle."""
    grids = quack_grids(BwdConfig(), 12288, 2, 66, 132, 8192)
    assert {(each.cluster_n, rows) for _, each, rows in grids} == {(1, 132), (1, 264), (2, 132)}
    assert {each.use_tma for _, each, _ in grids} == {False, True}
    assert all(text.endswith(f"partial_rows={rows}") for text, _, rows in grids)
    assert len({text for text, _, _ in grids}) == len(grids)


@pytest.mark.parametrize(
    ("rows", "cols", "usual", "partial_rows"),
    [
        (8192, 4096, 264, {132, 528}),
        (524288, 64, 2112, {132, 264, 528}),
        (8192, 7168, 132, {264, 528}),
        (200, 4096, 264, {132, 200}),
        (16, 4096, 264, {16}),
        (1, 64, 2112, {1}),
    ],
)
def test_quack_without_a_cluster_has_other_grids_too(rows, cols, usual, partial_rows):
    """Its heuristic looks at the columns alone: 264 blocks, and as many partial rows to sum, for 16 rows of 4096."""
    grids = quack_grids(BwdConfig(cluster_n=1, threads_per_row=8), cols, 2, usual, 132, rows)
    assert {each for *_, each in grids} == partial_rows
    assert len({text for text, *_ in grids}) == len(grids) == 2 * len(partial_rows), "by TMA, and without"


def test_few_rows_leave_few_grids_of_quack_s_clusters():
    grids = quack_grids(BwdConfig(), 12288, 2, 66, 132, 4)
    assert {(each.cluster_n, rows) for _, each, rows in grids} == {(1, 4), (2, 4)}
    assert len({text for text, *_ in grids}) == len(grids) == 4


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("cols", [64, 1024, 4096, 8192, 65536])
def test_quack_has_at_most_forty_settings_of_an_op(cluster, cols):
    """Each is compiled, or at least timed, in every cell."""
    chosen = BwdConfig(cluster_n=cluster)
    grids = quack_grids(chosen, cols, 2, 264, 132, 1 << 17)
    assert 1 + len(quack_neighbours(chosen, cols, 2)) + len(grids) <= 40


def test_row_mode_is_tried_where_it_changes_the_kernel(monkeypatch):
    install(monkeypatch, "liger.triton")
    few, many = ((rows, 64) for rows in (4096, 4096 * 8))
    assert len(peers.make_providers("liger.triton", few, torch.bfloat16, CPU)) == 1
    assert len(peers.make_providers("liger.triton", many, torch.bfloat16, CPU)) == 2


def test_liger_cute_refuses_what_liger_passes_on(monkeypatch):
    install(monkeypatch, "liger.cute")
    with pytest.raises(ValueError, match="rows of 12, no multiple of 8"):
        peers.make_providers("liger.cute", (4, 12), torch.bfloat16, CPU)


def test_a_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.why_missing("quack") == (
        "no module quack, cutlass, tvm_ffi. To mend it: pip install '.[peers]' in a checkout"
    )


def test_pytorch_says_why_it_has_no_quack(monkeypatch):
    name = "torch._native.cutedsl_utils"
    monkeypatch.setitem(sys.modules, name, None)
    assert "has no overrides of F.rms_norm" in peers.why_missing("torch.quack")
    utils = {"runtime_available": lambda: True, "runtime_version": lambda: "4.8.1"}
    utils |= {"_CUTEDSL_REQUIRED_VERSIONS": {"4.4.2", "4.4.1"}, "_version_is_ok": lambda: False}
    monkeypatch.setitem(sys.modules, name, module(name, **utils))
    assert "takes nvidia-cutlass-dsl 4.4.1, 4.4.2, found 4.8.1" in peers.why_missing("torch.quack")
    monkeypatch.setitem(sys.modules, name, module(name, **utils | {"runtime_available": lambda: False}))
    assert "finds no nvidia-cutlass-dsl" in peers.why_missing("torch.quack")
    monkeypatch.setitem(sys.modules, name, module(name, **utils | {"_version_is_ok": lambda: True}))
    assert peers.why_missing("torch.quack") is None


# torch.compile


@pytest.fixture
def compiled(monkeypatch):
    """The options of each call of torch.compile."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: found.append(options))
    return found


has_pdl = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10", reason=f"Inductor of torch 2.9 has no option {PDL}"
)


@has_pdl
@pytest.mark.parametrize("name", ["torch.compile", MAX_AUTOTUNE])
def test_torch_compile_is_timed_with_programmatic_launches_too(name, compiled, monkeypatch):
    """cutile has them; Inductor only if it is told."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = peers.make_providers(name, (4, 8), torch.bfloat16, torch.device("cuda", 0))
    assert [each.label for each in made] == [f"{name} (enable_pdl={on})" for on in (False, True)]
    mode = list_mode_options("max-autotune-no-cudagraphs") if name == MAX_AUTOTUNE else {}
    assert bool(mode) is (name == MAX_AUTOTUNE)
    each = len(compiled) // 2
    assert each >= 2
    assert [options["options"] for options in compiled] == [mode | {PDL: False}] * each + [
        mode | {PDL: True}
    ] * each


@pytest.mark.parametrize("reason", ["older GPU", "older torch", "no GPU"])
def test_torch_compile_has_one_setting_where_it_has_no_choice(reason, compiled, monkeypatch):
    device = CPU if reason == "no GPU" else torch.device("cuda", 0)
    capability = (8, 9) if reason == "older GPU" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if reason == "older torch":
        monkeypatch.setattr(_inductor, "list_options", list)
    (provider,) = peers.make_providers("torch.compile", (4, 8), torch.bfloat16, device)
    assert provider.label == "torch.compile" and all(each["options"] == {} for each in compiled)


@has_pdl
def test_inductor_takes_both_settings_and_they_compile_ahead(monkeypatch):
    seen = []

    def run_op(provider, op, inputs, poisons):
        if op == "forward":  # compiles it
            seen.append((provider.settings, provider.forward(inputs.x, inputs.weight)[0].shape))

    monkeypatch.setattr(ours, "_has_pdl", lambda device: True)
    monkeypatch.setattr(warm, "run_op", run_op)
    warm.first_calls(warm.Task(MAX_AUTOTUNE, (4, 8), torch.float32), CPU)
    assert seen == [(f"enable_pdl={on}", (4, 8)) for on in (False, True)]


def test_every_peer_is_pinned_and_named_in_results():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["peers"]
    pinned = dict(requirement.split(";")[0].strip().split("==") for requirement in extra)
    assert {name.split("[")[0] for name in pinned} == set(PEERS)

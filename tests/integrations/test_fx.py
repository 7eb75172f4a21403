# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The passes over traced graphs: what they refuse, what they leave as it is, what is marked for Inductor, and that two
trainings have the same bits."""

import logging
import operator
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, needs_inductor, why_skip
from torch import nn
from torch.fx import Graph, GraphModule
from traced_norms import (
    BACKWARD,
    FORWARD,
    MARK,
    MARKS,
    REPLACED,
    WEIGHT,
    X,
    compile_regions,
    described,
    marked,
    norms,
    trace,
    two_norms_graph,
)

from tilegym_rmsnorm.integrations.fx import annotate_rmsnorm_for_regional_inductor_pass, replace_rmsnorm_pass

PASSES = [annotate_rmsnorm_for_regional_inductor_pass, replace_rmsnorm_pass]

pytestmark = MARKS


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("thing", [nn.Linear(8, 8), Graph(), None, lambda x: x])
def test_what_is_no_graph_module_is_refused(run, thing):
    with pytest.raises(TypeError, match=f"gm: expected a torch.fx.GraphModule, got {type(thing).__name__}"):
        run(thing)


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("function", [torch.sin, lambda x: F.layer_norm(x, (8,)).relu(), lambda x: x])
def test_a_graph_without_norms_stays_as_it_is(run, function, caplog):
    gm, _ = trace(function, X)
    before, code = described(gm), gm.code
    with caplog.at_level(logging.DEBUG, "tilegym_rmsnorm"):
        assert run(gm) is gm
    assert described(gm) == before and gm.code == code
    assert re.search("(marked|replaced) 0 ", caplog.text)
    assert gm.meta.get(REPLACED, 0) == 0


@pytest.mark.parametrize("settings", [None, {}, {"max_autotune": True, "coordinate_descent_tuning": True}])
def test_norms_and_their_getitems_are_marked_and_nothing_else_is(settings):
    gm, _ = two_norms_graph()
    _, before = described(gm)
    assert [node.target for node in norms(gm)] == [FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert annotate_rmsnorm_for_regional_inductor_pass(gm, (X, WEIGHT), rmsnorm_compile_config=settings) is gm
    of_norms = {user for norm in norms(gm) for user in norm.users}
    assert {node.target for node in of_norms} == {operator.getitem} and len(of_norms) == 8
    assert set(marked(gm)) == of_norms | set(norms(gm))
    expected = {} if settings is None else {"inductor_configs": settings}
    assert all(node.meta["custom"] == {MARK: expected} for node in marked(gm))
    assert [{k: v for k, v in node.meta.items() if k != "custom"} for node in gm.graph.nodes] == [
        meta for _, meta in before
    ]


def test_other_custom_metadata_is_kept_and_shared_dicts_are_not_written_to():
    gm, _ = two_norms_graph()
    shared = {"phase": "forward", MARK: "what a pass before this one wrote"}
    for node in gm.graph.nodes:
        node.meta["custom"] = shared
    annotate_rmsnorm_for_regional_inductor_pass(gm)
    changed = [node for node in gm.graph.nodes if node.meta["custom"] is not shared]
    assert len(changed) == 12 and shared[MARK] == "what a pass before this one wrote"
    assert all(node.meta["custom"] == {"phase": "forward", MARK: {}} for node in changed)


def test_other_users_of_a_norm_are_not_marked():
    """Targets alone decide, without metadata, as in torchtitan's pass."""
    graph = Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(FORWARD, (x, [8], None, 1e-5))
    y = graph.call_function(operator.getitem, (norm, 0))
    graph.output((norm, graph.call_function(torch.ops.aten.sin.default, (y,))))
    gm = GraphModule(nn.Module(), graph)
    annotate_rmsnorm_for_regional_inductor_pass(gm)
    assert marked(gm) == [norm, y]


def test_a_region_for_each_norm():
    gm, _ = two_norms_graph()
    settings = {"max_autotune": True}
    annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config=settings, one_region_each=True)
    regions = []
    for norm in norms(gm):
        [mark, *others] = [node.meta["custom"][MARK] for node in (norm, *norm.users)]
        assert mark["inductor_configs"] == settings and all(other == mark for other in others)
        regions.append(mark["inductor_region"])
    assert len(set(regions)) == 4


@pytest.mark.parametrize("settings", [["max_autotune"], "max_autotune", True])
def test_settings_that_are_no_dict_are_refused(settings):
    gm, _ = two_norms_graph()
    before = described(gm)
    with pytest.raises(
        TypeError, match=f"rmsnorm_compile_config: expected a dict or None, got {type(settings).__name__}"
    ):
        annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config=settings)
    assert described(gm) == before


@needs_inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"max_autotune": True},
        {"coordinate_descent_tuning": True},
        {"wrap_inductor_compiled_regions": True},
    ],
    ids=str,
)
def test_inductor_compiles_what_is_marked(settings):
    pytest.importorskip("torch.fx.passes.regional_inductor", reason="this torch has no regional_inductor")
    config = pytest.importorskip("torch._inductor.config")
    if not all(hasattr(config, name) for name in settings or {}):
        pytest.skip(f"Inductor of this torch does not know {settings}")
    gm, mode = two_norms_graph()
    expected = gm(X, WEIGHT)
    annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config=settings)
    gm = compile_regions(gm, mode)
    assert not norms(gm)
    torch.testing.assert_close(gm([X, WEIGHT]), expected)


@needs_inductor
@pytest.mark.slow
@pytest.mark.parametrize("one_region_each", [False, True])
def test_how_many_regions_are_compiled(one_region_each):
    """Two norms stand side by side, as those of q and k."""
    regional = pytest.importorskip("torch.fx.passes.regional_inductor")
    gm, mode = trace(lambda q, k: (F.rms_norm(q, (8,), eps=1e-5), F.rms_norm(k, (8,), eps=1e-5)), X, X + 1)
    annotate_rmsnorm_for_regional_inductor_pass(gm, one_region_each=one_region_each)
    if one_region_each and "inductor_region" not in Path(regional.__file__).read_text(encoding="utf-8"):
        pytest.skip("this torch has no inductor_region")
    gm = compile_regions(gm, mode)
    calls = [
        node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem
    ]
    assert len(calls) == 1 + one_region_each
    for got, x in zip(gm([X, X + 1]), (X, X + 1), strict=True):
        torch.testing.assert_close(got, F.rms_norm(x, (8,), eps=1e-5))


@needs_inductor
@pytest.mark.slow
def test_inductor_says_which_setting_it_does_not_know():
    pytest.importorskip("torch.fx.passes.regional_inductor", reason="this torch has no regional_inductor")
    gm, mode = two_norms_graph()
    annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config={"max_autotunes": True})
    with pytest.raises(ValueError, match="max_autotunes"):
        compile_regions(gm, mode)


class Net(nn.Module):
    """Two layers of a residual stream, with norms before each and behind all."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(16, eps=1e-5) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x)).tanh()
        return self.norms[2](x).square().mean()


def annotated_and_compiled(gm, mode):
    # On a GPU Inductor times kernels, and may choose another, with another order of sums, the next time.
    config = {"deterministic": True}
    run = compile_regions(
        annotate_rmsnorm_for_regional_inductor_pass(gm, rmsnorm_compile_config=config), mode
    )
    return lambda *tensors: run(list(tensors))


def replaced_by(backend):
    return lambda gm, mode: replace_rmsnorm_pass(gm, backend=backend)


def trained(change):
    """Losses, gradients and weights of five steps of a graph that holds the forward and the backward."""
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    names, weights = zip(*net.named_parameters(), strict=True)

    def step(x, *weights):
        loss = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))
        return loss, *torch.autograd.grad(loss, weights)

    gm, mode = trace(step, torch.empty(12, 16, device=DEVICE), *weights)
    assert len(norms(gm)) == 6
    run, weights, seen = change(gm, mode), [each.detach() for each in weights], []
    for _ in range(5):
        loss, *gradients = run(torch.randn(12, 16, device=DEVICE), *weights)
        weights = [weight - 0.1 * each for weight, each in zip(weights, gradients, strict=True)]
        seen += [loss, *gradients, *weights]
    return seen


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(annotated_and_compiled, marks=[needs_inductor, pytest.mark.slow], id="annotated"),
        pytest.param(replaced_by("torch"), id="torch"),
        pytest.param(replaced_by("cutile"), id="cutile"),
    ],
)
def test_two_trainings_have_the_same_bits(change, request):
    if "cutile" in request.node.name and why_skip("cutile"):
        pytest.skip(why_skip("cutile"))
    if change is annotated_and_compiled:
        pytest.importorskip("torch.fx.passes.regional_inductor", reason="this torch has no regional_inductor")
    first, second = trained(change), trained(change)
    assert len(first) == 5 * 11
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.testing.assert_close(first, trained(lambda gm, mode: gm), rtol=1e-4, atol=1e-5)

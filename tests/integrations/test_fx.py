# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The passes over traced graphs: what they refuse, what they leave as it is, what is marked for Inductor, that two
trainings have the same bits, and our ops in the places of aten's, with their values."""

import copy
import logging
import operator
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BACKENDS,
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    assert_within,
    expected_results,
    make_inputs,
    needs_inductor,
    why_skip,
)
from torch import nn
from torch.fx import Graph, GraphModule
from torch.profiler import profile
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
    two_norms,
    two_norms_graph,
)

from tilegym_rmsnorm import BackendUnavailableError, rms_norm, use_backend
from tilegym_rmsnorm.integrations.fx import annotate_rmsnorm_for_regional_inductor_pass, replace_rmsnorm_pass

pytestmark = MARKS


PASSES = [annotate_rmsnorm_for_regional_inductor_pass, replace_rmsnorm_pass]


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


OUR_FORWARD = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
OUR_BACKWARD = torch.ops.tilegym_rmsnorm.rms_norm_backward.default
PAGE = Path(__file__).parents[2] / "docs" / "traced-graphs.md"


def test_ops_take_the_places_with_all_metadata():
    gm, _ = two_norms_graph()
    for number, node in enumerate(gm.graph.nodes):
        node.meta |= {
            "custom": {"number": number},
            "stack_trace": f"line {number}",
            "seq_nr": number,
            "nn_module_stack": {str(number): ("layer", nn.RMSNorm)},
            "tensor_meta": (number, number),
        }
    old = [dict(norm.meta) for norm in norms(gm)]
    others = [(node.name, dict(node.meta)) for node in gm.graph.nodes if node not in norms(gm)]
    outputs = [[(user.name, user.args[1]) for user in norm.users] for norm in norms(gm)]
    assert replace_rmsnorm_pass(gm, (X, WEIGHT), backend="torch") is gm
    gm.graph.lint()
    new = [node for node in gm.graph.nodes if node.target in (OUR_FORWARD, OUR_BACKWARD)]
    assert not norms(gm) and len(new) == gm.meta[REPLACED] == 4
    assert [(node.name, dict(node.meta)) for node in gm.graph.nodes if node not in new] == others
    assert [[(user.name, user.args[1]) for user in node.users] for node in new] == outputs
    for node, meta in zip(new, old, strict=True):
        # And residual_out, behind y and rstd; db and d_residual, behind dx and dw.
        more = [None] * (1 if node.target is OUR_FORWARD else 2)
        meta |= {key: (*meta[key], *more) for key in ("val", "tensor_meta")}
        assert node.meta == meta


def test_what_the_ops_are_given():
    gm, _ = two_norms_graph()
    x, weight = (node for node in gm.graph.nodes if node.op == "placeholder")
    replace_rmsnorm_pass(gm, backend="torch")
    first, second, of_second, of_first = [
        node for node in gm.graph.nodes if node.target in (OUR_FORWARD, OUR_BACKWARD)
    ]
    numbers = 0.0, "once", 1.0, None, None  # no residual: alpha 1
    assert first.args == (x, None, weight, None, 1, 1e-5, *numbers, "torch", 0)
    assert second.args[1:] == (None, None, None, 1, 1e-3, *numbers, "torch", 0)
    assert of_first.args[1:3] == (x, weight)
    assert of_first.args[4:] == (None, 3, 1, *numbers, None, None, "torch", 0)
    assert of_second.args[2] is None
    assert of_second.args[4:] == (None, 1, 1, *numbers, None, None, "torch", 0)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_eps_none_is_what_aten_takes(dtype):
    gm, _ = trace(lambda x: F.rms_norm(x, (8,)), X.to(dtype))
    assert norms(gm)[0].args[3] is None
    replace_rmsnorm_pass(gm)
    [node] = [node for node in gm.graph.nodes if node.target is OUR_FORWARD]
    assert node.args[5] == torch.finfo(FP64 if dtype == FP64 else FP32).eps


def forward_and_backward(eps, needs_dx=True, needs_dw=True):
    """aten's ops, as a graph holds them, with arguments by name too."""

    def run(x, dy, weight):
        y, rstd = FORWARD(x, x.shape[1:], weight, eps=eps)
        return y, rstd, *BACKWARD(dy, x, x.shape[1:], rstd, weight, output_mask=[needs_dx, needs_dw])

    return run


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_values_beside_float64(backend, dtype, mask):
    if why_skip(backend):
        pytest.skip(why_skip(backend))
    inputs = make_inputs(13, 100, dtype, dtype)
    gm, _ = trace(forward_and_backward(inputs.eps, *mask), inputs.x, inputs.dy, inputs.weight)
    replace_rmsnorm_pass(gm, backend=backend)
    assert gm.meta[REPLACED] == 2
    [wanted] = [node.args[5] for node in gm.graph.nodes if node.target is OUR_BACKWARD]
    assert wanted == 1 * mask[0] + 2 * mask[1]
    y, rstd, dx, dw = gm(inputs.x, inputs.dy, inputs.weight)
    assert ((dx is not None), (dw is not None)) == mask
    results = {"y": y, "rstd": rstd[:, 0]} | ({"dx": dx} if mask[0] else {}) | ({"dw": dw} if mask[1] else {})
    assert_within(expected_results(inputs), **results)


def test_several_normalized_dimensions():
    inputs = make_inputs(6, 24, FP32, FP32)
    shaped = [each.view(-1, 2, 12) for each in inputs[:2]] + [inputs.weight.view(2, 12)]
    gm, _ = trace(forward_and_backward(inputs.eps), *shaped)
    replace_rmsnorm_pass(gm, backend="torch")
    y, rstd, dx, dw = gm(*shaped)
    assert gm.meta[REPLACED] == 2 and rstd.shape == (6, 1, 1)
    assert y.shape == dx.shape == (6, 2, 12) and dw.shape == (2, 12)
    flat = {"y": y.flatten(1), "rstd": rstd.flatten(), "dx": dx.flatten(1), "dw": dw.flatten()}
    assert_within(expected_results(inputs), **flat)


def test_a_graph_for_any_sizes_stays_one():
    """And takes them: nothing that the pass asks fixes a size."""
    gm, mode = two_norms_graph(symbolic=True)
    guards = len(mode.shape_env.guards)
    replace_rmsnorm_pass(gm, backend="torch")
    assert gm.meta[REPLACED] == 4 and len(mode.shape_env.guards) == guards
    x, weight = torch.randn(7, 8, device=DEVICE, requires_grad=True), WEIGHT.clone().requires_grad_()
    torch.testing.assert_close(gm(x.detach(), weight.detach()), two_norms(x, weight))


def test_a_backend_is_that_in_effect_unless_it_is_named(caplog):
    gm, _ = trace(lambda x: F.rms_norm(x, (8,), eps=1e-5), X)
    named = replace_rmsnorm_pass(copy.deepcopy(gm), backend="torch")
    replace_rmsnorm_pass(gm)
    assert "None, 0)" in gm.code and "'torch', 0)" in named.code
    with use_backend("triton"), caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        if why_skip("triton"):
            with pytest.raises(BackendUnavailableError, match="triton"):
                gm(X)
        else:
            torch.testing.assert_close(gm(X), F.rms_norm(X, (8,), eps=1e-5))
        torch.testing.assert_close(named(X), F.rms_norm(X, (8,), eps=1e-5))


def test_an_unknown_backend_is_refused():
    gm, _ = two_norms_graph()
    before = described(gm)
    with pytest.raises(ValueError, match="backend: expected one of .*, got 'cutiles'"):
        replace_rmsnorm_pass(gm, backend="cutiles")
    assert described(gm) == before and REPLACED not in gm.meta


run_both = forward_and_backward(1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_is_named_is_given_what_it_runs(backend, dtype, caplog):
    """A float64 norm was given to kernels, which always refuse it: the graph had run, and raised then."""
    x, dy, weight = X.to(dtype), X.cos().to(dtype), WEIGHT.to(dtype)
    try:
        rms_norm(x, (8,), weight, backend=backend)
        is_run = True
    except BackendUnavailableError:
        is_run = False
    gm, _ = trace(run_both, x, dy, weight)
    expected, code = gm(x, dy, weight), gm.code
    with caplog.at_level(logging.DEBUG, "tilegym_rmsnorm"):
        replace_rmsnorm_pass(gm, backend=backend)
    assert gm.meta[REPLACED] == 2 * is_run and len(norms(gm)) == 2 * (not is_run)
    if not is_run:
        assert gm.code == code
        assert len(re.findall(f"stays as it is: backend '{backend}' cannot run it: ", caplog.text)) == 2
        [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert f"replaced 0 of 2 fused norms; backend '{backend}' cannot run it: " in warning.message
    torch.testing.assert_close(gm(x, dy, weight), expected)


@pytest.mark.parametrize("backend", ["cutile", "triton"])
def test_of_a_graph_the_norms_that_a_backend_runs(backend):
    """And of a pair the half that it runs, with the other's rstd: the graph says of one dy that it is wider than a
    kernel takes. aten's own backward of a GPU takes no such dy, so that it is given another."""
    if why_skip(backend):
        pytest.skip(why_skip(backend))

    def run(x, dy, wide_dy, weight):
        return *run_both(x, dy, weight), *run_both(x, wide_dy, weight), F.rms_norm(x.double(), (8,))

    given = X, X.cos(), X.sin(), WEIGHT
    gm, _ = trace(run, *given)
    expected, wide = gm(*given), norms(gm)[3:]
    wide[0].args[0].meta["val"] = wide[0].args[0].meta["val"].double()
    assert [norm.target for norm in wide] == [BACKWARD, FORWARD]
    replace_rmsnorm_pass(gm, backend=backend)
    assert norms(gm) == wide and gm.meta[REPLACED] == 3
    torch.testing.assert_close(gm(*given), expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="for a CPU")
def test_tensors_of_a_cpu_without_an_interpreter(monkeypatch):
    gm, _ = two_norms_graph()
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "0")
    code = gm.code
    assert replace_rmsnorm_pass(gm, backend="cutile").meta[REPLACED] == 0 and gm.code == code
    assert replace_rmsnorm_pass(gm, backend="auto").meta[REPLACED] == 4
    for got, each in zip(
        gm(X, WEIGHT), two_norms(X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()), strict=True
    ):
        torch.testing.assert_close(got, each)


def test_tensors_without_memory_are_refused_by_no_backend():
    """Device meta launches nothing."""
    x, weight = X.double(), WEIGHT.double()
    gm, _ = trace(run_both, x, x, weight)
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            node.meta["val"] = torch.empty_like(value, device="meta")
    assert replace_rmsnorm_pass(gm, backend="cutile").meta[REPLACED] == 2
    assert gm(*(each.to("meta") for each in (x, x, weight)))[2].shape == x.shape


def without_val(norm):
    del norm.args[0].meta["val"]


def complex_weight(norm):
    norm.args[-2].meta["val"] = torch.empty(8, dtype=torch.complex64, device="meta")


def short_rstd(norm):
    norm.args[3].meta["val"] = torch.empty(4, device="meta")


def argument(place, value):
    def change(norm):
        norm.args = (*norm.args[:place], value, *norm.args[place + 1 :])

    return change


def last_result(norm):
    list(norm.users)[1].args = (norm, -1)


def whole_result(norm):
    norm.graph.output_node().args = ((norm,),)


LEFT = {  # the op whose last norm in a graph is changed, how, and what the log says of it
    "no val": (FORWARD, without_val, r'input has no meta\["val"\]'),
    "no val, backward": (BACKWARD, without_val, r'grad_out has no meta\["val"\]'),
    "a number for x": (FORWARD, argument(0, 1.0), r'input has no meta\["val"\]'),
    "complex": (FORWARD, complex_weight, "weight has dtype torch.complex64"),
    "complex, backward": (BACKWARD, complex_weight, "weight has dtype torch.complex64"),
    "negative eps": (FORWARD, argument(3, -1.0), "eps: expected a finite number, at least 0"),
    "eps of another node": (FORWARD, argument(3, "eps"), "eps: expected a finite number"),
    "no shape": (FORWARD, argument(1, []), "normalized_shape is"),
    "a long shape": (FORWARD, argument(1, [2, 4, 8]), "normalized_shape is"),
    "no rstd": (BACKWARD, argument(3, None), "it has no grad_out or no rstd"),
    "a flat rstd": (BACKWARD, short_rstd, "rstd has dtype torch.float32 and 1 dimensions"),
    "a mask of numbers": (BACKWARD, argument(5, [1, 1]), "output_mask is"),
    "a short mask": (BACKWARD, argument(5, [True]), "output_mask is"),
    "too few arguments": (
        BACKWARD,
        lambda norm: setattr(norm, "args", norm.args[:4]),
        "its arguments are not those",
    ),
    "a result from behind": (BACKWARD, last_result, "its results are not taken by getitem"),
    "all results": (BACKWARD, whole_result, "its results are not taken by getitem"),
}
# All four that take the weight, and the backward of the same x.
STAY_TOO = {"complex": 4, "complex, backward": 4, "no val": 2}


@pytest.mark.parametrize("what", LEFT)
def test_what_cannot_be_replaced_stays_and_is_counted(what, caplog):
    op, change, reason = LEFT[what]
    gm, _ = trace(
        lambda x, w: two_norms(x, w) + two_norms(x * 2, w),
        X.clone().requires_grad_(),
        WEIGHT.clone().requires_grad_(),
    )
    [*_, left] = [norm for norm in norms(gm) if norm.target is op and norm.args[-2] is not None]
    change(left)
    args, meta, count = left.args, left.meta, len(norms(gm))
    with caplog.at_level(logging.DEBUG, "tilegym_rmsnorm"):
        replace_rmsnorm_pass(gm)
    fewer = count - len(norms(gm))
    assert left in norms(gm) and left.args == args and left.meta is meta
    assert (
        fewer
        == gm.meta[REPLACED]
        == len([node for node in gm.graph.nodes if node.target in (OUR_FORWARD, OUR_BACKWARD)])
    )
    assert fewer == count - STAY_TOO.get(what, 1)
    assert re.search(f"{left.name} stays as it is: {reason}", caplog.text)
    assert f"replaced {fewer} of {count} fused norms" in caplog.text


@pytest.mark.parametrize("dtype", [torch.complex64, FP32])
def test_tensors_that_aten_takes_and_the_ops_do_not(dtype):
    """Complex ones, and rows of no elements."""
    shape = (4, 8) if dtype.is_complex else (4, 0)
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    gm, _ = trace(lambda x: FORWARD(x, x.shape[1:], None, 1e-5)[0], x)
    code = gm.code
    replace_rmsnorm_pass(gm)
    assert gm.meta[REPLACED] == 0 and gm.code == code and len(norms(gm)) == 1


def test_a_second_run_finds_nothing():
    gm, _ = two_norms_graph()
    replace_rmsnorm_pass(gm)
    code = gm.code
    replace_rmsnorm_pass(gm)
    assert gm.code == code and gm.meta[REPLACED] == 0


def test_both_passes_one_after_the_other():
    """Marks are metadata, which is kept."""
    gm, _ = two_norms_graph()
    annotate_rmsnorm_for_regional_inductor_pass(gm)
    count = len(marked(gm))
    replace_rmsnorm_pass(gm)
    assert len(marked(gm)) == count and gm.meta[REPLACED] == 4


@needs_inductor
@pytest.mark.slow
def test_replaced_norms_stay_whole_in_regions_of_inductor():
    """Inductor compiles the rest: here all of the graph is one region."""
    pytest.importorskip("torch.fx.passes.regional_inductor", reason="this torch has no regional_inductor")
    gm, mode = two_norms_graph()
    expected = gm(X, WEIGHT)
    replace_rmsnorm_pass(gm, backend="torch")
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {MARK: {}}
    gm = compile_regions(gm, mode)
    assert not [node for node in gm.graph.nodes if node.target is OUR_FORWARD]
    with profile() as seen:
        results = gm([X, WEIGHT])
    ran = {event.name for event in seen.events()}
    assert {"tilegym_rmsnorm::rms_norm_forward", "tilegym_rmsnorm::rms_norm_backward"} <= ran
    torch.testing.assert_close(results, expected)


def test_forward_and_backward_graphs_of_aot_autograd():
    """Two graphs are made, between which rstd goes as aten has it."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func

    replaced = []

    def compiler(gm, example_inputs):
        replaced.append(replace_rmsnorm_pass(gm, example_inputs, backend="torch").meta[REPLACED])
        return make_boxed_func(gm.forward)

    def run(x, weight):
        return F.rms_norm(F.rms_norm(x, (8,), weight, 1e-5).sin(), (8,), None, 1e-3).square().sum()

    tensors = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    loss = aot_function(run, fw_compiler=compiler, bw_compiler=compiler)(*tensors)
    got = torch.autograd.grad(loss, tensors)
    assert replaced == [2, 2]
    torch.testing.assert_close(got, two_norms(*tensors))


def test_the_page_replaces_both_norms():
    """test_docs.py runs it without these kernels, and finds none to replace."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block.replace('"cuda"', '"cpu"'), str(PAGE), "exec"), names)
    assert names["gm"].meta[REPLACED] == 2 and not norms(names["gm"])

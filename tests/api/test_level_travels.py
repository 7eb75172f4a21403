# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A level of reproducibility reaches the backend in each call, and a backward has its forward's."""

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from every_op import each_op, fewest, fresh, note_unknown, of_each_op, usual
from helpers import why_skip
from levels import LEVELS, NotedLevels
from processes import mesh_of_one, placed
from torch.fx.experimental.proxy_tensor import make_fx

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import reproducibility
from tilegym_rmsnorm.backends import around_kernels, around_rope
from tilegym_rmsnorm.integrations import quack
from tilegym_rmsnorm.integrations.fx import replace_rmsnorm_pass
from tilegym_rmsnorm.ops.norm.spec import Spec
from tilegym_rmsnorm.ops.rope.spec import RopeSpec
from tilegym_rmsnorm.routes import library_op

N = 8


@pytest.fixture
def noted(monkeypatch):
    return NotedLevels(monkeypatch)


def backward_of(results):
    return torch.autograd.grad([each.sum() for each in results if each.requires_grad], _leaves(results))


def _leaves(results):
    found, nodes = [], [each.grad_fn for each in results if each.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None and not any(leaf is one for one in found):
            found.append(leaf)
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


@of_each_op(usual)
@pytest.mark.parametrize("how", ["public", "by_op"])
def test_a_backward_has_its_forwards_level_after_the_block(noted, op, kind, how):
    """The first call of a kind, and a known one."""
    made = fresh(op, kind)
    call = getattr(made, how)
    for name, flags in (*LEVELS, *LEVELS[::-1]):
        with tr.reproducible(name):
            results = call(*made.recorded(), *made.fixed.values())
        forwards, backwards = noted.take()
        assert set(forwards) == {flags} and not backwards
        backward_of(results)
        _, backwards = noted.take()
        assert set(backwards) == {flags}, "without a block"


@each_op
def test_known_calls_are_of_one_level(noted, monkeypatch, op):
    unknown = note_unknown(op, monkeypatch)
    made = fresh(op, next(iter(fewest(op).values())))
    for is_known in (False, True):
        for name, flags in LEVELS:
            unknown.clear()
            with tr.reproducible(name):
                results = made.public(*made.recorded(), *made.fixed.values())
            assert bool(unknown) is not is_known
            assert noted.take() == ([flags], [])
            unknown.clear()
            backward_of(results)
            assert noted.take() == ([], [flags])


@each_op
def test_the_backward_of_a_kernel_keeps_its_level_in_a_block_and_a_thread_of_its_own(noted, op):
    made = fresh(op, next(iter(fewest(op).values())))
    with tr.reproducible("device"):
        results = made.public(*made.recorded(), *made.fixed.values())
    noted.take()
    with tr.reproducible("run"):
        thread = threading.Thread(target=backward_of, args=(results,))
        thread.start()
        thread.join()
    assert noted.take() == ([], [3])


@pytest.mark.parametrize("backend", ["cutile", "triton"])
@each_op
def test_kernels_get_the_level(noted, op, backend):
    if reason := why_skip(backend):
        pytest.skip(reason)
    made = fresh(op, next(iter(fewest(op).values())))
    with tr.reproducible("device"):
        results = made.public(*made.recorded(), *made.fixed.values(), backend=backend)
    backward_of(results)
    forwards, backwards = noted.take()
    assert set(forwards) == set(backwards) == {3}


@each_op
@pytest.mark.parametrize("argument", [0, 1, 3, 5, 7])
def test_an_op_that_runs_has_its_argument_and_the_level_in_effect(noted, op, argument):
    """Called by all its arguments, by name, and without the last one, as older graphs call it."""
    made = fresh(op, next(iter(fewest(op).values())))
    given = made.of_forward(*made.tensors)
    for call in (
        lambda: op.forward(*given, argument),
        lambda: op.forward(*given, reproducible=argument),
        *([lambda: op.forward(*given)] if argument == 0 else []),
    ):
        for _ in range(2):
            for name, flags in LEVELS:
                with tr.reproducible(name):
                    results = call()
                assert noted.take() == ([argument | flags], [])
                if any(each is not None and each.requires_grad for each in results):
                    backward_of([each for each in results if each is not None and each.requires_grad])
                    assert set(noted.take()[1]) == {argument | flags}
    wanted = made.of_backward(1)
    noted.take()
    for name, flags in LEVELS:
        with tr.reproducible(name), torch.no_grad():
            op.backward(*wanted, argument)
        assert noted.take() == ([], [argument | flags])


@each_op
@pytest.mark.parametrize("argument", [2, 4, 6, 8, -1])
def test_an_op_refuses_flags_that_are_no_level(op, argument):
    made = fresh(op, next(iter(fewest(op).values())))
    given = made.of_forward(*made.tensors)
    message = f"reproducible: expected one of 0, 1, 3, 5, 7, got {argument}"
    for tensors in (given, [each.to("meta") if isinstance(each, torch.Tensor) else each for each in given]):
        with pytest.raises(ValueError, match=message):
            op.forward(*tensors, argument)
    with pytest.raises((TypeError, RuntimeError)):
        op.forward(*given, 1.0)


def test_the_last_argument_of_each_op_is_the_level():
    for overload in library_op.DECOMPOSITIONS:
        last = overload._schema.arguments[-1]
        assert (last.name, str(last.type), last.default_value) == ("reproducible", "int", 0)


def test_functions_without_autograd(noted):
    x, weight, dy = torch.randn(3, N), torch.rand(N), torch.randn(3, N)
    for name, flags in LEVELS * 2:
        with tr.reproducible(name):
            _, rstd = tr.rms_norm_forward(x, weight)
            tr.rms_norm_backward(x, dy, weight, rstd, needs_db=True)
            quack.rmsnorm_bwd(x, weight, dy, rstd, torch.randn(3, N, dtype=torch.float64))
        assert noted.take() == ([flags], [flags, flags])


def test_a_module(noted):
    norm = tr.RMSNorm(N, bias=True)
    for name, flags in LEVELS * 2:
        with tr.reproducible(name):
            y, total = norm(torch.randn(3, N), torch.randn(3, N))
        (y.sum() + total.sum()).backward()
        assert noted.take() == ([flags], [flags])


@each_op
def test_vmap_and_fake_tensors(noted, op):
    made = fresh(op, next(iter(fewest(op).values())))
    given = made.of_forward(*made.tensors)
    given = [each.detach() if isinstance(each, torch.Tensor) else each for each in given]
    batched = torch.stack([given[0]] * 2)
    for argument in (0, 3):
        results = torch.vmap(lambda x: op.forward(x, *given[1:], argument)[0])(batched)  # noqa: B023
        assert set(noted.take()[0]) == {argument}
        torch.testing.assert_close(results[0], op.forward(*given)[0])
        noted.take()


@each_op
def test_dtensors(noted, op):
    from torch.distributed.tensor import Replicate

    with mesh_of_one() as mesh:
        made = fresh(op, next(iter(op.placed.values())))
        for name, flags in LEVELS * 2:  # through the engine, and as known calls
            leaves = placed(made.recorded(), mesh, [Replicate()] * len(made.leaves))
            fixed = placed(made.fixed.values(), mesh, [Replicate()] * len(made.fixed))
            with tr.reproducible(name):
                results = made.public(*leaves, *fixed)
            assert set(noted.take()[0]) == {flags}
            torch.autograd.grad([each.sum() for each in results], leaves)
            assert set(noted.take()[1]) == {flags}


@each_op
def test_ops_of_dtensors(noted, op):
    """Of which backwards are known by themselves."""
    from torch.distributed.tensor import Replicate

    with mesh_of_one() as mesh:
        made = fresh(op, next(iter(op.placed.values())))
        given = made.of_backward(1)
        count = sum(each is None or isinstance(each, torch.Tensor) for each in given[:9])
        tensors = [each if each is None else each.detach() for each in given[:count]]
        noted.take()
        for argument in (0, 3):
            for name, flags in LEVELS * 2:
                with tr.reproducible(name), torch.no_grad():
                    on_mesh = placed(tensors, mesh, [Replicate()] * count)
                    op.backward(*on_mesh, *given[count:], argument)
                assert noted.take() == ([], [argument | flags])


@pytest.mark.parametrize("name", ["triton", "cutile"])
def test_the_aten_override_has_the_level_in_effect(noted, name):
    if reason := why_skip(name):
        pytest.skip(reason)
    x, weight = torch.randn(3, N, requires_grad=True), torch.rand(N, requires_grad=True)
    with tr.override_aten("cpu"), tr.use_backend(name):
        for level, flags in LEVELS[:3] * 2:
            with tr.reproducible(level):
                y, rstd = torch.ops.aten._fused_rms_norm(x.detach(), (N,), weight.detach(), 1e-6)
                given = torch.ones_like(y), x.detach(), (N,), rstd, weight.detach(), [True, True]
                torch.ops.aten._fused_rms_norm_backward(*given)
            assert noted.take() == ([flags], [flags])


def test_passes_over_graphs_write_the_level():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, N, device="meta")
    target = torch.ops.aten._fused_rms_norm.default
    for _ in range(2):
        graph.call_function(target, (x, [N], None, 1e-6))
    graph.output(x)
    gm = torch.fx.GraphModule({}, graph)
    with tr.reproducible("device"):
        replace_rmsnorm_pass(gm)
    found = [node.args[-1] for node in gm.graph.nodes if node.op == "call_function"]
    assert found == [3, 3]


def test_a_graph_of_the_adapter_has_the_level():
    tensors = torch.randn(3, N), torch.rand(N), torch.randn(3, N), torch.ones(3)
    more = torch.randn(3, N, dtype=torch.float64)
    with tr.reproducible("device"):
        gm = make_fx(lambda *given: quack.rmsnorm_bwd(*given, more)[0])(*tensors)
    assert [node.args[-1] for node in gm.graph.nodes if "tilegym" in str(node.target)] == [3]


def test_the_log_names_the_level_of_a_choice(caplog):
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"), tr.reproducible("device"):
        tr.rms_norm(torch.randn(3, 24), (24,))
    [line] = [each for each in caplog.messages if "runs on backend" in each]
    assert ", casting 'once', reproducible 'device' runs on backend torch" in line


@each_op
def test_calls_by_operations_are_told_once_for_each_kind(caplog, monkeypatch, op):
    monkeypatch.setattr(reproducibility, "_told", set())
    made = fresh(op, next(iter(fewest(op).values())))

    def told():
        found = [each for each in caplog.messages if "promises nothing" in each]
        caplog.clear()
        return found

    def both_passes(**options):
        return made.both_passes(**options)

    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        both_passes(backend="torch")
        assert not told(), "without a level"
        for level in ("batch", "device"):
            with tr.reproducible(level):
                both_passes(backend="torch")
                lines = told()
                assert len(lines) == 2 and all(f"under reproducible {level!r}" in each for each in lines)
                both_passes(backend="torch")
                assert not told()
    monkeypatch.setattr(reproducibility, "_told", set())
    x = next(iter(made.leaves.values()))
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"), tr.reproducible("batch"):
        rest = made.tensors[1:]
        torch.func.vjp(lambda x: made.public(x, *rest)[0], x.detach())
        assert len(told()) == 1


def test_db_alone_is_told(caplog, monkeypatch):
    """A sum by PyTorch."""
    monkeypatch.setattr(reproducibility, "_told", set())
    x, bias = torch.randn(3, N), torch.rand(N, requires_grad=True)
    y = tr.rms_norm(x, (N,), bias=bias)
    with tr.reproducible("device"):
        y = tr.rms_norm(x, (N,), bias=bias)
    monkeypatch.setattr(reproducibility, "_told", set())
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        y.sum().backward()
    assert [each for each in caplog.messages if "rms_norm_backward" in each and "'device'" in each]


def test_calls_composed_around_kernels_keep_it():
    seen = []

    def forward(spec, tensors):
        seen.append(spec.reproducible)
        return tensors[0].clone(), torch.ones(tensors[0].shape[:-1]).reshape(-1), None

    x, weight = torch.randn(4, 2, N), torch.rand(2, N)
    spec = Spec(N, 1e-6, 0.0, "once", heads=2, reproducible=3)
    around_kernels.forward(forward, spec, (x, weight, None, None))
    q, table = torch.randn(1, 4, 2, N), torch.randn(4, N)
    of_rope = RopeSpec(N, 1e-6, 0.0, N, False, "once", "end", 3)
    around_rope.forward(forward, of_rope, (q, None, None, None, table, table, None))
    assert seen == [3, 3]


def test_formulas_without_a_level_tell_nothing(caplog):
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        F.rms_norm(torch.randn(3, N), (N,))
        tr.rms_norm(torch.randn(3, N), (N,), backend="torch")
    assert not [each for each in caplog.messages if "promises nothing" in each]

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Blocks of settings that compiled code begins: they hold for the calls in them, as in eager code, or an error says
that they cannot. None is left for later calls in silence."""

import contextlib

import pytest
import torch
from helpers import DEVICE, why_skip
from levels import NotedLevels
from torch.torch_version import TorchVersion

import tilegym_rmsnorm as tr

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]

N = 8
W = torch.rand(N, device=DEVICE)
BLOCKS = {
    "reproducible": (lambda: tr.reproducible("device"), tr.get_reproducible, tr.set_reproducible),
    "use_backend": (lambda: tr.use_backend("triton"), tr.get_current_backend, tr.set_backend),
}
OTHER = {tr.set_reproducible: "batch", tr.set_backend: "torch"}
LEFT = "{}: expected compiled code to end each block that it begins, .* To go on without that block, call {}"


@pytest.fixture(
    params=[
        "reproducible",
        pytest.param(
            "use_backend",
            marks=pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
        ),
    ]
)
def setting(request):
    """Make a block; what holds now; the setter; what an error says of a block that is left."""
    make, get, set_ = BLOCKS[request.param]
    yield make, get, set_, LEFT.format(request.param, set_.__name__)
    set_(None)


def norm(x):
    return tr.rms_norm(x, (N,), W, 1e-6)


def x():
    return torch.randn(3, N, device=DEVICE)


def begun(make, x):
    make().__enter__()
    return norm(x)


def begun_in_a_stack(make, x):
    contextlib.ExitStack().enter_context(make())
    return norm(x)


# Dynamo before 2.11 does not trace it: eager code runs.
STACKS = [begun_in_a_stack] if TorchVersion(torch.__version__) >= "2.11" else []


def begun_before_an_exception(make, x):
    try:
        make().__enter__()
        x = norm(x)
        raise ValueError("inside")
    except ValueError:
        return norm(x)


def begun_in_a_generator(make, x):
    def rows():
        with make():
            yield norm(x)
            yield x

    return next(rows())


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "leaves", [begun, begun_before_an_exception, begun_in_a_generator, *STACKS], ids=lambda f: f.__name__
)
def test_a_block_that_a_graph_leaves_is_an_error_of_all_later_calls(leaves, fullgraph, setting):
    make, get, set_, message = setting
    compiled = torch.compile(lambda x: leaves(make, x), backend="aot_eager", fullgraph=fullgraph)
    other = torch.compile(lambda x: norm(x) * 2, backend="aot_eager", fullgraph=fullgraph)
    set_(OTHER[set_])
    norm(x())  # a known call, too
    other(x())
    compiled(x())
    calls = [lambda: norm(x()), lambda: other(x()), get, lambda: norm(x())]
    if fullgraph:  # else it runs as eager code, which begins a block before the call that raises
        calls.append(lambda: compiled(x()))
    for later in calls:
        with pytest.raises(Exception, match=message):
            later()
    set_(OTHER[set_])
    assert get() == OTHER[set_]
    norm(x())
    other(x())


def test_calls_between_graphs_raise_where_the_first_leaves_a_block(setting):
    """What runs between two graphs would not be in the block."""
    make, _, _, message = setting

    def broken(x):
        block = make()
        block.__enter__()
        x = norm(x)
        torch._dynamo.graph_break()
        x = norm(x)
        block.__exit__(None, None, None)
        return x

    with pytest.raises(RuntimeError, match=message):
        torch.compile(broken, backend="aot_eager")(x())


def in_order(make, x):
    with make():
        return norm(x)


def raising(make, x):
    with contextlib.suppress(ValueError), make():
        x = norm(x)
        raise ValueError("inside")
    return norm(x)


def in_a_stack(make, x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(make())
        return norm(x)


def of_a_generator(make, x):
    @contextlib.contextmanager
    def around():
        with make():
            yield

    with around():
        return norm(x)


def by_hand(make, x):
    block = make()
    block.__enter__()
    x = norm(x)
    block.__exit__(None, None, None)
    return norm(x)


def broken_in_a_block(make, x):
    with make():
        x = norm(x)
        torch._dynamo.graph_break()
        x = norm(x)
    return norm(x)


@pytest.mark.parametrize(
    "function",
    [in_order, raising, in_a_stack, of_a_generator, by_hand, broken_in_a_block],
    ids=lambda f: f.__name__,
)
def test_a_block_that_ends_holds_as_in_eager_code_and_leaves_nothing(function, setting, monkeypatch):
    make, get, set_, _ = setting
    noted = NotedLevels(monkeypatch)
    set_(OTHER[set_])
    function(make, x())
    expected, backends = noted.take(), list(noted.backends)
    compiled = torch.compile(lambda x: function(make, x), backend="aot_eager")
    for _ in range(2):
        noted.backends.clear()
        compiled(x())
        assert noted.take() == expected and noted.backends == backends
        assert get() == OTHER[set_]
    norm(x())


def test_blocks_that_end_in_another_order_run_as_eager_code(monkeypatch):
    noted = NotedLevels(monkeypatch)

    def crossed(x):
        first, second = tr.reproducible("device"), tr.reproducible("batch")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        x = norm(x)
        second.__exit__(None, None, None)
        return norm(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="the block that began last ends first"):
        torch.compile(crossed, backend="aot_eager", fullgraph=True)(x())
    torch.compiler.reset()
    for run in (crossed, torch.compile(crossed, backend="aot_eager")):
        run(x())
        assert noted.take() == ([1, 0], []) and tr.get_reproducible() == "run"


def test_a_block_of_eager_code_ends_in_a_compiled_function(monkeypatch):
    """Not another one that began in the graph."""
    noted = NotedLevels(monkeypatch)

    def ends(x, block):
        with tr.reproducible("device"):
            block.__exit__(None, None, None)
            x = norm(x)
        return norm(x)

    for run in (ends, torch.compile(ends, backend="aot_eager")):
        block = tr.reproducible("batch")
        block.__enter__()
        run(x(), block)
        assert noted.take() == ([3, 0], [])
        assert tr.get_reproducible() == "run"


def test_the_end_of_no_block_is_an_error():
    for run in (lambda: tr.reproducible().__exit__(), torch.compile(lambda: tr.reproducible().__exit__())):
        with pytest.raises(RuntimeError, match="reproducible: expected the end of a block that has begun"):
            run()

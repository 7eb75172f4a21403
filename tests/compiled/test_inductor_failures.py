# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "inductor" where the compiler fails: the reference serves, and warns once; what is the caller's is raised."""

import contextlib

import pytest
import torch
from helpers import DEVICE, FP32, why_skip
from inductor_runs import Passing, uncompiled
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.skipif(why_skip("inductor") is not None, reason=str(why_skip("inductor")))


class Untraceable(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        torch._dynamo.graph_break()
        return function(*args, **(kwargs or {}))


@pytest.fixture
def threads():
    """Dynamo compiles anew for each number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextlib.contextmanager
def changed(set_to, before, after):
    set_to(after)
    try:
        yield
    finally:
        set_to(before)


def allow_tf32(is_allowed):
    torch.backends.cuda.matmul.allow_tf32 = is_allowed


def test_more_numbers_of_threads_than_dynamo_compiles_for(threads):
    norm = uncompiled()
    told = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(1, 13):
            threads(number)
            told += norm.check(norm.call)
        assert [("FailOnRecompileLimitHit" in text, "_forward" in text) for text in told] == [
            (True, True),
            (True, False),
        ]
        assert 'backend="triton"' in told[0]
        for number, is_compiled in ((2, True), (7, False), (1, True)):
            threads(number)
            assert norm.is_compiled(norm.call) == is_compiled


def test_global_state_that_dynamo_guards_on(threads):
    """Beyond the limit the reference serves, whatever is left of the limit and in whatever order they come."""
    norm = uncompiled()
    states = (
        lambda: changed(torch.use_deterministic_algorithms, False, True),
        lambda: changed(torch.set_default_dtype, FP32, torch.float64),
        lambda: changed(allow_tf32, False, True),
        lambda: changed(torch.set_float32_matmul_precision, "highest", "medium"),
        lambda: changed(torch.set_default_device, None, DEVICE.type),
        lambda: torch.device(DEVICE.type),
        Passing,
        lambda: changed(threads, torch.get_num_threads(), torch.get_num_threads() + 1),
    )
    told = []
    with torch._dynamo.config.patch(recompile_limit=3):
        for state in (*states, *reversed(states)):
            with state():
                told += norm.check(norm.call)
            told += norm.check(norm.call)
    assert len(told) == 2


FORBIDDING = {
    "fail_on_recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "error_on_recompile": lambda: torch._dynamo.config.patch(error_on_recompile=True),
}


@pytest.mark.parametrize("name", FORBIDDING)
def test_a_recompilation_that_is_forbidden(name, threads):
    norm = uncompiled()
    if name == "error_on_recompile":  # which lets a first compilation be
        threads(1)
        norm.check(norm.call)
        threads(2)
    with FORBIDDING[name]():
        assert len(norm.check(norm.call)) == 2  # of both passes
        assert not norm.check(norm.call)
    assert norm.is_compiled(norm.call)


def test_a_compiler_that_breaks_is_asked_once():
    norm, calls = uncompiled(), []

    def breaks(*_):
        calls.append(1)
        raise KeyError("no such thing")

    with torch.compiler.set_stance("default", force_backend=breaks):
        told = norm.check(norm.call)
        assert len(told) == len(calls) == 2  # the passes
        assert "BackendCompilerFailed" in told[0] and "no such thing" in told[0]
        assert not norm.check(norm.call) and len(calls) == 2
    assert not norm.check(norm.call)


def test_a_compiler_that_breaks_leaves_what_is_compiled(threads):
    norm = uncompiled()
    threads(1)
    norm.check(norm.call)
    with Untraceable():
        told = norm.check(norm.call)
        assert len(told) == 2 and "Unsupported" in told[0]
    assert norm.is_compiled(norm.call)
    threads(2)
    assert not norm.check(norm.call)


def test_compiled_code_that_fails_is_not_run_again():
    norm, runs = uncompiled(), []

    def compiles(*_):
        def run(*_):
            runs.append(1)
            # An error within PyTorch's compiler, which is no type of its own.
            torch.fx.Graph().node_copy(None)

        return run

    with torch.compiler.set_stance("default", force_backend=compiles):
        assert len(norm.check(norm.call)) == len(runs) == 2
        assert not norm.check(norm.call) and len(runs) == 2


def raises_where_it_runs(*_):
    def run(*_):
        raise torch.OutOfMemoryError("out of memory")

    return run


def raises_where_it_compiles(*_):
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("backend", [raises_where_it_runs, raises_where_it_compiles])
def test_out_of_memory_is_the_callers(backend):
    norm = uncompiled()
    with torch.compiler.set_stance("default", force_backend=backend):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                norm.check(norm.call)
    assert norm.is_compiled(norm.call)


def test_what_the_reference_refuses_too_is_the_callers():
    norm = uncompiled()

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.rsqrt:
                raise ValueError("no roots here")
            return function(*args, **(kwargs or {}))

    with Refusing(), pytest.raises(ValueError, match="no roots here"):
        norm.call()
    assert norm.is_compiled(norm.call)

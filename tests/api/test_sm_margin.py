# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""SMs that a process leaves free: who says how many, and that calls follow it."""

import threading
import types

import pytest
import torch
import torch.nn.functional as F

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import settings

M, N = 2500, 40  # more rows than are "few"; they are walked


class Step:
    """A forward, whose backward can be run more than once."""

    def __init__(self, n: int = N, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        scale = torch.exp2(8 * torch.rand(M, 1, generator=generator) - 4)
        self.x = (torch.randn(M, n, generator=generator) * scale).requires_grad_()
        self.weight = (torch.rand(n, generator=generator) + 0.5).requires_grad_()
        self.dy = torch.randn(M, n, generator=generator)
        self.y = tr.rms_norm(self.x, (n,), self.weight, 1e-6, backend="cutile")

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.y, (self.x, self.weight), self.dy, retain_graph=True)

    def exact(self) -> tuple[torch.Tensor, ...]:
        x, weight = (each.detach().double().requires_grad_() for each in (self.x, self.weight))
        return torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-6), (x, weight), self.dy.double())


@pytest.mark.parametrize("margin", range(3))
def test_a_backward_is_right_and_has_the_same_bits_again(launches, margin):
    """The interpreter's GPU has three SMs."""
    step = Step(seed=margin)
    tr.set_sm_margin(margin)
    dx, dw = step.backward()
    assert launches.grids["backward_tiles"] == 3 - margin
    for got, exact in zip((dx, dw), step.exact(), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-3)
    tr.set_sm_margin(2 - margin)
    step.backward()
    tr.set_sm_margin(margin)
    for one, again in zip((dx, dw), step.backward(), strict=True):
        assert torch.equal(one, again)


def test_a_backward_follows_what_holds_when_it_runs(launches):
    step = Step()
    with tr.use_sm_margin(2):
        step.backward()
        assert launches.grids["backward_tiles"] == 1
        with tr.use_sm_margin(1):
            step.backward()
            assert launches.grids["backward_tiles"] == 2
        assert tr.get_sm_margin() == 2
    step.backward()
    assert launches.grids["backward_tiles"] == 3


def test_a_margin_holds_in_all_threads(launches):
    """Autograd runs backwards in threads of its own, which see no context variable."""
    step = Step()
    with tr.use_sm_margin(2):
        thread = threading.Thread(target=step.backward)
        thread.start()
        thread.join()
    assert launches.grids["backward_tiles"] == 1


def test_a_decorated_function_has_its_margin_and_leaves_none():
    seen = []

    @tr.use_sm_margin(2)
    def nested(depth: int) -> None:
        seen.append(tr.get_sm_margin())
        with tr.use_sm_margin(depth):
            if depth:
                nested(depth - 1)
            seen.append(tr.get_sm_margin())

    nested(1)
    assert seen == [2, 2, 0, 1] and tr.get_sm_margin() == 0
    with pytest.raises(RuntimeError, match="inside"), tr.use_sm_margin(1):
        raise RuntimeError("inside")
    assert tr.get_sm_margin() == 0
    margin = tr.use_sm_margin(3)
    with margin:
        tr.set_sm_margin(7)
        with margin:
            assert tr.get_sm_margin() == 3
        assert tr.get_sm_margin() == 7, "one object, two blocks"
    assert tr.get_sm_margin() == 0


@pytest.mark.parametrize("is_one_object", [False, True])
def test_blocks_of_threads_end_in_any_order(is_one_object):
    """The margin of the block that began last of those that have not ended; none stays behind."""
    begin = {name: threading.Event() for name in "ab"}
    end = {name: threading.Event() for name in "ab"}
    done = threading.Semaphore(0)
    one = tr.use_sm_margin(2)
    blocks = {"a": one, "b": one if is_one_object else tr.use_sm_margin(1)}

    def run(name):
        begin[name].wait(10)
        with blocks[name]:
            done.release()
            end[name].wait(10)
        done.release()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    seen = []
    for event in (begin["a"], begin["b"], end["a"], end["b"]):
        event.set()
        assert done.acquire(timeout=10)
        seen.append(tr.get_sm_margin())
    for thread in threads:
        thread.join()
    assert seen == ([2, 2, 2, 0] if is_one_object else [2, 1, 1, 0])


def test_each_call_of_a_decorated_function_is_a_block_of_its_own():
    """The first of two overlapping calls to end ends its own block."""
    inside, go = threading.Event(), threading.Event()

    @tr.use_sm_margin(2)
    def wait(is_first: bool) -> None:
        if is_first:
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=wait, args=(True,))
    thread.start()
    assert inside.wait(10)
    with tr.use_sm_margin(1):

        @tr.use_sm_margin(2)
        def end_the_first() -> int:
            go.set()
            thread.join()
            return tr.get_sm_margin()

        wait(False)
        assert tr.get_sm_margin() == 1
        assert end_the_first() == 2
        assert tr.get_sm_margin() == 1
    assert tr.get_sm_margin() == 0


def test_a_function_that_the_block_would_not_hold_is_refused():
    def numbers():
        yield 1

    with pytest.raises(TypeError, match="use_sm_margin: expected a plain function, got"):
        tr.use_sm_margin(1)(numbers)


def test_the_environment_says_it_where_nothing_else_does(monkeypatch):
    for value, expected in (("12", 12), (" 3 ", 3), ("", 0), ("0", 0)):
        monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, value)
        tr.set_sm_margin(None)
        assert tr.get_sm_margin() == expected
    monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, "5")
    tr.set_sm_margin(None)
    assert tr.get_sm_margin() == 5
    with tr.use_sm_margin(2):
        assert tr.get_sm_margin() == 2
        monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, "6")  # read again where a block is to follow it
        with tr.use_sm_margin(None):
            assert tr.get_sm_margin() == 6
    assert tr.get_sm_margin() == 6


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "٣", "0x4", "²"])
def test_an_environment_without_a_number_is_refused(monkeypatch, launches, value):
    step = Step()
    launches.grids.clear()
    monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, value)
    tr.set_sm_margin(None)
    with pytest.raises(ValueError, match="TILEGYM_RMSNORM_SM_MARGIN: expected a number of SMs"):
        tr.get_sm_margin()
    with pytest.raises(ValueError, match=f"or nothing, got '{value}'"):
        step.backward()
    assert not launches.grids


@pytest.mark.parametrize("ask", [tr.set_sm_margin, tr.use_sm_margin])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "sm_margin: expected 0 or more, got -1"),
        (1.0, TypeError, "sm_margin: expected an integer or None, got 1.0"),
        (True, TypeError, "sm_margin: expected an integer or None, got True"),
        ("2", TypeError, "sm_margin: expected an integer or None, got '2'"),
    ],
)
def test_what_is_no_margin_is_refused(ask, value, error, message):
    tr.set_sm_margin(1)
    with pytest.raises(error, match=message):
        ask(value)
    assert tr.get_sm_margin() == 1, "what held still holds"


def test_a_margin_that_leaves_no_sm_is_refused_before_a_launch(launches):
    step = Step()
    launches.grids.clear()
    for margin in (3, 4, 10**6):
        tr.set_sm_margin(margin)
        for call in (step.backward, Step):
            message = f"sm_margin: expected 0 to 2 for a GPU of 3 SMs, got {margin}, set by set_sm_margin"
            with pytest.raises(ValueError, match=message):
                call()
    assert not launches.grids
    tr.set_sm_margin(2)
    step.backward()


def test_a_margin_of_the_environment_that_leaves_no_sm_is_named_so(monkeypatch, launches):
    """Whoever meets it may never have heard of a margin."""
    step = Step()
    launches.grids.clear()
    monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, "3")
    tr.set_sm_margin(None)
    for call in (step.backward, Step):
        with pytest.raises(ValueError, match="of 3 SMs, got 3, set by TILEGYM_RMSNORM_SM_MARGIN$"):
            call()
    with (
        tr.use_sm_margin(4),
        pytest.raises(ValueError, match="got 4, set by set_sm_margin or use_sm_margin$"),
    ):
        step.backward()
    assert not launches.grids
    with tr.use_sm_margin(2):
        step.backward()


def test_a_margin_that_no_gpu_has_is_refused_where_it_is_set(monkeypatch):
    """CUDA is asked only where it is initialized."""
    asked = []
    counts = {0: 132, 1: 144}

    def properties(index):
        asked.append(index)
        return types.SimpleNamespace(multi_processor_count=counts[index])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    tr.set_sm_margin(144)
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    tr.set_sm_margin(143)
    with pytest.raises(ValueError, match="sm_margin: expected 0 to 143 for a GPU of 144 SMs, got 144$"):
        tr.set_sm_margin(144)
    assert tr.get_sm_margin() == 143 and sorted(set(asked)) == [0, 1]


def test_teams_are_an_eighth_of_what_is_left(launches):
    """Two of the interpreter's three SMs are left: no team then."""
    x, weight = torch.randn(2, 20480).requires_grad_(), torch.ones(20480).requires_grad_()

    def run():
        launches.grids.clear()
        tr.rms_norm(x, (20480,), weight, 1e-6, backend="cutile").sum().backward()
        return [name for name in launches.grids if "team" in name]

    assert run()
    with tr.use_sm_margin(1):
        assert not run()

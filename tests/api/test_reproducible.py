# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The level of reproducibility: who says it, which of several holds, and what is refused."""

import threading

import pytest
import torch

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import settings
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE, LEVELS, REPRODUCIBLE_VARIABLE, VLLM, flags

KNOWN = "expected one of 'run', 'batch', 'device', 'vllm', 'device,vllm', got"


def test_the_flags_of_each_level():
    """ "device" includes "batch", as vLLM's order does."""
    assert tr.get_reproducible() == "run" and flags() == 0
    expected = {
        ("run", None): 0,
        ("batch", None): BATCH,
        ("device", None): BATCH | DEVICE,
        ("batch", "vllm"): BATCH | VLLM,
        ("run", "vllm"): BATCH | VLLM,
        ("device", "vllm"): BATCH | DEVICE | VLLM,
    }
    for (level, order), number in expected.items():
        with tr.reproducible(level, order=order):
            assert flags() == number
            assert LEVELS[tr.get_reproducible()] == number
    with tr.reproducible():
        assert flags() == BATCH
    with tr.reproducible(order="vllm"):
        assert flags() == BATCH | VLLM
    assert flags() == 0


@pytest.mark.parametrize("name", LEVELS)
def test_what_is_returned_can_be_set_again(name):
    tr.set_reproducible(name)
    assert tr.get_reproducible() == name
    before = tr.get_reproducible()
    tr.set_reproducible("run")
    tr.set_reproducible(before)
    assert tr.get_reproducible() == name


def test_the_block_that_began_last_holds_whole():
    seen = []
    with tr.reproducible("device"):
        with tr.reproducible("batch", order="vllm"):
            seen.append(tr.get_reproducible())
            with tr.reproducible("run"):
                seen.append(tr.get_reproducible())
            tr.set_reproducible("batch")  # the inner block's, until it ends
            seen.append(tr.get_reproducible())
        seen.append(tr.get_reproducible())
    assert seen == ["vllm", "run", "batch", "device"] and tr.get_reproducible() == "run"
    with pytest.raises(RuntimeError, match="inside"), tr.reproducible():
        raise RuntimeError("inside")
    assert tr.get_reproducible() == "run"


def test_a_decorated_function_has_its_level_and_leaves_none():
    seen = []

    @tr.reproducible("device", order="vllm")
    def nested(depth: int) -> None:
        seen.append(tr.get_reproducible())
        if depth:
            with tr.reproducible("run"):
                nested(depth - 1)
                seen.append(tr.get_reproducible())

    nested(1)
    assert seen == ["device,vllm", "device,vllm", "run"] and tr.get_reproducible() == "run"

    def numbers():
        yield 1

    with pytest.raises(TypeError, match="reproducible: expected a plain function, got"):
        tr.reproducible()(numbers)


def test_a_level_holds_in_all_threads_and_blocks_end_in_any_order():
    began, end = threading.Event(), threading.Event()

    def run():
        with tr.reproducible("device"):
            began.set()
            end.wait(10)

    with tr.reproducible("batch"):
        thread = threading.Thread(target=run)
        thread.start()
        assert began.wait(10)
        assert tr.get_reproducible() == "device"
    assert tr.get_reproducible() == "device", "the other thread's block has not ended"
    end.set()
    thread.join()
    assert tr.get_reproducible() == "run"


def test_the_environment_says_it_where_nothing_else_does(monkeypatch):
    for value in (*LEVELS, " batch ", ""):
        monkeypatch.setenv(REPRODUCIBLE_VARIABLE, value)
        tr.set_reproducible(None)
        assert tr.get_reproducible() == (value.strip() or "run")
    monkeypatch.setenv(REPRODUCIBLE_VARIABLE, "device")
    tr.set_reproducible(None)
    with tr.reproducible("run"):
        assert tr.get_reproducible() == "run"
    assert tr.get_reproducible() == "device"
    tr.set_reproducible("batch")
    assert tr.get_reproducible() == "batch"


@pytest.mark.parametrize("value", ["Batch", "batch,device", "vllm,device", "1", "batch;", "none"])
def test_an_environment_without_a_level_is_refused(monkeypatch, value):
    monkeypatch.setenv(REPRODUCIBLE_VARIABLE, value)
    tr.set_reproducible(None)
    message = f"^{REPRODUCIBLE_VARIABLE}: {KNOWN} '{value}'"
    with pytest.raises(ValueError, match=message):
        tr.get_reproducible()
    x = torch.ones(2, 8)
    for backend in ("auto", "torch"):
        with pytest.raises(ValueError, match=message):
            tr.rms_norm(x, (8,), backend=backend)
    with tr.reproducible("batch"):
        tr.rms_norm(x, (8,))


def test_a_misspelt_variable_is_warned_of(monkeypatch):
    monkeypatch.setenv("TILEGYM_RMSNORM_REPRODUCIBEL", "batch")
    assert "REPRODUCIBEL (TILEGYM_RMSNORM_REPRODUCIBLE?)" in settings.unknown_variables()
    settings.warn_of_unknown_variables.cache_clear()
    with pytest.warns(UserWarning, match=r"TILEGYM_RMSNORM_REPRODUCIBLE\?"):
        settings.warn_of_unknown_variables()
    assert tr.get_reproducible() == "run"


@pytest.mark.parametrize("ask", [tr.set_reproducible, tr.reproducible])
@pytest.mark.parametrize("level", ["batches", "", 1, True, ["batch"], torch.float32, len])
def test_an_unknown_level_is_refused(ask, level):
    tr.set_reproducible("device")
    with pytest.raises(ValueError, match=f"^level: {KNOWN} ") as raised:
        ask(level)
    assert repr(level) in str(raised.value)
    for order in ("batch", 1, ["vllm"]):
        with pytest.raises(ValueError, match=r"^order: expected 'vllm' or None, got ") as raised:
            ask("batch", order=order)
        assert repr(order) in str(raised.value)
    assert tr.get_reproducible() == "device", "what held still holds"


def test_an_order_alone_is_of_batch_and_none_has_none():
    tr.set_reproducible(order="vllm")
    assert tr.get_reproducible() == "vllm"
    with pytest.raises(ValueError, match="order: expected None beside level None, got 'vllm'"):
        tr.set_reproducible(None, order="vllm")
    assert tr.get_reproducible() == "vllm"


def test_a_block_needs_a_level():
    with pytest.raises(ValueError, match=f"level: {KNOWN} None"):
        tr.reproducible(None)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""TILEGYM_RMSNORM_INTERPRET: what means on and off, and where a value that means neither is told."""

import os

import pytest
import torch

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import __main__
from tilegym_rmsnorm.backends import cutile, registry
from tilegym_rmsnorm.commands import doctor

VARIABLE = cutile.INTERPRET_VARIABLE
EXPECTED = f"{VARIABLE}: expected 1, true, on, yes or 0, false, off, no, or nothing, got "


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def misspelt(monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")


@pytest.mark.parametrize("value", ["1", "true", "True", "on", " ON ", "yes", "yes\n"])
def test_on(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert cutile.interpreting() is True


@pytest.mark.parametrize("value", ["0", "false", "off", "OFF", "no", " no", "", "  ", None])
def test_off(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert cutile.interpreting() is False


@pytest.mark.parametrize("value", ["2", "-1", "ture", "1,", "none"])
def test_neither(monkeypatch, value):
    """The value silently meant off."""
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError) as raised:
        cutile.interpreting()
    assert str(raised.value) == f"{EXPECTED}{value!r}"


def test_a_call_that_the_interpreter_would_run_says_so(misspelt):
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=f"{EXPECTED}'2'"):
        tr.rms_norm(x, (8,), backend="cutile")
    y = tr.rms_norm(x, (8,), backend="auto")
    assert torch.equal(y, tr.rms_norm(x, (8,), backend="torch"))
    y.sum().backward()


def test_a_call_like_one_that_the_interpreter_ran_is_refused_when_it_is_off(monkeypatch):
    """No such call is known, of norms or of heads: the variable may change at any time."""
    x, table = torch.randn(2, 3, 8), torch.randn(2, 8)

    def norm():
        tr.rms_norm(x, 8, backend="cutile")

    def heads():
        tr.qk_norm_rope(x, x, None, None, table, table, backend="cutile")

    for call in (norm, heads):
        monkeypatch.setenv(VARIABLE, "1")
        call()
        call()
        monkeypatch.setenv(VARIABLE, "0")
        with pytest.raises(tr.BackendUnavailableError):
            call()


def test_what_runs_on_this_machine_is_answered_with_the_reason(misspelt, no_gpu):
    unusable = registry.why_unusable("cutile")
    assert unusable.reason == f"{EXPECTED}'2'" and unusable.remedy == f"correct {VARIABLE}, or unset it"
    assert "torch" in tr.get_available_backends() and not tr.is_backend_available("cutile")
    assert tr.get_registry_info()["backends"]["cutile"]["reason"] == unusable.reason
    # This error lists the backends that are usable.
    with pytest.raises(tr.BackendUnavailableError, match="Usable on this machine: "):
        tr.rms_norm(torch.randn(2, 8, dtype=torch.float64), (8,), backend="triton")


def test_a_gpu_never_asks(monkeypatch):
    """Reading the environment takes a microsecond of each call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cutile, "_gpu_unusable", lambda device: None)
    monkeypatch.setattr(cutile, "interpreting", lambda: pytest.fail("it was read"))
    monkeypatch.setattr(cutile, "_cuda_tile_unusable", lambda: None)
    monkeypatch.setattr(cutile, "_tileiras_unusable", lambda: None)
    device = torch.device("cuda", 0)
    assert cutile.unusable(registry.Request(device, torch.float32, torch.float32, "once")) is None
    assert cutile.unusable(None) is None


def test_doctor_names_it_and_ends(misspelt, no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(doctor.installation, "visible_gpus", lambda: [])
    monkeypatch.setattr(doctor, "run_kernels_apart", doctor.run_kernels)
    monkeypatch.setattr(registry, "AUTO_ORDER", ("cutile", "torch"))
    status = __main__.main(["doctor"])
    output = capsys.readouterr().out
    assert status == 0, "the best backend of this machine is not concerned"
    assert f"cutile           not usable: {EXPECTED}'2'\n" in output
    assert f"to mend it: correct {VARIABLE}, or unset it\n" in output
    assert __main__.main(["doctor", "--backend", "cutile"]) == 1
    assert f"ValueError: {EXPECTED}'2'" in capsys.readouterr().out
    assert os.environ[VARIABLE] == "2"

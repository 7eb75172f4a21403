# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A process's policy against kernels whose blocks wait for each other; and variables that begin as this package's do,
and that nothing reads: a warning in the first call."""

import functools
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import RMSNorm, rms_norm, settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.routes import known_calls

N = 20480  # a row of a team, on Hopper and in the interpreter


def run() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, N, generator=generator).requires_grad_()
    weight = torch.randn(N, generator=generator).requires_grad_()
    y = tr.rms_norm(x, (N,), weight, 1e-6, backend="cutile")
    return y, *torch.autograd.grad(y, (x, weight), torch.randn(y.shape, generator=generator))


def test_what_is_set_while_the_environment_is_read_holds(monkeypatch):
    @functools.cache
    def read():
        tr.set_teams(False)
        return True

    monkeypatch.setattr(settings._TEAMS, "_by_environment", read)
    settings.teams()
    assert settings.teams() is False


def test_the_log_says_which_kernels_serve_and_why(launches, caplog):
    with caplog.at_level("DEBUG", logger="tilegym_rmsnorm"):
        run()
        run()
    forward, backward = [each.getMessage() for each in caplog.records if each.levelname == "DEBUG"]
    what = f"of {N} float32 columns beside a float32 weight, few:"
    assert forward.startswith(f"forward {what} forward_rows width=")
    assert (
        backward.startswith(f"backward {what} clear_board width=") and "backward_pipelined_team" in backward
    )
    assert backward.endswith(" (the rule for 18433 to 131072 columns)")


def teams_in(names: list[str]) -> list[str]:
    return [name for name in names if "team" in name or name == "clear_board"]


def test_without_teams_no_kernel_waits_and_the_values_are_right(launches):
    run()
    assert teams_in(launches.bound)
    launches.bound.clear()
    tr.set_teams(False)
    y, dx, dw = run()
    assert launches.bound and not teams_in(launches.bound)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, N, generator=generator).double().requires_grad_()
    weight = torch.randn(N, generator=generator).double().requires_grad_()
    expected = F.rms_norm(x, (N,), weight, 1e-6)
    dy = torch.randn(y.shape, generator=generator).double()
    for got, exact in zip(
        (y, dx, dw), (expected, *torch.autograd.grad(expected, (x, weight), dy)), strict=True
    ):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
    launches.bound.clear()
    tr.set_teams(True)
    run()
    assert not launches.bound, "the plans with teams are kept"


def test_a_backward_follows_what_holds_when_it_runs(launches):
    x = torch.randn(2, N).requires_grad_()
    y = tr.rms_norm(x, (N,), None, 1e-6, backend="cutile")
    y.sum().backward(retain_graph=True)
    assert teams_in(launches.bound)
    launches.bound.clear()
    tr.set_teams(False)
    y.sum().backward()
    assert launches.bound and not teams_in(launches.bound)


ON, OFF = ("1", "true", "on", "yes", "True", "ON"), ("0", "false", "off", "no", "False", "NO")
SPELLED = {**dict.fromkeys(ON, True), **dict.fromkeys(OFF, False)}


@pytest.mark.parametrize(("value", "said"), SPELLED.items())
def test_spellings_of_a_switch(monkeypatch, value, said):
    assert settings.parse_switch(value) is said
    for text in (value, f" {value}\n"):
        monkeypatch.setenv("A_SWITCH", text)
        assert settings.switch("A_SWITCH", default=not said) is said


@pytest.mark.parametrize("value", ["2", "-1", "ture", "1,", "none", "y", "on off"])
def test_a_switch_that_says_neither_on_nor_off(monkeypatch, value):
    assert settings.parse_switch(value) is None
    monkeypatch.setenv("A_SWITCH", value)
    with pytest.raises(ValueError) as raised:
        settings.switch("A_SWITCH", default=True)
    expected = "1, true, on, yes or 0, false, off, no, or nothing"
    assert str(raised.value) == f"A_SWITCH: expected {expected}, got {value!r}"


@pytest.mark.parametrize("value", [None, "", "  "])
@pytest.mark.parametrize("default", [True, False])
def test_a_switch_that_says_nothing(monkeypatch, value, default):
    monkeypatch.delenv("A_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("A_SWITCH", value)
    assert settings.switch("A_SWITCH", default) is default


@pytest.mark.parametrize(("value", "said"), [("1", True), (" off ", False), ("", True), (None, True)])
def test_the_environment_says_it_where_nothing_else_does(monkeypatch, value, said):
    if value is not None:
        monkeypatch.setenv(settings.TEAMS_VARIABLE, value)
    assert settings.teams() is said
    tr.set_teams(not said)
    assert settings.teams() is not said
    tr.set_teams(None)
    assert settings.teams() is said


@pytest.mark.parametrize(
    ("variable", "value"), [(settings.TEAMS_VARIABLE, "maybe"), (settings.SM_MARGIN_VARIABLE, "all")]
)
@pytest.mark.parametrize("backend", [None, "torch"])
def test_every_first_call_reads_the_environment(monkeypatch, variable, value, backend):
    """A value that means nothing was noticed by the backends alone that need it, on another machine perhaps."""
    monkeypatch.setattr(registry, "_chosen", {})
    known_calls.forget()
    monkeypatch.setenv(variable, value)
    tr.set_sm_margin(None)
    x = torch.ones(2, 8)
    calls = [
        lambda: tr.rms_norm(x, 8, backend=backend),
        lambda: tr.rms_norm_forward(x, None, backend=backend),
    ]
    if backend is None:
        torch._dynamo.reset()
        calls.append(torch.compile(lambda: tr.rms_norm(x, 8), backend="eager"))
    for call in calls:
        with pytest.raises(ValueError, match=f"{variable}: expected .*, got '{value}'"):
            call()
    tr.set_teams(True)  # says it in the variable's place
    tr.set_sm_margin(0)
    for call in calls:
        call()


def test_what_is_neither_is_refused(monkeypatch):
    monkeypatch.setenv(settings.TEAMS_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="TILEGYM_RMSNORM_TEAMS: expected .*, got 'maybe'"):
        settings.teams()
    with pytest.raises(TypeError, match="enabled: expected True, False or None, got 0"):
        tr.set_teams(0)


PROGRAM = """
import torch
from tilegym_rmsnorm import rms_norm

for n in (8, 9, 8):
    rms_norm(torch.randn(2, n), n)
"""


@pytest.fixture
def first_call():
    settings.warn_of_unknown_variables.cache_clear()
    yield
    settings.warn_of_unknown_variables.cache_clear()


def test_the_first_call_warns_once(monkeypatch):
    monkeypatch.setenv("TILEGYM_RMSNORM_BACKED", "torch")
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, check=True)
    known = ", ".join(settings.VARIABLES)
    meant = "TILEGYM_RMSNORM_BACKED (TILEGYM_RMSNORM_BACKEND?)"
    assert done.stderr.count(f"environment: expected {known}, got {meant}, which changes nothing") == 1


def test_each_unknown_name_is_in_the_warning(monkeypatch, first_call):
    for name in (
        "TILEGYM_RMSNORM_SM_MARGINS",
        "TILEGYM_RMSNORM_CACHE",
        "TILEGYM_RMSNORM_",
        "Tilegym_RMSNorm_Backend",
        "TILEGYM_RMSNORMS",
        "TILEGYM_BACKEND",
    ):
        monkeypatch.setenv(name, "8")
    cache, margin = settings.CACHE_VARIABLE, settings.SM_MARGIN_VARIABLE
    names = f"TILEGYM_RMSNORM_, TILEGYM_RMSNORM_CACHE ({cache}?), TILEGYM_RMSNORM_SM_MARGINS ({margin}?)"
    names += f", Tilegym_RMSNorm_Backend ({settings.BACKEND_VARIABLE}?), which"
    with pytest.warns(UserWarning, match=re.escape(f"got {names} changes nothing") + "$") as told:
        for n in (1021, 1019):  # widths that no other test has, so that each call chooses a backend
            rms_norm(torch.randn(3, n), n)
    assert len(told) == 1


def test_known_variables_and_others_do_not_warn(monkeypatch, first_call):
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(settings.COMMIT_VARIABLE, "feedbeef")
    monkeypatch.setenv(settings.CACHE_VARIABLE, "off")
    monkeypatch.setenv("TILEGYM_LOG", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RMSNorm(1013)(torch.randn(3, 1013))

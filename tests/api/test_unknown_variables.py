# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Variables that begin as this package's do, and that nothing reads: a warning in the first call, and none after it."""

import re
import subprocess
import sys
import warnings

import pytest
import torch

from tilegym_rmsnorm import RMSNorm, rms_norm, settings

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

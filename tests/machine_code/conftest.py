# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

import os

import helpers
import pytest


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory):
    """Kernels that one process of a run has compiled are there for the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        helpers.shared = tmp_path_factory.getbasetemp().parent
    yield
    helpers.shared = None

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

import pytest


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch):
    """The machine that counts, on which calls of tensors of device "meta" run, and warmups."""
    from counting import counted_calls

    with counted_calls(monkeypatch) as machine:
        yield machine

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch):
    """The machine that counts, on which calls of tensors of device "meta" run, and warmups."""
    from counting import counted_calls

    with counted_calls(monkeypatch) as machine:
        yield machine


@pytest.fixture(scope="module")
def compiled_by():
    """compiled_by(capability, calls, cache=None): the kernels that each call compiled. Triton's cache makes a second
    run short."""
    with _answers_of("triton_compile.py") as ask:
        yield lambda capability, calls, cache=None: ask(
            [capability, [_as_dict(call) for call in calls], cache]
        )


@pytest.fixture(scope="module")
def keys_by():
    """keys_by(target, calls, specialized=(), device="cpu"): of each call, its kernels with Triton's keys."""
    with _answers_of("triton_keys.py") as ask:

        def keys(target, calls, specialized=(), device="cpu"):
            return ask([target, [_as_dict(call) for call in calls], specialized, device])

        yield keys


@contextlib.contextmanager
def _answers_of(program):
    """Start a program of tests/support that answers each line with one."""
    program = Path(__file__).parents[1] / "support" / program
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([sys.executable, program], env=environment, stderr=errors, **pipes) as process,
    ):

        def ask(request):
            start = errors.seek(0, os.SEEK_END)
            print(json.dumps(request, default=str), file=process.stdin, flush=True)
            found = json.loads(process.stdout.readline() or "null")
            errors.seek(start)
            assert found is not None, errors.read()[-3000:]
            return found

        yield ask
        process.stdin.close()


def _as_dict(call):
    """The fields of a RopeCase, or of a NormCase and of its variant."""
    fields = call if isinstance(call, dict) else call._asdict()
    return fields | fields.pop("variant")._asdict() if "variant" in fields else fields

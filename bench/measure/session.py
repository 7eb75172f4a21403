# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Session of a run, shared by all shapes; an error of one provider leaves the others be."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator

import torch

from tilegym_rmsnorm.measure.timer import DeviceTimer

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal: compilers write it into their errors


class ContextLostError(RuntimeError):
    """A kernel of `provider` broke the CUDA context: nothing more can run in this process."""

    def __init__(self, provider: str, text: str):
        super().__init__(f"{provider}: {text}")
        self.provider, self.text = provider, text


def this_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def run_in_interpreters() -> None:
    """Makes kernels run as Python. Triton reads its variable when it is imported, which nothing has done yet."""
    os.environ.setdefault("TILEGYM_RMSNORM_INTERPRET", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")


class Session:
    """The device, its timer, and the providers and ops that are measured on it."""

    def __init__(self, providers: tuple[str, ...], ops: tuple[str, ...], device: torch.device):
        self.providers, self.ops, self.device = providers, ops, device
        self.is_cuda = device.type == "cuda"
        self.timer = DeviceTimer(device)
        self.copy_bytes_per_second = self.timer.copy_bytes_per_second() if self.is_cuda else None

    @contextlib.contextmanager
    def contained(self, provider: str, fail: Callable[[str], None]) -> Iterator[None]:
        """Passes an exception of one provider to `fail`, as one line, so that the others are still measured."""
        try:
            yield
        except Exception as error:
            fail(describe(error))
            if self.is_cuda:
                try:
                    torch.cuda.synchronize(self.device)
                    torch.cuda.empty_cache()
                except RuntimeError as lost:
                    raise ContextLostError(provider, f"{describe(error)}; then {_one_line(lost)}") from lost


def describe(error: BaseException) -> str:
    """One line: the exception, and the one that it hides (a failed capture hides why it failed)."""
    text = _one_line(error)
    if error.__context__ is not None and not error.__suppress_context__:
        text += f" (after {_one_line(error.__context__)})"
    return text


def _one_line(error: BaseException) -> str:
    text = COLOUR.sub("", "".join(traceback.format_exception_only(error)))
    return " ".join(text.split())[:400]

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the norms of a patched Qwen3 under a level: of a prompt in a batch, then alone on the same inputs of each norm.

python3 model_rows.py FILE    the prompt alone, first in this process, against what FILE has of it in a batch
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hf_models import SIZES, VOCABULARY, spread
from processes import run_script
from torch import Tensor, nn

from tilegym_rmsnorm import patch_model, reproducible
from tilegym_rmsnorm.integrations.huggingface import folding, norms
from tilegym_rmsnorm.reproducibility import LevelName

INTEGERS = {2: torch.int16, 4: torch.int32}
# What computes the norms of a patched model, and which of its arguments are rows. Of `_run` the calls with a residual.
FUNCTIONS = ((norms, "compute", (1,)), (norms, "_run", (0, 1)), (folding, "qk_norm_rope", (0, 1)))
# How often: before each layer and after all; with a residual; of q and k.
KINDS = {"compute": 3, "_run": 2, "qk_norm_rope": 2}


class Call(NamedTuple):
    """One call of FUNCTIONS: the rows that it got, y and what else it returned, and its gradients of the rows."""

    name: str
    rows: list[Tensor]
    results: list[Tensor]


class Setup(NamedTuple):
    """A model and a prompt. The sizes are those of hf_models.SIZES, but for these."""

    sizes: dict[str, int]
    dtype: torch.dtype
    device: str
    backend: str
    prompt: list[int]

    def built(self) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **self.sizes}))
        spread(model)
        model.to(self.device, self.dtype)
        patch_model(model, patch_layers=True, backend=self.backend)
        return model

    def alone(self) -> Tensor:
        return torch.tensor([self.prompt], device=self.device)

    def in_batch(self, size: int, place: int) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(VOCABULARY, (size, len(self.prompt)), generator=generator)
        tokens[place] = torch.tensor(self.prompt)
        return tokens.to(self.device)


def run(
    model: nn.Module, tokens: Tensor, given: list[Call] | None = None, level: LevelName = "batch"
) -> list[Call]:
    """Run the model under a level, and return what its norms computed, with gradients for a dy that follows from the
    results. given: calls whose rows the norms get, in place of those that the model has for them."""
    calls: list[Call] = []

    def noting(name: str, places: tuple[int, ...], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "_run" and arguments[1] is None:  # by `compute`, which is noted
                return original(*arguments, **options)
            changed = list(arguments)
            for number, place in enumerate(places):
                rows = arguments[place] if given is None else given[len(calls)].rows[number]
                changed[place] = rows.detach().requires_grad_()
            rows = [changed[place] for place in places]
            found = original(*changed, **options)
            outputs = [found] if isinstance(found, Tensor) else list(found)
            results = [each.detach() for each in outputs]
            if torch.is_grad_enabled():
                results += torch.autograd.grad(
                    outputs, rows, [each.flip(-1) for each in results], retain_graph=True
                )
            calls.append(Call(name, [each.detach().clone() for each in rows], results))
            return found

        return call

    with pytest.MonkeyPatch.context() as patch, reproducible(level):
        for module, name, places in FUNCTIONS:
            patch.setattr(module, name, noting(name, places, getattr(module, name)))
        model(input_ids=tokens)
    return calls


def of_prompt(calls: list[Call], place: int) -> list[Call]:
    """Cut the prompt out of what a batch computed, each tensor in memory of its own."""
    return [
        Call(name, *([each[place : place + 1].clone() for each in some] for some in tensors))
        for name, *tensors in calls
    ]


def differing(calls: list[Call], expected: list[Call]) -> list[str]:
    """Name the calls whose inputs or results have other bits."""
    assert [each.name for each in calls] == [each.name for each in expected]
    return [
        f"{number}: {what} {index} of {one.name}"
        for number, (one, other) in enumerate(zip(calls, expected, strict=True))
        for what in ("rows", "results")
        for index, pair in enumerate(zip(getattr(one, what), getattr(other, what), strict=True))
        if not torch.equal(*map(_bits, pair))
    ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


def check(setup: Setup, size: int, places: Iterable[int]) -> None:
    """A prompt alone has the bits that it has at these places of a batch."""
    model = setup.built()
    for place in places:
        in_batch = run(model, setup.in_batch(size, place))
        assert Counter(each.name for each in in_batch) == KINDS
        expected = of_prompt(in_batch, place)
        for _ in range(2):  # by all checks, then known
            assert differing(run(model, setup.alone(), expected), expected) == []


def check_first_calls(setup: Setup, size: int, place: int, folder: Path, **environment: str) -> None:
    """So it has as the first that a process runs."""
    expected = of_prompt(run(setup.built(), setup.in_batch(size, place)), place)
    path = folder / "calls.pt"
    torch.save({"setup": tuple(setup), "calls": [tuple(each) for each in expected]}, path)
    done = run_script(__file__, path, **environment)
    assert done.returncode == 0 and done.stdout == f"passed {sum(KINDS.values())}\n", (
        done.stdout + done.stderr[-3000:]
    )


def main(path: str) -> None:
    found = torch.load(path)
    setup, expected = Setup(*found["setup"]), [Call(*each) for each in found["calls"]]
    calls = run(setup.built(), setup.alone(), expected)
    if lines := differing(calls, expected):
        sys.exit("\n".join(lines))
    print("passed", len(calls))


if __name__ == "__main__":
    main(sys.argv[1])

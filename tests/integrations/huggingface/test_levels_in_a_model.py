# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A patched Qwen3 under `reproducible("batch")`, by the kernels' interpreters: its norms compute for a prompt alone
what they compute for it in a batch of 8, from the same inputs. tests/gpu/test_gpu_levels_model.py has larger ones."""

import model_rows
import pytest
import torch
from helpers import BF16, FP32, HAS_GPU, settle_interpreters
from levels import NotedLevels

from tilegym_rmsnorm.routes import known_calls

pytestmark = pytest.mark.skipif(HAS_GPU, reason="tests/gpu has these tests")
BATCH, PLACES = 8, (0, 5)
PROMPT = torch.randint(model_rows.VOCABULARY, (33,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(params=[BF16, FP32], ids=["bfloat16", "float32"])
def setup(request, backend, monkeypatch):
    if backend == "torch":
        pytest.skip("it has no kernels")
    settle_interpreters(monkeypatch)  # so that calls become known, as on a GPU
    known_calls.forget()
    return model_rows.Setup({}, request.param, "cpu", backend, PROMPT)


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "no_grad"])
def test_a_prompt_alone_has_the_bits_that_it_has_in_a_batch(setup, has_grad):
    with torch.set_grad_enabled(has_grad):
        model_rows.check(setup, BATCH, PLACES)


def test_it_has_other_bits_without_the_level(known_kernels, monkeypatch):
    """Where the batch is of another size class, and kernels for many rows add in another order: so the test above can
    fail."""
    from tilegym_rmsnorm.backends.cutile.host import norm

    monkeypatch.setattr(norm, "size_class", lambda m, n: "few" if m <= len(PROMPT) else "large")
    setup = model_rows.Setup({"hidden_size": 8192}, FP32, "cpu", "cutile", PROMPT[:9])
    model = setup.built()
    for level, has_same in (("batch", True), ("run", False)):
        in_batch = model_rows.run(model, setup.in_batch(BATCH, 5), level=level)
        expected = model_rows.of_prompt(in_batch, 5)
        calls = model_rows.run(model, setup.alone(), expected, level)
        assert (model_rows.differing(calls, expected) == []) is has_same


@pytest.mark.slow
def test_so_it_has_in_the_first_calls_of_a_process(setup, tmp_path):
    interpreters = {"TILEGYM_RMSNORM_INTERPRET": "1", "TRITON_INTERPRET": "1"}
    model_rows.check_first_calls(setup, BATCH, PLACES[-1], tmp_path, **interpreters)


def test_every_norm_of_a_model_gets_the_level(setup, monkeypatch):
    noted, model = NotedLevels(monkeypatch), setup.built()
    model_rows.run(model, setup.alone())
    forwards, backwards = noted.take()
    assert len(forwards) == len(backwards) == sum(model_rows.KINDS.values()) and {*forwards, *backwards} == {
        1
    }


def test_other_bits_are_found(setup):
    """Of inputs and of results."""
    model = setup.built()
    calls = model_rows.run(model, setup.alone())
    others = model_rows.run(model, setup.alone(), calls)
    assert model_rows.differing(others, calls) == []
    for index, what in ((1, "rows"), (3, "results")):
        tensor = getattr(others[index], what)[-1]
        tensor.view(-1)[-1] = torch.nextafter(tensor.view(-1)[-1], torch.tensor(9.0).to(tensor))
    assert [line.partition(" ")[0] for line in model_rows.differing(others, calls)] == ["1:", "3:"]

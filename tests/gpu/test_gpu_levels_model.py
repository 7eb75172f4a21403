# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A patched Qwen3 under `reproducible("batch")` on a GPU: its norms compute for a prompt alone what they compute for it
in a batch of 64, from the same inputs, and in the first calls of a process."""

import pytest
import torch
from helpers import BF16, DEVICE, FP32

pytest.importorskip("transformers", reason="transformers is not installed")
import model_rows

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BATCH, PLACES = 64, (0, 37)
# 100 rows alone and 6400 in the batch: those of other size classes.
PROMPT = torch.randint(model_rows.VOCABULARY, (100,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = [
    {"hidden_size": 1024, "head_dim": 128, "max_position_embeddings": 128},
    {"hidden_size": 4096, "head_dim": 64, "max_position_embeddings": 128},
]


@pytest.fixture(params=[(sizes, dtype) for sizes in SIZES for dtype in (BF16, FP32)])
def setup(request, backend):
    if backend == "torch":
        pytest.skip("it has no kernels")
    sizes, dtype = request.param
    return model_rows.Setup(sizes, dtype, str(DEVICE), backend, PROMPT)


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "no_grad"])
def test_a_prompt_alone_has_the_bits_that_it_has_in_a_batch(setup, has_grad):
    with torch.set_grad_enabled(has_grad):
        model_rows.check(setup, BATCH, PLACES)


def test_so_it_has_in_the_first_calls_of_a_process(setup, tmp_path):
    """With nothing compiled before."""
    caches = {name: str(tmp_path / name) for name in ("CUDA_TILE_CACHE_DIR", "TRITON_CACHE_DIR")}
    model_rows.check_first_calls(setup, BATCH, PLACES[-1], tmp_path, **caches)

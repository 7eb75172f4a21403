# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torch.compile breaks its graph at a call that adds dw to main_grad, and sees marks that come and go."""

import pytest
import torch
from helpers import BF16, DEVICE
from torch import nn

from tilegym_rmsnorm import RMSNorm, accumulate_main_grad, rms_norm_rope

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo", "marks_end")]
N = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = (RMSNorm(N, 1e-5, dtype=BF16, device=DEVICE) for _ in range(2))

    def forward(self, x, table):
        y = self.norm(2 * x)
        y, total = self.other(y + 1, x)
        return rms_norm_rope(y, self.norm.weight, table, table, eps=1e-5) * total


def gradients_of(run, block, *inputs):
    """Those of the two weights, wherever they are."""
    for each in (block.norm.weight, block.other.weight):
        each.grad, each.main_grad = None, torch.zeros(N, device=DEVICE)
    run(*inputs).sum().backward()
    found = [(each.grad, each.main_grad) for each in (block.norm.weight, block.other.weight)]
    assert all((grad is None) == bool(added.any()) for grad, added in found)
    return [added if grad is None else grad for grad, added in found], [grad is None for grad, _ in found]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block_adds(backend):
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(block, backend=backend)
    inputs = torch.randn(3, 5, N, dtype=BF16, device=DEVICE), torch.randn(3, N, device=DEVICE)
    for marked in ([], [block.norm], [block.norm, block.other], [block.other], []):
        accumulate_main_grad(block, False)
        for each in marked:
            accumulate_main_grad(each)
        wanted, were_added = gradients_of(block, block, *inputs)
        found, are_added = gradients_of(compiled, block, *inputs)
        assert are_added == were_added == [each in marked for each in (block.norm, block.other)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_one_graph_cannot_add():
    block = Block()
    accumulate_main_grad(block.norm)
    inputs = torch.randn(3, 5, N, dtype=BF16, device=DEVICE), torch.randn(3, N, device=DEVICE)
    with pytest.raises(Exception, match="accumulate_main_grad"):
        torch.compile(block, backend="eager", fullgraph=True)(*inputs)
    with torch.no_grad():
        torch.compile(block, backend="eager", fullgraph=True)(*inputs)

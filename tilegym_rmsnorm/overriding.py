# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`override_aten`, which imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilegym_rmsnorm.integrations.aten import Override

__all__ = ["override_aten"]


def override_aten(device_type: str = "cuda") -> Override:
    """Run `F.rms_norm`, `nn.RMSNorm` and their gradients on these kernels, in models that are left as they are.

    It overrides `aten::_fused_rms_norm` and `aten::_fused_rms_norm_backward`. PyTorch calls them where x and weight are
    both float16, both bfloat16 or both float32. Calls that no kernel of backend "cutile" or "triton" can take run as
    before, and so do all where `use_backend` or `set_backend` names another backend. Autograd stays PyTorch's, so that
    gradients of gradients, forward mode, `torch.func` and DTensor work as before. Graphs that Inductor compiles have no
    call of these ops.

    It holds for the whole process, from the call on: until `undo()` of what is returned, or to the end of its `with`
    block. Overrides may lie in each other, and end in any order: the first one does the work, the last one undoes it.

        with override_aten() as override:
            F.rms_norm(x, (4096,), weight).sum().backward()
        print(override.stats)

    Args:
        device_type: `"cuda"`. Or `"cpu"`, for tests where there is no GPU: it overrides CPU tensors, whose kernels run
            in an interpreter, and only while their backend is asked for by name and its interpreter is switched on.

    Returns:
        A context manager with `undo()`, and `stats`: for each of the two ops how many calls were "taken", and how many
        declined for which reason.

    Raises:
        ValueError: device_type is no such name.
        RuntimeError: PyTorch was built without CUDA, or is a release whose ops are others. Nothing is overridden.
    """
    from tilegym_rmsnorm.integrations.aten import override

    return override(device_type)

# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The peak of bytes that a call allocates outside of its kernels."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def size_of(*tensors: Tensor | None) -> int:
    """The bytes of these tensors, counting once those that are one."""
    sizes = {id(t): t.numel() * t.element_size() for t in tensors if t is not None}
    return sum(sizes.values())


class Living(TorchDispatchMode):
    """`peak` is the most bytes of storages that lived at once and were made inside the block.

    given: tensors from before the block, of which the call makes views. Kernels must not be seen (`without_kernels`):
    the interpreter makes tensors of its own.
    """

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in given if t is not None}
        self._kept = [t for t in given if t is not None]  # or another storage could have the same address
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._found = {key: each for key, each in self._found.items() if not each[0].expired()}
        if storage._cdata not in self._known:
            self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._found.values()))

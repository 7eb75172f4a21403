# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What Dynamo makes of the public functions: it traces the reference, and leaves every other call out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilegym_rmsnorm import gate, registry
from tilegym_rmsnorm.registry import get_current_backend


@torch._disable_dynamo  # torch.compiler.disable would import Dynamo here and now
def break_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch.compile calls and does not look into: it would trace through the caches of a launch, or fail there.

    Only the reference asked for by name is left to it. A wrapper around each function, or torch.compiler.disable, would
    cost every eager call 0.2 to 0.5 us; asking `is_dynamo_compiling` costs 0.03 us.
    """
    return function(*args, **kwargs)


# What Dynamo says where it may not break the graph (fullgraph=True, strict export), as torch.compiler.disable sets it.
break_graph._torchdynamo_disable = True
break_graph._torchdynamo_disable_msg = (
    "the kernels of tilegym_rmsnorm are launched outside of graphs. To have an RMSNorm in the graph, pass "
    'backend="torch" to rms_norm or RMSNorm: Inductor then compiles the reference. What set_backend says, and '
    "use_backend around the compiled function, is not seen here"
)


def traced(backend: str | None) -> str | None:
    """The backend as Dynamo traces it: what `use_backend` says in the traced function. For strict export, and inside a
    transform of torch.func, it is the one in effect, "torch" where that is "auto": no kernel would be chosen there, and
    Dynamo cannot go on behind a call that it leaves out."""
    name = registry.traced_backend() if backend is None else backend
    if gate.is_exporting() or gate.is_in_torch_func():
        name = _backend_in_effect() if name is None else name
        return "torch" if name == "auto" else name
    return name


def _backend_in_effect() -> str:
    return get_current_backend()


# As torch.compiler.assume_constant_result does, which would import Dynamo: it cannot read what use_backend sets. So a
# graph that is run again keeps the backend that was in effect when it was traced; it is the reference's in each case.
_backend_in_effect._dynamo_marked_constant = True

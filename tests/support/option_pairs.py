# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run calls that hold every two options of an op together, by each route. Numbers are new in each run; a failure prints
the seed. A case (covering.py) says besides the options of the call:

    needs   "all", the name of a leaf, or "none": which tensors require grad
    used    "all", or the name of a result: on what a loss depends
    route   "eager", "known", "op", "create_graph", or one that the test has a function for
"""

import random

import torch
from every_op import note_unknown
from helpers import settle_interpreters
from torch.nn import Parameter

ROUTES = "eager", "known", "op", "create_graph"


def values_of(op, case, make, names, backend, patch, function=None, apart=()):
    """Return the seed, the results by these names, and by those of leaves the gradients that there are.

    make: makes the call of a seed. function: of leaves by name and a backend; None: that of the route. apart: results
    to which some leaves do not lead."""
    needs, used, route = (case[name] for name in ("needs", "used", "route"))

    def run(call):
        leaves = {name: Parameter(each, needs in ("all", name)) for name, each in call.leaves.items()}
        run_call = call.by_op if route == "op" else call.public
        if function is None:
            found = run_call(*leaves.values(), *call.fixed.values(), backend=backend)
        else:
            found = function(leaves, backend)
        results, dys = (dict(zip(names, each, strict=False)) for each in (found, call.dys))
        recorded = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        # Not the sum with a residual where the weight alone needs a gradient.
        outputs = [name for name, each in results.items() if used in ("all", name) and each.requires_grad]
        assert bool(outputs) == bool(recorded)
        gradients = ()
        if recorded:
            gradients = torch.autograd.grad(
                [results[name] for name in outputs],
                list(recorded.values()),
                [dys[name] for name in outputs],
                create_graph=route == "create_graph",
                allow_unused=used != "all",
            )
        there = {name: each for name, each in zip(recorded, gradients, strict=True) if each is not None}
        assert used in apart or len(there) == len(recorded)
        # PyTorch's operations, and the gradient of a sum that is passed on, have strides of their own.
        is_free = route == "create_graph" or used == "residual_out"
        assert all(each.is_contiguous() for each in (*results.values(), *(() if is_free else there.values())))
        return results, {name: each.detach().contiguous() for name, each in there.items()}

    seed = random.SystemRandom().getrandbits(31)
    print(case, "seed", seed)
    if route != "known":
        return seed, *run(make(seed))
    settle_interpreters(patch)
    run(make(seed + 1))
    unknown = note_unknown(op, patch)
    found = run(make(seed))
    assert not [name for name in unknown if "check" in name]
    return seed, *found

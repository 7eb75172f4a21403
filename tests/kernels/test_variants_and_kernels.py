# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Kernels and their variants belong together: each kernel gets every argument that it names, and each setting reaches
the kernel that it is of."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Iterator

import every_op
import plain_calls
import pytest
import torch
from planning import classes_of, device, plan, problem

from tilegym_rmsnorm.backends.cutile import plans
from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.kernels.tiles import ConstBool, ConstInt
from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Split, Team
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import OPS, Device
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BY_KERNEL, WEIGHT_LOADS
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

N = 20
HINTS = {"warps", "occupancy"}  # to the compiler
GRIDS = {"grid_percent", "slab"}  # what decides how many blocks are launched, and for which rows
# By which arguments a setting reaches its kernel, where they do not have its name.
OTHER_NAMES = {
    **{
        (kernel, "weight_load"): ("EARLY_WEIGHT", "JOINT_WEIGHT")
        for kernel in ("forward_rows", "forward_tiles")
    },
    ("forward_team", "weight_load"): ("JOINT_WEIGHT",),
    ("clear_board", "width"): ("SLOTS",),
}
MODULES = [
    importlib.import_module(f"{plans.__name__}.{each.name}") for each in pkgutil.iter_modules(plans.__path__)
]
CLASSES = {name: each for module in MODULES for name, each in classes_of(module).items()}
every_variant = pytest.mark.parametrize("variant_class", CLASSES.values(), ids=CLASSES)
every_setting = pytest.mark.parametrize(
    ("variant_class", "setting"),
    [
        pytest.param(each, field.name, id=f"{name}-{field.name}")
        for name, each in CLASSES.items()
        for field in dataclasses.fields(each)
    ],
)


def example_of(variant_class: type[Variant]) -> Variant:
    """A variant that holds rows of N elements, at the defaults where there are some."""
    width = 16 if issubclass(variant_class, Team) else 32
    numbers = {"width": width, "warps": 4, "occupancy": 1, "latency": 2, "members": 2}
    numbers |= {
        "rows": 4,
        "heads": 2,
        "k_rows": 4,
        "k_heads": 2,
        "pieces": 1,
        "strip": 16,
        "slab": 8,
        "vector": 4,
    }
    required = [f.name for f in dataclasses.fields(variant_class) if f.default is dataclasses.MISSING]
    return variant_class(**{name: numbers[name] for name in required})


def values_of(variant: Variant, setting: str) -> list:
    """Values of a setting, all different."""
    value = getattr(variant, setting)
    if setting == "weight_load":
        return [each for each in WEIGHT_LOADS if each != "early" or variant.kernel != "forward_team"]
    if setting == "grid_percent":
        return [100, 50]
    return [False, True] if isinstance(value, bool) else [value, 2 * value or 16]


def parameters_of(variant: Variant | type[Variant]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(KERNELS[variant.kernel]).parameters)


def plan_with(step: Variant, **options) -> Plan:
    """A plan whose constants are those of a step. options: of `planning.problem`."""
    op = step.serves[0] if step.serves else "backward"
    first = step if step.serves else example_of(variants.BackwardRows)
    return plan(first, op, N, torch.float32, **options)


def constants_with(step: Variant, architecture: int = 90, casting: str = "once") -> dict:
    """The constants of a step in such a plan, or of a kernel of another op."""
    for op in every_op.OPS:
        if (made := op.plan_of(step, architecture, casting)) is not None:
            return made.constants(step)
    return plan_with(step, architecture=architecture, casting=casting).constants(step)


def test_every_kernel_has_a_variant_and_every_variant_a_kernel():
    assert sorted(each.kernel for each in CLASSES.values()) == sorted(KERNELS), "one each"
    assert all(function.__name__ == name for name, function in KERNELS.items())
    assert BY_KERNEL == {each.kernel: each for each in CLASSES.values() if each.serves}
    assert all(set(each.serves) <= set(OPS) for each in CLASSES.values())


@every_variant
def test_arrays_and_numbers_come_before_compile_time_arguments(variant_class):
    """launcher.py passes them so, and tells them apart by their names."""
    parameters = parameters_of(variant_class).values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    are_constants = [p.annotation in (ConstInt, ConstBool) for p in parameters]
    assert are_constants == [p.name.isupper() for p in parameters] == sorted(are_constants)


@every_variant
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("casting", ["once", "llama"])
def test_a_plan_has_every_compile_time_argument(casting, architecture, variant_class):
    variant = example_of(variant_class)
    if architecture >= 90 or not variant.uses_tma:
        variant.check(N, 4, architecture)
    constants = constants_with(variant, architecture, casting)
    for name, parameter in parameters_of(variant).items():
        if name.isupper():
            assert type(constants[name]) is (bool if parameter.annotation is ConstBool else int), name
    assert constants["DEPENDENT"] == (architecture >= 90)
    if "ROUND_XHAT" in parameters_of(variant):
        assert constants["ROUND_XHAT"] == (casting == "llama")


def test_switches_say_what_the_problem_is():
    for op, weight in (("backward", "same"), ("dx", "same"), ("dx", None)):
        made = plan(example_of(variants.BackwardRows), op, N, torch.float32, weight=weight)
        constants = made.constants(made.first)
        assert constants["HAS_DW"] == (op == "backward") and constants["HAS_WEIGHT"] == (weight is not None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_uses_every_argument(kernel):
    tree = ast.parse(inspect.getsource(KERNELS[kernel]))
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert set(inspect.signature(KERNELS[kernel]).parameters) <= read


@every_setting
def test_every_setting_reaches_its_kernel(variant_class, setting):
    """No variant has a field that its kernel does not use: what differs in it alone is compiled, or launched,
    differently."""
    variant, parameters = example_of(variant_class), parameters_of(variant_class)
    names = OTHER_NAMES.get((variant.kernel, setting), (setting.upper(),))
    hints = HINTS - {"warps"} if "WARPS" in parameters else HINTS  # a row's sum has a lane for each thread
    found = []
    for value in values_of(variant, setting):
        changed = dataclasses.replace(variant, **{setting: value})
        if setting in GRIDS:
            found.append(plan_with(changed).sizes(2000))
        elif setting not in hints:
            found.append([constants_with(changed)[name] for name in names])
    assert all(found.count(each) == 1 for each in found)
    is_taken = [name in parameters for name in names]
    assert not any(is_taken) if setting in GRIDS | hints else all(is_taken)


class Noting(InterpretedMachine):
    """Launches nothing. Keeps by the kernels' names what each launch gave, by the names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: dict[str, dict] = {}

    def bind(self, function, variant, constants):
        assert KERNELS[variant.kernel] is function
        names = list(inspect.signature(function).parameters)

        def launch(grid, arguments):
            assert all(type(extent) is int and extent > 0 for extent in grid)
            self.launched[variant.kernel] = dict(zip(names, arguments + constants, strict=True))

        return launch


def arrays_of(made: Plan, m: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return {name: (shape, dtype)} of kernels' arrays. A missing weight or dw is never touched."""
    problem, sizes = made.problem, made.sizes(m)
    x, row = ((m, N), torch.bfloat16), ((m,), torch.float32)
    found = {name: x for name in ("x", "y", "dx", "dy")} | {"rstd": row}
    found["weight"] = ((64,) if problem.weight is None else (N,), torch.float32)
    found["dw_partial"] = ((sizes.partial_rows, N) if problem.op == "backward" else (64,), torch.float32)
    found["dw"] = ((N,), torch.float32)
    dtypes = {"int32": torch.int32, "float32": torch.float32}
    return found | {name: (shape, dtypes[dtype]) for name, (shape, dtype) in sizes.temporaries.items()}


def plans_of(variant: Variant, facts: Device) -> Iterator[Plan]:
    """Yield plans of each op served: without a weight where one may be missing, and of dw with partial rows of each
    kind, but for slabs, which have several rows of x."""
    for op in variant.serves:
        weights = (torch.float32,) if op == "backward" else (torch.float32, None)
        kinds = ("shared", "own") if op == "backward" and not isinstance(variant, Split) else ("shared",)
        for weight, partials in itertools.product(weights, kinds):
            asked = problem(op, N, torch.bfloat16, weight=weight, facts=facts, partials=partials)
            yield plan_of(asked, variant)


@pytest.mark.parametrize("m", [1, 37])
@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if each.serves])
def test_arrays_and_numbers_have_the_names_that_kernels_give_them(name, m):
    """launcher.py offers them by name: those of the call, and temporary ones that a plan asks for."""
    variant, machine = example_of(CLASSES[name]), Noting()
    for made in plans_of(variant, machine.facts):
        machine.launched.clear()
        x, rstd = torch.zeros(m, N, dtype=torch.bfloat16), torch.zeros(m)
        weight = None if made.problem.weight is None else torch.zeros(N)
        if made.problem.op == "forward":
            plain_calls.forward(Forward(machine, made), x, weight, 0.5, 0.25)
        else:
            plain_calls.backward(Backward(machine, made), x, torch.zeros_like(x), weight, rstd, 0.25)
        sizes = made.sizes(m)
        kernels = {
            step.kernel for step, grid in zip(made.steps, sizes.grids, strict=True) if grid is not None
        }
        assert machine.launched.keys() == kernels
        numbers = {"inv_n": 1 / N, "eps": 0.5, "offset": 0.25, "tiles_in_slab": sizes.tiles_in_slab}
        # of a call without them
        numbers |= dict.fromkeys(("residual", "bias", "d_residual_out", "d_residual", "db_partial", "db"), ())
        arrays = arrays_of(made, m)
        for kernel, given in machine.launched.items():
            for parameter, value in given.items():
                if parameter in arrays:
                    assert (tuple(value.shape), value.dtype) == arrays[parameter], (kernel, parameter)
                elif not parameter.isupper():
                    assert value == numbers[parameter], (kernel, parameter)


def test_the_kernels_of_these_plans_are_all_there_are():
    """So that none is launched by something that the test above does not see."""
    launched = {
        step.kernel
        for each in CLASSES.values()
        if each.serves
        for made in plans_of(example_of(each), device())
        for step in made.steps
    }
    assert launched == {each.kernel for each in classes_of(variants).values()}

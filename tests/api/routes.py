# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A table of the routes that calls take: form of the call x kind of tensors x surrounding x backend -> what runs, why,
the nodes of the graphs, and the bits of the results. routes.txt keeps it, test_routes.py compares.

    python tests/api/routes.py               prints the table
    python tests/api/routes.py --write       rewrites routes.txt
    python tests/api/routes.py --bits        a line for each result with the hash of its bits: one machine can compare
                                             before and after a change
    python tests/api/routes.py grad Dynamo   prints these surroundings alone
"""

import os
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":  # as conftest.py and pyproject.toml set it up
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import argparse
import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from route_cases import (
    BACKENDS,
    EPS,
    FAKE_MODES,
    FORMS,
    KINDS,
    MESHES,
    MORE_SHARDS,
    ROWS,
    Form,
    Kind,
    backend_of,
    loss_of,
)
from route_surroundings import SURROUNDINGS, Failed, Watched
from torch import Tensor
from torch.torch_version import TorchVersion

KEPT = Path(__file__).with_name("routes.txt")
VERSION = ".".join(torch.__version__.split(".")[:2])
COMMAND = "python tests/api/routes.py --write"


class Cell(NamedTuple):
    surrounding: str
    form: str
    kind: str
    backend: str


class Seen(NamedTuple):
    """Observations of a cell. nodes: by phase, of each graph."""

    route: str
    reason: str
    nodes: str
    bits: str


def _cells(
    surroundings: str | Iterable[str],
    forms: str,
    kinds: str = "tensors",
    backends: str = "torch; auto; kernel",
) -> Iterator[Cell]:
    """The product of these, which are separated by semicolons. "*": all."""
    choices = surroundings, forms, kinds, backends
    known: tuple[Any, ...] = SURROUNDINGS, FORMS, KINDS, BACKENDS
    parts = [
        list(all_of) if chosen == "*" else [each.strip() for each in chosen.split(";")]
        for chosen, all_of in zip(choices, known, strict=True)
    ]
    for part, all_of in zip(parts, known, strict=True):
        assert set(part) <= set(all_of), f"unknown: {set(part) - set(all_of)}"
    yield from itertools.starmap(Cell, itertools.product(*parts))


@functools.cache
def cells() -> tuple[Cell, ...]:
    """Every value of each axis, and the pairs that matter: the whole product would take hours."""
    every_backend = "; ".join(BACKENDS)
    plain_kinds = "; ".join(name for name in KINDS if name != "tensors")
    of_norm = "; ".join(name for name in FORMS if not name.startswith("op ") and "eps of" not in name)
    eager = (
        "inference mode; grad, known call; backward in another thread; create_graph; saved tensors copied by hooks; "
        "saved tensors of another dtype by hooks; saved tensors turned into TwoTensor by hooks; is_grads_batched; "
        "FlopCounterMode; a silent mode; a mode that wraps tensors; allow_mutation_on_saved_tensors; "
        "a mode in the backward alone; with torch.device; FakeTensorMode; selective checkpointing; dual level; "
        "tangent; autocast of CPUs; autocast of CUDA; torch.func.vjp; torch.func.jvp; torch.func.vmap; "
        "torch.func.vmap of the backward; torch.func.functionalize; torch.jit.trace"
    )
    few = "plain; residual; offset, llama; rms_norm_forward; rms_norm_backward"
    found = [
        *_cells("grad", "*", backends="torch; none usable; auto; kernel"),
        *_cells("grad", "plain; residual", backends=every_backend),
        *_cells("grad", few + "; heads; float64", backends="interpreter; no GPU"),
        *_cells("grad", "RMSNorm", "parameters"),
        *_cells("grad", "plain; residual", plain_kinds),
        *_cells("no grad", "plain; rms_norm_forward", plain_kinds, "auto; kernel"),
        *_cells(
            "no grad",
            "rms_norm_backward; op forward",
            "TwoTensor; fake; DTensor, rows sharded; no rows; complex",
        ),
        *_cells(eager, few + "; only bias learns; op forward"),
        *_cells("create_graph", "bias; heads, bias, residual; only residual_out used", backends="auto"),
        *_cells("create_graph", "op add forward; RMSNorm", backends="auto"),
        *_cells(
            "create_graph",
            "plain; residual",
            "DTensor, rows sharded; DTensor, columns sharded",
            "torch; auto",
        ),
        *_cells(
            "grad; create_graph",
            "bias; only bias learns; heads, bias, residual; only residual_out used",
            "DTensor, rows sharded",
            "torch; auto",
        ),
        *_cells(
            "grad",
            "op forward; op add forward",
            "of inference mode; still communicated; a pending minus sign; dy a TwoTensor; complex; no rows",
            "auto",
        ),
        *_cells(
            "torch.func.vjp; torch.func.jvp; torch.func.vmap",
            "bias; heads; op add forward; op backward; op add backward",
            backends="auto",
        ),
        *_cells("AOTAutograd", of_norm, backends="auto"),
        *_cells("AOTAutograd", few + "; heads; only bias learns; bias", backends="torch"),
        *_cells("AOTAutograd", "plain; residual; only bias learns; float64", backends="kernel"),
        *_cells("AOTAutograd", "plain", "TwoTensor; complex; DTensor, rows sharded"),
        *_cells("AOTAutograd", "plain", "no rows; rows of no elements", "auto"),
        *_cells("AOTAutograd", "residual", "TwoTensor; DTensor, rows sharded", "auto"),
        *_cells("AOTAutograd, dynamic", "plain; residual", backends="auto"),
        *_cells("AOTAutograd, dynamic", "eps of a size"),
        *_cells("Dynamo", "plain; rms_norm_forward"),
        *_cells("Dynamo", "residual; op forward; rms_norm_backward; float64", backends="auto"),
        *_cells("Dynamo; Dynamo, fullgraph", "plain", "complex; nested, jagged"),
        *_cells("Dynamo, dynamic; Dynamo, fullgraph", "plain; eps of a size"),
        *_cells("Dynamo, vmap", "plain; residual"),
        *_cells("Dynamo, use_backend", "plain", backends="auto; torch"),
        *_cells("make_fx", few + "; only bias learns"),
        *_cells(
            "make_fx, symbolic; make_fx, fake, pre_dispatch",
            "plain; residual; rms_norm_forward",
            backends="torch; auto",
        ),
        *_cells("make_fx, symbolic", "eps of a size"),
        *_cells("make_fx", "plain", "TwoTensor; complex; no rows"),
        *_cells("make_fx of the backward; aot_function", "plain; residual; only bias learns"),
        *_cells("compiled autograd", "plain; residual; only bias learns; heads"),
        *_cells("compiled autograd", "op forward; op add forward; float64", backends="auto"),
        *_cells("export", few + "; bias"),
        *_cells("export, strict", "plain; residual; rms_norm_backward", backends="torch; auto"),
        *_cells("export", "plain; residual", "complex; rows of no elements"),
        *_cells("export, dynamic", "plain; residual; eps of a size"),
    ]
    return tuple(dict.fromkeys(found))


def _base(form: Form, kind: Kind) -> dict[str, Tensor]:
    """Plain tensors with the values of a cell."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (shape, dtype) in form.tensors.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name not in ROWS:
            values = values.abs() + 0.5
        tensors[name] = kind.base(name, values.to(dtype))
    if "rstd" in tensors:
        x = tensors["x"].to(tensors["rstd"].dtype if not tensors["x"].is_complex() else tensors["x"].dtype)
        found = torch.rsqrt(x.abs().square().mean(-1) + EPS)
        is_op = tensors["rstd"].ndim > 1
        tensors["rstd"] = found[..., None] if is_op else found.flatten()
    return tensors


def _leaves(form: Form, tensors: dict[str, Any]) -> dict[str, Any]:
    for name in form.learn:
        each = tensors.get(name)
        can_learn = each is not None and (each.is_floating_point() or each.is_complex())
        if can_learn and not each.is_inference():
            each.requires_grad_()
    return tensors


@functools.cache
def expected(form_title: str, kind_title: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Results by name of backend "torch" for plain tensors in eager mode, their gradients, and F.rms_norm's results
    where it has the same arguments. No results where that is an error."""
    form, kind = FORMS[form_title], KINDS[kind_title]
    generator = torch.Generator().manual_seed(1)
    with backend_of("torch") as backend:
        base = _leaves(form, {name: each.clone() for name, each in _base(form, kind).items()})
        row = {} if kind.row is None else {"row": kind.row}
        try:
            results = form.run({**base, **row}, backend)
        except (TypeError, ValueError):
            _, dys, _ = expected(form_title, "tensors")
            return {}, dys, {}
        dys = {
            name: None if y is None else torch.randn(y.shape, generator=generator, dtype=y.dtype)
            for name, y in results.items()
        }
        found = _with_gradients(form, base, results, dys)
        x = {**base, "x": base["x"].detach()}
        others = {name: each.detach() for name, each in x.items()} | row
        run = functools.partial(_first, form, others)
        found["tangent"] = torch.func.jvp(run, (x["x"],), (torch.ones_like(x["x"]),))[1]
    theirs = {}
    if form.like is not None and kind.row is None:
        theirs = _with_gradients(form, base, {"y": form.like(base)}, dys)
    return found, dys, theirs


def _first(form: Form, others: dict[str, Any], x: Tensor) -> Any:
    return next(each for each in form.run({**others, "x": x}, "torch").values() if each is not None)


def _with_gradients(
    form: Form, tensors: dict[str, Any], results: dict[str, Any], dys: dict[str, Any]
) -> dict[str, Any]:
    found = dict(results)
    names = [name for name in form.used if results.get(name) is not None and results[name].requires_grad]
    leaves = {name: tensors[name] for name in form.learn if name in tensors and tensors[name].requires_grad}
    if not names:
        return found
    outputs, cotangents = [results[name] for name in names], [dys[name] for name in names]
    options = {"allow_unused": True, "create_graph": True}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, **options)
    found |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
    recorded = [each for each in gradients if each is not None and each.requires_grad]
    if recorded:
        second = torch.autograd.grad(loss_of(recorded), list(leaves.values()), allow_unused=True)
        found |= {f"second grad {n}": g for n, g in zip(leaves, second, strict=True)}
    return found


def observe(cell: Cell) -> tuple[Seen, dict[str, Any]]:
    """Observe a cell; return its results too."""
    form, kind = FORMS[cell.form], KINDS[cell.kind]
    found, dys, theirs = expected(cell.form, cell.kind)
    names = kind.names
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if kind.mesh is not None:
            MESHES.append(stack.enter_context(kind.mesh()))
            _forget_placements()
        FAKE_MODES.clear()
        torch.manual_seed(0)
        backend = stack.enter_context(backend_of(cell.backend))
        tensors = {
            name: kind.make(each) if names is None or name in names else each
            for name, each in _base(form, kind).items()
        }
        given_dys = {
            name: dy if dy is None or not _is_like(name, names) else kind.make(dy) for name, dy in dys.items()
        }
        watched = Watched(form, kind, backend, _leaves(form, tensors), given_dys)
        with contextlib.suppress(Failed):
            SURROUNDINGS[cell.surrounding](watched)
        results = {name: _values(kind, each) for name, each in watched.results.items()}
    route = "; ".join(f"{name}: {phase.route()}" for name, phase in watched.phases.items())
    graphs = {name: phase.graphs for name, phase in watched.phases.items() if phase.graphs}
    nodes = "\n".join(f"{name}: {' '.join(graph) or '-'}" for name, of in graphs.items() for graph in of)
    reason = "; ".join(dict.fromkeys(watched.reasons)).replace(_USUAL_REASON, "..., but ")
    bits = _relations(results, found, theirs)
    if cell.backend == "interpreter":  # whose sums are NumPy's
        bits = bits.replace("equal:", "close:")
    return Seen(route, reason, nodes, bits), results


_USUAL_REASON = "it takes tensors with memory of their own, in calls that nothing records or transforms, but "


def _is_like(name: str, names: tuple[str, ...] | None) -> bool:
    """Whether a gradient of this result is made of the cell's kind."""
    of = {"y": "dy", "residual_out": "d_residual_out"}.get(name)
    return names is None or of in names


def _forget_placements() -> None:
    """PyTorch's caches of placements name the mesh of an earlier cell, an equal one, which a graph does not have."""
    from torch.distributed.tensor import debug

    if clear := getattr(debug, "_clear_sharding_prop_cache", None):
        clear()


def _values(kind: Kind, result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    from torch._subclasses.fake_tensor import FakeTensor

    result = kind.values(result)
    result = getattr(result, "a", result)  # of what a mode or a hook wrapped
    return "no values" if isinstance(result, FakeTensor) or result.is_meta else result.detach()


def _relations(results: dict[str, Any], found: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Say which results have the bits of eager backend "torch", which of F.rms_norm, and which are close."""
    by_relation: dict[str, list[str]] = {}
    for name, result in results.items():
        by_relation.setdefault(_relation(name, result, found, theirs), []).append(name)
    return "; ".join(f"{relation}: {', '.join(names)}" for relation, names in by_relation.items())


def _relation(name: str, result: Any, found: dict[str, Any], theirs: dict[str, Any]) -> str:
    if result is None or isinstance(result, str):
        return result or ("no gradient" if found.get(name) is None else "MISSING")
    other = found.get(name)
    if other is None:
        return "compared with nothing" if result.any() else "zeros"
    other = other.detach()
    if result.dtype is not other.dtype:
        return f"of {str(result.dtype).removeprefix('torch.')}"
    result = result.reshape(other.shape) if result.numel() == other.numel() else result
    if result.shape != other.shape:
        return "OF ANOTHER SHAPE"
    if torch.equal(result, other):
        return "equal"
    if name in theirs and torch.equal(result, theirs[name].detach()):
        return "F.rms_norm's"
    tolerance = 1e-2 if other.dtype.itemsize == 2 else 1e-5
    return "close" if torch.allclose(result, other, rtol=tolerance, atol=tolerance) else "DIFFERENT"


def observed(surroundings: Iterable[str]) -> dict[Cell, Seen]:
    return {cell: observe(cell)[0] for cell in cells() if cell.surrounding in set(surroundings)}


def of_any_version(seen: dict[Cell, Seen]) -> dict[Cell, Seen]:
    """Keep what no version of torch changes: of graphs our ops, of PyTorch's errors the type, and the bits where no
    PyTorch operations are derived or recorded in another order."""
    return {cell: _of_any_version(each) for cell, each in seen.items() if not _depends_on_torch(cell)}


def _depends_on_torch(cell: Cell) -> bool:
    """Since 2.14 PyTorch gathers DTensors with fewer rows than shards itself, so that an op may. 2.9 exports no two
    tensors of one dynamic size, and compiles no eps of a dynamic size."""
    version = TorchVersion(torch.__version__)
    return (
        cell.kind == MORE_SHARDS if version >= "2.14" else version < "2.11" and "dynamic" in cell.surrounding
    )


def differences(kept: dict[Cell, Seen], seen: dict[Cell, Seen]) -> list[str]:
    """List changes, each above the cells that it is in."""
    changes: dict[tuple[str, ...], list[Cell]] = {}
    for cell in seen:
        if kept.get(cell) != seen[cell]:
            pairs = zip(Seen._fields, kept.get(cell, ("",) * len(Seen._fields)), seen[cell], strict=True)
            lines = [
                f"{sign} {name:7} {line}"
                for name, *both in pairs
                for sign, text in zip("-+", both, strict=True)
                for line in text.splitlines()
                if both[0] != both[1]
            ]
            changes.setdefault(tuple(lines), []).append(cell)
    return [
        line
        for lines, cells in changes.items()
        for line in (*lines, *("    " + " | ".join(c) for c in cells))
    ]


def _of_any_version(seen: Seen) -> Seen:
    route, reason, nodes, bits = seen
    reason = re.sub(
        r"(RuntimeError|AttributeError|Unsupported|break): (?!a kernel of tilegym).*", r"\1", reason
    )
    ops = "\n".join(re.findall(r"op \w+\(.*?\)", nodes))
    return Seen(route, reason, ops, "" if "operations in the graph" in route else bits)


HEADING = """\
The routes that calls take, of torch {version} on a CPU without a GPU: what tests/api/routes.py sees.
Rewritten by: {command}

Below each surrounding stand what was seen, and the calls of which it was: form | kind of tensors | backends.
route   by phase: "kernel" and "reference" are the implementations that backends register, "op" is an op of
        torch.ops.tilegym_rmsnorm, "operations" are PyTorch's own; "a > b": a, which runs b.
reason  why no kernel runs, where one could; the error; or why a graph breaks. "..., but": it takes tensors with memory
        of their own, in calls that nothing records or transforms, but
nodes   of each graph, with the numbers that an op is given; "." is a tensor.
bits    results that are equal to those of backend "torch" for plain tensors in eager mode, or only close.
Backends: tests/api/route_cases.py. "kernel" is a stand-in by name, which "auto" takes too; where "none usable" stands,
there is none.
"""


def render(seen: dict[Cell, Seen]) -> str:
    """The table as it is kept. Backends that see the same share a line, and lines that do share a block."""
    lines = [HEADING.format(version=VERSION, command=COMMAND)]
    for surrounding in SURROUNDINGS:
        blocks: dict[Seen, dict[tuple[str, str], list[str]]] = {}
        for cell, each in seen.items():
            if cell.surrounding == surrounding:
                blocks.setdefault(each, {}).setdefault((cell.form, cell.kind), []).append(cell.backend)
        if blocks:
            lines.append(f"\n=== {surrounding} ===\n")
        for each, calls in blocks.items():
            for name, text in zip(Seen._fields, each, strict=True):
                lines += [f"{name:7} {line}" for line in text.splitlines()]
            lines += [
                f"    {form} | {kind} | {', '.join(backends)}" for (form, kind), backends in calls.items()
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def read(text: str) -> tuple[str, dict[Cell, Seen]]:
    """The version of torch that a table is of, and its cells."""
    version = text.split("of torch ", 1)[1].split()[0]
    seen: dict[Cell, Seen] = {}
    for section in text.split("\n=== ")[1:]:
        surrounding, rest = section.split(" ===\n", 1)
        for block in rest.strip("\n").split("\n\n"):
            fields: dict[str, list[str]] = {name: [] for name in Seen._fields}
            for line in block.splitlines():
                if line.startswith("    "):
                    form, kind, backends = line.strip().split(" | ")
                    each = Seen(*("\n".join(lines) for lines in fields.values()))
                    seen |= {Cell(surrounding, form, kind, name): each for name in backends.split(", ")}
                else:
                    fields[line[:7].strip()].append(line[8:])
    return version, seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("surroundings", nargs="*", help="of which; all where none is named")
    parser.add_argument("--write", action="store_true", help="rewrite routes.txt")
    parser.add_argument("--bits", action="store_true", help="print hashes of results instead")
    options = parser.parse_args()
    chosen = options.surroundings or list(SURROUNDINGS)
    if unknown := set(chosen) - set(SURROUNDINGS):
        parser.error(f"unknown: {unknown}")
    if options.bits:
        for cell in cells():
            if cell.surrounding in chosen:
                for name, result in observe(cell)[1].items():
                    print(" | ".join(cell), name, _hash(result), sep=" | ")
        return
    table = render(observed(chosen))
    if options.write:
        KEPT.write_text(table, encoding="utf-8")
    else:
        print(table, end="")


def _hash(result: Any) -> str:
    if not isinstance(result, Tensor):
        return str(result)
    number = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{number} {str(result.dtype).removeprefix('torch.')} {tuple(result.shape)} {result.stride()}"


if __name__ == "__main__":
    main()

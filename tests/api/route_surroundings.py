# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The fourth axis of routes.py: what is around a call. Each function makes a cell's call, phase by phase; `Watched`
notes what runs, the nodes of the graphs, and the results."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from route_cases import EVENTS, ROWS, Form, Kind, Tensors, loss_of
from test_gate import MODES
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.fx import GraphModule

NAMESPACE = "tilegym_rmsnorm"
_PASSED_OVER = re.compile(r"^rms_norm_(\w+) of .* not cutile: (.*?) \(to mend it")


_ARITHMETIC = {f"aten::{name}" for name in ("rms_norm", "rsqrt", "mul", "add", "sum", "_fused_rms_norm")}


class Failed(Exception):
    """A phase of a cell ended in an error, which `Watched` has noted."""


class Phase:
    """Observations of one phase."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.graphs: list[list[str]] = []
        self.breaks: list[str] = []
        self.error: str | None = None
        self.note = ""
        self.has_arithmetic = False

    def route(self) -> str:
        parts = []
        if self.breaks:
            parts.append("graph break")
        if self.graphs and (not self.breaks or any(_has_op(graph) for graph in self.graphs)):
            has_op = any(_has_op(graph) for graph in self.graphs)
            parts.append("op in the graph" if has_op else "operations in the graph")
        elif "op" in self.events:
            parts += ["op", "operations"] if self.has_arithmetic and self.events == ["op"] else ["op"]
        implementations = [event for event in dict.fromkeys(self.events) if event != "op"]
        parts += implementations
        if self.error is not None:
            parts.append("error")
        if not parts or parts == ["graph break"]:
            parts.append("operations" if self.has_arithmetic else "nothing to compute")
        return " > ".join(parts) + self.note


class Watched:
    """One cell: its tensors, and all that is noted of it."""

    def __init__(self, form: Form, kind: Kind, backend: str | None, tensors: Tensors, dys: Tensors) -> None:
        self.form, self.kind, self.backend = form, kind, backend
        self.tensors, self.dys = tensors, dys
        self.phases: dict[str, Phase] = {}
        self.results: dict[str, Any] = {}
        self.reasons: list[str] = []

    def call(self, tensors: Tensors) -> dict[str, Any]:
        row = {} if self.kind.row is None else {"row": self.kind.row}
        return self.form.run({**tensors, **row}, self.backend)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The call as a function of its tensors. Free of this object, which Dynamo would look into."""
        run, backend, names = self.form.run, self.backend, tuple(self.tensors)
        row = {} if self.kind.row is None else {"row": self.kind.row}

        def function(*values: Any) -> tuple[Any, ...]:
            return tuple(run({**dict(zip(names, values, strict=True)), **row}, backend).values())

        return function

    def names_of_results(self) -> list[str]:
        return list(self.dys)

    def learned(self) -> dict[str, Tensor]:
        given = {name: self.tensors.get(name) for name in self.form.learn}
        return {name: each for name, each in given.items() if each is not None and each.requires_grad}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Notes which ops and implementations run inside, what is logged, and an error, which ends the cell."""
        phase = self.phases.setdefault(name, Phase())
        EVENTS.clear()
        torch._dynamo.utils.counters.clear()
        watch = profiler.profile(use_kineto=False)
        try:
            with _logged(self.reasons), watch:
                yield phase
        except Failed:
            raise
        except Exception as error:  # of any kind: it is what the cell shows
            phase.error = text_of(error)
            self.reasons.append(phase.error)
            raise Failed from error
        finally:
            called = {event.name for event in watch.function_events or ()}
            if any(name.startswith(f"{NAMESPACE}::") for name in called):
                phase.events.append("op")
            phase.has_arithmetic |= not called.isdisjoint(_ARITHMETIC)
            phase.events += EVENTS
            for text in torch._dynamo.utils.counters["graph_break"]:
                phase.breaks.append(text)
                self.reasons.append(_of_break(text))

    def note(self, results: Sequence[Any]) -> list[Any]:
        """Results of the call, in its order."""
        self.results |= dict(zip(self.names_of_results(), results, strict=True))
        return list(results)

    def note_gradients(self, gradients: Sequence[Any], prefix: str = "") -> None:
        names = [f"{prefix}grad {name}" for name in self.learned()]
        self.results |= dict(zip(names, gradients, strict=True))

    def forward(self) -> dict[str, Any]:
        with self.phase("call"):
            results = self.call(self.tensors)
        self.note(tuple(results.values()))
        self.note_owner(results)
        return results

    def note_owner(self, results: dict[str, Any]) -> None:
        """Whether an autograd.Function recorded the call, or PyTorch's operations."""
        functions = [each.grad_fn for each in results.values() if isinstance(each, Tensor) and each.grad_fn]
        if functions:
            is_ours = isinstance(functions[0], torch._C._FunctionBase)
            self.phases["call"].note = ", recorded by " + ("a Function" if is_ours else "PyTorch")

    def backward(self, results: dict[str, Any], dys: Tensors | None = None, **options: Any) -> list[Any]:
        outputs, cotangents = self.outputs(results, dys)
        if not outputs:
            return []
        leaves = list(self.learned().values())
        with self.phase("backward"):
            gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, **options)
        self.note_gradients(gradients)
        return list(gradients)

    def outputs(self, results: dict[str, Any], dys: Tensors | None = None) -> tuple[list[Any], list[Any]]:
        """The results that a loss depends on, and their gradients."""
        dys = self.dys if dys is None else dys
        names = [name for name in self.form.used if name in results]
        names = [name for name in names if results[name] is not None and results[name].requires_grad]
        return [results[name] for name in names], [dys[name] for name in names]


@contextlib.contextmanager
def _logged(reasons: list[str]) -> Iterator[None]:
    """Adds to reasons why "auto" passed over kernels."""
    logger = logging.getLogger(NAMESPACE)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := _PASSED_OVER.match(record.getMessage()):
                reasons.append(f"{found[1]}: {found[2]}")

    handler, level, propagates = Handler(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def text_of(error: BaseException) -> str:
    """Type and text of an error, without what depends on the machine: the remedy, the backends that are usable."""
    text = str(error).strip()
    if found := re.search(r"tilegym_rmsnorm: .*", text):  # what Dynamo quotes
        text = found[0]
    if "msg = a kernel of tilegym_rmsnorm" in text or "a kernel of tilegym_rmsnorm was" in text:
        text = text[text.index("a kernel of tilegym_rmsnorm") :]
    text = re.split(r"\. To mend it: | Usable on this machine", text)[0].splitlines()[0] if text else ""
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return f"{type(error).__name__}: {text[:400]}"


def _of_break(text: str) -> str:
    ours = re.search(r"a kernel of tilegym_rmsnorm[^\n]*", text)
    return "break: " + (ours[0].split(" To mend it")[0] if ours else text.strip().splitlines()[0])[:400]


def _has_op(nodes: list[str]) -> bool:
    return any(node.startswith("op ") for node in nodes)


_NO_COMPUTATION = ("getitem", "size", "validate_outputs")


def nodes_of(graph: GraphModule) -> list[str]:
    """List a graph's calls in order, and those of graphs inside of it; our ops with the numbers they are given."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
    called = (node for each in graphs for node in each.nodes if node.op.startswith("call_"))
    return [name for name in map(_named, called) if name not in _NO_COMPUTATION]


def _named(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        arguments = ", ".join(map(_shown, node.args))
        return f"op {target._schema.name.split('::')[1]}({arguments})"
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.overloadpacket.__name__}.{target._overloadname}".removesuffix(".default")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _shown(argument: Any) -> str:
    return "." if isinstance(argument, torch.fx.Node) else str(argument).removeprefix("torch.")


# Eager calls.


def no_grad(o: Watched) -> None:
    with torch.no_grad():
        o.forward()


def inference_mode(o: Watched) -> None:
    with torch.inference_mode():
        o.forward()


def grad(o: Watched) -> None:
    o.backward(o.forward())


def known_call(o: Watched) -> None:
    """Make the same call a second time."""
    o.call(o.tensors)
    grad(o)


def create_graph(o: Watched) -> None:
    gradients = o.backward(o.forward(), create_graph=True)
    found = [each for each in gradients if each is not None and each.requires_grad]
    if found:
        with o.phase("second backward"):
            second = torch.autograd.grad(loss_of(found), list(o.learned().values()), allow_unused=True)
        o.note_gradients(second, "second ")


def saved_tensors(change: Callable[[Tensor], Tensor]) -> Callable[[Watched], None]:
    def run(o: Watched) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), change):
            o.backward(o.forward())

    return run


def _two(tensor: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(tensor.clone(), tensor.clone())


def batched_gradients(o: Watched) -> None:
    results = o.forward()
    dys = {name: torch.stack([dy, dy * 2]) for name, dy in o.dys.items() if dy is not None}
    gradients = o.backward(results, dys, is_grads_batched=True)
    if gradients:
        o.note_gradients([None if each is None else each[0] for each in gradients])


def mode(make: Callable[[], Any]) -> Callable[[Watched], None]:
    def run(o: Watched) -> None:
        with make():
            grad(o)

    return run


def mode_in_the_backward(o: Watched) -> None:
    results = o.forward()
    with MODES["silent"]():
        o.backward(results)


def fake_mode(o: Watched) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        grad(o)


def checkpointed(o: Watched) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    function = o.function()
    with o.phase("call"):
        results = checkpoint(function, *o.tensors.values(), use_reentrant=False, context_fn=contexts)
    o.note(results)
    o.backward(dict(zip(o.names_of_results(), results, strict=True)))


def dual_level(o: Watched) -> None:
    """A level of forward-mode differentiation in which none of the tensors has a tangent."""
    with forward_ad.dual_level():
        grad(o)


def tangent(o: Watched) -> None:
    with forward_ad.dual_level(), torch.no_grad():
        x = forward_ad.make_dual(o.tensors["x"].detach(), torch.ones_like(o.tensors["x"]))
        with o.phase("call"):
            results = o.call({**o.tensors, "x": x})
        unpacked = [each if each is None else forward_ad.unpack_dual(each) for each in results.values()]
        o.note([each and each.primal for each in unpacked])
        o.results["tangent"] = next(each.tangent for each in unpacked if each is not None)


def autocast(device: str) -> Callable[[Watched], None]:
    def run(o: Watched) -> None:
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(
            device, True
        )  # torch.autocast turns itself off where there is no such device
        try:
            grad(o)
        finally:
            torch.set_autocast_enabled(device, before)

    return run


def in_a_thread(o: Watched) -> None:
    """The backward in another thread."""
    from concurrent.futures import ThreadPoolExecutor

    results = o.forward()
    outputs, dys = o.outputs(results)
    if outputs:
        with o.phase("backward"), ThreadPoolExecutor() as pool:
            call = pool.submit(
                torch.autograd.grad, outputs, list(o.learned().values()), dys, allow_unused=True
            )
            gradients = call.result()
        o.note_gradients(gradients)


# Transforms of torch.func.


def func_vjp(o: Watched) -> None:
    function, names = o.function(), o.names_of_results()
    with o.phase("call"):
        results, pull = torch.func.vjp(function, *(each.detach() for each in o.tensors.values()))
    o.note(results)
    with o.phase("backward"):
        used = [name in o.form.used for name in names]
        dys = [
            torch.zeros_like(each) if not is_used else o.dys[name]
            for each, is_used, name in zip(results, used, names, strict=True)
        ]
        gradients = dict(zip(o.tensors, pull(tuple(dys)), strict=True))
    o.note_gradients([gradients[name] for name in o.learned()])


def func_jvp(o: Watched) -> None:
    names = list(o.tensors)
    values = tuple(each.detach() for each in o.tensors.values())
    tangents = tuple(
        (torch.ones_like if name == "x" else torch.zeros_like)(value)
        for name, value in zip(names, values, strict=True)
    )
    with o.phase("call"):
        results, of_results = torch.func.jvp(o.function(), values, tangents)
    o.note(results)
    o.results["tangent"] = of_results[0]


def _vmapped(o: Watched, function: Callable[..., Any]) -> Callable[..., Any]:
    are_rows = (name in ROWS or (name == "rstd" and each.ndim > 1) for name, each in o.tensors.items())
    return torch.func.vmap(function, in_dims=tuple(0 if is_rows else None for is_rows in are_rows))


def func_vmap(o: Watched) -> None:
    """Over the first dimension of the arrays of rows. The dw and db of the batch are added."""
    with o.phase("call"):
        results = _vmapped(o, o.function())(*(each.detach() for each in o.tensors.values()))
    names = o.names_of_results()
    o.note([each.sum(0) if name in ("dw", "db") else each for name, each in zip(names, results, strict=True)])


def func_functionalize(o: Watched) -> None:
    with o.phase("call"):
        results = torch.func.functionalize(o.function())(*(each.detach() for each in o.tensors.values()))
    o.note(results)


def func_grad_outside(o: Watched) -> None:
    """The backward inside of a transform, of a forward that ran before."""
    results = o.forward()
    outputs, dys = o.outputs(results)
    if outputs:
        leaves = list(o.learned().values())

        def gradients(*dys: Tensor) -> Any:
            return torch.autograd.grad(outputs, leaves, dys, allow_unused=True)

        with o.phase("backward"):
            got = torch.func.vmap(gradients)(*(dy.expand(2, *dy.shape) for dy in dys))
        o.note_gradients([None if each is None else each[0] for each in got])


# Graphs.


def jit_trace(o: Watched) -> None:
    values = tuple(each.detach() for each in o.tensors.values())
    with o.phase("call") as phase:
        traced = torch.jit.trace(o.function(), values, check_trace=False)
        phase.graphs.append(
            [
                node.kind().removeprefix("aten::").replace(f"{NAMESPACE}::", "op ")
                for node in traced.inlined_graph.nodes()
                if not node.kind().startswith("prim::")
            ]
        )
        results = traced(*values)
    o.note(results if isinstance(results, tuple) else (results,))


def make_fx(**options: Any) -> Callable[[Watched], None]:
    """Trace a forward and its backward."""

    def run(o: Watched) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        given = {name: each.detach() for name, each in o.tensors.items()}
        given |= {f"grad {name}": dy for name, dy in o.dys.items() if dy is not None and name in o.form.used}
        names, learned = list(given), list(o.learned())

        def both(*values: Any) -> Any:
            all_values = dict(zip(names, values, strict=True))
            tensors = {name: all_values[name].detach() for name in o.tensors}
            for name in learned:
                tensors[name].requires_grad_()
            results = o.call(tensors)
            dys = {name: all_values.get(f"grad {name}") for name in o.dys}
            outputs, cotangents = o.outputs(results, dys)
            if not outputs:
                return tuple(results.values()), None
            leaves = [tensors[name] for name in learned]
            gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
            return tuple(results.values()), gradients

        with o.phase("both") as phase:
            graph = make_fx(both, _allow_non_fake_inputs=True, **options)(*given.values())
            phase.graphs.append(nodes_of(graph))
            if "real" in options.values():
                EVENTS.clear()  # those of the graph alone are noted
            results, gradients = graph(*given.values())
        o.note(results)
        if gradients is not None:
            o.note_gradients(gradients)

    return run


def make_fx_of_backward(o: Watched) -> None:
    """Trace a backward alone, whose forward ran before."""
    from torch.fx.experimental.proxy_tensor import make_fx

    outputs, dys = o.outputs(o.forward())
    leaves = list(o.learned().values())

    def gradients(*dys: Tensor) -> Any:
        return torch.autograd.grad(outputs, leaves, dys, allow_unused=True, retain_graph=True)

    if outputs:
        with o.phase("backward") as phase:
            graph = make_fx(gradients)(*dys)
            phase.graphs.append(nodes_of(graph))
            got = graph(*dys)
        o.note_gradients(got)


def _keeping(phases: Sequence[Phase]) -> Callable[[str], Callable[..., Any]]:
    """Compilers of graphs, which note them and run them as they are."""

    def compiler_of(name: str) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        def compile_graph(graph: GraphModule, _: Any) -> Any:
            phases[name == "backward"].graphs.append(nodes_of(graph))
            return make_boxed_func(graph.forward)

        return compile_graph

    return compiler_of


def _compiled(o: Watched, function: Callable[..., Any], backend: Callable[..., Any], **options: Any) -> None:
    """Runs the function compiled by this backend, and its backward."""
    compiled = torch.compile(function, backend=backend, **options)
    with o.phase("call"):
        results = compiled(*o.tensors.values())
    o.note(results)
    o.backward(dict(zip(o.names_of_results(), results, strict=True)))


def dynamo(dynamic: bool = False, **options: Any) -> Callable[[Watched], None]:
    """The graph that Dynamo gives its compilers, without gradients."""

    def run(o: Watched) -> None:
        torch._dynamo.reset()

        def keep(graph: GraphModule, _: Any) -> Any:
            o.phases["call"].graphs.append(nodes_of(graph))
            return graph.forward

        with torch.no_grad():
            _compiled(o, o.function(), keep, dynamic=dynamic, **options)

    return run


def dynamo_of(transform: Callable[[Watched, Callable[..., Any]], Callable[..., Any]]) -> Callable[..., None]:
    """Note Dynamo's graph of a transformed call."""

    def run(o: Watched) -> None:
        torch._dynamo.reset()

        def keep(graph: GraphModule, _: Any) -> Any:
            o.phases["call"].graphs.append(nodes_of(graph))
            return graph.forward

        compiled = torch.compile(transform(o, o.function()), backend=keep)
        with o.phase("call"):
            results = compiled(*(each.detach() for each in o.tensors.values()))
        o.results |= results if isinstance(results, dict) else {}
        if isinstance(results, tuple):
            o.note(results)

    return run


def _in_use_backend(o: Watched, function: Callable[..., Any]) -> Callable[..., Any]:
    from tilegym_rmsnorm import use_backend

    def inside(*values: Any) -> Any:
        with use_backend("cutile"):
            return function(*values)

    return inside


def aot(dynamic: bool = False) -> Callable[[Watched], None]:
    """Dynamo, and the graphs that AOTAutograd makes of the forward and the backward."""

    def run(o: Watched) -> None:
        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        phases = [o.phases.setdefault(name, Phase()) for name in ("call", "backward")]
        of = _keeping(phases)
        backend = aot_autograd(fw_compiler=of("call"), bw_compiler=of("backward"))
        try:
            _compiled(o, o.function(), backend, dynamic=dynamic)
        finally:
            if not (phases[1].graphs or phases[1].events or phases[1].error):
                del o.phases["backward"]

    return run


def aot_function(o: Watched) -> None:
    """AOTAutograd without Dynamo."""
    from functorch.compile import aot_function

    phases = [o.phases.setdefault(name, Phase()) for name in ("call", "backward")]
    of = _keeping(phases)
    compiled = aot_function(o.function(), of("call"), of("backward"))
    try:
        with o.phase("call"):
            results = compiled(*o.tensors.values())
        o.note(results)
        o.backward(dict(zip(o.names_of_results(), results, strict=True)))
    finally:
        if not (phases[1].graphs or phases[1].events or phases[1].error):
            del o.phases["backward"]


def compiled_autograd(o: Watched) -> None:
    """An eager forward, and a backward that compiled autograd makes a graph of."""
    results = o.forward()
    outputs, dys = o.outputs(results)
    if not outputs:
        return
    torch._dynamo.reset()
    phase = o.phases["backward"] = Phase()

    def keep(graph: GraphModule, _: Any) -> Any:
        phase.graphs.append([node for node in nodes_of(graph)])
        return graph.forward

    with o.phase("backward"):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=keep)):
            gradients = torch.autograd.grad(outputs, list(o.learned().values()), dys, allow_unused=True)
    o.note_gradients(gradients)


def export(strict: bool, dynamic: bool = False) -> Callable[[Watched], None]:
    def run(o: Watched) -> None:
        torch._dynamo.reset()
        function = o.function()

        class Module(torch.nn.Module):
            def forward(self, *values: Any) -> Any:
                return function(*values)

        values = tuple(each.detach() for each in o.tensors.values())
        shapes = None
        if dynamic:
            batch = torch.export.Dim("batch", min=2, max=64)
            shapes = (tuple({0: batch} if each.ndim > 1 else None for each in values),)
        with o.phase("call") as phase:
            exported = torch.export.export(Module(), values, strict=strict, dynamic_shapes=shapes)
            phase.graphs.append(nodes_of(exported.graph_module))
            results = exported.module()(*values)
        o.note(results if isinstance(results, tuple) else (results,))

    return run


SURROUNDINGS: dict[str, Callable[[Watched], None]] = {
    "no grad": no_grad,
    "inference mode": inference_mode,
    "grad": grad,
    "grad, known call": known_call,
    "backward in another thread": in_a_thread,
    "create_graph": create_graph,
    "saved tensors copied by hooks": saved_tensors(lambda t: t.clone()),
    "saved tensors of another dtype by hooks": saved_tensors(lambda t: t.double()),
    "saved tensors turned into TwoTensor by hooks": saved_tensors(_two),
    "is_grads_batched": batched_gradients,
    "FlopCounterMode": mode(MODES["flop counter"]),
    "a silent mode": mode(MODES["silent"]),
    "a mode that wraps tensors": mode(MODES["wrapping"]),
    "allow_mutation_on_saved_tensors": mode(MODES["saved tensors that may change"]),
    "a mode in the backward alone": mode_in_the_backward,
    "with torch.device": mode(lambda: torch.device("cpu")),
    "FakeTensorMode": fake_mode,
    "selective checkpointing": checkpointed,
    "dual level": dual_level,
    "tangent": tangent,
    "autocast of CPUs": autocast("cpu"),
    "autocast of CUDA": autocast("cuda"),
    "torch.func.vjp": func_vjp,
    "torch.func.jvp": func_jvp,
    "torch.func.vmap": func_vmap,
    "torch.func.vmap of the backward": func_grad_outside,
    "torch.func.functionalize": func_functionalize,
    "torch.jit.trace": jit_trace,
    "make_fx": make_fx(tracing_mode="real"),
    "make_fx, symbolic": make_fx(tracing_mode="symbolic"),
    "make_fx, fake, pre_dispatch": make_fx(tracing_mode="fake", pre_dispatch=True),
    "make_fx of the backward": make_fx_of_backward,
    "Dynamo": dynamo(),
    "Dynamo, dynamic": dynamo(dynamic=True),
    "Dynamo, fullgraph": dynamo(fullgraph=True),
    "Dynamo, vmap": dynamo_of(_vmapped),
    "Dynamo, use_backend": dynamo_of(_in_use_backend),
    "AOTAutograd": aot(),
    "AOTAutograd, dynamic": aot(dynamic=True),
    "aot_function": aot_function,
    "compiled autograd": compiled_autograd,
    "export": export(strict=False),
    "export, strict": export(strict=True),
    "export, dynamic": export(strict=False, dynamic=True),
}

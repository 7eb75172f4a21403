# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Make subclasses of RMSNorm with other defaults, to replace the norm class of a model.

Model code does more with a norm class than call it: isinstance, __name__, copies, pickles. So the replacement is a
class; functools.partial fails at isinstance.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar

import torch

from tilegym_rmsnorm.call.options import (
    check_casting,
    checked_bool,
    checked_eps,
    checked_heads,
    checked_number,
)
from tilegym_rmsnorm.call.validation import ALL_DTYPES, checked_dtype
from tilegym_rmsnorm.nn.keywords import OURS, check_keywords
from tilegym_rmsnorm.settings import check_backend_name

Norm = TypeVar("Norm", bound=torch.nn.RMSNorm)

# Names of parameters in the norms of transformers, beside `eps`.
OTHER_NAMES = {name: OURS[name].removesuffix("=") for name in ("hidden_size", "dim", "with_scale")}
# `forward` reads these. They are class attributes too, for modules that get the class after they were built.
_READ_BY_FORWARD = ("offset", "casting", "backend", "residual_alpha", "residual_dtype", "out_dtype")

_classes: dict[tuple[Any, ...], type] = {}


class ConfiguredType(type):
    """Metaclass of configured classes, which pickle as the call that made them: no module has them by name."""


def configured_class(base: type[Norm], options: Mapping[str, Any]) -> type[Norm]:
    """Return the subclass of `base` that has `options` as defaults: the same object for the same options.

    Raises TypeError or ValueError on an option that is unknown or does not fit.
    """
    defaults = _checked(base, options)
    if made_from := _made_from(base):
        base, inherited = made_from
        defaults = {**inherited, **defaults}
    items = sorted(defaults.items())
    key = (base, *items)
    if key not in _classes:
        _classes.setdefault(key, _make(base, dict(items)))  # so that two threads get one class
    return _classes[key]


def _make(base: Any, defaults: dict[str, Any]) -> type:
    parameters = _parameters_of(base)
    positional = [p.name for p in parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        if len(args) > len(positional):
            raise TypeError(
                f"{base.__name__}: expected at most {len(positional)} positional arguments, got {len(args)}"
            )
        options = dict(zip(positional, args, strict=False))
        for name, value in named.items():
            parameter = name if name in parameters else OTHER_NAMES.get(name, "")
            if parameter not in parameters:
                check_keywords(base.__name__, [name])
                known = ", ".join((*parameters, *OTHER_NAMES))
                raise TypeError(f"{base.__name__}: expected arguments among {known}, got {name!r}")
            if parameter in options:
                raise TypeError(
                    f"{base.__name__}: expected one value of {parameter}, got another by {name!r}"
                )
            options[parameter] = value
        base.__init__(self, **{**defaults, **options})

    text = ", ".join(f"{name}={value!r}" for name, value in defaults.items())
    qualified = f"{base.__qualname__}.configured({text})"
    constructor: Any = __init__
    constructor.__qualname__ = f"{qualified}.__init__"
    # torch.nn.utils.skip_init and help() read the signature.
    constructor.__signature__ = inspect.Signature(
        [
            Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
            *(p.replace(default=defaults.get(p.name, p.default)) for p in parameters.values()),
        ]
    )
    attributes = {
        "__init__": constructor,
        "__module__": base.__module__,
        "__qualname__": qualified,
        "__doc__": base.__doc__,
        "made_from": (base, defaults),
        "__reduce_ex__": functools.partialmethod(reduce_instance, base),
        **{name: defaults[name] for name in _READ_BY_FORWARD if name in defaults},
    }
    # The short name stays: transformers initializes modules with RMSNorm in the name of their class.
    return ConfiguredType(base.__name__, (base,), attributes)


def _made_from(cls: type) -> tuple[Any, dict[str, Any]] | None:
    # From __dict__: a subclass of a configured class inherits made_from, but was not made by that call.
    return cls.__dict__.get("made_from")


def _parameters_of(cls: type) -> dict[str, Parameter]:
    """Collect the constructor's parameters but self, and where it takes **kwargs, those of its base class."""
    parameters: dict[str, Parameter] = {}
    each: Any
    for each in cls.__mro__:
        found = list(inspect.signature(each.__init__).parameters.values())[1:]
        any_keyword = False
        for parameter in found:
            if parameter.kind is Parameter.VAR_KEYWORD:
                any_keyword = True
            elif parameter.kind is not Parameter.VAR_POSITIONAL:
                parameters.setdefault(parameter.name, parameter)
        if not any_keyword:
            break
    return parameters


def _checked(base: type, options: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in _parameters_of(base) if name != "normalized_shape"]
    unknown = [name for name in options if name not in known]
    check_keywords("configured", (name for name in unknown if name not in OTHER_NAMES))
    if unknown:
        raise TypeError(f"configured: expected options among {', '.join(known)}, got {unknown[0]!r}")
    checked = dict(options)
    if "eps" in options:
        checked_eps(options["eps"])
    if "casting" in options:
        check_casting(options["casting"])
    for name in ("offset", "residual_alpha"):
        if name in options:
            checked[name] = checked_number(name, options[name])
    if "heads" in options:
        checked["heads"] = checked_heads(options["heads"])
    for name in ("residual_dtype", "out_dtype"):
        checked_dtype(name, options.get(name))
    check_backend_name(options.get("backend"))
    if options.get("device") is not None:
        checked["device"] = torch.device(options["device"])
    checked_dtype("dtype", options.get("dtype"), ALL_DTYPES)
    for name in ("elementwise_affine", "bias"):
        checked_bool(name, options.get(name, False))
    return checked


def reduce_instance(module: Any, base: Any, protocol: Any) -> Any:
    """Reduce a module (`__reduce_ex__`) to the call that made its class, in place of the class. dill and cloudpickle
    ignore copyreg for classes, and would pickle the functions of the class."""
    reduced = base.__reduce_ex__(module, protocol)
    cls = type(module)
    made = copyreg.dispatch_table.get(type(cls), str)(cls)
    if isinstance(made, str) or isinstance(reduced, str) or reduced[1][:1] != (cls,):
        return reduced
    return instance_of, (made, reduced[0], *reduced[1][1:]), *reduced[2:]


def instance_of(
    made: tuple[Callable[..., type], tuple[Any, ...]], make: Callable[..., Any], *arguments: Any
) -> Any:
    """Make the module that `reduce_instance` reduced, before its state is set."""
    function, given = made
    return make(function(*given), *arguments)


def _reduce(cls: ConfiguredType) -> str | tuple[Any, ...]:
    made_from = _made_from(cls)
    return (configured_class, made_from) if made_from else cls.__qualname__


copyreg.pickle(ConfiguredType, _reduce)

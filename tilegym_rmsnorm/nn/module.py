# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the module `RMSNorm`, a drop-in for `torch.nn.RMSNorm` that calls `rms_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from tilegym_rmsnorm.call.options import (
    check_casting,
    checked_bool,
    checked_eps,
    checked_heads,
    checked_number,
    refuse_torch_jit_script,
)
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.validation import ALL_DTYPES, checked_dtype, checked_sizes_of_weight
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.functional import checked_norm, norm_of
from tilegym_rmsnorm.nn.configured import Norm, configured_class
from tilegym_rmsnorm.nn.keywords import names_ours
from tilegym_rmsnorm.ops.norm.op import norm_in_graph
from tilegym_rmsnorm.settings import BackendName, check_backend_name


class RMSNorm(torch.nn.RMSNorm):
    """Normalize the last dimensions of x; the first five parameters and the state dict are `torch.nn.RMSNorm`'s.

    y has x's dtype unless out_dtype says otherwise, also where weight is float32 beside 16-bit x: there Hugging Face's
    LlamaRMSNorm returns float32.

    `configured` makes a class with other defaults. `torch.jit.script` of this module raises RuntimeError.

    Args:
        normalized_shape: The last dimensions of x, as an int or a sequence of ints.
        eps: None: the machine epsilon of the dtype in which the call is computed.
        elementwise_affine: Whether there is a weight, of shape `normalized_shape`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        offset: Added to the weight: 1 for Gemma. The weight starts at 1 - offset, so that the factor starts at 1.
        bias: Learn an additive bias of shape `normalized_shape` too, started at 0; as in `torch.nn.LayerNorm`, only
            with `elementwise_affine`. Without a bias the module has no attribute `bias`.
        heads: H: weight and bias have a row for each head, shape `(H, *normalized_shape)`, for x of shape
            `(*, H, *normalized_shape)`; only with `elementwise_affine`. None: one weight serves all rows.
        residual_alpha: Multiplies x where `forward` is given a residual; without a residual it has no effect.
        residual_dtype: The dtype of the sum that `forward` returns beside y where it is given a residual. None: that of
            `x + residual`.
        out_dtype: The dtype of y. None: x's.
        casting: `"once"` or `"llama"`, see `rms_norm`.
        backend: A name or `"auto"`. None: the backend in effect when the module is called.

    Raises:
        ValueError: A size, eps, offset, heads or residual_alpha is out of range, casting or backend is not a known
            name, or heads is given without a weight.
        TypeError: A size, eps, offset, heads or residual_alpha is not a number, a switch is not a bool, or weight or y
            may not have a given dtype.
    """

    __module__ = "tilegym_rmsnorm"  # pickles hold this name, so that the file can move

    # Attributes for a module that was built as a torch.nn.RMSNorm and got this class later.
    offset = 0.0
    casting: Casting = "once"
    backend: str | None = None
    heads: int | None = None
    residual_alpha = 1.0
    residual_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    __prepare_scriptable__ = refuse_torch_jit_script

    @names_ours
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        bias: bool = False,
        heads: int | None = None,
        residual_alpha: float = 1.0,
        residual_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        casting: Casting = "once",
        backend: BackendName | None = None,
    ) -> None:
        shape = checked_sizes_of_weight(normalized_shape)
        checked_bool("elementwise_affine", elementwise_affine)
        checked_dtype("dtype", dtype, ALL_DTYPES)
        check_casting(casting)
        self.heads = checked_heads(heads)
        if heads is not None and not elementwise_affine:
            raise ValueError(
                f"heads: expected None without a weight (elementwise_affine=False), got {self.heads}"
            )
        self.residual_alpha = checked_number("residual_alpha", residual_alpha)
        self.residual_dtype = checked_dtype("residual_dtype", residual_dtype)
        self.out_dtype = checked_dtype("out_dtype", out_dtype)
        checked_bool("bias", bias)
        check_backend_name(backend)
        self.offset = checked_number("offset", offset)  # before the base class, which resets the parameters
        super().__init__(list(shape), checked_eps(eps), elementwise_affine, device, dtype)
        self.casting = casting
        self.backend = backend
        if heads is not None:
            weight = self.weight.new_empty((heads, *self.normalized_shape))
            self.weight = Parameter(weight)
            self.reset_parameters()
        if bias and elementwise_affine:
            self.bias = Parameter(torch.zeros_like(self.weight))

    @classmethod
    def configured(cls: type[Norm], **defaults: Any) -> type[Norm]:
        """Make a subclass with other defaults, to replace a model's norm class: `RMSNorm.configured(offset=1.0)`.

        Its constructor also takes `hidden_size` or `dim` for `normalized_shape` and `with_scale` for
        `elementwise_affine`. The same defaults give the same class; copies, pickles and `configured()` of it work.

        Args:
            **defaults: eps, elementwise_affine, device, dtype, offset, bias, heads, residual_alpha, residual_dtype,
                out_dtype, casting, backend; checked here.

        Returns:
            The class.

        Raises:
            ValueError: As the constructor.
            TypeError: As the constructor, and for an unknown name.
        """
        return configured_class(cls, defaults)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)
        if getattr(self, "bias", None) is not None:  # absent while the base class initializes
            torch.nn.init.zeros_(self.bias)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None):
        """Normalize x.

        Args:
            x: Shape `(*, *normalized_shape)`.
            residual: x's shape, any floating dtype. `residual_alpha * x + residual` is normalized instead of x, and
                returned too.

        Returns:
            Tensor | tuple[Tensor, Tensor]: y, of x's shape; `(y, sum)` where a residual is given.
        """
        if is_traced():  # with few guards: a method for these lines would be one more
            tensors = x, self.weight, getattr(self, "bias", None), residual
            of_sum = (1.0, None) if residual is None else (self.residual_alpha, self.residual_dtype)
            numbers = self.normalized_shape, self.eps, self.offset, self.casting, *of_sum, self.out_dtype
            result = norm_in_graph(tensors, numbers, self.backend, True)
            return checked_norm(tensors, numbers, self.backend) if result is None else result
        # Dictionaries are read: Module.__getattr__ takes 0.6 us for an attribute, 2 us for one that is absent. But not
        # where the class says what a name is: SimpleFSDP's classes have properties, which gather the parameters.
        attributes, cls = self.__dict__, type(self)
        parameters = attributes["_parameters"]
        weight = (
            parameters["weight"] if "weight" in parameters and not hasattr(cls, "weight") else self.weight
        )
        if "bias" in parameters:
            bias = self.bias if hasattr(cls, "bias") else parameters["bias"]
        elif "bias" in attributes or attributes["_modules"] or attributes["_buffers"]:
            bias = getattr(self, "bias", None)  # no Parameter: a tensor, parametrized, or a buffer
        else:
            bias = None
        if "backend" not in attributes:
            self._take_defaults()
        alpha, residual_dtype = 1.0, None
        if residual is not None:
            alpha, residual_dtype = self.residual_alpha, self.residual_dtype
        shape, eps, offset = attributes["normalized_shape"], attributes["eps"], attributes["offset"]
        numbers = shape, eps, offset, attributes["casting"], alpha, residual_dtype, self.out_dtype
        return norm_of((x, weight, bias, residual), numbers, attributes["backend"])

    if TYPE_CHECKING:
        __call__ = forward  # torch.nn.Module's is Any to type checkers

    def _take_defaults(self) -> None:
        """Set the attributes of a module that was built as a torch.nn.RMSNorm; its eps stays."""
        self.offset, self.casting, self.backend = self.offset, self.casting, self.backend

    def extra_repr(self) -> str:
        has_bias = getattr(self, "bias", None) is not None
        more = "".join(
            f", {name}={getattr(self, name)!r}"
            for name in ("heads", "residual_alpha", "residual_dtype", "out_dtype")
            if getattr(self, name) != getattr(RMSNorm, name)
        )
        return (
            f"{super().extra_repr()}, offset={self.offset}, bias={has_bias}{more}, "
            f"casting={self.casting!r}, backend={self.backend!r}"
        )

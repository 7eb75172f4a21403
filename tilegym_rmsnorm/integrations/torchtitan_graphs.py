# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Put the passes of `tilegym_rmsnorm.integrations.fx` at their places among those of torchtitan's graph trainer.

Written against torchtitan 0.3.0, which imports this module by the name of a config, or whose configs import it. It
registers two pipelines of passes, for `--compile.pass_pipeline`:

    tilegym_rmsnorm_replace      the default one, and behind its passes of FSDP `replace_rmsnorm_pass`
    tilegym_rmsnorm_regional     the default one, with `annotate_rmsnorm_for_regional_inductor_pass` of this package
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.experiments.graph_trainer import passes as theirs
from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline

from tilegym_rmsnorm.integrations import fx

Passes = list[Callable[..., Any]]


@register_pass_pipeline("tilegym_rmsnorm_replace")
def replace_pipeline(traced_result: Any, config: Any, *, parallel_dims: Any = None) -> Passes:
    """Replace the fused norms when all passes that know them are through, and before Inductor compiles anything."""
    passes = theirs.construct_default_graph_passes(traced_result, config, parallel_dims=parallel_dims)
    first = "annotate_flex_attention_for_regional_inductor_pass", "full_inductor_compilation_pass"
    return _with(passes, fx.replace_rmsnorm_pass, first)


@register_pass_pipeline("tilegym_rmsnorm_regional")
def regional_pipeline(traced_result: Any, config: Any, *, parallel_dims: Any = None) -> Passes:
    """Mark the fused norms before regional Inductor compiles what is marked, in the place of torchtitan's own pass.

    Raises:
        ValueError: The config does not ask for regional Inductor.
    """
    passes = theirs.construct_default_graph_passes(traced_result, config, parallel_dims=parallel_dims)
    mark = fx.annotate_rmsnorm_for_regional_inductor_pass
    return _with([each for each in passes if _name(each) != mark.__name__], mark, ("regional_inductor_pass",))


def _with(passes: Passes, new: Callable[..., Any], names: tuple[str, ...]) -> Passes:
    """Insert a pass before the first that has one of these names."""
    places = [number for number, each in enumerate(passes) if _name(each) in names]
    if not places:
        found = ", ".join(map(_name, passes))
        raise ValueError(
            f"{new.__name__}: expected {' or '.join(names)} among torchtitan's passes, got {found}"
        )
    return [*passes[: places[0]], new, *passes[places[0] :]]


def _name(each: Any) -> str:
    return getattr(each, "func", each).__name__  # of a partial

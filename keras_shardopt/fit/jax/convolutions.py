"""Rewrites convolutions inside loops to the layout for which XLA has fast CPU code.

XLA has fast CPU code for one layout: inputs (rows, space, channels), and kernels (space, channels in, channels out). It
converts other layouts, such as those of gradients, only outside of loops (pass `ConvCanonicalization`). In the body of
a loop, it computes other layouts element by element, several times slower. So this file converts them before XLA
compiles. XLA still transposes some convolutions with kernels larger than the image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core.primitives import conv_general_dilated_p


def in_layout_of_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its convolutions in the layout of XLA's fast CPU code; unchanged on a GPU or TPU."""
    if jax.default_backend() != "cpu":
        return function

    def rewritten(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        found = core.jaxpr_as_fun(_rewritten(traced))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return rewritten


def _rewritten(traced: core.ClosedJaxpr) -> core.ClosedJaxpr:
    return traced.replace(jaxpr=traced.jaxpr.replace(eqns=[_equation(equation) for equation in traced.jaxpr.eqns]))


def _equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    if equation.primitive is conv_general_dilated_p:
        shapes = [atom.aval for atom in equation.invars]
        convolve = jax.jit(lambda lhs, rhs: _convolution(lhs, rhs, equation.params))
        (call,) = jax.make_jaxpr(convolve)(*shapes).jaxpr.eqns
        return equation.replace(primitive=call.primitive, params=call.params)
    # If this operation is a loop, branch or call, rewrite the convolutions in its body.
    params = {name: jax.tree.map(_within, value) for name, value in equation.params.items()}
    return equation.replace(params=params)


def _within(value: Any) -> Any:
    return _rewritten(value) if isinstance(value, core.ClosedJaxpr) else value


def _convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Any:
    before, space = params["dimension_numbers"], range(1, lhs.ndim - 1)
    outer = (0, lhs.ndim - 1, *space)  # dimensions of rows, channels, and space
    now = jax.lax.ConvDimensionNumbers(outer, (lhs.ndim - 1, lhs.ndim - 2, *range(lhs.ndim - 2)), outer)
    lhs, rhs = _moved(lhs, before.lhs_spec, now.lhs_spec), _moved(rhs, before.rhs_spec, now.rhs_spec)
    found = conv_general_dilated_p.bind(lhs, rhs, **{**params, "dimension_numbers": now})
    return _moved(found, now.out_spec, before.out_spec)


def _moved(array: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    """Return the array with its dimension `before[i]` at `after[i]`."""
    come_from = dict(zip(after, before))
    return jax.lax.transpose(array, [come_from[i] for i in range(array.ndim)])

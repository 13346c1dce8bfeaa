"""The values that summaries measure in an update. Each function returns the `Measure` of one kind of value."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.summaries.tags import LARC_TAGS, PREFIX, rate_tag
from keras_shardopt.numerics import Gradients, Tensor, Variable, clipped_to, dense, global_norm, map_values
from keras_shardopt.optimizers import GradientClipping
from keras_shardopt.wrapping.chain import base_optimizers, leaf_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

Read = Callable[[], Gradients]
"""A function that returns the gradients of the unscaled loss, in float32."""


class Measure:
    """Measures one kind of value in an update, and stores it in variables.

    Args:
        shapes: the shapes of the variables.
        measured: takes a function that returns the gradients, and their variables. Returns one value per shape.
        tags: takes the stored arrays. Returns the values by tag: floats, and arrays for histograms.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        measured: Callable[[Read, Sequence[Variable]], Sequence[Any]],
        tags: Callable[[list[np.ndarray]], dict[str, Any]],
    ) -> None:
        self.variables = [new_variable(shape) for shape in shapes]
        self._measured = measured
        self._tags = tags

    def run(self, read: Read, variables: Sequence[Variable]) -> None:
        """Measure an update, and store the results."""
        for variable, value in zip(self.variables, self._measured(read, variables)):
            variable.assign(ops.cast(value, variable.dtype))

    def tags(self) -> dict[str, Any]:
        """Return the stored values by tag."""
        return self._tags([ops.convert_to_numpy(variable) for variable in self.variables])


class Trained:
    """The variables of an optimizer, and those that its update changes instead, such as slices or master weights."""

    def __init__(self, optimizer: OptimizerWrapper, last: OptimizerWrapper) -> None:
        self.optimizer = optimizer
        self.updated: list[Variable] = list(last._variables_inside(last._trainable_variables))
        """The variables that the update changes; `last` is the wrapper around the innermost optimizer."""
        self.leaves = base_optimizers(optimizer)

    @property
    def paths(self) -> list[str]:
        """The paths of `updated`. A path that occurs more than once has a number appended."""
        seen: collections.Counter[str] = collections.Counter()
        found = []
        for path in (variable.path for variable in self.updated):
            found.append(f"{path}_{seen[path]}" if seen[path] else path)
            seen[path] += 1
        return found

    def of_gradients(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the trainable variables; for those missing in `variables`, their slice or copy that is updated."""
        chosen = {id(v) for v in variables}
        trainable = self.optimizer._trainable_variables
        return [v if id(v) in chosen else inner for v, inner in zip(trainable, self.updated)]

    def by_variable(
        self, variables: Sequence[Variable], grads: Gradients, measure: Callable[[Tensor, Variable], Tensor]
    ) -> Tensor:
        """Return the results of `measure` for each trainable variable and its gradient; NaN without a gradient."""
        found = {id(v): g for v, g in zip(variables, grads) if g is not None}
        nan = ops.full((), float("nan"), "float32")
        values = [measure(found[id(v)], v) if id(v) in found else nan for v in self.of_gradients(variables)]
        return ops.stack([ops.cast(value, "float32") for value in values])

    def rates(self) -> Tensor:
        """Return the learning rates of `leaves`, the optimizers with an update rule."""
        return ops.stack([ops.cast(leaf.learning_rate, "float32") for leaf in self.leaves])


def learning_rates(trained: Trained) -> Measure:
    """Measure the learning rates."""

    def tags(stored: list[np.ndarray]) -> dict[str, Any]:
        return {rate_tag(leaf, len(trained.leaves)): float(rate) for leaf, rate in zip(trained.leaves, stored[0])}

    return Measure([(len(trained.leaves),)], lambda *_: [trained.rates()], tags)


def norm_of_all(tag: str, clipping: GradientClipping | None = None) -> Measure:
    """Measure the global norm of the gradients, after `clipping`."""
    return Measure(
        [()],
        lambda read, _: [global_norm(_clipped(read(), clipping))],
        lambda stored: {PREFIX + tag: float(stored[0])},
    )


def each_gradient(trained: Trained, clipping: GradientClipping | None, has_norms: bool, has_values: bool) -> Measure:
    """Measure the norm of each gradient after `clipping` (`has_norms`), and its elements (`has_values`)."""
    updated = trained.updated

    def measured(read: Read, variables: Sequence[Variable]) -> Sequence[Any]:
        grads = _clipped(read(), clipping)
        norms = trained.by_variable(variables, grads, lambda g, _: global_norm([g]))
        if not has_values:
            return [norms]
        whole = dict(zip(map(id, variables), grads))
        kept = [whole.get(id(v)) for v in trained.of_gradients(variables)]
        zeros = [ops.zeros(v.shape, "float32") if g is None else g for g, v in zip(kept, updated)]
        return [norms, *map(dense, zeros, updated)]

    def tags(stored: list[np.ndarray]) -> dict[str, Any]:
        norms, *gradients = stored
        found: dict[str, Any] = {}
        for i, path in enumerate(trained.paths):
            if has_values and not np.isnan(norms[i]):
                found[f"{PREFIX}gradients/{path}"] = np.where(np.isfinite(gradients[i]), gradients[i], 0)
            if has_norms and not np.isnan(norms[i]):
                found[f"{PREFIX}gradient_norm/{path}"] = float(norms[i])
        return found

    return Measure([(len(updated),), *[v.shape for v in updated if has_values]], measured, tags)


def weights(trained: Trained) -> Measure:
    """Keep the values of all variables before the update."""
    return Measure(
        [v.shape for v in trained.updated],
        lambda *_: [ops.convert_to_tensor(v) for v in trained.updated],
        lambda stored: {f"{PREFIX}variables/{path}": value for path, value in zip(trained.paths, stored)},
    )


def weight_norms(trained: Trained) -> Measure:
    """Measure the norm of each variable before the update."""
    return Measure(
        [(len(trained.updated),)],
        lambda *_: [ops.stack([global_norm([ops.convert_to_tensor(v)]) for v in trained.updated])],
        lambda stored: {f"{PREFIX}variable_norm/{path}": float(norm) for path, norm in zip(trained.paths, stored[0])},
    )


def larc_factors(trained: Trained, larc: LARC) -> Measure:
    """Measure the factor by which `larc` scales each gradient."""

    def measured(read: Read, variables: Sequence[Variable]) -> Sequence[Any]:
        unit = larc._incoming_scale()
        ratios = trained.by_variable(variables, read(), lambda g, v: larc.ratio(map_values(lambda x: x * unit, g), v))
        return [ratios, trained.rates()]

    def tags(stored: list[np.ndarray]) -> dict[str, Any]:
        ratios, rates = stored
        found = {}
        for variable, path, ratio in zip(trained.optimizer._trainable_variables, trained.paths, map(float, ratios)):
            if np.isnan(ratio):
                continue
            leaf = leaf_of(trained.optimizer, variable)
            rate = float(next(rate for rate, other in zip(rates, trained.leaves) if other is leaf))
            values = dict(zip(LARC_TAGS, (float(ratio < 1), ratio, rate * ratio)))
            for tag in LARC_TAGS if larc.larc_mode == "clip" else LARC_TAGS[1:]:
                found[f"{PREFIX}{tag}/{path}"] = values[tag]
        return found

    return Measure([(len(trained.updated),), (len(trained.leaves),)], measured, tags)


def new_variable(shape: Sequence[int], dtype: str = "float32") -> Variable:
    """Create a variable, filled with zeros, for a measured value."""
    # On TensorFlow, each replica assigns its own copy, because an update cannot always communicate. Copies are equal.
    return keras.Variable(
        ops.zeros(tuple(shape), dtype),
        dtype=dtype,
        trainable=False,
        autocast=False,
        synchronization="on_read",
        aggregation="only_first_replica",
        name="summary",
    )


def _clipped(grads: Gradients, clipping: GradientClipping | None) -> Gradients:
    return grads if clipping is None else clipped_to(grads, clipping.clip_gradients, global_norm(grads))

"""Measures gradients and weights inside updates, for summaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.summaries.tags import LARC_TAGS, PREFIX, STAGES, rate_tag
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    clipped_to,
    dense,
    global_norm,
    in_float32,
    map_values,
    overwrites_variable,
)
from keras_shardopt.optimizers import GradientClipping
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.update import watch
from keras_shardopt.wrapping.chain import base_optimizers, chain_of, leaf_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

_Read = Callable[[], Gradients]
"""A function that returns the gradients of the unscaled loss, in float32."""


class Observer:
    """Measures values in an update, and stores them in variables.

    The variables are part of the optimizer's state, because compiled steps and branches can assign only variables of
    the optimizer.
    """

    def __init__(self, optimizer: OptimizerWrapper, names: Sequence[str], every: int) -> None:
        self.is_due: bool | None = True
        self._stage_variables: dict[str, list[Variable]] = {}
        self._optimizer = optimizer
        self._every = every
        chain = [o for o in chain_of(optimizer) if isinstance(o, OptimizerWrapper)]
        last = chain[-1]
        changing = [o for o in chain if isinstance(o, (GradientClipping, LARC))]
        clipping = [o for o in changing if isinstance(o, GradientClipping)]
        larcs = [o for o in changing if isinstance(o, LARC)]
        # Each entry has a wrapper, the method of this observer that the wrapper calls, and the function that measures.
        self._hooks: list[tuple[OptimizerWrapper, str, Callable[..., None]]] = []
        before = (changing[0], "before_transform") if changing else (last, "before_update")
        # To save memory, clipped gradients are not stored. The functions that measure clipped gradients clip again.
        self._clipping = clipping[-1] if clipping else None
        clipped = (clipping[-1], "before_transform") if clipping else before
        if "global_gradient_norm" in names:
            self._hooks.append((*before, self._store_global_norm))
            if clipping:
                self._hooks.append((*clipped, self._store_clipped_norm))
        if "gradients" in names or "gradient_norm" in names:
            self._hooks.append((*clipped, self._store_gradients))
        if "larc_summaries" in names and larcs:
            self._hooks.append((larcs[-1], "before_transform", self._store_larc))
        self._hooks.append((last, "before_update", self._store_update))
        self._names = names
        self._larc = larcs[-1] if larcs and "larc_summaries" in names else None
        self._stages = [(STAGES[name][1], *self._watch(name)) for name in names if name in STAGES]
        self._observed = [wrapper for wrapper in chain if any(wrapper is hook[0] for hook in self._hooks)]
        self._leaves = base_optimizers(optimizer)
        self._updated = list(last._variables_inside(last._trainable_variables))
        with placement.colocate_with(self._updated[0]):
            self._stored = {**self._stage_variables, **self._new_values(bool(clipping))}
        placement.place(self._all_variables(), "replicated")
        self.attach()

    @property
    def has_stages(self) -> bool:
        """Whether this observer has inserted stages into a `CrossShard`, which `detach` removes for good."""
        return bool(self._stages)

    def attach(self) -> None:
        """Start observing, again after `detach`."""
        for wrapper in self._observed:
            wrapper._observe(self)

    def detach(self) -> None:
        """Stop measuring, and remove this observer from the optimizer."""
        for _, _, end in self._stages:
            end()
        for wrapper in self._observed:
            wrapper._observe(None)

    def _watch(self, name: str) -> tuple[Any, Callable[[], None]]:
        """Make the outermost `CrossShard` measure a summary, because it receives each replica's own gradients."""
        found = cross_shards_in(self._optimizer)
        if not found:
            raise ValueError(
                f'`summaries=["{name}"]` requires a `CrossShard`, because this summary measures the gradients of each '
                f"replica. Received: {self._optimizer!r}. Use `CrossShard({self._optimizer!r})`."
            )
        window = found[0].accumulation

        def add_variable(shape: Sequence[int], dtype: str = "float32", **_: Any) -> Variable:
            self._stage_variables.setdefault(name, []).append(_new_variable(shape, dtype))
            return self._stage_variables[name][-1]

        with placement.colocate_with(found[0]._trainable_variables[0]):
            if processes.num_replicas() == 1 and window is None:
                raise ValueError(
                    f'`summaries=["{name}"]` compares the gradients of several replicas or micro-batches. '
                    f"Received: 1 replica, with {found[0]!r}. "
                    "Use several replicas, or `CrossShard(..., gradient_accumulation_steps=k)`."
                )
            if processes.process()[0] > 1:  # the exchange raises an error if a process lacks this summary
                processes.gather_objects(name)
            made, _ = STAGES[name]
            return watch(found[0], made(), f'summaries=["{name}"]', add_variable)

    def _new_values(self, clips: bool) -> dict[str, list[Variable]]:
        names, updated = self._names, self._updated
        values = {"update": [_new_variable((), "int32")]}
        if "learning_rate" in names or self._larc is not None:
            values["rates"] = [_new_variable((len(self._leaves),))]
        if "global_gradient_norm" in names:
            values["global_norm"] = [_new_variable(())]
            if clips:
                values["clipped_norm"] = [_new_variable(())]
        if "gradients" in names or "gradient_norm" in names:
            values["gradient_norms"] = [_new_variable((len(updated),))]
        if "gradients" in names:
            values["gradients"] = [_new_variable(v.shape) for v in updated]
        if "variable_norm" in names:
            values["variable_norms"] = [_new_variable((len(updated),))]
        if "variables" in names:
            values["variables"] = [_new_variable(v.shape) for v in updated]
        if self._larc is not None:
            values["ratios"] = [_new_variable((len(updated),))]
        return values

    def _all_variables(self) -> list[Variable]:
        return list(itertools.chain.from_iterable(self._stored.values()))

    def variables_of(self, wrapper: OptimizerWrapper) -> list[Variable]:
        """Return the variables of this observer that are part of the state of `wrapper`."""
        return self._all_variables() if wrapper is self._observed[-1] else []

    def before_transform(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Measure the gradients that `wrapper` receives. Called before the wrapper changes the gradients."""
        self._run_hooks(wrapper, "before_transform", grads, variables)

    def before_update(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Measure the gradients that `wrapper` passes to its inner optimizer."""
        self._run_hooks(wrapper, "before_update", grads, variables)

    def _run_hooks(self, wrapper: OptimizerWrapper, when: str, grads: Gradients, variables: Sequence[Variable]) -> None:
        hooks = [hook for w, moment, hook in self._hooks if w is wrapper and moment == when]
        if not hooks:
            return
        is_due: Any = self.is_due
        if is_due is None or runtime.version(wrapper.iterations) is None:
            update = ops.add(ops.convert_to_tensor(wrapper.iterations), 1)
            is_due = ops.equal(ops.mod(update, self._every), 0)
        plain = [(g, v) for g, v in zip(grads, variables) if not overwrites_variable(v)]
        unit = wrapper._incoming_scale()
        kept_variables = [v for _, v in plain]

        # Convert gradients inside the measuring branch. As its inputs, converted gradients would stay in memory.
        def read() -> Gradients:
            return [None if g is None else map_values(lambda x: in_float32(x) / unit, g) for g, _ in plain]

        def run_all() -> None:
            for hook in hooks:
                hook(read, kept_variables)

        runtime.cond(is_due, lambda _: run_all(), (), self._all_variables(), communicates=False)

    def _store(self, name: str, values: Sequence[Any]) -> None:
        for variable, value in zip(self._stored[name], values):
            variable.assign(ops.cast(value, variable.dtype))

    def _clipped(self, grads: Gradients) -> Gradients:
        if self._clipping is None:
            return grads
        return clipped_to(grads, self._clipping.clip_gradients, global_norm(grads))

    def _store_global_norm(self, read: _Read, variables: Sequence[Variable]) -> None:
        self._store("global_norm", [global_norm(read())])

    def _store_clipped_norm(self, read: _Read, variables: Sequence[Variable]) -> None:
        self._store("clipped_norm", [global_norm(self._clipped(read()))])

    def _store_gradients(self, read: _Read, variables: Sequence[Variable]) -> None:
        grads = self._clipped(read())
        self._store("gradient_norms", [self._by_variable(variables, grads, lambda g, _: global_norm([g]))])
        if "gradients" in self._stored:
            whole = dict(zip(map(id, variables), grads))
            kept = [whole.get(id(v)) for v in self._trainable_of(variables)]
            zeros = [ops.zeros(v.shape, "float32") if g is None else g for g, v in zip(kept, self._updated)]
            self._store("gradients", [dense(g, v) for g, v in zip(zeros, self._updated)])

    def _store_larc(self, read: _Read, variables: Sequence[Variable]) -> None:
        larc = self._larc
        assert larc is not None
        unit = larc._incoming_scale()
        ratios = self._by_variable(variables, read(), lambda g, v: larc.ratio(map_values(lambda x: x * unit, g), v))
        self._store("ratios", [ratios])

    def _store_update(self, read: _Read, variables: Sequence[Variable]) -> None:
        if "rates" in self._stored:
            self._store("rates", [ops.stack([ops.cast(leaf.learning_rate, "float32") for leaf in self._leaves])])
        if "variable_norms" in self._stored:
            self._store("variable_norms", [ops.stack([global_norm([ops.convert_to_tensor(v)]) for v in self._updated])])
        if "variables" in self._stored:
            self._store("variables", [ops.convert_to_tensor(v) for v in self._updated])
        self._store("update", [ops.add(ops.convert_to_tensor(self._optimizer.iterations), 1)])

    def _trainable_of(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the trainable variables; for those missing in `variables`, their slice or copy that is updated."""
        trainable = self._optimizer._trainable_variables
        chosen = {id(v) for v in variables}
        return [v if id(v) in chosen else inner for v, inner in zip(trainable, self._updated)]

    def _by_variable(
        self, variables: Sequence[Variable], grads: Gradients, measure: Callable[[Tensor, Variable], Tensor]
    ) -> Tensor:
        """Return the results of `measure` for each trainable variable and its gradient; NaN without a gradient."""
        found = {id(v): g for v, g in zip(variables, grads) if g is not None}
        nan = ops.full((), float("nan"), "float32")
        values = [measure(found[id(v)], v) if id(v) in found else nan for v in self._trainable_of(variables)]
        return ops.stack([ops.cast(value, "float32") for value in values])

    def values(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the last measured update, and its values by tag: floats, and arrays for histograms."""
        stored = {name: [ops.convert_to_numpy(v) for v in variables] for name, variables in self._stored.items()}
        update = int(stored["update"][0])
        tags: dict[str, Any] = {}
        if not update:
            return 0, tags
        if "learning_rate" in self._names:
            rates = zip(self._leaves, stored["rates"][0])
            tags.update({rate_tag(leaf, len(self._leaves)): float(rate) for leaf, rate in rates})
        for name, tag in (
            ("global_norm", "global_gradient_norm"),
            ("clipped_norm", "global_clipped_gradient_norm"),
        ):
            if name in stored:
                tags[PREFIX + tag] = float(stored[name][0])
        for attributes, stage, _ in self._stages:
            found = {tag: getattr(stage, attribute) for tag, attribute in attributes.items()}
            tags.update({PREFIX + tag: value for tag, value in found.items() if np.isfinite(value)})
        paths = _unique([v.path for v in self._updated])
        has_gradient = [True] * len(paths)
        if "gradient_norms" in stored:
            has_gradient = [not np.isnan(norm) for norm in stored["gradient_norms"][0]]
        for i, path in enumerate(paths):
            if "gradients" in stored and has_gradient[i]:
                gradient = stored["gradients"][i]
                tags[f"{PREFIX}gradients/{path}"] = np.where(np.isfinite(gradient), gradient, 0)
            if "gradient_norm" in self._names and has_gradient[i]:
                tags[f"{PREFIX}gradient_norm/{path}"] = float(stored["gradient_norms"][0][i])
            if "variables" in stored:
                tags[f"{PREFIX}variables/{path}"] = stored["variables"][i]
            if "variable_norms" in stored:
                tags[f"{PREFIX}variable_norm/{path}"] = float(stored["variable_norms"][0][i])
            if self._larc is not None and not np.isnan(stored["ratios"][0][i]):
                tags.update(self._larc_tags(i, path, float(stored["ratios"][0][i]), stored["rates"][0]))
        return update, tags

    def _larc_tags(self, i: int, path: str, ratio: float, rates: np.ndarray) -> dict[str, float]:
        assert self._larc is not None
        leaf = leaf_of(self._optimizer, self._optimizer._trainable_variables[i])
        rate = float(rates[next(k for k, other in enumerate(self._leaves) if other is leaf)])
        values = [float(ratio < 1), ratio, rate * ratio]
        kept = zip(LARC_TAGS, values) if self._larc.larc_mode == "clip" else zip(LARC_TAGS[1:], values[1:])
        return {f"{PREFIX}{tag}/{path}": value for tag, value in kept}


def _new_variable(shape: Sequence[int], dtype: str = "float32") -> Variable:
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


def _unique(names: Sequence[str]) -> list[str]:
    """Append a number to names that occur more than once."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name] - 1}")
    return result

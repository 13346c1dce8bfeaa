"""Runs the measurements of summaries inside updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.summaries import measures as kinds
from keras_shardopt.classic.summaries.measures import Measure, Trained, new_variable
from keras_shardopt.classic.summaries.tags import PREFIX, STAGES
from keras_shardopt.numerics import Gradients, Variable, in_float32, map_values, overwrites_variable
from keras_shardopt.optimizers import GradientClipping
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.update import watch
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

_Moment = tuple[OptimizerWrapper, str]
"""When to measure: a wrapper, and the method of the observer that the wrapper calls."""


class Observer:
    """Measures values in an update, and stores them in variables.

    The variables are part of the optimizer's state, because compiled steps and branches can assign only variables of
    the optimizer.
    """

    def __init__(self, optimizer: OptimizerWrapper, names: Sequence[str], every: int) -> None:
        self.is_due: bool | None = True
        self._optimizer = optimizer
        self._every = every
        self._stage_variables: list[Variable] = []
        self._stages = [(STAGES[name][1], *self._watch(name)) for name in names if name in STAGES]
        chain = [o for o in chain_of(optimizer) if isinstance(o, OptimizerWrapper)]
        self._last = chain[-1], "before_update"
        trained = Trained(optimizer, chain[-1])
        with placement.colocate_with(trained.updated[0]):
            self._update = new_variable((), "int32")
            self._measures = _measures(chain, names, trained)
        placement.place(self._all_variables(), "replicated")
        measured = [self._last, *[moment for moment, _ in self._measures]]
        self._observed = [wrapper for wrapper in chain if any(wrapper is other for other, _ in measured)]
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

        def add_variable(shape: Sequence[int], dtype: str = "float32", **_: Any) -> Variable:
            self._stage_variables.append(new_variable(shape, dtype))
            return self._stage_variables[-1]

        with placement.colocate_with(found[0]._trainable_variables[0]):
            if processes.num_replicas() == 1 and found[0].accumulation is None:
                raise ValueError(
                    f'`summaries=["{name}"]` compares the gradients of several replicas or micro-batches. '
                    f"Received: 1 replica, with {found[0]!r}. "
                    "Use several replicas, or `CrossShard(..., gradient_accumulation_steps=k)`."
                )
            if processes.process()[0] > 1:  # the exchange raises an error if a process lacks this summary
                processes.gather_objects(name)
            made, _ = STAGES[name]
            return watch(found[0], made(), f'summaries=["{name}"]', add_variable)

    def _all_variables(self) -> list[Variable]:
        measured = [variable for _, measure in self._measures for variable in measure.variables]
        return [*self._stage_variables, self._update, *measured]

    def variables_of(self, wrapper: OptimizerWrapper) -> list[Variable]:
        """Return the variables of this observer that are part of the state of `wrapper`."""
        return self._all_variables() if wrapper is self._observed[-1] else []

    def before_transform(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Measure the gradients that `wrapper` receives. Called before the wrapper changes the gradients."""
        self._run((wrapper, "before_transform"), grads, variables)

    def before_update(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Measure the gradients that `wrapper` passes to its inner optimizer."""
        self._run((wrapper, "before_update"), grads, variables)

    def _run(self, now: _Moment, grads: Gradients, variables: Sequence[Variable]) -> None:
        wrapper, _ = now
        measures = [measure for moment, measure in self._measures if moment == now]
        is_last = self._last == now
        if not measures and not is_last:
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
            for measure in measures:
                measure.run(read, kept_variables)
            if is_last:
                count = ops.add(ops.convert_to_tensor(self._optimizer.iterations), 1)
                self._update.assign(ops.cast(count, self._update.dtype))

        runtime.cond(is_due, lambda _: run_all(), (), self._all_variables(), communicates=False)

    def values(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the last measured update, and its values by tag: floats, and arrays for histograms."""
        update = int(ops.convert_to_numpy(self._update))
        tags: dict[str, Any] = {}
        if not update:
            return 0, tags
        for _, measure in self._measures:
            tags.update(measure.tags())
        for attributes, stage, _ in self._stages:
            found = {tag: getattr(stage, attribute) for tag, attribute in attributes.items()}
            tags.update({PREFIX + tag: value for tag, value in found.items() if np.isfinite(value)})
        return update, tags


def _measures(
    chain: Sequence[OptimizerWrapper], names: Sequence[str], trained: Trained
) -> list[tuple[_Moment, Measure]]:
    """Return the measurements that the summaries `names` need, each with its moment in the update."""
    changing = [o for o in chain if isinstance(o, (GradientClipping, LARC))]
    clipping = [o for o in changing if isinstance(o, GradientClipping)]
    larcs = [o for o in changing if isinstance(o, LARC)]
    last = chain[-1], "before_update"
    before = (changing[0], "before_transform") if changing else last
    # To save memory, clipped gradients are not stored. Each measurement of clipped gradients clips again.
    clipped, clip = ((clipping[-1], "before_transform"), clipping[-1]) if clipping else (before, None)
    found: list[tuple[_Moment, Measure]] = []
    if "learning_rate" in names:
        found.append((last, kinds.learning_rates(trained)))
    if "global_gradient_norm" in names:
        found.append((before, kinds.norm_of_all("global_gradient_norm")))
        if clip is not None:
            found.append((clipped, kinds.norm_of_all("global_clipped_gradient_norm", clip)))
    if "gradients" in names or "gradient_norm" in names:
        found.append((clipped, kinds.each_gradient(trained, clip, "gradient_norm" in names, "gradients" in names)))
    if "variables" in names:
        found.append((last, kinds.weights(trained)))
    if "variable_norm" in names:
        found.append((last, kinds.weight_norms(trained)))
    if "larc_summaries" in names and larcs:
        found.append(((larcs[-1], "before_transform"), kinds.larc_factors(trained, larcs[-1])))
    return found

"""Looks at gradients as they pass through an optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.summaries.tags import OF_LARC, PREFIX, STAGES, rate_tag
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
from keras_shardopt.optimizers.cross_shard import cross_shards
from keras_shardopt.update import watch
from keras_shardopt.wrapping.chain import base_optimizers, descendants, leaf_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

_Seen = Callable[[], Gradients]
"""Makes the gradients that are looked at, in float32 and in units of the loss."""


class Observer:
    """Keeps, as variables of the optimizer's, numbers that only the update itself knows.

    They travel with the state of the innermost wrapper that it looks at, so that they come out of every compiled step
    and every branch in which an update happens.
    """

    def __init__(self, optimizer: OptimizerWrapper, names: Sequence[str], every: int) -> None:
        self.is_due: bool | None = True
        self._of_stages: dict[str, list[Variable]] = {}
        self._optimizer = optimizer
        self._every = every
        chain = [o for o in [optimizer, *descendants(optimizer)] if isinstance(o, OptimizerWrapper)]
        last = chain[-1]
        changing = [o for o in chain if isinstance(o, (GradientClipping, LARC))]
        clipping = [o for o in changing if isinstance(o, GradientClipping)]
        larcs = [o for o in changing if isinstance(o, LARC)]
        # Who is asked, when, and for what.
        self._looks: list[tuple[OptimizerWrapper, str, Callable[..., None]]] = []
        before = (changing[0], "before_transform") if changing else (last, "before_update")
        # Clipped once more where someone looks: what the clipping gives away need not lie in memory for that.
        self._clipping = clipping[-1] if clipping else None
        clipped = (clipping[-1], "before_transform") if clipping else before
        if "global_gradient_norm" in names:
            self._looks.append((*before, self._see_global_norm))
            if clipping:
                self._looks.append((*clipped, self._see_clipped_norm))
        if "gradients" in names or "gradient_norm" in names:
            self._looks.append((*clipped, self._see_gradients))
        if "larc_summaries" in names and larcs:
            self._looks.append((larcs[-1], "before_transform", self._see_larc))
        self._looks.append((last, "before_update", self._see_update))
        self._names = names
        self._larc = larcs[-1] if larcs and "larc_summaries" in names else None
        self._stages = [(STAGES[name][1], *self._watch(name)) for name in names if name in STAGES]
        self._watched = [wrapper for wrapper in chain if any(wrapper is look[0] for look in self._looks)]
        self._leaves = base_optimizers(optimizer)
        self._updated = list(last._variables_inside(last._trainable_variables))
        with placement.colocate_with(self._updated[0]):
            self._notes = {**self._of_stages, **self._new_notes(bool(clipping))}
        placement.place(self._all_notes(), "replicated")
        for wrapper in self._watched:
            wrapper._observe(self)

    def leave(self) -> None:
        """Looks no longer."""
        for _, _, end in self._stages:
            end()
        for wrapper in self._watched:
            wrapper._observe(None)

    def _watch(self, name: str) -> tuple[Any, Callable[[], None]]:
        """Insert the stage of a summary into the outermost `CrossShard`, which has each replica's gradients."""
        found = cross_shards(self._optimizer)
        if not found:
            raise ValueError(
                f'`summaries=["{name}"]` needs a `CrossShard`, which has the gradients of each replica. '
                f"Received: {self._optimizer!r}. Use `CrossShard({self._optimizer!r})`."
            )
        window = found[0].accumulation

        def note(shape: Sequence[int], dtype: str = "float32", **_: Any) -> Variable:
            self._of_stages.setdefault(name, []).append(_note(shape, dtype))
            return self._of_stages[name][-1]

        with placement.colocate_with(found[0]._trainable_variables[0]):
            if processes.num_replicas() == 1 and window is None:
                raise ValueError(
                    f'`summaries=["{name}"]` compares the gradients of replicas, or of micro-batches. '
                    f"Received: 1 replica, with {found[0]!r}. "
                    "Train on several, or use `CrossShard(..., gradient_accumulation_steps=k)`."
                )
            if processes.process()[0] > 1:  # they exchange more from now on, so all must have this summary
                processes.gather_objects(name)
            made, _ = STAGES[name]
            return watch(found[0], made(), f'summaries=["{name}"]', note)

    # -- state ---------------------------------------------------------------------------------------------------

    def _new_notes(self, clips: bool) -> dict[str, list[Variable]]:
        names, updated = self._names, self._updated
        notes = {"update": [_note((), "int32")]}
        if "learning_rate" in names or self._larc is not None:
            notes["rates"] = [_note((len(self._leaves),))]
        if "global_gradient_norm" in names:
            notes["global_norm"] = [_note(())]
            if clips:
                notes["clipped_norm"] = [_note(())]
        if "gradients" in names or "gradient_norm" in names:
            notes["gradient_norms"] = [_note((len(updated),))]
        if "gradients" in names:
            notes["gradients"] = [_note(v.shape) for v in updated]
        if "variable_norm" in names:
            notes["variable_norms"] = [_note((len(updated),))]
        if "variables" in names:
            notes["variables"] = [_note(v.shape) for v in updated]
        if self._larc is not None:
            notes["ratios"] = [_note((len(updated),))]
        return notes

    def _all_notes(self) -> list[Variable]:
        return list(itertools.chain.from_iterable(self._notes.values()))

    def variables_of(self, wrapper: OptimizerWrapper) -> list[Variable]:
        """All of them, with the innermost wrapper that is looked at."""
        return self._all_notes() if wrapper is self._watched[-1] else []

    # -- looking -------------------------------------------------------------------------------------------------

    def before_transform(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """See `Observer`."""
        self._look(wrapper, "before_transform", grads, variables)

    def before_update(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """See `Observer`."""
        self._look(wrapper, "before_update", grads, variables)

    def _look(self, wrapper: OptimizerWrapper, when: str, grads: Gradients, variables: Sequence[Variable]) -> None:
        looks = [see for w, moment, see in self._looks if w is wrapper and moment == when]
        if not looks:
            return
        is_due: Any = self.is_due
        if is_due is None or runtime.version(wrapper.iterations) is None:
            update = ops.add(ops.convert_to_tensor(wrapper.iterations), 1)
            is_due = ops.equal(ops.mod(update, self._every), 0)
        plain = [(g, v) for g, v in zip(grads, variables) if not overwrites_variable(v)]
        unit = wrapper._incoming_scale()
        seen_variables = [v for _, v in plain]

        # Only those who want gradients make them: where steps are traced, what a branch reads must lie in memory.
        def seen() -> Gradients:
            return [None if g is None else map_values(lambda x: in_float32(x) / unit, g) for g, _ in plain]

        def see_all() -> None:
            for see in looks:
                see(seen, seen_variables)

        runtime.cond(is_due, lambda _: see_all(), (), self._all_notes(), communicates=False)

    def _keep(self, name: str, values: Sequence[Any]) -> None:
        for note, value in zip(self._notes[name], values):
            note.assign(ops.cast(value, note.dtype))

    def _clipped(self, grads: Gradients) -> Gradients:
        """What the clipping makes of gradients; without one, these themselves."""
        if self._clipping is None:
            return grads
        return clipped_to(grads, self._clipping.clip_gradients, global_norm(grads))

    def _see_global_norm(self, seen: _Seen, variables: Sequence[Variable]) -> None:
        self._keep("global_norm", [global_norm(seen())])

    def _see_clipped_norm(self, seen: _Seen, variables: Sequence[Variable]) -> None:
        self._keep("clipped_norm", [global_norm(self._clipped(seen()))])

    def _see_gradients(self, seen: _Seen, variables: Sequence[Variable]) -> None:
        grads = self._clipped(seen())
        self._keep("gradient_norms", [self._by_variable(variables, grads, lambda g, _: global_norm([g]))])
        if "gradients" in self._notes:
            whole = dict(zip(map(id, variables), grads))
            kept = [whole.get(id(v)) for v in self._given(variables)]
            zeros = [ops.zeros(v.shape, "float32") if g is None else g for g, v in zip(kept, self._updated)]
            self._keep("gradients", [dense(g, v) for g, v in zip(zeros, self._updated)])

    def _see_larc(self, seen: _Seen, variables: Sequence[Variable]) -> None:
        larc = self._larc
        assert larc is not None
        unit = larc._incoming_scale()
        self._keep(
            "ratios",
            [self._by_variable(variables, seen(), lambda g, v: larc.ratio(map_values(lambda x: x * unit, g), v))],
        )

    def _see_update(self, seen: _Seen, variables: Sequence[Variable]) -> None:
        if "rates" in self._notes:
            self._keep("rates", [ops.stack([ops.cast(leaf.learning_rate, "float32") for leaf in self._leaves])])
        if "variable_norms" in self._notes:
            self._keep("variable_norms", [ops.stack([global_norm([ops.convert_to_tensor(v)]) for v in self._updated])])
        if "variables" in self._notes:
            self._keep("variables", [ops.convert_to_tensor(v) for v in self._updated])
        self._keep("update", [ops.add(ops.convert_to_tensor(self._optimizer.iterations), 1)])

    def _given(self, variables: Sequence[Variable]) -> list[Variable]:
        """The trainable variables, as they are where `variables` come from."""
        mine = self._optimizer._trainable_variables
        chosen = {id(v) for v in variables}
        return [v if id(v) in chosen else inner for v, inner in zip(mine, self._updated)]

    def _by_variable(
        self, variables: Sequence[Variable], grads: Gradients, number: Callable[[Tensor, Variable], Tensor]
    ) -> Tensor:
        """A number for each trainable variable, NaN where there is no gradient."""
        found = {id(v): g for v, g in zip(variables, grads) if g is not None}
        nan = ops.full((), float("nan"), "float32")
        numbers = [number(found[id(v)], v) if id(v) in found else nan for v in self._given(variables)]
        return ops.stack([ops.cast(n, "float32") for n in numbers])

    # -- what was seen -------------------------------------------------------------------------------------------

    def values(self) -> tuple[int, dict[str, Any]]:
        """See `Recorder.values`."""
        notes = {name: [ops.convert_to_numpy(note) for note in kept] for name, kept in self._notes.items()}
        update = int(notes["update"][0])
        tags: dict[str, Any] = {}
        if not update:
            return 0, tags
        if "learning_rate" in self._names:
            rates = zip(self._leaves, notes["rates"][0])
            tags.update({rate_tag(leaf, len(self._leaves)): float(rate) for leaf, rate in rates})
        for name, tag in (
            ("global_norm", "global_gradient_norm"),
            ("clipped_norm", "global_clipped_gradient_norm"),
        ):
            if name in notes:
                tags[PREFIX + tag] = float(notes[name][0])
        for attributes, stage, _ in self._stages:
            found = {tag: getattr(stage, attribute) for tag, attribute in attributes.items()}
            tags.update({PREFIX + tag: value for tag, value in found.items() if np.isfinite(value)})
        paths = _unique([v.path for v in self._updated])
        has_gradient = [True] * len(paths)
        if "gradient_norms" in notes:
            has_gradient = [not np.isnan(norm) for norm in notes["gradient_norms"][0]]
        for i, path in enumerate(paths):
            if "gradients" in notes and has_gradient[i]:
                gradient = notes["gradients"][i]
                tags[f"{PREFIX}gradients/{path}"] = np.where(np.isfinite(gradient), gradient, 0)
            if "gradient_norm" in self._names and has_gradient[i]:
                tags[f"{PREFIX}gradient_norm/{path}"] = float(notes["gradient_norms"][0][i])
            if "variables" in notes:
                tags[f"{PREFIX}variables/{path}"] = notes["variables"][i]
            if "variable_norms" in notes:
                tags[f"{PREFIX}variable_norm/{path}"] = float(notes["variable_norms"][0][i])
            if self._larc is not None and not np.isnan(notes["ratios"][0][i]):
                tags.update(self._of_larc(i, path, float(notes["ratios"][0][i]), notes["rates"][0]))
        return update, tags

    def _of_larc(self, i: int, path: str, ratio: float, rates: np.ndarray) -> dict[str, float]:
        assert self._larc is not None
        leaf = leaf_of(self._optimizer, self._optimizer._trainable_variables[i])
        rate = float(rates[next(k for k, other in enumerate(self._leaves) if other is leaf)])
        values = [float(ratio < 1), ratio, rate * ratio]
        kept = zip(OF_LARC, values) if self._larc.larc_mode == "clip" else zip(OF_LARC[1:], values[1:])
        return {f"{PREFIX}{tag}/{path}": value for tag, value in kept}


def _note(shape: Sequence[int], dtype: str = "float32") -> Variable:
    # Each replica of TensorFlow keeps its own, equal ones: where an update happens, replicas cannot always communicate.
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
    """The names, those that come again with a number."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name] - 1}")
    return result

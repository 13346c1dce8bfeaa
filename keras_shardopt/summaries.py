"""What happens inside updates, as TensorBoard event files.

Hides where in a chain of optimizers a number is to be had, how it gets out of a compiled step, and who writes files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt._typing import Gradients, Tensor, Variable
from keras_shardopt.numerics import (
    clip_by_global_norm,
    dense,
    global_norm,
    in_float32,
    is_next_value,
    is_sparse,
    map_values,
)
from keras_shardopt.optimizers import LARC, GradientClipping
from keras_shardopt.replica import framework
from keras_shardopt.wrapper import OptimizerWrapper, inside, leaf_of, leaves

SUMMARIES = (
    "learning_rate",
    "gradients",
    "gradient_norm",
    "global_gradient_norm",
    "variables",
    "variable_norm",
    "larc_summaries",
    "loss_scale",
)
"""What can be asked for."""

DEFAULT_SUMMARIES = ("learning_rate", "global_gradient_norm", "loss_scale")
"""What None asks for."""

_PREFIX = "Loss_Optimization/"
_OF_LARC = ("larc_clip_on", "larc_grad_update", "larc_final_lr")


def checked_summaries(summaries: Sequence[str] | None) -> tuple[str, ...]:
    """The names of summaries, each once; None stands for the default ones.

    Raises:
        TypeError: if it is not a list of names.
        ValueError: if a name is unknown.
    """
    if summaries is None:
        return DEFAULT_SUMMARIES
    if isinstance(summaries, str) or not isinstance(summaries, (list, tuple, set, frozenset)):
        raise TypeError(f"`summaries` must be a list of names, or None. Received: summaries={summaries!r}")
    # Asked for by itself, it would have nothing to clip.
    names = [
        "global_gradient_norm" if name == "global_clipped_gradient_norm" else name for name in map(_word, summaries)
    ]
    unknown = [name for name in names if name not in SUMMARIES]
    if unknown:
        raise ValueError(f"`summaries` may hold {list(SUMMARIES)}. Received: {unknown} among them.")
    return tuple(name for name in SUMMARIES if name in names)


def _word(name: Any) -> str:
    return name if isinstance(name, str) else type(name).__name__


def checked_log_dir(log_dir: Any) -> None:
    """Raises TypeError unless it is a path or None."""
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(f"`log_dir` must be a path or None. Received: log_dir={log_dir!r}")


class Recorder:
    """Sees every so many updates of an optimizer, and writes what was asked for.

    Args:
        optimizer: a `keras.optimizers.Optimizer` that is built. Of one that no wrapper of this package is around, only
            the learning rate can be seen.
        log_dir: path or None. The chief of all processes writes event files there; None writes nothing.
        summaries: names out of `SUMMARIES`, or None.
        every: int >= 1, in updates.
        prefix: what all tags of this optimizer begin with.
        beside: another recorder, into whose files this one writes.
        looks_inside: bool. Whether the updates themselves can be seen; else only what can be read between them.

    Raises:
        ValueError: if what is asked for cannot be seen.
        ImportError: if files are to be written and `tensorboardX` is not installed.
    """

    def __init__(
        self,
        optimizer: Any,
        log_dir: Any,
        summaries: Sequence[str] | None,
        every: int,
        *,
        prefix: str = "",
        beside: Recorder | None = None,
        looks_inside: bool = True,
    ) -> None:
        names = checked_summaries(summaries)
        self.optimizer = optimizer
        self._prefix = prefix
        self.every = every
        self._names = names
        self._observer: _Observer | None = None
        if not looks_inside:
            pass
        elif isinstance(optimizer, OptimizerWrapper):
            if set(names) - {"loss_scale"}:
                self._observer = _Observer(optimizer, names, every)
        elif summaries is not None and set(names) - {"learning_rate"}:
            raise ValueError(
                "`summaries` of gradients can be had of the optimizers of this package only. Received: "
                f"summaries={list(names)}, with {type(optimizer).__name__}. "
                f"Put it into a `CrossShard`, which alone changes nothing: `CrossShard({type(optimizer).__name__}())`."
            )
        self._write: Callable[[dict[str, Any] | None, int], None] | None = None
        if beside is not None:
            self._write = beside._write
        elif log_dir is not None and not framework.process()[1]:
            self._write = _event_writer(log_dir)
        self._last_step = -1

    @property
    def num_micro_steps(self) -> int:
        """How many gradients make an update."""
        chain = [self.optimizer, *inside(self.optimizer)]
        steps = [getattr(o, "gradient_accumulation_steps", None) for o in chain if isinstance(o, OptimizerWrapper)]
        return next((k for k in steps if k), 1)

    def expect(self, is_due: bool | None) -> None:
        """Says before a step, where steps are run line by line, whether what it does will be asked for.

        None stands for each `every`-th update, which is then found by reading their number.
        """
        if self._observer is not None:
            self._observer.is_due = is_due

    def values(self) -> tuple[int, dict[str, Any]]:
        """The number of the update that was seen last, and what was seen, by tag: floats, and arrays for histograms."""
        optimizer = self.optimizer
        tags: dict[str, Any] = {}
        if self._observer is not None:
            step, tags = self._observer.values()
        else:
            step = int(ops.convert_to_numpy(optimizer.iterations))
            if "learning_rate" in self._names:
                tags.update(rates(optimizer))
        if "loss_scale" in self._names and (scale := dynamic_loss_scale(optimizer)) is not None:
            tags[f"{_PREFIX}loss_scale"] = scale
        return step, tags

    def record(self, more: Callable[[], dict[str, float]] = dict) -> bool:
        """Writes what was seen since the last time, if anything, and what `more` returns. Returns whether it has."""
        if self._write is None or not self._names:
            return False
        step, tags = self.values()
        if step <= self._last_step or step <= 0:
            return False
        self._last_step = step
        self._write({**{f"{self._prefix}{tag}": value for tag, value in tags.items()}, **more()}, step)
        return True

    def close(self) -> None:
        """Looks no longer, and ends the file. A compiled step must be compiled anew."""
        if self._observer is not None:
            self._observer.leave()
        if self._write is not None:
            self._write(None, 0)
            self._write = None


def rates(optimizer: Any) -> dict[str, float]:
    """The learning rates of now, by the tags that Keras gives them."""
    found = leaves(optimizer)
    tags = [_rate_tag(leaf, len(found)) for leaf in found]
    return {tag: float(ops.convert_to_numpy(leaf.learning_rate)) for tag, leaf in zip(tags, found)}


def dynamic_loss_scale(optimizer: Any) -> float | None:
    """The scale of the loss, if the optimizer has one that changes."""
    scale = getattr(optimizer, "loss_scale", None)
    return None if scale is None or isinstance(scale, (int, float)) else float(ops.convert_to_numpy(scale))


def _rate_tag(leaf: Any, num_leaves: int) -> str:
    return "learning_rate" if num_leaves == 1 else f"learning_rate_{leaf.name}"


_Seen = Callable[[], Gradients]
"""Makes the gradients that are looked at, in float32 and in units of the loss."""


class _Observer:
    """Keeps, as variables of the optimizer's, numbers that only the update itself knows.

    They travel with the state of the innermost wrapper that it looks at, so that they come out of every compiled step
    and every branch in which an update happens.
    """

    def __init__(self, optimizer: OptimizerWrapper, names: Sequence[str], every: int) -> None:
        self.is_due: bool | None = True
        self._optimizer = optimizer
        self._every = every
        chain = [o for o in [optimizer, *inside(optimizer)] if isinstance(o, OptimizerWrapper)]
        last = chain[-1]
        changing = [o for o in chain if isinstance(o, (GradientClipping, LARC))]
        clipping = [o for o in changing if isinstance(o, GradientClipping)]
        larcs = [o for o in changing if isinstance(o, LARC)]
        # Who is asked, when, and for what.
        self._looks: list[tuple[OptimizerWrapper, str, Callable[..., None]]] = []
        before = (changing[0], "arriving") if changing else (last, "departing")
        # Clipped once more where someone looks: what the clipping gives away need not lie in memory for that.
        self._clipping = clipping[-1] if clipping else None
        clipped = (clipping[-1], "arriving") if clipping else before
        if "global_gradient_norm" in names:
            self._looks.append((*before, self._see_global_norm))
            if clipping:
                self._looks.append((*clipped, self._see_clipped_norm))
        if "gradients" in names or "gradient_norm" in names:
            self._looks.append((*clipped, self._see_gradients))
        if "larc_summaries" in names and larcs:
            self._looks.append((larcs[-1], "arriving", self._see_larc))
        self._looks.append((last, "departing", self._see_update))
        self._names = names
        self._larc = larcs[-1] if larcs and "larc_summaries" in names else None
        self._watched = [wrapper for wrapper in chain if any(wrapper is look[0] for look in self._looks)]
        self._leaves = leaves(optimizer)
        self._updated = list(last._variables_inside(last._trainable_variables))
        with framework.beside(self._updated[0]):
            self._notes = self._new_notes(bool(clipping))
        framework.place_state(self._all_notes())
        for wrapper in self._watched:
            wrapper._observe(self)

    def leave(self) -> None:
        """Looks no longer."""
        for wrapper in self._watched:
            wrapper._observe(None)

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

    def arriving(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """See `Observer`."""
        self._look(wrapper, "arriving", grads, variables)

    def departing(self, wrapper: OptimizerWrapper, grads: Gradients, variables: Sequence[Variable]) -> None:
        """See `Observer`."""
        self._look(wrapper, "departing", grads, variables)

    def _look(self, wrapper: OptimizerWrapper, when: str, grads: Gradients, variables: Sequence[Variable]) -> None:
        looks = [see for w, moment, see in self._looks if w is wrapper and moment == when]
        if not looks:
            return
        is_due: Any = self.is_due
        if framework.steps_are_traced or is_due is None:
            update = ops.add(ops.convert_to_tensor(wrapper.iterations), 1)
            is_due = ops.equal(ops.mod(update, self._every), 0)
        plain = [(g, v) for g, v in zip(grads, variables) if not is_next_value(v)]
        unit = wrapper._incoming_scale()
        seen_variables = [v for _, v in plain]

        # Only those who want gradients make them: where steps are traced, what a branch reads must lie in memory.
        def seen() -> Gradients:
            return [None if g is None else map_values(lambda x: in_float32(x) / unit, g) for g, _ in plain]

        def see_all() -> None:
            for see in looks:
                see(seen, seen_variables)

        framework.when(is_due, see_all, self._all_notes())

    def _keep(self, name: str, values: Sequence[Any]) -> None:
        for note, value in zip(self._notes[name], values):
            note.assign(ops.cast(value, note.dtype))

    def _clipped(self, grads: Gradients) -> Gradients:
        """What the clipping makes of gradients; without one, these themselves."""
        return grads if self._clipping is None else clip_by_global_norm(grads, self._clipping.clip_gradients)[0]

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
            self._keep("gradients", [_dense_or_zeros(g, v) for g, v in zip(kept, self._updated)])

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
            tags.update({_rate_tag(leaf, len(self._leaves)): float(rate) for leaf, rate in rates})
        for name, tag in (
            ("global_norm", "global_gradient_norm"),
            ("clipped_norm", "global_clipped_gradient_norm"),
        ):
            if name in notes:
                tags[_PREFIX + tag] = float(notes[name][0])
        paths = _unique([v.path for v in self._updated])
        has_gradient = [True] * len(paths)
        if "gradient_norms" in notes:
            has_gradient = [not np.isnan(norm) for norm in notes["gradient_norms"][0]]
        for i, path in enumerate(paths):
            if "gradients" in notes and has_gradient[i]:
                gradient = notes["gradients"][i]
                tags[f"{_PREFIX}gradients/{path}"] = np.where(np.isfinite(gradient), gradient, 0)
            if "gradient_norm" in self._names and has_gradient[i]:
                tags[f"{_PREFIX}gradient_norm/{path}"] = float(notes["gradient_norms"][0][i])
            if "variables" in notes:
                tags[f"{_PREFIX}variables/{path}"] = notes["variables"][i]
            if "variable_norms" in notes:
                tags[f"{_PREFIX}variable_norm/{path}"] = float(notes["variable_norms"][0][i])
            if self._larc is not None and not np.isnan(notes["ratios"][0][i]):
                tags.update(self._of_larc(i, path, float(notes["ratios"][0][i]), notes["rates"][0]))
        return update, tags

    def _of_larc(self, i: int, path: str, ratio: float, rates: np.ndarray) -> dict[str, float]:
        assert self._larc is not None
        leaf = leaf_of(self._optimizer, self._optimizer._trainable_variables[i])
        rate = float(rates[next(k for k, other in enumerate(self._leaves) if other is leaf)])
        values = [float(ratio < 1), ratio, rate * ratio]
        kept = zip(_OF_LARC, values) if self._larc.larc_mode == "clip" else zip(_OF_LARC[1:], values[1:])
        return {f"{_PREFIX}{tag}/{path}": value for tag, value in kept}


def _note(shape: Sequence[int], dtype: str = "float32") -> Variable:
    # Each replica of TensorFlow keeps its own, equal ones: where an update happens, replicas cannot always meet.
    return keras.Variable(
        ops.zeros(tuple(shape), dtype),
        dtype=dtype,
        trainable=False,
        autocast=False,
        synchronization="on_read",
        aggregation="only_first_replica",
        name="summary",
    )


def _dense_or_zeros(grad: Tensor | None, variable: Variable) -> Tensor:
    if grad is None:
        return ops.zeros(variable.shape, "float32")
    return dense(grad, variable.shape[0]) if is_sparse(grad) else grad


def _unique(names: Sequence[str]) -> list[str]:
    """The names, those that come again with a number."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name] - 1}")
    return result


_num_files = itertools.count()


def _event_writer(log_dir: Any) -> Callable[[dict[str, Any] | None, int], None]:
    """A function of tags with their values and a step, that writes them; None instead of tags ends the file."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Summaries are written with `tensorboardX`, which is not installed. "
            'Use `pip install "keras-shardopt[summaries]"`, or `log_dir=None` to write none.'
        ) from error
    # Files are named by the second in which they are made; two of the same one would be one.
    suffix = f".{os.getpid()}.{next(_num_files)}"
    writer = SummaryWriter(str(log_dir), filename_suffix=suffix)

    def write(tags: dict[str, Any] | None, step: int) -> None:
        if tags is None:
            writer.close()
            return
        for tag, value in tags.items():
            if isinstance(value, np.ndarray):
                if np.isfinite(value).all():
                    writer.add_histogram(tag, value, step)
            else:
                writer.add_scalar(tag, value, step)
        writer.flush()

    return write

"""Whether an update can be split by variable or by element: found by a trial update of a fresh optimizer.

Three runs on small variables say it. One updates each of them whole; one updates each cut in two; two more update only
every other one, with empty ones in between. Where the parts get what the whole gets, a variable may be cut. Where each
gets the same without the others, whole variables may be given to different replicas. Otherwise neither is right.

Private names of Keras touched here (test_private_names.py holds them):
    `Optimizer._exclude_from_weight_decay` - the keys of variables that do not decay, before the optimizer is built.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.numerics import Optimizer, Variable, dtype_of, overwrites_variable
from keras_shardopt.update.reducing import ReducingOptimizer
from keras_shardopt.wrapping.chain import base_optimizers, descendants
from keras_shardopt.wrapping.slots import empty_name_scope, named_like, slots_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

# From small to large, so that what is within a limit and what is beyond it both occur.
_SCALES = (1e-3, 1.0, 30.0, 1e3, 1e6, 1.0)
_TOLERANCE = 1e-4
"""Of an update's own size. Sums over a whole variable, or over all of them, differ from those of parts by far more."""


def are_elementwise(optimizer: Optimizer, variables: Sequence[Variable]) -> list[bool]:
    """Whether each variable may be updated in parts; those that may not can be updated whole, without the others.

    Args:
        optimizer: one with an update rule, not built yet. It is left as it is.
        variables: what it is to be built on. They are left as they are.

    Raises:
        ValueError: if an update depends on other variables than its own, or is not the same each time.
    """
    molds = [_Probe(v, i) for i, v in enumerate(variables) if not overwrites_variable(v)]
    whole = _Run(optimizer, [[mold.whole] for mold in molds])
    # By itself: next to one more, which is large, so that a single variable is tried together with another, too.
    more = _Probe(variables[0], len(variables), scale=50.0)
    crowd = _Run(optimizer, [[mold.whole] for mold in [*molds, more]])
    apart = [
        _Run(optimizer, [[mold.whole if i % 2 == parity else mold.empty] for i, mold in enumerate(molds)])
        for parity in (0, 1)
    ]
    _check_independent(optimizer, molds, whole, crowd, apart)
    halves = _Run(optimizer, [mold.halves for mold in molds])
    may = [
        _alike(whole.effects[i], halves.effects[i])
        and all(names == whole.slot_names[i] for names in halves.names_of_parts[i])
        and halves.slots_are_shaped[i]
        for i in range(len(molds))
    ]
    # State that belongs to no variable, and is no number: nobody could say which part of it is whose.
    known = all(not shape for shape in halves.shared_shapes)
    kinds: dict[Any, bool] = {}
    for i, mold in enumerate(molds):
        if may[i] and known:
            kind = (_large_shape(mold.variable), tuple(whole.slot_names[i]))
            if kind not in kinds:
                kinds[kind] = _is_as_small_ones(optimizer, mold, whole.slot_names[i])
            may[i] = kinds[kind]
    found = iter(may)
    return [False if overwrites_variable(v) else next(found) and known for v in variables]


def _large_shape(variable: Variable) -> tuple[int, ...]:
    limit = 256 if len(variable.shape) < 3 else 64
    return tuple(min(size, limit) for size in variable.shape)


def _check_independent(
    optimizer: Optimizer, molds: Sequence[_Probe], whole: _Run, crowd: _Run, apart: Sequence[_Run]
) -> None:
    """Raise ValueError if an update depends on other variables than its own, or is not the same each time."""
    for i, mold in enumerate(molds):
        if not (_alike(whole.effects[i], crowd.effects[i]) and _alike(whole.effects[i], apart[i % 2].effects[i])):
            again = _Run(optimizer, [[mold.whole] for mold in molds])
            if not all(_alike(a, b) for a, b in zip(whole.effects, again.effects)):
                raise ValueError(
                    f"{_rule(optimizer)} Received: one whose updates are not the same each time. {_ADVICE}"
                )
            raise ValueError(
                f"{_rule(optimizer)} Received: one whose update of `{mold.path}` depends on other variables, as with "
                f"a norm over all of them. {_ADVICE}"
            )
    for run in apart if len(molds) > 1 else []:
        for mine, theirs in zip(whole.shared_state, run.shared_state):
            if mine.shape == theirs.shape and not _alike([mine], [theirs]):
                raise ValueError(
                    f"{_rule(optimizer)} Received: one with state that depends on several variables, or on one "
                    f"but was not made with `add_variable_from_reference`. {_ADVICE}"
                )


def _is_as_small_ones(optimizer: Optimizer, mold: _Probe, slot_names: Sequence[str]) -> bool:
    """Whether the state of a variable is made like that of a small one; some factor that of large matrices only."""
    values = np.zeros(_large_shape(mold.variable), "float32")
    run = _Run(optimizer, [[(mold.variable, values, [])]], num_steps=0)
    return run.slots_are_shaped[0] and run.slot_names[0] == slot_names and not any(run.shared_shapes)


def are_elementwise_inside(optimizer: Optimizer, variables: Sequence[Variable]) -> list[bool]:
    """Whether all that is inside may update each variable in parts; see `are_elementwise`."""
    leaf = base_optimizers(optimizer)[0]
    units = {wrapper._shard_unit for wrapper in descendants(optimizer) if wrapper is not leaf}
    found = are_elementwise(leaf, variables)
    if any(wrapper._takes_penalties for wrapper in descendants(optimizer) if wrapper is not leaf):
        _refuse_penalties(variables)
    if "variable" in units:
        return [False] * len(found)
    return [cuttable and v.constraint is None for cuttable, v in zip(found, variables)]


def _refuse_penalties(variables: Sequence[Variable]) -> None:
    penalised = [v.path for v in variables if getattr(v, "regularizer", None) and dtype_of(v).endswith("float16")]
    if penalised:
        raise ValueError(
            "With `shard_state=True`, `MixedPrecision` cannot take the gradients of penalties over, as only one rank "
            f"has a variable's master. Received: regularizers of {penalised}. Use weight decay, or `shard_state=False`."
        )


def check_can_shard(optimizer: ReducingOptimizer) -> None:
    """Raises ValueError if something inside could not be right with a part of the gradients."""
    chain = descendants(optimizer)
    for one in chain:
        is_leaf = not isinstance(one, OptimizerWrapper) and getattr(one, "inner_optimizer", None) is None
        several = hasattr(one, "optimizers") and not isinstance(one, OptimizerWrapper)
        if several or not (is_leaf or getattr(one, "_shard_unit", None)):
            raise ValueError(
                "`shard_state=True` shows the optimizers inside a part of the gradients only, with which "
                f"{type(one).__name__} would be wrong. Received: inner_optimizer={optimizer.inner!r}. Use "
                "`shard_state=False`, or what can do with a part: `GradientClipping`, `LARC`, `LossScaling` and "
                "`MixedPrecision` of this package around one optimizer."
            )


def keep_exclusions(
    optimizer: ReducingOptimizer,
    variables: Sequence[Variable],
    inside_for: Callable[[Sequence[Variable]], list[Variable]],
) -> None:
    """Lets those inside who were told to leave out variables leave out what stands for them."""
    key = optimizer._var_key
    for leaf in base_optimizers(optimizer):
        excluded = getattr(leaf, "_exclude_from_weight_decay", None)
        if excluded:
            excluded |= {key(v) for v in inside_for([v for v in variables if leaf._var_key(v) in excluded])}
    known = {key(variable) for variable in variables}
    for wrapper in descendants(optimizer):
        told = getattr(wrapper, "_excluded", None)
        if told is not None and told[0] is not None:
            mine = inside_for([v for v in told[0] if key(v) in known])
            wrapper.exclude_from_weight_decay(var_list=mine, var_names=told[1])


def holds_weights(optimizer: Optimizer, variables: Sequence[Variable]) -> bool:
    """Whether its state starts with something of the weights, so that state and weights must start together."""
    run = _Run(
        optimizer, [[_Probe(v, i).whole] for i, v in enumerate(variables) if not overwrites_variable(v)], num_steps=0
    )
    return any(array.size > 1 and np.ptp(array) > 0 for array in run.state)


def first_state(optimizer: Optimizer, variables: Sequence[Variable], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The state that such an optimizer starts with, where it is built on variables like these with these values."""
    fresh = _fresh(optimizer)
    with empty_name_scope():
        fresh.build([_made(variable, array) for variable, array in zip(variables, values)])
    return [ops.convert_to_numpy(v) for v in fresh.variables]


_ADVICE = (
    "Use `shard_state=False`, another optimizer, or what this package has for it: `GradientClipping(inner_optimizer, "
    "...)` for `global_clipnorm`, and `LossScaling` for `LossScaleOptimizer`."
)


def _rule(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"`shard_state=True` needs an optimizer that updates each variable by itself, unlike this {name}."


class _Probe:
    """A small stand-in for a variable: whole, in two parts, and without elements."""

    def __init__(self, variable: Variable, seed: int, scale: float = 1.0) -> None:
        rank = len(variable.shape)
        shape = (2, 3, 4, *[2] * (rank - 3))[:rank] if rank != 2 else (4, 6)
        shape = (24,) if rank == 1 else shape
        random = np.random.default_rng(seed)
        values = random.normal(size=shape).astype("float32")
        size = int(np.prod(shape))
        # The second half is much larger, so that what looks at both shows.
        factors = np.where(np.arange(size) < size // 2, 1.0, 30.0).reshape(shape) * scale
        grads = [(random.normal(size=shape) * factors * s).astype("float32") for s in _SCALES]
        self.variable = variable
        self.path = str(getattr(variable, "path", variable.name))
        self.whole = (variable, values, grads)
        half = size // 2
        parts = [slice(0, half), slice(half, size)] if size > 1 else [slice(0, size)]
        self.halves = [(variable, values.reshape(-1)[p], [g.reshape(-1)[p] for g in grads]) for p in parts]
        nothing = np.zeros(empty_shape(shape), "float32")
        self.empty = (variable, nothing, [nothing] * len(grads))


def empty_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a variable of the same rank (at least 1) without elements."""
    return (0,) * max(1, len(shape))


class _Run:
    """What becomes of some variables, each in one part or several."""

    def __init__(self, optimizer: Optimizer, parts: Sequence[Sequence[Any]], num_steps: int = len(_SCALES)) -> None:
        fresh = _fresh(optimizer, **_VISIBLE)
        made = [[_made(like, values) for like, values, _ in each] for each in parts]
        flat = [variable for each in made for variable in each]
        with empty_name_scope():
            fresh.build(flat)
        self._look_at_state(fresh, made, flat)
        # What becomes of each: its updates one after another, and its state after the last.
        self.effects: list[list[np.ndarray]] = [[] for _ in parts]
        chosen = [i for i, variable in enumerate(flat) if 0 not in variable.shape]
        grads = [grads for each in parts for _, _, grads in each]
        for step in range(num_steps):
            before = [_joined(each) for each in made]
            fresh.apply([ops.convert_to_tensor(grads[i][step]) for i in chosen], [flat[i] for i in chosen])
            for effects, old, each in zip(self.effects, before, made):
                effects.append(_joined(each) - old)
        # An update may hide what its state shows: one that goes by signs, or is too small to change a weight.
        for effects, slots in zip(self.effects, self._slots):
            effects += [_joined_slot(parts) for parts in slots]
        self.state = [np.array(ops.convert_to_numpy(v), "float64") for v in fresh.variables]
        self.shared_state = [np.array(ops.convert_to_numpy(v), "float64") for v in self._shared]

    def _look_at_state(self, fresh: Any, made: Sequence[Sequence[Variable]], flat: Sequence[Variable]) -> None:
        """Which state belongs to which part, by its name, as `SlotAccess` finds it."""
        owned = list(slots_of(fresh, flat))
        names: list[list[str]] = [[] for _ in flat]
        slots: list[list[Variable]] = [[] for _ in flat]
        shaped = [True] * len(flat)
        for position, name, slot in owned:
            names[position].append(name)
            slots[position].append(slot)
            shaped[position] &= tuple(slot.shape) in ((), tuple(flat[position].shape))
        seen = {id(slot) for _, _, slot in owned}
        self._shared = [v for v in fresh.variables if id(v) not in seen]
        self.shared_shapes = [tuple(v.shape) for v in self._shared]
        ranges = list(itertools.pairwise(np.cumsum([0, *[len(each) for each in made]])))
        self.names_of_parts = [names[start:stop] for start, stop in ranges]
        # For each variable its slots, of all its parts together.
        self._slots = [list(zip(*slots[start:stop])) for start, stop in ranges]
        self.slot_names = [each[0] for each in self.names_of_parts]
        self.slots_are_shaped = [all(shaped[start:stop]) for start, stop in ranges]


def _made(like: Variable, values: np.ndarray) -> Variable:
    def initializer(shape: Any, dtype: Any = None) -> Any:
        return ops.reshape(ops.convert_to_tensor(values, dtype), shape)

    return named_like(like, initializer=initializer, shape=values.shape, dtype="float32")


# At a rate of 0 nothing could be seen, as where a schedule begins, nor before a window of gradients is full.
_VISIBLE = {"learning_rate": 0.05, "gradient_accumulation_steps": None}


def _fresh(optimizer: Optimizer, **changes: Any) -> Any:
    kind: Any = type(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rate that is a lambda is not going to be stored
            config = optimizer.get_config()
        return kind.from_config({**config, **{key: value for key, value in changes.items() if key in config}})
    except Exception as error:  # anything: both are functions of the user's
        raise ValueError(
            "`shard_state=True` tries an optimizer out first, and so needs one that can be made from its config. "
            f"Received: {kind.__name__}, which fails with {type(error).__name__}: {error}. "
            "Give it `get_config` and `from_config`, or use `shard_state=False`."
        ) from error


def _joined(parts: Sequence[Variable]) -> np.ndarray:
    return np.concatenate([np.array(ops.convert_to_numpy(part), "float64").reshape(-1) for part in parts])


def _joined_slot(parts: Sequence[Variable]) -> np.ndarray:
    # A number is not divided: each part is to have that of the whole.
    return np.unique(_joined(parts)) if not any(len(part.shape) for part in parts) else _joined(parts)


def _alike(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    for one, other in zip(some, others):
        if one.size != other.size:
            return False
        size = max(float(np.max(np.abs(one), initial=0.0)), float(np.max(np.abs(other), initial=0.0)))
        difference = float(np.max(np.abs(one.reshape(-1) - other.reshape(-1)), initial=0.0))
        if not (difference <= _TOLERANCE * size or math.isnan(size)):
            return False
    return True

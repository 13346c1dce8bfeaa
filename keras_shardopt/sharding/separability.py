"""Whether an update can be divided by variable or by element, determined by trial updates of a fresh optimizer.

The trials use small variables. A variable can be split if its two halves are updated like the whole variable. Different
replicas can update different variables if two changes have no effect on updates: adding a variable, and leaving out
every second variable. If a change has an effect, the state cannot be divided.

Private names of Keras touched here (test_private_names.py checks that each exists):
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
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.chain import base_optimizers, descendants
from keras_shardopt.wrapping.slots import empty_name_scope, full_name, named_like, slots_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

# Factors of the trial gradients, one per step. Small and large gradients reach both sides of an optimizer's thresholds.
_SCALES = (1e-3, 1.0, 30.0, 1e3, 1e6, 1.0)
_TOLERANCE = 1e-4
"""The largest accepted difference between trials, relative to the update. Updates that depend on a sum over elements or
variables differ far more."""


def are_elementwise(optimizer: Optimizer, variables: Sequence[Variable], part_rank: int = 1) -> list[bool]:
    """Return, for each variable, whether slices of it can be updated separately. Otherwise the variable stays whole.

    Args:
        optimizer: an optimizer with an update rule, before its build. It is not changed.
        variables: the variables on which the optimizer will be built. They are not changed.
        part_rank: the number of dimensions of a slice, 1 or 2. Some optimizers update matrices by another rule.

    Raises:
        ValueError: if an update depends on other variables, or is not deterministic.
    """
    probes = [_Probe(v, i, part_rank) for i, v in enumerate(variables) if not overwrites_variable(v)]
    whole = _Run(optimizer, [[probe.whole] for probe in probes])
    # The added variable has large gradients, so an update that depends on other variables changes visibly.
    extra = _Probe(variables[0], len(variables), part_rank, scale=50.0)
    with_extra = _Run(optimizer, [[probe.whole] for probe in [*probes, extra]])
    alternating = [
        _Run(optimizer, [[probe.whole if i % 2 == parity else probe.empty] for i, probe in enumerate(probes)])
        for parity in (0, 1)
    ]
    _check_independent(optimizer, probes, whole, with_extra, alternating)
    halves = _Run(optimizer, [probe.halves for probe in probes])
    may_split = [
        _are_close(whole.effects[i], halves.effects[i])
        and all(names == whole.slot_names[i] for names in halves.names_of_parts[i])
        and halves.slots_are_shaped[i]
        for i in range(len(probes))
    ]
    # If an array of state belongs to no variable, it belongs to no slice either, so no variable can be split.
    all_owned = all(not shape for shape in halves.shared_shapes)
    kinds: dict[Any, bool] = {}
    for i, probe in enumerate(probes):
        if may_split[i] and all_owned:
            kind = (_large_shape(probe.variable), tuple(whole.slot_names[i]))
            if kind not in kinds:
                kinds[kind] = _has_state_like_small_ones(optimizer, probe, whole.slot_names[i])
            may_split[i] = kinds[kind]
    found = iter(may_split)
    return [False if overwrites_variable(v) else next(found) and all_owned for v in variables]


def _large_shape(variable: Variable) -> tuple[int, ...]:
    limit = 256 if len(variable.shape) < 3 else 64
    return tuple(min(size, limit) for size in variable.shape)


def _check_independent(
    optimizer: Optimizer, probes: Sequence[_Probe], whole: _Run, with_extra: _Run, alternating: Sequence[_Run]
) -> None:
    """Compare trials. Raise ValueError if an update depends on other variables, or is not deterministic."""
    for i, probe in enumerate(probes):
        if not (
            _are_close(whole.effects[i], with_extra.effects[i])
            and _are_close(whole.effects[i], alternating[i % 2].effects[i])
        ):
            again = _Run(optimizer, [[probe.whole] for probe in probes])
            if not all(_are_close(a, b) for a, b in zip(whole.effects, again.effects)):
                raise ValueError(f"{_rule(optimizer)} Received: an optimizer with nondeterministic updates. {_ADVICE}")
            raise ValueError(
                f"{_rule(optimizer)} Received: an update of `{probe.path}` that depends on other variables, such as a "
                f"norm over all variables. {_ADVICE}"
            )
    for run in alternating if len(probes) > 1 else []:
        for mine, theirs in zip(whole.shared_state, run.shared_state):
            if mine.shape == theirs.shape and not _are_close([mine], [theirs]):
                raise ValueError(
                    f"{_rule(optimizer)} Received: state that depends on several variables, or state of one variable "
                    f"that was not created with `add_variable_from_reference`. {_ADVICE}"
                )


def _has_state_like_small_ones(optimizer: Optimizer, probe: _Probe, slot_names: Sequence[str]) -> bool:
    """Whether a large variable has state like the small trial variable. Some optimizers factor only large matrices."""
    values = np.zeros(_large_shape(probe.variable), "float32")
    run = _Run(optimizer, [[(probe.variable, values, [])]], num_steps=0)
    return run.slots_are_shaped[0] and run.slot_names[0] == slot_names and not any(run.shared_shapes)


def are_elementwise_inside(optimizer: Optimizer, variables: Sequence[Variable], part_rank: int = 1) -> list[bool]:
    """Return whether all wrapped optimizers can update each variable in parts. See `are_elementwise`."""
    leaf = base_optimizers(optimizer)[0]
    units = {wrapper._shard_unit for wrapper in descendants(optimizer) if wrapper is not leaf}
    found = are_elementwise(leaf, variables, part_rank)
    if any(wrapper._takes_penalties for wrapper in descendants(optimizer) if wrapper is not leaf):
        _refuse_penalties(variables)
    if "variable" in units:
        return [False] * len(found)
    return [splittable and v.constraint is None for splittable, v in zip(found, variables)]


def _refuse_penalties(variables: Sequence[Variable]) -> None:
    penalized = [v.path for v in variables if getattr(v, "regularizer", None) and dtype_of(v).endswith("float16")]
    if penalized:
        raise ValueError(
            "With `shard_state=True`, `MixedPrecision` cannot compute the gradients of regularizers, because only one "
            f"rank has a variable's master weights. Received: regularizers of {penalized}. Use weight decay, or "
            "`shard_state=False`."
        )


def check_can_shard(optimizer: CrossShardProtocol) -> None:
    """Raise ValueError if an inner optimizer needs all gradients: with `shard_state`, it would receive only slices."""
    chain = descendants(optimizer)
    for one in chain:
        is_leaf = not isinstance(one, OptimizerWrapper) and getattr(one, "inner_optimizer", None) is None
        several = hasattr(one, "optimizers") and not isinstance(one, OptimizerWrapper)
        if several or not (is_leaf or getattr(one, "_shard_unit", None)):
            raise ValueError(
                "With `shard_state=True`, the optimizers inside receive only a part of the gradients, but "
                f"{type(one).__name__} needs all gradients. Received: inner_optimizer={optimizer.inner!r}. Use "
                "`shard_state=False`, or only this package's `GradientClipping`, `LARC`, `LossScaling` and "
                "`MixedPrecision` around one optimizer."
            )


def keep_exclusions(
    optimizer: CrossShardProtocol,
    variables: Sequence[Variable],
    inside_for: Callable[[Sequence[Variable]], list[Variable]],
) -> None:
    """If a variable is excluded from weight decay, exclude also the variable that inner optimizers update instead.

    `inside_for` returns the variables that inner optimizers update in place of its argument.
    """
    key = optimizer._var_key
    for leaf in base_optimizers(optimizer):
        excluded = getattr(leaf, "_exclude_from_weight_decay", None)
        if excluded:
            excluded |= {key(v) for v in inside_for([v for v in variables if leaf._var_key(v) in excluded])}
    own_keys = {key(variable) for variable in variables}
    for wrapper in descendants(optimizer):
        exclusions = getattr(wrapper, "_excluded", None)
        if exclusions is not None and exclusions[0] is not None:
            mine = inside_for([v for v in exclusions[0] if key(v) in own_keys])
            wrapper.exclude_from_weight_decay(var_list=mine, var_names=exclusions[1])


def holds_weights(optimizer: Optimizer, variables: Sequence[Variable]) -> bool:
    """Whether the optimizer computes its initial state from the weights."""
    run = _Run(
        optimizer, [[_Probe(v, i).whole] for i, v in enumerate(variables) if not overwrites_variable(v)], num_steps=0
    )
    return any(array.size > 1 and np.ptp(array) > 0 for array in run.state)


def first_state(optimizer: Optimizer, variables: Sequence[Variable], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the state that the optimizer would have after `build` if the variables had these values."""
    fresh = fresh_copy(optimizer)
    with empty_name_scope():
        fresh.build([_variable_with(variable, array) for variable, array in zip(variables, values)])
    return [ops.convert_to_numpy(v) for v in fresh.variables]


_ADVICE = (
    "Use `shard_state=False`, another optimizer, or this package's replacement: `GradientClipping(inner_optimizer, "
    "...)` for `global_clipnorm`, and `LossScaling` for `LossScaleOptimizer`."
)


def _rule(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"`shard_state=True` needs an optimizer that updates each variable independently, unlike this {name}."


class _Probe:
    """Small trial values and gradients for a variable, in three forms: whole, in two halves, and empty."""

    def __init__(self, variable: Variable, seed: int, part_rank: int = 1, scale: float = 1.0) -> None:
        rank = len(variable.shape)
        shape = (2, 3, 4, *[2] * (rank - 3))[:rank] if rank != 2 else (4, 6)
        shape = (24,) if rank == 1 else shape
        random = np.random.default_rng(seed)
        values = random.normal(size=shape).astype("float32")
        size = int(np.prod(shape))
        # Gradients are much larger in the second half, so statistics of a half differ from those of the whole.
        factors = np.where(np.arange(size) < size // 2, 1.0, 30.0).reshape(shape) * scale
        grads = [(random.normal(size=shape) * factors * s).astype("float32") for s in _SCALES]
        self.variable = variable
        self.path = full_name(variable)
        self.whole = (variable, values, grads)
        half = size // 2
        parts = [slice(0, half), slice(half, size)] if size > 1 else [slice(0, size)]
        shaped = (-1,) if part_rank == 1 else (2 if size > 1 else 1, -1)
        cuts = [[array.reshape(-1)[p].reshape(shaped) for array in (values, *grads)] for p in parts]
        self.halves = [(variable, first, rest) for first, *rest in cuts]
        nothing = np.zeros(empty_shape(shape), "float32")
        self.empty = (variable, nothing, [nothing] * len(grads))


def empty_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an empty variable with as many dimensions as `shape` (at least 1)."""
    return (0,) * max(1, len(shape))


class _Run:
    """A trial: trains small variables, each whole or as several `parts`, with a fresh optimizer. Records results."""

    def __init__(self, optimizer: Optimizer, parts: Sequence[Sequence[Any]], num_steps: int = len(_SCALES)) -> None:
        fresh = fresh_copy(optimizer, **VISIBLE)
        made = [[_variable_with(like, values) for like, values, _ in each] for each in parts]
        flat = [variable for each in made for variable in each]
        with empty_name_scope():
            fresh.build(flat)
        self._map_state(fresh, made, flat)
        # For each variable (an entry of `parts`): its updates in order, then its state after the last update.
        self.effects: list[list[np.ndarray]] = [[] for _ in parts]
        chosen = [i for i, variable in enumerate(flat) if 0 not in variable.shape]
        grads = [grads for each in parts for _, _, grads in each]
        for step in range(num_steps):
            before = [_joined(each) for each in made]
            fresh.apply([ops.convert_to_tensor(grads[i][step]) for i in chosen], [flat[i] for i in chosen])
            for effects, old, each in zip(self.effects, before, made):
                effects.append(_joined(each) - old)
        # Compare state too: updates hide differences if they use only signs, or are too small to change a weight.
        for effects, slots in zip(self.effects, self._slots):
            effects += [_joined_slot(parts) for parts in slots]
        self.state = [np.array(ops.convert_to_numpy(v), "float64") for v in fresh.variables]
        self.shared_state = [np.array(ops.convert_to_numpy(v), "float64") for v in self._shared]

    def _map_state(self, fresh: Any, made: Sequence[Sequence[Variable]], flat: Sequence[Variable]) -> None:
        """Find the state of each part of a variable, by the names of the state variables."""
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
        # For each variable, a list of its slots. A slot is a tuple: one state variable for each part of the variable.
        self._slots = [list(zip(*slots[start:stop])) for start, stop in ranges]
        self.slot_names = [each[0] for each in self.names_of_parts]
        self.slots_are_shaped = [all(shaped[start:stop]) for start, stop in ranges]


def _variable_with(like: Variable, values: np.ndarray) -> Variable:
    def initializer(shape: Any, dtype: Any = None) -> Any:
        return ops.reshape(ops.convert_to_tensor(values, dtype), shape)

    return named_like(like, initializer=initializer, shape=values.shape, dtype="float32")


# Options that make updates visible in a trial: a schedule may begin with a rate of 0, and accumulation delays updates.
VISIBLE = {"learning_rate": 0.05, "gradient_accumulation_steps": None}


def fresh_copy(optimizer: Optimizer, **changes: Any) -> Any:
    """Return an unbuilt copy of the optimizer, with these changes of its config."""
    kind: Any = type(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of learning rates that it cannot store
            config = optimizer.get_config()
        return kind.from_config({**config, **{key: value for key, value in changes.items() if key in config}})
    except Exception as error:  # users' `get_config` and `from_config` may raise anything
        raise ValueError(
            "`shard_state=True` tests a copy of the optimizer, so the optimizer must be creatable from its config. "
            f"Received: {kind.__name__}, whose config fails with {type(error).__name__}: {error}. Implement "
            "`get_config` and `from_config`, or use `shard_state=False`."
        ) from error


def _joined(parts: Sequence[Variable]) -> np.ndarray:
    return np.concatenate([np.array(ops.convert_to_numpy(part), "float64").reshape(-1) for part in parts])


def _joined_slot(parts: Sequence[Variable]) -> np.ndarray:
    # Scalar state is not divided. `unique` merges equal scalars of the parts into one, as a whole variable has.
    return np.unique(_joined(parts)) if not any(len(part.shape) for part in parts) else _joined(parts)


def _are_close(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    for one, other in zip(some, others):
        if one.size != other.size:
            return False
        size = max(float(np.max(np.abs(one), initial=0.0)), float(np.max(np.abs(other), initial=0.0)))
        difference = float(np.max(np.abs(one.reshape(-1) - other.reshape(-1)), initial=0.0))
        if not (difference <= _TOLERANCE * size or math.isnan(size)):
            return False
    return True

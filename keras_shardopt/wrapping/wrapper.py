"""A Keras optimizer around another one, with the interface and the files of the inner one.

Hides everything that Keras, its callbacks and its saving expect of an optimizer that stands in for another:
forwarding, building, stateless updates, files. A concrete wrapper fills in `transform_gradients` and the
constructor, and is never subclassed; to vary it, wrap it. What else this package asks of wrappers begins with an
underscore, so that their `help` shows what is for users.

Private names of Keras touched here (a test holds each of them):
    `Optimizer._variables`, `_untrack_variable` - the base class's own variables.
    `Optimizer._trainable_variables`, `_trainable_variables_indices`, `_var_key` - what the optimizer was built on.
    `Optimizer._iterations` - the update counter.
    `Optimizer._model_variables_moving_average` - the weights that `SwapEMAWeights` swaps in.
    `keras.src.trainers.trainer`, `keras.src.optimizers.multi_optimizer` - the modules that ask whether an optimizer is
        a `LossScaleOptimizer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_shardopt.arguments import with_article
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.gradient_scope import OUTSIDE, GradientScope
from keras_shardopt.backends.keras_callers import caller_module, running_instance
from keras_shardopt.backends.patches import install
from keras_shardopt.numerics import Gradients, Tensor, Variable
from keras_shardopt.wrapping.chain import (
    Wrapping,
    base_optimizers,
    descendants,
    get_optimizer,
    innermost,
    keys_on_the_way_in,
    refuse_local_gradients,
    scales_loss,
    shown,
)
from keras_shardopt.wrapping.rollback import Rollback, leaves_out_updates, note_assignments, rollback_of
from keras_shardopt.wrapping.slots import SlotAccess, empty_name_scope
from keras_shardopt.wrapping.stored_state import (
    DividedState,
    WrapperState,
    assign_all,
    load,
    load_what_came_before,
    named_store,
    portable,
)
from keras_shardopt.wrapping.trackable import InCheckpoints

if TYPE_CHECKING:
    from typing_extensions import Self

# Where gradients can be multiplied in the pass of an update.
_kernels = for_backend({"torch": "keras_shardopt.kernels.torch.fused"})

_ASK_FOR_LOSS_SCALING = ("keras.src.trainers.trainer", "keras.src.optimizers.multi_optimizer")


def _of_innermost(name: str, default: Any) -> property:
    """A property that reads and writes `name` of the innermost optimizer."""

    def read(self: OptimizerWrapper) -> Any:
        # The base class's constructor reads and writes these before there is an inner optimizer.
        return getattr(innermost(self), name, default) if self._inner else default

    def write(self: OptimizerWrapper, value: Any) -> None:
        if self._inner:
            # From wrapper to wrapper, so that each one sees what is set from outside.
            inner = self.inner
            setattr(inner if isinstance(inner, OptimizerWrapper) else innermost(inner), name, value)

    return property(read, write)


class OptimizerWrapper(SlotAccess, Wrapping, InCheckpoints, keras.optimizers.Optimizer):
    """Delegates to an inner optimizer, after giving a subclass the chance to change the gradients.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or a name or config that `keras.optimizers.get` accepts.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `inner_optimizer` is neither an optimizer, a name nor a config.
        ValueError: if `inner_optimizer` is a name or config that Keras does not know.
    """

    built: bool
    name: str
    _trainable_variables: list[Variable]

    _inner: tuple[Any, ...] = ()
    """The inner optimizer; empty while the base class is constructed."""

    _arguments: tuple[str, ...] = ()
    """The constructor's other arguments that files hold as they are, in attributes of the same names."""

    _scope: GradientScope = OUTSIDE
    """What is known of the gradients that come to it: of the `CrossShard` around it, which sets this."""

    @property
    def _saving_needs_all_replicas(self) -> bool:
        """Whether `save_own_variables` gathers what each replica holds a part of, so that all must enter it."""
        return False

    _iterations = _of_innermost("_iterations", None)
    use_ema = _of_innermost("use_ema", False)
    ema_momentum = _of_innermost("ema_momentum", 0.99)
    ema_overwrite_frequency = _of_innermost("ema_overwrite_frequency", None)
    gradient_accumulation_steps = _of_innermost("gradient_accumulation_steps", None)
    weight_decay = _of_innermost("weight_decay", None)
    clipnorm = _of_innermost("clipnorm", None)
    global_clipnorm = _of_innermost("global_clipnorm", None)
    clipvalue = _of_innermost("clipvalue", None)
    loss_scale_factor = _of_innermost("loss_scale_factor", None)

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner = get_optimizer(inner_optimizer, type(self).__name__)
        if self._needs_global_gradients:
            refuse_local_gradients(self, inner)
        self._init_around(inner, name)

    def _init_around(self, inner: Any, name: str | None) -> None:
        """The constructor of an optimizer around `inner`, which may be None if `self.inner` is overridden."""
        install("optimizers")
        super().__init__(learning_rate=0.0, name=name)
        # The base class's counter and rate would be saved and shown, and never change.
        for variable in list(self._variables):
            self._untrack_variable(variable)
        self._inner = (inner,)
        self._loaded = self._loaded_own = None  # what was loaded before it is built
        self._saved_apart = WrapperState(self)
        self._observer: Any = None  # a `summaries.observer.Observer`
        self._rollback: Rollback | None = None
        self._collects = False
        if any(map(leaves_out_updates, [self, *([] if inner is None else [inner, *descendants(inner)])])):
            note_assignments()  # from here on: the first forward pass comes before the first update

    # -- what a concrete wrapper fills in ------------------------------------------------------------------------

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """The gradients that the inner optimizer shall see.

        Args:
            grads: one tensor (on TensorFlow also `tf.IndexedSlices`) or None per variable.
            variables: the trainable variables of `grads`, in the same order.

        Returns:
            A list like `grads`.
        """
        del variables
        return grads

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Lets the inner optimizer update `variables` with gradients that are transformed already."""
        variables = self._variables_inside(variables)
        if self._observer is not None:
            self._observer.before_update(self, grads, variables)
        # Under JAX an `apply` that holds a condition (LossScaleOptimizer) assigns traced values to variables
        # from inside a branch, which JAX forbids. `stateless_apply` is written for it, for all variables at once.
        if runtime.updates_are_stateless and _same(variables, self.inner._trainable_variables):
            state = self.inner.variables
            new = self.inner.stateless_apply([v.value for v in state], grads, [v.value for v in variables])
            for variable, value in zip([*variables, *state], itertools.chain(*new)):
                variable.assign(value)
        else:
            self.inner.apply(grads, variables)

    def _hands_over(
        self, grads: Gradients, variables: Sequence[Variable], factors: Sequence[Tensor | None], divides: bool = False
    ) -> bool:
        """Whether the inner optimizer multiplies these gradients, of the update that comes, by scalars or None."""
        if _kernels is None or self._observer is not None:
            return False
        return bool(_kernels.hand_over(self.inner, grads, variables, factors, divides))

    def _inner_is_built(self) -> None:
        """Called once, by `build`, when there is all state and nothing has been loaded into it."""

    def _variables_inside(self, variables: Sequence[Variable]) -> list[Variable]:
        """What the inner optimizer updates in place of these variables; asked once before it is built."""
        return list(variables)

    def _own_slots(self) -> Iterator[tuple[Any, str, Variable]]:
        """Key of the trainable variable, name and state, for the state of its own that it keeps per variable."""
        return iter(())

    @property
    def _lasting_state(self) -> list[Variable]:
        """Which of the variables of its own go into files; it keeps those that a step leaves for the next ones."""
        return list(self._variables)

    @property
    def _replica_state(self) -> list[Variable]:
        """Which of the variables of its own hold another value on each replica."""
        return []

    def _on_outer_loss_scaling(self) -> None:
        """Called when a `keras.optimizers.LossScaleOptimizer` is put around this wrapper, or further out."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner._on_outer_loss_scaling()

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the inner optimizer's state for these trainable variables. Building again changes nothing."""
        if self.built:
            return
        variables = list(variables)
        if _is_in_loss_scaling("build"):  # where Keras' MultiOptimizer stands between it and us
            self._on_outer_loss_scaling()
        inside = self._variables_inside(variables)
        if self.inner.built and not _same(inside, self.inner._trainable_variables):
            raise ValueError(
                "An inner optimizer can be used for one model only. "
                f"Received: {with_article(self.inner)} that was built for other variables. Make a new one."
            )
        if not self.inner.built:
            # TensorFlow builds from inside `apply`, in a name scope of ours; paths must not depend on that.
            # Tracking stays on: Adafactor counts on it for variables that it does not use.
            with empty_name_scope():
                self.inner.build(inside)
        self._trainable_variables = variables
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        placement.place(self.variables, "replicated")
        self.built = True
        self._inner_is_built()
        self._rollback = rollback_of(self)
        load_what_came_before(self)
        self._restore_deferred()

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer."""
        # Not called `inner_optimizer`: Keras' callbacks would unwrap that one level, and miss the innermost.
        return self._inner[0]

    @property
    def variables(self) -> list[Variable]:
        """The state of the innermost optimizer, as without wrappers, then that of the wrappers around it."""
        if not self._inner:
            return self._variables[:]
        own = [v for wrapper in self._wrappers for v in wrapper._variables]
        # What an observer keeps for the time it watches is part of the state of a compiled step, but of no file.
        watched = [(w, w._observer) for w in self._wrappers if w._observer is not None]
        return [*self._inner_state, *own, *(v for wrapper, observer in watched for v in observer.variables_of(wrapper))]

    @property
    def _wrappers(self) -> list[OptimizerWrapper]:
        """This one and those that it is right around, from the inside out."""
        inner = self.inner
        return [*(inner._wrappers if isinstance(inner, OptimizerWrapper) else []), self]

    @property
    def _inner_state(self) -> list[Variable]:
        return list(self._wrappers[0].inner.variables)

    @property
    def _shared_variables(self) -> list[Variable]:
        """Those of `variables` that are equal on all replicas."""
        apart = {id(v) for o in [self, *descendants(self)] if isinstance(o, OptimizerWrapper) for v in o._replica_state}
        return [v for v in self.variables if id(v) not in apart]

    def _observe(self, observer: Any) -> None:
        """Lets `observer` see the gradients of each update as they arrive here and as they leave; None ends that.

        A compiled step must be compiled anew afterwards, because `variables` are more then, or fewer.
        """
        self._observer = observer

    def _position(self, variable: Variable) -> int:
        """The position of a trainable variable among those that the optimizer was built on."""
        found: int = self._trainable_variables_indices[self._var_key(variable)]
        return found

    # -- updating ------------------------------------------------------------------------------------------------

    @runtime.no_autograph
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """Updates the variables. See `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "`trainable_variables` must be given on the first call, or the optimizer built before. "
                    f"Call `{type(self).__name__}.build(trainable_variables)` first."
                )
            self.build(trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "`grads` must have one entry per trainable variable. "
                f"Received: {len(grads)} gradients for {len(variables)} variables."
            )
        self._check_variables_are_known(variables)
        if self._observer is not None:
            self._observer.before_transform(self, grads, variables)
        grads = list(self.transform_gradients(grads, variables))
        rollback = self._rollback
        if rollback is None:
            self.update_inner(grads, variables)
            return
        before = runtime.no_compile(rollback.begin, self)
        self.update_inner(grads, variables)
        runtime.no_compile(rollback.settle, self, before)

    @runtime.no_autograph
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Updates the variables of (gradient, variable) pairs. Returns the update counter."""
        grads, variables = zip(*grads_and_vars)
        self.apply(list(grads), list(variables))
        return self._iterations

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """See `keras.optimizers.Optimizer.scale_loss`."""
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """See `keras.optimizers.Optimizer.finalize_variable_values`."""
        self._finalize_inner(var_list)

    def _finalize_inner(self, variables: Sequence[Variable]) -> None:
        self.inner.finalize_variable_values(variables)
        if runtime.updates_are_stateless and self.use_ema:
            # Keras puts the arrays of the averages into the weights. A step gives up either, and then both are gone.
            for variable in variables:
                variable.assign(keras.ops.copy(variable.value))

    def exclude_from_weight_decay(
        self, var_list: Sequence[Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def _incoming_scale(self) -> Any:
        """By what the gradients that arrive here are too large, because the loss was scaled.

        1 unless `loss_scale_factor` is set or an inner optimizer scales the loss: those unscale further inside.
        """
        return self.inner.scale_loss(1.0)

    def _optimizers_with_slots(self) -> Sequence[Any]:
        return base_optimizers(self)

    def _slots(self) -> Iterator[tuple[Any, str, Variable]]:
        for wrapper in [self, *descendants(self)]:
            if isinstance(wrapper, OptimizerWrapper):
                yield from wrapper._own_slots()
        yield from super()._slots()

    def _slot_keys(self, variable: Variable) -> list[Any]:
        return keys_on_the_way_in(self, variable)

    # -- what callbacks read and write ---------------------------------------------------------------------------

    @property
    def iterations(self) -> keras.Variable:
        """The number of updates so far."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; it can be set."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    @property
    def loss_scale(self) -> keras.Variable | float:
        """By what the loss is multiplied now: a scalar variable or a number; 1.0 where nothing inside scales it."""
        inner = self.inner
        if isinstance(inner, OptimizerWrapper):
            return inner.loss_scale
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            return inner.dynamic_scale if inner.built else inner.initial_scale
        return 1.0 if inner.loss_scale_factor is None else inner.loss_scale_factor

    @property
    def skipped_steps(self) -> keras.Variable | int:
        """How many updates an overflow has prevented so far: a scalar variable, or 0 where nobody counts them."""
        return self.inner.skipped_steps if isinstance(self.inner, OptimizerWrapper) else 0

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers of an inner `keras.optimizers.MultiOptimizer`; an AttributeError where there is none."""
        several: list[keras.optimizers.Optimizer] = innermost(self).optimizers
        return several

    @property
    def _model_variables_moving_average(self) -> list[Variable]:
        averages: list[Variable] = innermost(self)._model_variables_moving_average
        return averages

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):  # what is state is added as such
            object.__setattr__(self, name, value)
            return
        # A LossScaleOptimizer assigns this to what it is put around, from its constructor, and `compile` calls that
        # constructor: there is no earlier moment. Not in the property's setter: on TensorFlow, Keras does not call
        # that where the old value is the new one.
        if name == "loss_scale_factor" and self._inner and _is_in_loss_scaling("__init__"):
            self._on_outer_loss_scaling()
        super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class, but a `LossScaleOptimizer`'s where Keras asks whether the loss is scaled already.

        Keras asks that of the outermost optimizer only: `compile` under the "mixed_float16" policy, which would else
        put one more `LossScaleOptimizer` around, and `MultiOptimizer`, which cannot hold one. (`isinstance` looks at
        the type first, and then at `__class__`.) Should Keras ask elsewhere one day, `_on_outer_loss_scaling` is
        called as usual, and refuses.
        """
        asks = caller_module() in _ASK_FOR_LOSS_SCALING and any(self._inner)
        is_scaled = asks and any(map(scales_loss, [self, *descendants(self)]))
        return keras.optimizers.LossScaleOptimizer if is_scaled else type(self)

    def __dir__(self) -> list[str]:
        # The saver walks what is listed here, and would store the inner optimizer's state once more.
        return [name for name in super().__dir__() if name not in ("inner", "optimizers") and name[:1] != "_"]

    # -- saving --------------------------------------------------------------------------------------------------

    @property
    def wrapper_state(self) -> Any:
        """What the wrappers keep themselves, for the saver: a group of its own, next to the inner optimizer's state.

        So a file of `Adam()` and one of a wrapper around it hold the same arrays under the same names, and each can
        read the other's. None where no wrapper keeps anything.
        """
        chain = [self, *descendants(self)]
        kept = any(isinstance(o, OptimizerWrapper) and o._keeps_state for o in chain)
        return self._saved_apart if kept else None

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns one array to each of `variables`."""
        if not self.built:
            raise ValueError(
                "The optimizer must be built before its weights can be set. "
                f"Call `{type(self).__name__}.build(trainable_variables)` first."
            )
        assign_all(self, {str(i): weight for i, weight in enumerate(weights)}, self.variables)

    def save_own_variables(self, store: Any) -> None:
        """Writes the state as the inner optimizer would without a wrapper, with its class and a name for each slot."""
        self.inner.save_own_variables(named_store(self, store))

    def load_own_variables(self, store: Any) -> None:
        """Reads a state that this wrapper, or its plain inner optimizer, has written.

        An optimizer that is not built yet is built for the model that is compiled with it, so that `iterations` and
        `learning_rate` can be read at once. Without such a model, with state of other variables, and on several
        processes of JAX or TensorFlow, the arrays are kept and assigned when training builds it. Where there are none,
        as in a file of a model that was not compiled, the optimizer stays as it is, with a warning, as in Keras.

        Raises:
            ValueError: if the number of the arrays or the shape of one does not fit; or its name, or the class of the
                innermost optimizer, which a wrapper notes in an HDF5 file. Numbers that Keras adds to names may
                differ. Nothing is assigned then.
        """
        load(self, store)
        if self.built:
            self._on_file(loads=True)

    @property
    def _divided_state(self) -> DividedState | None:
        """What knows the whole of the state, where each replica holds a part of it."""
        inner = self.inner
        return inner._divided_state if isinstance(inner, OptimizerWrapper) else None

    def _load_inner(self, store: Any) -> None:
        self.inner.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`. The inner optimizer is part of it."""
        return {
            "name": self.name,
            "inner_optimizer": portable(keras.saving.serialize_keras_object(self.inner)),
            **{name: getattr(self, name) for name in self._arguments},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """The reverse of `get_config`. `config` is left as it is."""
        config = dict(config)
        inner = portable(config.pop("inner_optimizer"))
        return cls(keras.saving.deserialize_keras_object(inner, custom_objects=custom_objects), **config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.inner)}{self._repr_arguments()})"

    def _repr_arguments(self) -> str:
        """The other constructor arguments, as `", key=value"`."""
        return "".join(f", {name}={getattr(self, name)!r}" for name in self._arguments)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


def _is_in_loss_scaling(method: str) -> bool:
    """Whether that method of a `keras.optimizers.LossScaleOptimizer` is running further out."""
    return running_instance(keras.optimizers.LossScaleOptimizer, method) is not None

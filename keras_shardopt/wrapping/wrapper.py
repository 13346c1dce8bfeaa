"""A Keras optimizer around another one, with the same interface and the same variables in saved files.

The base class handles all that Keras, callbacks and the saver expect: forwarding, build, stateless updates, saving. A
concrete wrapper overrides `transform_gradients` and the constructor. Do not subclass a concrete wrapper; put another
wrapper around it. Hooks for this package begin with an underscore, so `help` lists only members for users.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._variables`, `_untrack_variable` - the base class's own variables.
    `Optimizer._trainable_variables`, `_trainable_variables_indices`, `_var_key` - the variables of the build.
    `Optimizer._iterations` - the update counter.
    `keras.src.trainers.trainer`, `keras.src.optimizers.multi_optimizer` - the modules that check whether an optimizer
        is a `LossScaleOptimizer`.
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
from keras_shardopt.wrapping.attributes import InnerAttributes
from keras_shardopt.wrapping.chain import (
    Wrapping,
    base_optimizers,
    chain_of,
    get_optimizer,
    innermost,
    keys_of,
    refuse_local_gradients,
    scales_loss,
    shown,
)
from keras_shardopt.wrapping.configs import portable
from keras_shardopt.wrapping.rollback import Rollback, may_skip_updates, rollback_of, save_before_assignments
from keras_shardopt.wrapping.slots import SlotAccess, empty_name_scope
from keras_shardopt.wrapping.stored_state import (
    StoredState,
    WrapperState,
    assign_all,
    load,
    load_deferred,
    named_store,
    save_all,
)
from keras_shardopt.wrapping.trackable import InCheckpoints

if TYPE_CHECKING:
    from typing_extensions import Self

# PyTorch only (otherwise None): kernels that can scale gradients within the update.
_kernels = for_backend({"torch": "keras_shardopt.kernels.torch.fused"})

_CHECK_FOR_LOSS_SCALING = ("keras.src.trainers.trainer", "keras.src.optimizers.multi_optimizer")


class OptimizerWrapper(InnerAttributes, SlotAccess, Wrapping, InCheckpoints, keras.optimizers.Optimizer):
    """Delegates to an inner optimizer. A subclass may change the gradients first.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or a name or config for `keras.optimizers.get`.
        name: str or None. None derives the name from the class.

    Raises:
        TypeError: if `inner_optimizer` is neither an optimizer, a name nor a config.
        ValueError: if `inner_optimizer` is an unknown name or config.
    """

    built: bool
    name: str
    _trainable_variables: list[Variable]

    _inner: tuple[Any, ...] = ()
    """The inner optimizer, as a tuple; empty during the base class's constructor."""

    _arguments: tuple[str, ...] = ()
    """Attributes with the constructor arguments that `get_config` stores, except `inner_optimizer` and `name`."""

    _scope: GradientScope = OUTSIDE
    """Facts about incoming gradients, such as whether they are reduced. Set by the `CrossShard` around this wrapper."""

    @property
    def _saving_needs_all_replicas(self) -> bool:
        """Whether `save_own_variables` runs collectives, so all replicas must call it."""
        return False

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner = get_optimizer(inner_optimizer, type(self).__name__)
        if self._needs_global_gradients:
            refuse_local_gradients(self, inner)
        self._init_around(inner, name)

    def _init_around(self, inner: Any, name: str | None) -> None:
        """Construct an optimizer around `inner`. `inner` can be None if the subclass overrides the property `inner`."""
        install("optimizers")
        super().__init__(learning_rate=0.0, name=name)
        # Remove the base class's counter and learning rate: files would contain them, but they never change.
        for variable in list(self._variables):
            self._untrack_variable(variable)
        self._inner = (inner,)
        self._loaded = self._loaded_wrapper_state = None  # arrays loaded before the build
        self._saved_wrapper_state = WrapperState(self)
        self._observer: Any = None  # a `summaries.observer.Observer`
        self._rollback: Rollback | None = None
        self._collects = False
        if any(map(may_skip_updates, [self, *([] if inner is None else chain_of(inner))])):
            save_before_assignments()  # not in `build`, because the first forward pass may precede it

    # -- hooks of concrete wrappers ------------------------------------------------------------------------------

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Return the gradients for the inner optimizer.

        Args:
            grads: one tensor (on TensorFlow also `tf.IndexedSlices`) or None per variable.
            variables: the trainable variables of `grads`, in the same order.

        Returns:
            A list like `grads`.
        """
        del variables
        return grads

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Update `variables` through the inner optimizer, with transformed gradients."""
        variables = self._variables_inside(variables)
        if self._observer is not None:
            self._observer.before_update(self, grads, variables)
        # On JAX, a `LossScaleOptimizer` runs its update in a branch, and JAX forbids assigning traced values there.
        # `stateless_apply` returns the values instead, but needs all trainable variables at once.
        if runtime.updates_are_stateless and _same(variables, self.inner._trainable_variables):
            state = self.inner.variables
            new = self.inner.stateless_apply([v.value for v in state], grads, [v.value for v in variables])
            for variable, value in zip([*variables, *state], itertools.chain(*new)):
                variable.assign(value)
        else:
            self.inner.apply(grads, variables)

    def _delegates_factors(
        self, grads: Gradients, variables: Sequence[Variable], factors: Sequence[Tensor | None], divides: bool = False
    ) -> bool:
        """Make the next update multiply or divide gradients by `factors`. Return False if the caller must do this."""
        if _kernels is None or self._observer is not None:
            return False
        return bool(_kernels.hand_over(self.inner, grads, variables, factors, divides))

    def _inner_is_built(self) -> None:
        """Called once in `build`, after all state is created, and before arrays from a file are assigned."""

    def _variables_inside(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables that the inner optimizer updates in place of `variables`."""
        return list(variables)

    def _own_slots(self) -> Iterator[tuple[Any, str, Variable]]:
        """Yield (key of the variable, name, state variable) for the state that this wrapper adds per variable."""
        return iter(())

    @property
    def _saved_state(self) -> list[Variable]:
        """The wrapper's own variables that files contain. Other variables only pass values between steps."""
        return list(self._variables)

    @property
    def _replica_state(self) -> list[Variable]:
        """The wrapper's own variables with a different value on each replica."""
        return []

    def _on_outer_loss_scaling(self) -> None:
        """Called if a `keras.optimizers.LossScaleOptimizer` is around this wrapper, directly or further out."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner._on_outer_loss_scaling()

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the inner optimizer's state for these trainable variables. Repeated calls do nothing."""
        if self.built:
            return
        variables = list(variables)
        if _is_in_loss_scaling("build"):  # finds also a loss scaling around a `MultiOptimizer`
            self._on_outer_loss_scaling()
        inside = self._variables_inside(variables)
        if self.inner.built and not _same(inside, self.inner._trainable_variables):
            raise ValueError(
                f"An inner optimizer cannot be used for two models. Received: {with_article(self.inner)} that was "
                "built for other variables. Create a new optimizer."
            )
        if not self.inner.built:
            # TensorFlow builds inside `apply`, in a name scope that must not be part of variable paths.
            # Do not turn off Keras' attribute tracking, because it collects Adafactor's placeholder variables.
            with empty_name_scope():
                self.inner.build(inside)
        self._trainable_variables = variables
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        placement.place(self.variables, "replicated")
        self.built = True
        self._inner_is_built()
        self._rollback = rollback_of(self)
        load_deferred(self)
        self._restore_deferred()

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer."""
        # Do not rename this to `inner_optimizer`: Keras' callbacks would then unwrap just one level of wrappers.
        return self._inner[0]

    @property
    def variables(self) -> list[Variable]:
        """The state of the innermost optimizer, in its own order, then the state of the wrappers around it."""
        if not self._inner:
            return self._variables[:]
        own = [v for wrapper in self._wrappers for v in wrapper._variables]
        # A compiled step also needs the temporary variables of an observer. Files exclude them.
        watched = [(w, w._observer) for w in self._wrappers if w._observer is not None]
        return [*self._inner_state, *own, *(v for wrapper, observer in watched for v in observer.variables_of(wrapper))]

    @property
    def _wrappers(self) -> list[OptimizerWrapper]:
        """This wrapper and the wrappers nested directly inside it, from the innermost to the outermost."""
        inner = self.inner
        return [*(inner._wrappers if isinstance(inner, OptimizerWrapper) else []), self]

    @property
    def _inner_state(self) -> list[Variable]:
        return list(self._wrappers[0].inner.variables)

    @property
    def _shared_variables(self) -> list[Variable]:
        """The variables that are equal on all replicas."""
        differ = {id(v) for o in chain_of(self) if isinstance(o, OptimizerWrapper) for v in o._replica_state}
        return [v for v in self.variables if id(v) not in differ]

    def _observe(self, observer: Any) -> None:
        """Pass the gradients of each update to `observer`, before and after this wrapper changes them.

        After each call, compiled steps must be recompiled, because the number of the optimizer's `variables` changes.
        """
        self._observer = observer

    def _position(self, variable: Variable) -> int:
        """Return the index of a trainable variable in the list that `build` received."""
        found: int = self._trainable_variables_indices[self._var_key(variable)]
        return found

    # -- updating ------------------------------------------------------------------------------------------------

    @runtime.no_autograph
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """Update the variables. See `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The first `apply` needs `trainable_variables`, because the optimizer is not built. Pass the "
                    f"variables, or call `{type(self).__name__}.build(trainable_variables)` first."
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
        """Update the variables of (gradient, variable) pairs. Return the update counter."""
        grads, variables = zip(*grads_and_vars)
        self.apply(list(grads), list(variables))
        return self._iterations

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor by which the inner optimizer scales it."""
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Set the final values of weights after training, such as averages with `use_ema`."""
        self._finalize_inner(var_list)

    def _finalize_inner(self, variables: Sequence[Variable]) -> None:
        self.inner.finalize_variable_values(variables)
        if runtime.updates_are_stateless and self.use_ema:
            # Keras lets weights and averages share arrays. A compiled JAX step frees (donates) each array, so copy it.
            for variable in variables:
                variable.assign(keras.ops.copy(variable.value))

    def exclude_from_weight_decay(
        self, var_list: Sequence[Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the weight decay of the inner optimizer."""
        self.inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def _incoming_scale(self) -> Any:
        """Return the factor by which loss scaling has multiplied incoming gradients.

        The factor is 1 unless `loss_scale_factor` is set or an inner optimizer scales the loss and unscales the
        gradients.
        """
        return self.inner.scale_loss(1.0)

    def _optimizers_with_slots(self) -> Sequence[Any]:
        return base_optimizers(self)

    def _slots(self) -> Iterator[tuple[Any, str, Variable]]:
        for wrapper in chain_of(self):
            if isinstance(wrapper, OptimizerWrapper):
                yield from wrapper._own_slots()
        yield from super()._slots()

    def _slot_keys(self, variable: Variable) -> list[Any]:
        return keys_of(self, variable)

    # -- what Keras sees -----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):  # bypass Keras' tracking: state is added explicitly
            object.__setattr__(self, name, value)
            return
        # If `compile` creates a `LossScaleOptimizer` around this wrapper, its constructor assigns this attribute.
        # Detect that here, because no hook runs earlier. On TensorFlow, Keras skips assignments of an equal value, so
        # the property's setter does not always run.
        if name == "loss_scale_factor" and self._inner and _is_in_loss_scaling("__init__"):
            self._on_outer_loss_scaling()
        super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class. While Keras checks for loss scaling, `LossScaleOptimizer` if an optimizer inside scales the loss.

        Keras checks only the outermost optimizer. Without this property, `compile` would add another
        `LossScaleOptimizer` under the "mixed_float16" policy.
        """
        checks = caller_module() in _CHECK_FOR_LOSS_SCALING and any(self._inner)
        is_scaled = checks and any(map(scales_loss, chain_of(self)))
        return keras.optimizers.LossScaleOptimizer if is_scaled else type(self)

    def __dir__(self) -> list[str]:
        # Keras' saver stores the objects with these names. Hide the inner optimizers, or their state is stored twice.
        return [name for name in super().__dir__() if name not in ("inner", "optimizers") and name[:1] != "_"]

    # -- saving --------------------------------------------------------------------------------------------------

    @property
    def wrapper_state(self) -> Any:
        """The wrappers' own state, as an object with a separate group in files; None if no wrapper has state.

        The other groups are the same in files of `Adam()` and of a wrapper around it, so each can load the other's.
        """
        chain = chain_of(self)
        kept = any(isinstance(o, OptimizerWrapper) and o._keeps_state for o in chain)
        return self._saved_wrapper_state if kept else None

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assign one array to each of `variables`."""
        if not self.built:
            raise ValueError(
                "Cannot set weights because the optimizer is not built. "
                f"Call `{type(self).__name__}.build(trainable_variables)` first."
            )
        assign_all(self, {str(i): weight for i, weight in enumerate(weights)}, self.variables)

    def save_own_variables(self, store: Any) -> None:
        """Write the state in the layout without wrappers, with the innermost optimizer's class and a name per array."""
        store = named_store(self, store)
        is_whole = type(innermost(self)).save_own_variables is not keras.optimizers.Optimizer.save_own_variables
        if store.process_for is None or is_whole:
            self.inner.save_own_variables(store)
        else:
            save_all(self, store, self._inner_state)

    def load_own_variables(self, store: Any) -> None:
        """Load a state that this wrapper, or its plain inner optimizer, has saved.

        Before `build`, this method builds the optimizer for the model that was compiled with the optimizer. So
        `iterations` and `learning_rate` are readable at once. If no such model exists, the variables differ, or several
        processes of JAX or TensorFlow run, training builds the optimizer, and the arrays are kept until then. An empty
        state leads to a warning, as in Keras.

        Raises:
            ValueError: if the number of arrays or a shape differs. In an HDF5 file written by a wrapper, also if a name
                or the class of the innermost optimizer differs; numbers that Keras adds to names may differ. Nothing is
                assigned then.
        """
        load(self, store)
        if self.built:
            self._before_file_access(loads=True)

    @property
    def _stored_state(self) -> StoredState:
        """The object that reads and assigns the state of the inner optimizers for files."""
        inner = self.inner
        return inner._stored_state if isinstance(inner, OptimizerWrapper) else StoredState()

    def _load_inner(self, store: Any) -> None:
        self.inner.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, with the config of the inner optimizer."""
        return {
            "name": self.name,
            "inner_optimizer": portable(keras.saving.serialize_keras_object(self.inner)),
            **{name: getattr(self, name) for name in self._arguments},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create an optimizer from the result of `get_config`, without changing `config`."""
        config = dict(config)
        inner = portable(config.pop("inner_optimizer"))
        return cls(keras.saving.deserialize_keras_object(inner, custom_objects=custom_objects), **config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.inner)}{self._repr_arguments()})"

    def _repr_arguments(self) -> str:
        """Return the constructor arguments in `_arguments` as text, each as `", key=value"`."""
        return "".join(f", {name}={getattr(self, name)!r}" for name in self._arguments)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


def _is_in_loss_scaling(method: str) -> bool:
    """Whether this method of a `keras.optimizers.LossScaleOptimizer` is running, further up the stack."""
    return running_instance(keras.optimizers.LossScaleOptimizer, method) is not None

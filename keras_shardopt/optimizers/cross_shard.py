"""CrossShard: averages gradients over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.gradient_scope import GradientScope
from keras_shardopt.numerics import Gradients, Optimizer, Tensor, Variable
from keras_shardopt.optimizers.communication import ReportsCommunication
from keras_shardopt.optimizers.made import register_created
from keras_shardopt.optimizers.memory import ReportsMemory
from keras_shardopt.optimizers.nonfinite_report import ReportsNonFinite
from keras_shardopt.optimizers.one_replica import OneReplicaShortcut
from keras_shardopt.optimizers.two_phases import TwoPhases
from keras_shardopt.sharding.separability import check_can_shard
from keras_shardopt.sharding.sharded_optimizer import ShardedState
from keras_shardopt.update import stages_of
from keras_shardopt.update.accumulation import Accumulation, refuse_accumulation_inside
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import Extension, ExtensionStage
from keras_shardopt.update.gradient_state import GradientStateFinder, refuse_local_gradients_inside
from keras_shardopt.update.nonfinite import SkipNonFinite
from keras_shardopt.update.old_arguments import with_objects
from keras_shardopt.update.options import CrossShardOptions, HasOptions, LocalTransform
from keras_shardopt.update.peers import Peers
from keras_shardopt.update.pipeline import Pipeline
from keras_shardopt.update.reducers import Reducer, reducer_of
from keras_shardopt.update.step import Stage, Step
from keras_shardopt.update.torch_speed import TorchSpeed
from keras_shardopt.update.trainer_context import joins_uneven_inputs, row_share
from keras_shardopt.update.units import scaled_gradients
from keras_shardopt.wrapping.chain import base_optimizers, chain_of, descendants, skips_overflows
from keras_shardopt.wrapping.slots import empty_name_scope
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

if TYPE_CHECKING:
    from typing_extensions import Self


@keras.saving.register_keras_serializable(package="keras_shardopt")
class CrossShard(
    OneReplicaShortcut, TwoPhases, ReportsNonFinite, ReportsCommunication, ReportsMemory, ShardedState, HasOptions
):
    r"""Averages gradients over all replicas, once per update.

    With $N$ replicas and $g_r$ the gradient of replica $r$'s mean loss, the inner optimizer gets
    $\frac{1}{N} \sum_r g_r$ on each of them, or $\sum_r g_r$ with `reduction="sum"`. With one replica, updates are
    bitwise identical to the inner optimizer's (on PyTorch with `torch=TorchSpeed(fused=False)`).

    Replicas are the devices of the strategy that the model was built in (TensorFlow), of a `keras.distribution` or a
    mapped axis (JAX), or the ranks of `torch.distributed`. Ranks take rank 0's weights before the first update.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer` or a wrapper, or its name or config.
        reduction: "mean" (default) or "sum". TF1's "weighted_mean" and "weighted_sum" are synonyms.
        group_assignment: lists of replica ids, all of the same length, such as `[[0, 1], [2, 3]]`. Each group averages
            separately. None (default) is one group. See [groups](../reduction.md#mean-sum-groups).
        gradients: "auto" (default), "local", "prescaled", "summed" or "global": how far gradients are reduced when the
            optimizer receives them, if "auto" cannot detect it. See [who reduces gradients](../reduction.md).
        gradient_accumulation_steps: int >= 1 or None. Micro-batches per update. Only the last one communicates, and
            counters and schedules count updates. See [accumulation](../accumulation.md).
        replica_clipnorm: float > 0 or None. Maximum global norm of each replica's gradients of its own mean loss,
            before they are averaged. See [each replica's own gradients](../reduction.md#each-replicas-own-gradients).
        replica_transform: a function `(grads, variables) -> grads` or None, for each replica's own gradients, before
            `replica_clipnorm`. Entries may be None. Saving requires a function registered with Keras.
        on_nonfinite: "ignore" (default), "skip" or "raise": the treatment of an update if a gradient of any replica
            has NaN or infinity. See [NaN and infinity](../nonfinite.md).
        shard_state: bool, False by default. True divides the optimizer state among replicas (ZeRO stage 1). All
            processes must then save together. See [sharded state](../sharded_state.md).
        compression: None (default), "float16", "bfloat16", "int8", "int4", "powersgd" or an object of
            `keras_shardopt.compression`. See [fewer bytes](../compression.md).
        extensions: a list with at most one `LocalSGD` (see [local SGD](../local_sgd.md)), `VirtualReplicas` (see
            [reproducible results](../randomness.md)) and `ShardedWeights` (see [sharded state](../sharded_state.md)).
        torch: a `TorchSpeed` or None (default). Settings for PyTorch; see [speed](../torch_speed.md).
        stages: a list of `keras_shardopt.Stage` objects; gradients pass through them in this order. See
            [custom stages](../stages.md).
        axis_name: str, "batch" by default. JAX: the name of the mapped axis of the replicas.
        name: str or None (default: derived from the class name).
        **old: deprecated arguments, accepted for one more release. `TorchSpeed` and the extensions replace them.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument has an unknown value or contradicts another; on every process, when the
            optimizer is built or first used, if replicas do not support an option or train different models.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9))
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer.apply([keras.ops.convert_to_tensor([10.0, 10.0])], [weight])
        >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
        [0.0, 1.0]

    References:
        `tf.compat.v1.tpu.CrossShardOptimizer`. It scaled the loss by 1/N and summed gradients over TPU cores. It
        accepted a replica in two groups, an error here.
    """

    _makes_gradients_global = True

    def __init__(
        self,
        inner_optimizer: Any,
        reduction: Literal["mean", "sum", "weighted_mean", "weighted_sum"] = "mean",
        group_assignment: Sequence[Sequence[int]] | None = None,
        *,
        gradients: Literal["auto", "local", "prescaled", "summed", "global"] = "auto",
        gradient_accumulation_steps: int | None = None,
        replica_clipnorm: float | None = None,
        replica_transform: LocalTransform | None = None,
        on_nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
        shard_state: bool = False,
        compression: Any = None,
        extensions: Sequence[Extension] = (),
        torch: TorchSpeed | None = None,
        stages: Sequence[Stage] = (),
        axis_name: str = "batch",
        name: str | None = None,
        **old: Any,
    ) -> None:
        options = CrossShardOptions(
            reduction=reduction,
            group_assignment=group_assignment,
            gradients=gradients,
            gradient_accumulation_steps=gradient_accumulation_steps,
            replica_clipnorm=replica_clipnorm,
            replica_transform=replica_transform,
            on_nonfinite=on_nonfinite,
            shard_state=shard_state,
            compression=compression,
            stages=stages,
            axis_name=axis_name,
            **with_objects(extensions, torch, old),
        )
        self._options = options  # before Keras' constructor, because that reads some options
        self._may_skip_updates = on_nonfinite != "ignore"
        super().__init__(inner_optimizer, name=name)
        refuse_local_gradients_inside(self.inner)
        refuse_accumulation_inside(base_optimizers(self), options.gradient_accumulation_steps)
        self._inside = descendants(self)
        self._skips_inside = any(map(skips_overflows, self._inside))
        if self._skips_inside and on_nonfinite == "raise":
            raise ValueError(
                '`on_nonfinite="raise"` would end training at the first overflow, but a dynamic loss scaling inside '
                f"needs overflows to find its scale. Received: inner_optimizer={self.inner!r}. Leave out "
                '`on_nonfinite`: the loss scaling skips such updates. Or use "skip", which also reports the replica.'
            )
        self._scope = GradientScope()
        self.scope_inside = GradientScope(self._scope, None if self.group_assignment is None else axis_name)
        self.scope_inside.give_to(self._inside)
        if options.gives_slices:
            check_can_shard(self)
        self._computed = False
        self._context = StageContext(self)
        found = stages_of(options, self._context)
        self.accumulation = next((stage for stage in found if isinstance(stage, Accumulation)), None)
        self._nonfinite = next((stage for stage in found if isinstance(stage, SkipNonFinite)), None)
        self.extension_stages = [stage for stage in found if isinstance(stage, ExtensionStage)]
        self._keeps_state = any(extension.keeps_state for extension in self.extension_stages)
        self.state_finder = GradientStateFinder(options)
        reducers = [extension.reducer for extension in self.extension_stages if extension.reducer is not None]
        reducer: Reducer = reducers[0] if reducers else reducer_of(self._context, options, found)
        self.peers = Peers(self._context, reducer.members)
        self.pipeline = Pipeline(found, reducer, self._update, self.axis_name, self.state_finder.classify)
        register_created(self)

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """The number of micro-batches per update, as set here or in the innermost optimizer."""
        own: int | None = self._options.gradient_accumulation_steps
        return super().gradient_accumulation_steps if own is None else own

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: Any) -> None:
        own = self._options.gradient_accumulation_steps
        if own is None:
            OptimizerWrapper.gradient_accumulation_steps.__set__(self, value)
        elif value != own and "accumulation" in vars(self):  # Keras' constructor also sets this attribute
            raise ValueError(
                f"`gradient_accumulation_steps` of a `CrossShard` cannot be changed. Received: {value!r}, for "
                f"{self!r}. Create a new `CrossShard`."
            )

    # -- building and files --------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the variables of its `Stage` objects and of the inner optimizer for these trainable variables."""
        variables = list(variables)
        if not self.built:
            self.peers.before_build(variables)
            with empty_name_scope():
                self.pipeline.build(variables, self.add_variable)
            if self.shard_state and (shards := self._divided(variables)) is not None:
                self._shards = shards
                pipeline = self.pipeline
                pipeline.reducer = reducer_of(self._context, self._options, pipeline.stages, pipeline.transport, shards)
        super().build(variables)
        refuse_accumulation_inside(base_optimizers(self), self._options.gradient_accumulation_steps)

    @property
    def _saved_state(self) -> list[Variable]:
        """The variables that files store in addition to those of the inner optimizer, without accumulated gradients."""
        return [variable for extension in self.extension_stages for variable in extension.saved_variables]

    @property
    def _replica_state(self) -> list[Variable]:
        """The variables that differ between replicas: divided optimizer state, and those of some `Stage` objects."""
        return [*self.pipeline.replica_state, *super()._replica_state]

    @property
    def _shared_own_variables(self) -> list[Variable]:
        """This optimizer's own variables that are equal on all replicas."""
        per_replica = {id(v) for v in self._replica_state}
        return [v for v in self._variables if id(v) not in per_replica]

    def _before_file_access(self, loads: bool) -> None:
        super()._before_file_access(loads)
        if loads and self.built:
            self.pipeline.reset()  # discards an unfinished accumulation window
        else:
            self.pipeline.before_reading()

    # -- updating ------------------------------------------------------------------------------------------------

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Reduces gradients over replicas and updates variables. With accumulation, only in the last micro-batch."""
        if self._scope.is_reduced:
            step = self.pipeline.resumed.replace(grads=grads, variables=variables, is_reduced=True)
        else:
            weight = self.peers.ready(variables, runtime.communicator(self.axis_name))
            if self._computed:
                grads = scaled_gradients(grads, variables, self.loss_scale)
            step = Step(grads, variables, weight=weight, row_share=row_share())
        self.pipeline.run(step)

    def _update(self, step: Step) -> None:
        self.scope_inside.give_to(self._inside)  # again, in case another scope was assigned since the constructor
        with self.scope_inside.reduced():
            super().update_inner(step.grads, step.variables)

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """See `keras.optimizers.Optimizer.scale_loss`."""
        if self._computed:
            self._computed = False
        loss = super().scale_loss(loss)
        self.pipeline.reducer.watch(loss, row_share())
        return loss

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """See `keras.optimizers.Optimizer.finalize_variable_values`. Signals the end of training to other ranks."""
        started = self.peers.connected_ranks()
        if started is not None and not joins_uneven_inputs() and not self._scope.is_reduced:
            self.pipeline.reducer.finish(started)
        if runtime.updates_are_stateless:  # raise errors now, because compiled steps cannot
            self.check_finite()
        else:
            self.pipeline.before_reading()
        super().finalize_variable_values(var_list)

    def _written(self) -> list[Variable]:
        """All variables that an update reads or assigns."""
        per_replica = [variable for extension in self.extension_stages for variable in extension.replica_state]
        return [*self._trainable_variables, *self._shared_variables, *per_replica, *self.pipeline.carried]

    def _on_outer_loss_scaling(self) -> None:
        """Raises ValueError: a `LossScaleOptimizer` around `CrossShard` would check gradients of one replica only."""
        raise ValueError(
            "A `LossScaleOptimizer` must be inside `CrossShard`, not around it. A `LossScaleOptimizer` outside checks "
            "the gradients of one replica only, so replicas skip different steps, and then diverge or deadlock. Use "
            "`CrossShard(LossScaling(inner_optimizer))`, or `CrossShard(LossScaleOptimizer(inner_optimizer))`. Under "
            '"mixed_float16", use `model.compile(optimizer=CrossShard(LossScaling(inner_optimizer)))`.'
        )

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        return {**super().get_config(), **self._options.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Reverses `get_config`. Does not change `config`."""
        loaded: Any = super().from_config(CrossShardOptions.from_config(config, custom_objects, cls), custom_objects)
        loaded.peers.is_loaded = True
        return loaded

    def _repr_arguments(self) -> str:
        return self._options.shown()


def cross_shards_in(optimizer: Optimizer) -> list[CrossShard]:
    """Returns all `CrossShard` in a chain of wrappers, outermost first. Returns [] for None."""
    chain = [] if optimizer is None else chain_of(optimizer)
    return [part for part in chain if isinstance(part, CrossShard)]

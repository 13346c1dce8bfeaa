"""CrossShard: gradients inside it are global."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt._typing import Gradients, Tensor, Variable
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.compression import Compressed
from keras_shardopt.backends.gradient_scope import claim_reduction, reduction_is_claimed
from keras_shardopt.numerics import overwrites_variable
from keras_shardopt.optimizers.two_phases import TwoPhases
from keras_shardopt.sharding.sharded_optimizer import ShardedState
from keras_shardopt.sharding.slices import check_can_shard
from keras_shardopt.update.accumulation import Accumulators, checked_num_steps, refuse_accumulation_inside
from keras_shardopt.update.agreement import check_agreement, described, losses_that_add_up
from keras_shardopt.update.all_reduce import Reduction, global_gradients, join_uneven_inputs
from keras_shardopt.update.nonfinite import (
    UNKNOWN,
    all_reduce_and_check,
    fail_among_all,
    first_not_finite,
    judge,
    num_flags,
)
from keras_shardopt.update.options import check_groups, group_assignment_of
from keras_shardopt.update.replica_transform import LocalTransform, scaled_gradients, transformed_gradients
from keras_shardopt.update.row_weights import weighted_gradients
from keras_shardopt.update.trainer_context import current_share, joins_uneven_inputs
from keras_shardopt.wrapping.chain import base_optimizers, children, descendants, innermost
from keras_shardopt.wrapping.rollback import note_assignments
from keras_shardopt.wrapping.wrapper import OptimizerWrapper, empty_name_scope

_SUMMED_ADVICE = "Use `shard_map(..., check_vma=False)`, or `jax.lax.pcast(w, axis_name, to='varying')` on weights."
_GLOBAL_ADVICE = (
    "Call `keras_shardopt.prepare(model)` after `compile` and before `fit`; in a loop of your own use "
    "`jax.shard_map(..., check_vma=False)` or `jax.pmap` on JAX, and no `DistributedDataParallel` on PyTorch."
)

_DIVIDED_BEFORE = (
    "All losses that an optimizer trains with must be divided by the number of replicas, or none. Received: a step in "
    "which nothing was seen to divide, after one that did divide. It counts as divided, too, because a `tf.function` "
    'that was traced before does not show. Use `CrossShard(..., gradients="prescaled")` if it is, and an optimizer of '
    'its own, with `gradients="local"`, for a loss that is the mean over the rows of one replica.'
)

_BUCKET_MIB = 25.0

_RAISES = 'With `on_nonfinite="raise"` all gradients must be finite.'

# The names of `tf.compat.v1.losses.Reduction`, which CrossShardOptimizer took, mean the same here.
_REDUCTIONS: dict[str, Reduction] = {"mean": "mean", "sum": "sum", "weighted_mean": "mean", "weighted_sum": "sum"}


@keras.saving.register_keras_serializable(package="keras_shardopt")
class CrossShard(TwoPhases, ShardedState):
    r"""Reduces the gradients of all replicas once, then lets the inner optimizer update.

    With $N$ replicas and $g_r$ the gradient of the mean loss of replica $r$, the inner optimizer sees
    $\frac{1}{N} \sum_r g_r$ (`reduction="mean"`) or $\sum_r g_r$ (`reduction="sum"`) on every replica. Whatever
    looks at gradients inside it (clipping, finite checks, norms) therefore sees what one process with the whole
    batch would see. With one replica the inner optimizer runs unchanged, bit for bit (on PyTorch with `fused=False`).

    Where the replicas are depends on the backend that runs Keras:

    - TensorFlow: the devices of the `tf.distribute` strategy whose scope the model was built in.
    - JAX: the axis `axis_name` inside `shard_map` or `pmap`; under a `keras.distribution` (as in `model.fit`) XLA
      has reduced the gradients before the optimizer sees them, and nothing is reduced again.
    - PyTorch: the ranks of the default process group of `torch.distributed`. Before the first update all ranks take
      rank 0's weights, optimizer state and seed state.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or the name or config of one. It may be a
            `MultiOptimizer`, a `LossScaleOptimizer` or another wrapper.
        reduction: "mean" (default) or "sum"; "weighted_mean" and "weighted_sum", TF1's names, mean the same.
        group_assignment: list of lists of replica ids, such as `[[0, 1], [2, 3]]`, or None for all in one group. Each
            id from 0 to N - 1 stands once, and groups are equally large. Gradients are reduced within the group, so
            the weights of groups drift apart: on TensorFlow each device keeps its own copy (a file holds replica
            0's), on PyTorch each rank (which start with the weights of the first rank of their group). On JAX it
            works inside `shard_map` and `pmap`, where weights and state have a leading axis of replicas; `model.fit`
            holds one copy for all, and is refused.
        gradients: how the gradients arrive, where that cannot be known. "auto" (default) finds it; see the table.

            | value | a replica's gradient is | true of |
            |---|---|---|
            | "local" | that of its own mean loss | PyTorch; JAX `pmap`, `shard_map(check_vma=False)`; a TensorFlow loop with a loss that is not divided by the number of replicas |
            | "prescaled" | that, divided by the number of replicas | TensorFlow `fit` and `keras.losses` under a strategy |
            | "summed" | the sum over replicas | JAX `shard_map(check_vma=True)` |
            | "global" | the mean over replicas | JAX under a `keras.distribution`; PyTorch where DDP owns the weights |

            Under a TensorFlow strategy "auto" is "prescaled" where the step is seen to divide a loss: with a loss of
            Keras, `tf.nn.compute_average_loss`, or the strategy's number of replicas. Else it is "local", as for a bare
            mean and a loss function that returns a scalar. A custom training loop that divides unseen, by a number made
            elsewhere, must say "prescaled"; a warning says so.
        gradient_accumulation_steps: int >= 1 or None. With $k$, only each $k$-th call of `apply` (micro-step) updates,
            with the mean of the $k$ gradients: the update of a batch that is $k$ times as large. Each replica adds up
            its own gradients, and nothing is communicated in between. `iterations`, schedules, bias correction, decay
            and moving averages count updates; clipping, `replica_clipnorm` and `replica_transform` see the mean of
            the window. Of micro-steps with unequal numbers of rows it is the mean of their means. Under JAX's `fit`
            with several replicas that takes `keras_shardopt.prepare(model)`, after `compile`, with this optimizer
            outermost and Keras' own `train_step`; without it updates are right, but each micro-step communicates, and
            a warning says so. Files hold nothing of a window, so that they fit any $k$ and number of replicas: a
            loaded optimizer starts a new one. Each replica keeps one more copy of the gradients. On TensorFlow sums of
            an `Embedding`'s gradients are dense, so Adam squares them as on the other backends; without accumulation
            Keras squares the gradients of a row that comes twice in a batch one by one.
        on_nonfinite: what happens where a reduced gradient is NaN or infinite, because one of any replica was, in any
            micro-step of the window. "ignore" (default) updates all the same, as Keras does. "skip" leaves out the
            update on all replicas: weights, slots and `iterations` stay, moving statistics and seeds go back to what
            they were before (except in a custom training loop on JAX), `skipped_steps` counts it, `last_nonfinite`
            tells who it was, and the next window starts clean. "raise" does that, and ends training on all replicas
            with a `FloatingPointError`: at once on PyTorch and in eager steps; with
            `tf.errors.InvalidArgumentError` in a `tf.function`; on JAX (and on TensorFlow with `jit_compile=True`)
            after the batch with `callbacks.StopOnNonFinite()`, else on JAX when `fit` ends. What replicas tell each
            other travels in the reduction that there is (with groups, in one more). A dynamic loss scaling inside
            decides by itself, and "skip" then only adds `last_nonfinite`. PyTorch reads one number per update.
        replica_clipnorm: float > 0 or None. Each replica's own gradient $g_r$ becomes
            $g_r \min(1, c / \lVert g_r \rVert)$ before it is reduced, with the norm over all variables together, so
            that one replica's explosion cannot shrink the others. In units of the replica's mean loss on every
            backend, also where a loss is divided by N or scaled inside. A lone replica is clipped as well. Under
            JAX's `fit` with several replicas it needs `keras_shardopt.prepare(model)`.
        replica_transform: a function `(grads, variables) -> grads` or None. As `replica_clipnorm`, with a rule of
            your own; it comes before that. It gets lists (entries may be None; float16 comes as float32), and
            returns a list with gradients of the same shapes. Where it makes or drops a gradient, it must do so on all
            replicas. To be saved it must be registered with `keras.saving.register_keras_serializable`.
        shard_state: bool. Whether each replica keeps its part of the optimizer state only, and updates its part of the
            weights, which then go to all (ZeRO-1). Updates are the same, bit for bit where the arithmetic is
            element-wise (on PyTorch with `fused=False`: kernels round the ends of arrays another way); files are the
            same, and fit any number of replicas. On PyTorch what a rank owns is cut out of all variables at equal
            places if the inner optimizer allows, which is tried out when it is built; variables that it must see whole
            (Lamb, Muon's matrices, `clipnorm`, constraints) go to one rank each. Saving is then a call of all ranks
            together. Under JAX's `keras.distribution` each state array is laid out along a dimension that the number of
            replicas divides. Under TensorFlow's `MirroredStrategy` each variable is cut into slices of one length, the
            last ones filled up with zeros; gradients are all-reduced as ever (there is no reduce-scatter), and weights
            gathered, which is 1.5 times the bytes of one all-reduce. There each replica keeps one more copy of its
            slices of the weights, sums of an `Embedding`'s gradients are dense, as with accumulation, and an optimizer
            that must see a variable whole (or is Ftrl, whose last digits are too noisy) is refused when it is built.
            `memory_report()` tells what each replica holds. Not under TensorFlow's other strategies, not inside
            `shard_map` and `pmap`, and not on a mesh of JAX's own without an active `keras.distribution`.
        compression: None (default), "float16" or "bfloat16". The dtype in which float32 and float64 gradients are sent
            and added up, with half the bytes; each is divided by the number of replicas $N$ first. The mean is off by
            at most $(N + 1) u$ times the mean of the $\lvert g_r \rvert$, with $u = 2^{-8}$ for "bfloat16" and
            $2^{-11}$ for "float16". In "float16" what is below $6 \cdot 10^{-8} N$ becomes 0, and what is above 65504
            $N$ infinite, which `on_nonfinite` and loss scalings notice. Where gradients are global before the optimizer
            sees them it is refused; under JAX's `fit` with several replicas it needs `keras_shardopt.prepare(model)`. A
            lone replica sends nothing.
        fused: "auto" (default) or False. On PyTorch, "auto" runs the updates of Keras' `Adam`, `AdamW`, `SGD` and
            `Adagrad` in one pass over memory (for `Adam` PyTorch's fused kernel), with Keras' formulas, variables and
            files, where weights are float32 or float64: some 13 times as fast on a CPU. Weights differ from those of
            Keras' own arithmetic in the last digits (within 1e-6 of their largest movement after 100 updates). False
            keeps that arithmetic, bit for bit. Other optimizers and backends do not care.
        overlap: "auto" (default) or False. On PyTorch, "auto" sends gradients while the backward pass computes others,
            where `fit` runs Keras' own `train_step`, and finishes inside the backward pass: `.grad` of the weights is
            then global. What cannot be sent early is sent in the same buckets when gradients reach the optimizer: in
            loops of your own, with `jit_compile=True`, in the first step. With micro-steps, `shard_state`,
            `on_nonfinite`, `group_assignment`, `replica_clipnorm` and `replica_transform`, and where DDP owns the
            weights, gradients travel as with False: all after the backward pass. Results are the same, up to the order
            of sums of more than two ranks. The buckets stay, as one more copy of the gradients, and the next step
            overwrites what `.grad` was. Other backends do not care.
        bucket_mib: float > 0. How many MiB of gradients PyTorch sends at a time with `overlap="auto"`, 25 by default;
            less where all gradients are less than 100 MiB, so that there is something to send early.
        axis_name: str. The name of the mapped axis over which JAX replicas are laid out.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `inner_optimizer` is neither an optimizer, a name nor a config; if `replica_clipnorm` or
            `bucket_mib` is not a number, `gradient_accumulation_steps` not an int, or `replica_transform` not a
            function.
        ValueError: if `reduction`, `gradients`, `on_nonfinite`, `compression`, `fused` or `overlap` is unknown; if
            `gradient_accumulation_steps` is less than 1, or an optimizer inside accumulates, too; if `on_nonfinite` is
            "raise" around a dynamic loss scaling; if `group_assignment` breaks one of its rules, or (on first use)
            names other replicas than there are; if `replica_clipnorm` is not > 0; if a `LossScaleOptimizer` is put
            around this optimizer, also by `compile` under the "mixed_float16" policy if nothing inside scales the loss;
            if `shard_state` comes with `group_assignment`. When it is built: if `shard_state` meets an optimizer that
            would be wrong with a part of the gradients, or is inside a `MultiOptimizer`; on TensorFlow also one that
            must see variables whole, or a strategy other than `MirroredStrategy`.
            At the first step: if each replica's own gradients are needed where they are reduced already;
            on every process, if processes differ in their variables, layers, losses, optimizers, arguments or versions.
            Later, on every rank of PyTorch: if some have frozen other layers than others.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9))
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer.apply([keras.ops.convert_to_tensor([10.0, 10.0])], [weight])
        >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
        [0.0, 1.0]

        Two micro-steps are one update:

        >>> optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2, on_nonfinite="skip")
        >>> for grad in (1.0, 3.0, float("nan"), 1.0):
        ...     optimizer.apply([keras.ops.convert_to_tensor([grad, grad])], [weight])
        >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
        [-2.0, -1.0]
        >>> int(optimizer.iterations), int(optimizer.skipped_steps), optimizer.last_nonfinite[0]
        (1, 1, 0)

    References:
        `tf.compat.v1.tpu.CrossShardOptimizer`, which scaled the loss by 1/N and summed gradients over TPU cores.
        Here the gradient is averaged instead, so `reduction` means the same wherever gradients are reduced. There a
        replica named twice in `group_assignment` passed, and clipping between `compute_gradients` and
        `apply_gradients` saw gradients that were divided by N.
    """

    _makes_gradients_global = True
    _accumulators: Accumulators  # None where it does not accumulate
    _skipped: Variable
    _nonfinite_source: Variable | None
    _num_reported: int
    _skips_inside: bool

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
        compression: Literal["float16", "bfloat16"] | None = None,
        fused: Literal["auto", False] = "auto",
        overlap: Literal["auto", False] = "auto",
        bucket_mib: float = _BUCKET_MIB,
        axis_name: str = "batch",
        name: str | None = None,
    ) -> None:
        if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
            raise ValueError(
                f'`reduction` must be "mean" or "sum" (or "weighted_mean", "weighted_sum"). '
                f"Received: reduction={reduction!r}"
            )
        arrivals = {"auto": None, **{gradient_state.value: gradient_state for gradient_state in GradientState}}
        if not isinstance(gradients, str) or gradients not in arrivals:
            raise ValueError(f"`gradients` must be one of {list(arrivals)}. Received: gradients={gradients!r}")
        if not isinstance(on_nonfinite, str) or on_nonfinite not in ("ignore", "skip", "raise"):
            raise ValueError(
                f'`on_nonfinite` must be "ignore", "skip" or "raise". Received: on_nonfinite={on_nonfinite!r}'
            )
        if compression is not None and not (isinstance(compression, str) and compression in ("float16", "bfloat16")):
            raise ValueError(
                f'`compression` must be None, "float16" or "bfloat16". Received: compression={compression!r}'
            )
        for argument, value in (("fused", fused), ("overlap", overlap)):
            if value is not False and not (isinstance(value, str) and value == "auto"):
                raise ValueError(f'`{argument}` must be "auto" or False. Received: {argument}={value!r}')
        check.real("bucket_mib", bucket_mib, above=0, fix="The default is 25.")
        if not isinstance(axis_name, str):
            raise TypeError(f"`axis_name` must be a str. Received: axis_name={axis_name!r}")
        _check_clipnorm(replica_clipnorm)
        if replica_transform is not None and not callable(replica_transform):
            raise TypeError(
                "`replica_transform` must be a function `(grads, variables) -> grads`, or None. "
                f"Received: replica_transform={replica_transform!r}"
            )
        groups = group_assignment_of(group_assignment)
        num_steps = checked_num_steps(gradient_accumulation_steps)
        check.flag("shard_state", shard_state)
        if shard_state and groups is not None:
            raise ValueError(
                "`shard_state=True` divides one state, and with `group_assignment` each group has its own. "
                f"Received: group_assignment={group_assignment!r}. Leave one of them out."
            )
        super().__init__(inner_optimizer, name=name)
        _refuse_inside(self.inner)
        if num_steps is not None:
            refuse_accumulation_inside(base_optimizers(self), num_steps)
        skips_inside = any(_skips_overflows(optimizer) for optimizer in descendants(self))
        if skips_inside and on_nonfinite == "raise":
            raise ValueError(
                '`on_nonfinite="raise"` would end training at the first overflow, which is how a dynamic loss scaling '
                f"inside finds its scale. Received: inner_optimizer={self.inner!r}. Leave `on_nonfinite` out: the loss "
                'scaling skips such updates. With `on_nonfinite="skip"` the nonfinite_source can be read, too.'
            )
        self.reduction = _REDUCTIONS[reduction]
        self.on_nonfinite = on_nonfinite
        self.shard_state = shard_state
        self.compression = compression
        self.fused = fused
        self.overlap = overlap
        self.bucket_mib = float(bucket_mib)
        self.__dict__["_shards"] = None
        if shard_state and not placement.lays_out_state:
            check_can_shard(self)
        self.gradients = gradients
        self.axis_name = axis_name
        self.replica_clipnorm = None if replica_clipnorm is None else float(replica_clipnorm)
        # Past Keras' tracking, which would turn lists into lists of its own.
        self.__dict__["group_assignment"] = groups
        self.__dict__["replica_transform"] = replica_transform
        self.__dict__["_gradient_state"] = arrivals[gradients]
        # How gradients arrived last, and what was said about that.
        self.__dict__["_last_arrival"] = None
        self.__dict__["_doubts"] = set()
        self.__dict__["_num_steps"] = num_steps
        # Now, as Keras makes its own counters, so that they can be read before `build`.
        self.__dict__["_skipped"] = self.__dict__["_nonfinite_source"] = None
        self.__dict__["_found_inf"] = None
        self.__dict__["_num_reported"] = 0
        self.__dict__["_skips_inside"] = skips_inside
        if on_nonfinite != "ignore":
            self.__dict__["_skipped"] = self.add_variable((), "zeros", dtype="int", name="skipped_steps")
            unknown = keras.initializers.Constant(UNKNOWN)
            self.__dict__["_nonfinite_source"] = self.add_variable((2,), unknown, dtype="int32", name="last_nonfinite")
            note_assignments()
        # Past Keras' tracking: what it holds is added to the state by `build`.
        self.__dict__["_accumulators"] = None
        if num_steps is not None and num_steps > 1:
            self.__dict__["_accumulators"] = Accumulators(num_steps, self._looks_at_own_gradients)
        # Whether `compute_gradients`, and not the caller, has last scaled a loss: then gradients come unscaled.
        self.__dict__["_computed"] = False
        # The torch ranks that this optimizer has started together with.
        self.__dict__["_peers"] = None
        # What reduces gradients while they are computed, and among which ranks.
        self.__dict__["_buckets"] = self.__dict__["_bucketed"] = None
        self.__dict__["_warned"] = False
        # What it was built as, in words, and whether all processes have found that they have the same.
        self.__dict__["_described"] = None
        self.__dict__["_agrees"] = False
        self.__dict__["_num_replicas_when_made"] = processes.num_replicas_of_scope()
        processes.register(self)

    @property
    def _leaves_out_updates(self) -> bool:  # type: ignore[override]
        return self.on_nonfinite != "ignore"

    @property
    def _needs_local_gradients(self) -> bool:
        """Whether it does something that needs each replica's own gradients, before they are reduced."""
        return self._looks_at_own_gradients or self.group_assignment is not None or self.compression is not None

    @property
    def _looks_at_own_gradients(self) -> bool:
        return self.replica_clipnorm is not None or self.replica_transform is not None

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """How many micro-steps make an update; of the innermost optimizer where this one does not accumulate."""
        steps: int | None = self.__dict__.get("_num_steps")
        return super().gradient_accumulation_steps if steps is None else steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: Any) -> None:
        if self.__dict__.get("_num_steps") is None:
            OptimizerWrapper.gradient_accumulation_steps.__set__(self, value)
        elif value != self.__dict__["_num_steps"]:
            raise ValueError(
                "`gradient_accumulation_steps` of a `CrossShard` cannot be changed. "
                f"Received: {value!r}, for {self!r}. Make a new one."
            )

    @property
    def _accumulates(self) -> bool:
        """Whether it updates only once in several calls of `apply`."""
        return self.__dict__.get("_accumulators") is not None

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Variable]) -> None:
        """See `OptimizerWrapper.build`."""
        variables = list(variables)
        if not self.built:
            placement.check_scope(variables, self.__dict__["_num_replicas_when_made"], self)
            processes.draw_apart(variables)
        if not self.built and processes.process()[0] > 1:
            # Not later: callbacks change the rate, and a step that is being traced cannot read it.
            self.__dict__["_described"] = described(self, variables)
            if processes.creates_variables_collectively():
                self._compare_with_peers()
        if self._accumulates and not self.built and not self._accumulators.is_built:
            with empty_name_scope():
                self._accumulators.build(variables, self.add_variable)
            if self.__dict__.get("_stacks"):
                self._stack_accumulators()
        if self.shard_state and not self.built:
            self.__dict__["_shards"] = self._divided(variables)
        super().build(variables)
        if self.__dict__["_num_steps"] is not None:
            refuse_accumulation_inside(base_optimizers(self), self.__dict__["_num_steps"])

    def _stack_accumulators(self) -> None:
        """From now on gradients come stacked: those of all replicas along a first dimension, which a step has made."""
        self.__dict__["_stacks"] = True
        accumulators = self._accumulators
        if accumulators.is_built and accumulators.stacked_along is None:
            accumulators.restart()
            accumulators.stacked_along = placement.stack(accumulators.of_this_replica)

    @property
    def _is_stacked(self) -> bool:
        """Whether gradients come stacked."""
        return self._accumulates and self._accumulators.stacked_along is not None

    @property
    def _lasting_state(self) -> list[Variable]:
        """None of its own variables: a file that is written within a window does not hold what there is of it."""
        return []

    @property
    def _replica_state(self) -> list[Variable]:
        """The sums of gradients, what else is kept for a window, and state that is divided."""
        window = self._accumulators if self._accumulates and self._accumulators.is_built else None
        sums = [] if window is None else [*window.of_this_replica, *window.snapshots]
        shards = self.__dict__.get("_shards")
        return sums if shards is None else [*sums, *[v for v in self.inner.variables if shards.is_divided(v)]]

    @property
    def _shared_own_variables(self) -> list[Variable]:
        """Those that it keeps itself and that are equal on all replicas."""
        apart = {id(v) for v in self._replica_state}
        return [v for v in self._variables if id(v) not in apart]

    # -- files ---------------------------------------------------------------------------------------------------

    def load_own_variables(self, store: Any) -> None:
        """See `OptimizerWrapper.load_own_variables`. A window of micro-steps starts anew."""
        super().load_own_variables(store)
        self._restart_window()

    def _restart_window(self) -> None:
        """Forgets the micro-steps since the last update: the next one is the first of its window."""
        if self._accumulates and self._accumulators.is_built:
            self._accumulators.restart()

    @property
    def _is_within_window(self) -> bool:
        """Whether there were micro-steps since the last update. Reading it waits for the devices."""
        return self._accumulates and self._accumulators.is_built and self._accumulators.num_taken > 0

    # -- gradients that are not finite ---------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> Any:
        """How many updates were left out because a gradient was not finite: a scalar variable, or 0."""
        return super().skipped_steps if self._skipped is None or self._skips_inside else self._skipped

    @property
    def last_nonfinite(self) -> tuple[int | None, str | None] | None:
        """Whose gradient was not finite last, and the path of the (first) variable that it was of.

        None where all have been finite so far, and with `on_nonfinite="ignore"`. The replica is None where gradients
        are reduced before the optimizer sees them. Reading it waits for the devices.
        """
        if self._nonfinite_source is None:
            return None
        replica, position = (int(i) for i in ops.convert_to_numpy(self._nonfinite_source))
        if position == UNKNOWN:
            return None
        return (None if replica == UNKNOWN else replica), self._names()[position]

    def check_finite(self, from_now: bool = False) -> None:
        """Raises if an update was left out since the last call. Compiled steps on JAX cannot raise by themselves.

        With `from_now` it never raises: what was left out before does not count for later calls.

        Raises:
            FloatingPointError: with the names of the replica and the variable; with `on_nonfinite="raise"` only.
        """
        if self.on_nonfinite == "raise":
            num_skipped = int(ops.convert_to_numpy(self._skipped))
            is_new, self.__dict__["_num_reported"] = num_skipped > self._num_reported, num_skipped
            runtime.raise_if(
                is_new and not from_now, ops.convert_to_numpy(self._nonfinite_source), self._names(), _RAISES
            )

    def _names(self) -> list[str]:
        return [getattr(v, "path", str(v)) for v in self._trainable_variables]

    @runtime.no_autograph
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """See `OptimizerWrapper.apply`.

        Raises:
            FloatingPointError: with `on_nonfinite="raise"`, where a gradient is not finite.
        """
        if self.on_nonfinite == "raise":
            before = ops.copy(ops.convert_to_tensor(self._skipped))
            super().apply(grads, trainable_variables)
            runtime.no_compile(self._stop_if_skipped, before)
        else:
            super().apply(grads, trainable_variables)

    def _stop_if_skipped(self, before: Tensor) -> None:
        # Read when the update is over, or TensorFlow might stop in the middle of it.
        is_new = ops.convert_to_tensor(self._skipped) > before
        rollback = self.__dict__["_rollback"]
        put_back = () if rollback is None else rollback.variables
        runtime.raise_if(is_new, ops.convert_to_tensor(self._nonfinite_source), self._names(), _RAISES, put_back)

    # -- updating ------------------------------------------------------------------------------------------------

    def _check_peers(self, replicas: Communicator | None = None) -> None:
        """Makes sure, once, that the processes train the same with the same optimizer. All must call it together.

        Raises:
            ValueError: on every process, if they do not. It names what differs.
        """
        replicas = runtime.communicator(self.axis_name) if replicas is None else replicas
        if self.__dict__["_agrees"] or not replicas.is_multi_process:
            return
        if self.__dict__["_described"] is None:
            if not self.built:
                return
            self.__dict__["_described"] = described(self, self._trainable_variables)
        runtime.no_compile(self._compare_with_peers, replicas)

    def _compare_with_peers(self, replicas: Communicator | None = None) -> None:
        check_agreement(self.__dict__["_described"])
        if self._shards is not None and replicas is not None:
            self._shards.check(replicas)
            self._shards.check_start(int(ops.convert_to_numpy(self.iterations)))
        self.__dict__["_agrees"] = True

    def _warn_of_sums(self, num_replicas: int) -> None:
        """Warns of a loss that is a sum over its replica's rows, where nobody computes that of the whole batch."""
        if self.reduction == "sum" or current_share() is not None:
            return
        for loss in losses_that_add_up(self, self._trainable_variables)[:1]:
            warnings.warn(
                f"A loss that adds up over rows has gradients that add up over replicas, and their mean is "
                f"{num_replicas} times too small. Received: {type(loss).__name__}(reduction='sum') with {self!r}. "
                'Use `CrossShard(..., reduction="sum")`, or call `keras_shardopt.prepare(model)` before `fit`.',
                stacklevel=2,
            )

    def _check_parts(self) -> None:
        """Makes sure, where state is divided, that its parts still belong together. All processes call it together.

        For what gives all processes the first one's values: parts of the state cannot come from there.

        Raises:
            ValueError: on every process, if they do not.
        """
        if self._shards is not None and self.__dict__["_agrees"]:
            self._shards.check_start(int(ops.convert_to_numpy(self.iterations)))

    def _have_started(self, replicas: Communicator) -> None:
        """Says that these replicas have equal weights and state already, before the first update."""
        self.__dict__["_peers"] = replicas

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Makes the gradients global."""
        if reduction_is_claimed(self):
            if self._shards is None or self._accumulates:
                return grads
            self.__dict__["_found_inf"] = None if self._nonfinite_source is None else judge(grads, variables)
            return self._shards.slices_of(grads, variables)
        replicas = runtime.communicator(self.axis_name)
        placement.check(variables, base_optimizers(self))
        if self.__dict__.pop("_is_loaded", False):
            placement.check_loaded(variables)
        if self._shards is not None:
            self._shards.check(replicas)
        elif self.shard_state and replicas.num_replicas > 1 and not replicas.is_global_view:
            raise ValueError(
                "`shard_state=True` on JAX is a layout of arrays under a `keras.distribution`, and inside `shard_map` "
                f"and `pmap` arrays are parts already. Received: axis_name={self.axis_name!r}, an axis of "
                f"{replicas.num_replicas} replicas. Train with `model.fit` inside `with keras_shardopt.data_parallel():`"
                ", or use `shard_state=False`."
            )
        elif self.shard_state:
            placement.check_can_lay_out(variables)
        share = 1.0
        self._check_peers(replicas)
        if not replicas.is_spmd and self.__dict__["_peers"] is not replicas:
            runtime.no_compile(self._warn_of_sums, replicas.num_replicas)
            members = self._members(replicas)
            share = members.broadcast_from_rank_0(self._trainable_variables, self._shared_variables)
            self.__dict__["_peers"] = replicas
        if self.__dict__["_computed"]:
            grads = scaled_gradients(grads, variables, self.loss_scale)
        if self._accumulates:
            return grads if self._is_stacked else self._own_gradients(grads, variables, share)
        grads, self.__dict__["_found_inf"] = self._reduced_and_checked(grads, variables, share)
        return grads

    def _own_gradients(self, grads: Gradients, variables: Sequence[Variable], weight: Any = 1.0) -> Gradients:
        """What this replica adds to its sums: its gradients times its weight, nothing where it has no rows."""
        share = _share_of_rows()
        if not isinstance(share, float) or share != 1:
            gradient_state = self._gradient_state_of(grads, variables, runtime.communicator(self.axis_name))
            if gradient_state not in (
                GradientState.LOCAL,
                GradientState.LOCAL_PRESCALED,
            ):  # every replica has those of all rows
                self.__dict__["_came_reduced"] = gradient_state  # asked again, DDP would not know it any more
                return grads
        return weighted_gradients(grads, variables, _none_without_rows(weight, share))

    def _reduce_gradients(
        self, grads: Gradients, variables: Sequence[Variable], weight: Any = 1.0, loss_scale: Any = None
    ) -> Gradients:
        """Transforms and clips this replica's gradients, as the constructor was told, and reduces them. No more.

        For training steps that reduce by themselves, and then update inside `claim_reduction([optimizer])`. All
        replicas must call it. Where the inner optimizer scales the loss, the gradients are those of the scaled loss.

        Args:
            grads: one tensor or None per variable, as they arrive.
            variables: the trainable variables of `grads`, in the same order.
            weight: a number or scalar tensor: how much this replica counts in the mean, after its gradients have been
                clipped. The weights of all replicas (of a group) should have the mean 1. Of a replica with weight 0
                nothing counts, also not a NaN.
            loss_scale: a number or scalar tensor: by what the loss was multiplied, where that was not done by the inner
                optimizer alone. None asks that.

        Returns:
            A list like `grads`.

        Raises:
            ValueError: if the gradients of several replicas are not local here but must be; if `group_assignment`
                names other replicas than there are; if replicas hold state of their own slices only.
        """
        if self._shards is not None:
            raise ValueError(
                "`_reduce_gradients` returns whole gradients, and with `shard_state=True` each replica takes slices. "
                f"Received: {self!r}. Call `apply` with each replica's own gradients, which reduces them."
            )
        reduced = self._reduced_and_checked(grads, variables, weight, loss_scale)[0]
        if self.__dict__["_buckets"] is None:
            return reduced
        return [None if grad is None else ops.copy(grad) for grad in reduced]  # out of memory that is used again

    def _reduced_and_checked(
        self,
        grads: Gradients,
        variables: Sequence[Variable],
        weight: Any = 1.0,
        loss_scale: Any = None,
        share: Any = None,
    ) -> tuple[Gradients, Tensor | None]:
        """As `_reduce_gradients`, and what `all_reduce_and_check` says of them; None with `on_nonfinite="ignore"`.

        `share` is this replica's part of the rows, where that is not the one of the step that is running.
        """
        share = _share_of_rows() if share is None else share
        # A replica's loss counts by the rows it has; what looks at its gradients wants those of its own mean loss.
        replicas = runtime.communicator(self.axis_name)
        buckets = self._buckets_among(replicas)
        if buckets is not None:
            return buckets.reduce(grads, variables, bool(share), weight), None
        members = self._members(replicas)
        gradient_state = self.__dict__.pop("_came_reduced", None) or self._gradient_state_of(grads, variables, replicas)
        if self._accumulates:
            self._warn_if_reduced(gradient_state, replicas)
        is_local = gradient_state in (GradientState.LOCAL, GradientState.LOCAL_PRESCALED)
        needs_own = self._looks_at_own_gradients or members.is_group
        if needs_own or self.compression is not None:
            self._check_local(gradient_state, replicas)
        unit = 1.0
        if needs_own:
            # There is no mean loss of no rows; what a transform makes of them counts for nothing, as is seen to below.
            rows = 1.0 if isinstance(share, float) and not share else share
            unit = (self.loss_scale if loss_scale is None else loss_scale) * rows

        def transformed(clipnorm: float | None, transform: LocalTransform | None) -> Gradients:
            if clipnorm is None and transform is None:
                return grads
            return transformed_gradients(
                grads, variables, replicas.num_replicas, gradient_state, unit, clipnorm, transform
            )

        grads = transformed(None, self.replica_transform)
        chosen, trained = variables, None
        if not replicas.is_spmd and len(variables) < len(self._trainable_variables):
            # All ranks send the same, also where some have frozen layers, so that they can notice.
            grads, variables, trained = self._with_frozen(grads, variables)
        # Before clipping, which makes all gradients NaN where one is, and after what may have put that right.
        looks = self._nonfinite_source is not None and (is_local or self._looks_at_own_gradients)
        found = first_not_finite(grads, variables) if looks else None
        grads = transformed(self.replica_clipnorm, None)
        if is_local:  # else every replica has the gradients of all rows, also one without any
            weight = _none_without_rows(weight, share)
            grads = weighted_gradients(grads, variables, weight)
        if found is not None and is_local:
            found = ops.where(ops.equal(weight, 0), ops.zeros_like(found), found)
        if self.compression is not None and is_local:
            members = Compressed(members, self.compression, divides=gradient_state is GradientState.LOCAL)
        if self._shards is not None and is_local:
            grads, found_inf = self._shards.reduce(
                grads, variables, members, self.reduction, gradient_state, found, trained
            )
            return self._without_frozen(grads, found_inf, variables, chosen)
        found_inf = None
        if self._nonfinite_source is None:
            try:
                grads = global_gradients(grads, variables, members, self.reduction, gradient_state, trained)
            except ValueError:
                if members.is_group and self._meets_inside and not replicas.is_spmd:
                    fail_among_all(replicas)
                raise
        else:
            grads, found_inf = all_reduce_and_check(
                grads, variables, members, self.reduction, gradient_state, found, trained
            )
        grads = grads if self._shards is None else self._shards.slices_of(grads, variables)
        return self._without_frozen(grads, found_inf, variables, chosen)

    @property
    def _meets_inside(self) -> bool:
        """Whether a loss scaling inside decides together with all replicas, those of other groups too."""
        return any(isinstance(part, OptimizerWrapper) and part._skips_overflows for part in descendants(self))

    def _with_frozen(
        self, grads: Gradients, variables: Sequence[Variable]
    ) -> tuple[list[Tensor | None], list[Variable], list[bool]]:
        """Gradients of all trainable variables, None where none is given; the variables; and which are given."""
        given = {self._position(variable): grad for variable, grad in zip(variables, grads)}
        every = range(len(self._trainable_variables))
        return [given.get(i) for i in every], list(self._trainable_variables), [i in given for i in every]

    def _without_frozen(
        self, grads: Gradients, found_inf: Tensor | None, variables: Sequence[Variable], chosen: Sequence[Variable]
    ) -> tuple[Gradients, Tensor | None]:
        """The reverse of `_with_frozen`, of gradients and what was found in them."""
        if variables is chosen:
            return grads, found_inf
        positions = [self._position(variable) for variable in chosen]
        if found_inf is not None:
            places = [UNKNOWN] * (len(variables) + 1)
            for place, position in enumerate(positions):
                places[position] = place
            name = ops.take(ops.convert_to_tensor(places, "int32"), found_inf[2] % len(places), axis=0)
            found_inf = ops.stack([found_inf[0], found_inf[1], name])
        return [grads[i] for i in positions], found_inf

    def _gradient_state_of(
        self, grads: Gradients, variables: Sequence[Variable], replicas: Communicator
    ) -> GradientState:
        """How these gradients arrive: as the constructor was told, or as the replicas find it."""
        gradient_state = self.__dict__["_gradient_state"]
        if gradient_state is not None:
            self._warn_once(replicas.objections(gradient_state) if self.gradients != "auto" else ())
            return gradient_state
        gradient_state = replicas.gradient_state(grads, variables)
        doubts = list(replicas.doubts)
        if not replicas.has_seen_losses and self.__dict__["_last_arrival"] is GradientState.LOCAL_PRESCALED:
            # Rather a function that was traced before, which is not seen again, than another kind of loss.
            gradient_state, doubts = GradientState.LOCAL_PRESCALED, [_DIVIDED_BEFORE]
        self.__dict__["_last_arrival"] = gradient_state
        self._warn_once(doubts)
        return gradient_state

    def _warn_once(self, doubts: Sequence[str]) -> None:
        for doubt in doubts:
            if doubt not in self.__dict__["_doubts"]:
                self.__dict__["_doubts"].add(doubt)
                warnings.warn(doubt, stacklevel=3)

    def _buckets_among(self, replicas: Communicator) -> Any:
        """What reduces gradients while they are computed; None where each is reduced by itself, after all of them."""
        if self.__dict__["_peers"] is not replicas or self.__dict__["_bucketed"] is replicas:
            return self.__dict__["_buckets"] if self.__dict__["_bucketed"] is replicas else None
        self.__dict__["_buckets"], self.__dict__["_bucketed"] = None, replicas
        is_local = self.gradients in ("auto", "local") and self.__dict__["_gradient_state"] in (
            None,
            GradientState.LOCAL,
        )
        needs_own = self._looks_at_own_gradients or self.group_assignment is not None
        is_plain = not (needs_own or self._accumulates or self.shard_state or self._nonfinite_source is not None)
        variables = self._trainable_variables
        if self.overlap == "auto" and is_local and is_plain and not any(map(overwrites_variable, variables)):
            num_bytes = self.bucket_mib * 2**20
            takes_mean = self.reduction == "mean"
            self.__dict__["_buckets"] = runtime.buckets(replicas, variables, takes_mean, num_bytes, self.compression)
        return self.__dict__["_buckets"]

    def _num_flags(self, replicas: Communicator) -> int:
        if self._nonfinite_source is None or self._members(replicas).is_group:
            return 0
        return num_flags(len(self._trainable_variables), replicas.num_replicas)

    @contextlib.contextmanager
    def _resuming(self, found_inf: Tensor | None) -> Iterator[None]:
        """Says, for the time of the block, what `_reduced_and_checked` has said of the gradients that come."""
        self.__dict__["_found_inf"] = found_inf
        try:
            yield
        finally:
            self.__dict__["_found_inf"] = None

    def _members(self, replicas: Communicator) -> Communicator:
        """The replicas that this one averages with."""
        check_groups(self.group_assignment, replicas)
        return replicas if self.group_assignment is None else replicas.split(self.group_assignment)

    def _check_local(self, gradient_state: GradientState, replicas: Communicator) -> None:
        """Refuses gradients that are reduced already where each replica's own are needed."""
        is_reduced = gradient_state is GradientState.GLOBAL or gradient_state is GradientState.SUMMED
        if replicas.num_replicas == 1 or not is_reduced:
            return
        given = [
            f"{name}={getattr(self, name)!r}"
            for name in ("group_assignment", "replica_clipnorm", "replica_transform", "compression")
            if getattr(self, name) is not None
        ]
        rule = f"`{given[0].partition('=')[0]}` needs the gradients of each replica, before they are reduced."
        if gradient_state is GradientState.SUMMED:
            received = "gradients that `shard_map` has summed over the replicas already"
            advice = _SUMMED_ADVICE
        else:
            received = f"gradients that are global already, with {replicas.num_replicas} replicas"
            if self.group_assignment is not None:
                # One program with replicated weights cannot hold weights that differ between groups.
                advice = (
                    "The weights of groups drift apart, so on JAX give each replica its own in a loop of your own "
                    "inside `jax.shard_map(..., check_vma=False)` or `jax.pmap`; `model.fit` has one copy for all. "
                    "On PyTorch train without `DistributedDataParallel`."
                )
            else:
                advice = _GLOBAL_ADVICE
        raise ValueError(f"{rule} Received: {', '.join(given)}, and {received}. {advice}")

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """See `keras.optimizers.Optimizer.scale_loss`."""
        self.__dict__["_computed"] = False
        loss = super().scale_loss(loss)
        if self.__dict__["_buckets"] is not None:
            self.__dict__["_buckets"].follow(loss, self, bool(_share_of_rows()))
        return loss

    # ------------------------------------------------------------------------------------------------------------

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """See `keras.optimizers.Optimizer.finalize_variable_values`. Ranks that go on training notice."""
        peers = self.__dict__["_peers"]
        has_peers = peers is not None and peers.are_current()
        if has_peers and not joins_uneven_inputs() and not reduction_is_claimed(self):
            buckets = self._buckets_among(peers)
            num_flags, members = self._num_flags(peers), self._members(peers)
            if self.compression is not None:
                members = Compressed(members, self.compression, divides=True)
            if buckets is not None:
                buckets.join_uneven_inputs()
            elif self._shards is not None:
                self._shards.join_uneven_inputs(members, num_flags)
            else:
                join_uneven_inputs(self._trainable_variables, members, num_flags)
        if not runtime.stops_in_step:
            self.check_finite()
        if self._shards is None:
            super().finalize_variable_values(var_list)
        elif self.use_ema or _finalizes(innermost(self)):
            self._shards.finalize(self.inner, var_list)

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Updates with gradients that nobody inside may reduce again; when accumulating, at the end of a window."""
        if self._accumulates:
            runtime.no_compile(self._accumulate, grads, variables)
        else:
            found_inf, self.__dict__["_found_inf"] = self.__dict__["_found_inf"], None
            self._update_if_finite(grads, variables, found_inf)

    def _accumulate(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        positions = [self._position(variable) for variable in variables]
        # The counter is the same on all replicas, so that all of them meet in the branch.
        is_complete, sums = self._accumulators.add(grads, positions, _share_of_rows())
        # Not the sums, or JAX would copy them in each micro-step.
        state = [*self._trainable_variables, *self._shared_variables]
        runtime.cond(is_complete, self._end_window, sums, state)

    def _end_window(self, sums: Sequence[Tensor]) -> None:
        means, positions, share = self._accumulators.means(sums)
        variables = [self._trainable_variables[i] for i in positions]

        def reduced(own: Any) -> tuple[Gradients, Tensor | None]:
            means, (share,) = own if isinstance(own, tuple) else (own, (1.0,))
            return self._reduced_and_checked(means, variables, share=share)

        own = means if isinstance(share, float) else (means, [share])
        if reduction_is_claimed(self):
            found_inf = None if self._nonfinite_source is None else judge(means, variables)
            slices = means if self._shards is None else self._shards.slices_of(means, variables)
            self._update_if_finite(slices, variables, found_inf)
            return
        grads, found_inf = runtime.map_replicas(reduced, own) if self._is_stacked else reduced(own)
        self._update_if_finite(grads, variables, found_inf)

    def _join_step(self, gradient_state: GradientState | None) -> None:
        """Called by a training step that knows how gradients arrive; None finds it."""
        if self.gradients == "auto":
            self.__dict__["_gradient_state"] = gradient_state

    def _decide_window(self, ends: bool) -> None:
        """Says whether the next call of `apply` updates, however many micro-steps there were; each counts as ever."""
        self._accumulators.decide(ends)

    def _warn_if_reduced(self, gradient_state: GradientState, replicas: Communicator) -> None:
        if (
            replicas.num_replicas > 1
            and gradient_state in (GradientState.GLOBAL, GradientState.SUMMED)
            and not self.__dict__["_warned"]
        ):
            self.__dict__["_warned"] = True
            warnings.warn(
                f"{self!r} accumulates gradients that are reduced already, so that updates are right, but each "
                f"micro-step communicates. {_SUMMED_ADVICE if gradient_state is GradientState.SUMMED else _GLOBAL_ADVICE}",
                stacklevel=2,
            )

    def _update_if_finite(self, grads: Gradients, variables: Sequence[Variable], found_inf: Tensor | None) -> None:
        if self._nonfinite_source is None:
            self._update(grads, variables)
            return
        if found_inf is None:  # somebody else has reduced them
            found_inf = judge(grads, variables)
        is_bad = found_inf[0] > 0
        places = ops.convert_to_tensor([*[self._position(v) for v in variables], UNKNOWN], "int32")
        names = ops.stack([found_inf[1], ops.take(places, found_inf[2] % (len(variables) + 1), axis=0)])
        self._nonfinite_source.assign(ops.where(is_bad, names, ops.convert_to_tensor(self._nonfinite_source)))
        if self._skips_inside:  # a loss scaling decides, and counts
            self._update(grads, variables)
            return
        self._skipped.assign(self._skipped + ops.cast(is_bad, self._skipped.dtype))
        runtime.cond(
            ops.logical_not(is_bad),
            lambda grads: self._update(grads, variables),
            grads,
            [*self._trainable_variables, *self._shared_variables],
        )

    def _update(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        if self.fused is False:
            self._update_with(grads, variables)
        else:
            runtime.update_fused(base_optimizers(self), self._update_with, grads, variables)

    def _update_with(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        with claim_reduction(descendants(self), None if self.group_assignment is None else self.axis_name):
            if self._shards is None:
                super().update_inner(grads, variables)
            else:
                replicas = runtime.communicator(self.axis_name)
                runtime.no_compile(self._shards.update, self.inner, grads, variables, replicas)

    def _on_outer_loss_scaling(self) -> None:
        """Refuses: a stock LossScaleOptimizer outside would look at gradients before they are reduced."""
        raise ValueError(
            "A `LossScaleOptimizer` must be inside `CrossShard`, not around it: outside it sees the gradients of one "
            "replica only, so that replicas skip different steps, and diverge or wait for each other for ever. "
            "Use `CrossShard(LossScaling(inner_optimizer))`, or `CrossShard(LossScaleOptimizer(inner_optimizer))`. "
            'Under the "mixed_float16" policy, where `compile` puts one around an optimizer that does not scale the '
            "loss: `model.compile(optimizer=CrossShard(LossScaling(inner_optimizer)))`."
        )

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        return {
            **super().get_config(),
            "reduction": self.reduction,
            "group_assignment": self.group_assignment,
            "gradients": self.gradients,
            "gradient_accumulation_steps": self.__dict__["_num_steps"],
            "on_nonfinite": self.on_nonfinite,
            "replica_clipnorm": self.replica_clipnorm,
            "replica_transform": keras.saving.serialize_keras_object(self.replica_transform),
            "shard_state": self.shard_state,
            "compression": self.compression,
            "fused": self.fused,
            "overlap": self.overlap,
            "bucket_mib": self.bucket_mib,
            "axis_name": self.axis_name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> OptimizerWrapper:
        """The reverse of `get_config`. `config` is left as it is."""
        transform = config.get("replica_transform")
        if isinstance(transform, dict):
            transform = keras.saving.deserialize_keras_object(transform, custom_objects=custom_objects)
            config = {**config, "replica_transform": transform}
        loaded = super().from_config(config, custom_objects)
        loaded.__dict__["_is_loaded"] = True
        return loaded

    def _repr_arguments(self) -> str:
        given = [f", reduction={self.reduction!r}"]
        if self.__dict__["_num_steps"] is not None:
            given.append(f", gradient_accumulation_steps={self.__dict__['_num_steps']}")
        if self.on_nonfinite != "ignore":
            given.append(f", on_nonfinite={self.on_nonfinite!r}")
        if self.shard_state:
            given.append(", shard_state=True")
        if self.fused is False:
            given.append(", fused=False")
        if self.overlap is False:
            given.append(", overlap=False")
        if self.bucket_mib != _BUCKET_MIB:
            given.append(f", bucket_mib={self.bucket_mib:g}")
        given += [
            f", {name}={getattr(self, name)!r}"
            for name in ("group_assignment", "replica_clipnorm", "replica_transform", "compression")
            if getattr(self, name) is not None
        ]
        given += [
            f", {name}={getattr(self, name)!r}"
            for name, default in (("gradients", "auto"), ("axis_name", "batch"))
            if getattr(self, name) != default
        ]
        return "".join(given)


def cross_shards(optimizer: Any) -> list[CrossShard]:
    """Every `CrossShard` of an optimizer, itself and inside it, from the outside in; none where it is None."""
    chain = [] if optimizer is None else [optimizer, *descendants(optimizer)]
    return [part for part in chain if isinstance(part, CrossShard)]


def _finalizes(leaf: Any) -> bool:
    """Whether an optimizer of a user's has something of its own to do when training ends."""
    return type(leaf).finalize_variable_values is not keras.optimizers.Optimizer.finalize_variable_values


def _skips_overflows(optimizer: Any) -> bool:
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer._skips_overflows
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _share_of_rows() -> Any:
    """This replica's rows in units of an equal part of the batch."""
    part = current_share()
    return 1.0 if part is None else part.row_share


def _none_without_rows(weight: Any, share: Any) -> Any:
    if isinstance(share, float):
        return weight if share else 0.0
    return ops.where(share > 0, weight, 0.0)


def _refuse_inside(optimizer: Any) -> None:
    """Refuses a `CrossShard` inside another one that would wait in vain for local gradients."""
    if isinstance(optimizer, CrossShard) and optimizer._accumulates:
        raise ValueError(
            "`gradient_accumulation_steps` must be given to the outer `CrossShard`, which would else communicate in "
            f"each micro-step. Received: inner_optimizer={optimizer!r}."
        )
    if isinstance(optimizer, CrossShard) and optimizer._needs_local_gradients:
        raise ValueError(
            "`group_assignment`, `replica_clipnorm`, `replica_transform` and `compression` need the gradients of each "
            f"replica, and inside another `CrossShard` they are global already. Received: inner_optimizer={optimizer!r}. "
            "Give these arguments to the outer `CrossShard`."
        )
    for inner in children(optimizer):
        _refuse_inside(inner)


def _check_clipnorm(replica_clipnorm: Any) -> None:
    if replica_clipnorm is None:
        return
    check.real("replica_clipnorm", replica_clipnorm, above=0, finite=False, fix="Leave it out to not clip.")

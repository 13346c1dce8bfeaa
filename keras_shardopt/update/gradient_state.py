"""Finds whether gradients are reduced when they reach an optimizer, and checks that its options allow this."""

from __future__ import annotations

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.communicator import Communicator, Evidence, GradientState
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Optimizer
from keras_shardopt.update.options import GRADIENT_STATES, CrossShardOptions, check_groups
from keras_shardopt.update.step import Step
from keras_shardopt.wrapping.chain import children

_SUMMED_ADVICE = "Use `shard_map(..., check_vma=False)`, or `jax.lax.pcast(w, axis_name, to='varying')` on weights."
_GLOBAL_ADVICE = (
    "Call `keras_shardopt.prepare(model)` after `compile` and before `fit`; in a custom training loop use "
    "`jax.shard_map(..., check_vma=False)` or `jax.pmap` on JAX, and no `DistributedDataParallel` on PyTorch."
)
_GROUPS_ADVICE = (
    # In one program, all replicas share the weights, so weights cannot differ between groups.
    "The groups of `group_assignment` train different weights. On JAX, `model.fit` has one copy of the weights for all "
    "replicas, so use a custom training loop inside `jax.shard_map(..., check_vma=False)` or `jax.pmap`. "
    "On PyTorch, train without `DistributedDataParallel`."
)
_DIVIDED_BEFORE = (
    "Either all losses of an optimizer must be divided by the number of replicas, or none. Received: a step without a "
    "detected division, after a step with a division. The loss is treated as divided, because losses in an already "
    'traced `tf.function` cannot be detected. If the loss is divided, use `CrossShard(..., gradients="prescaled")`. If '
    'the loss is the mean over the rows of one replica, use a separate optimizer with `gradients="local"`.'
)


# TensorFlow only: detects whether losses were divided by the number of replicas.
_losses = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.communicator"})


def _evidence_of(comm: Communicator, declared: GradientState | None = None) -> Evidence:
    found: Evidence = Evidence() if _losses is None else _losses.evidence_of(comm, declared)
    return found


class GradientStateFinder:
    """Determines the `GradientState` of incoming gradients: of one replica, summed, or averaged, for example."""

    def __init__(self, options: CrossShardOptions) -> None:
        self._options = options
        self.needing = options.needing_local_gradients()
        """The options that need each replica's unreduced gradients, as `name=value`."""
        self.declared_state: GradientState | None = GRADIENT_STATES[options.gradients]
        """How gradients arrive (reduced or not), as set by the argument `gradients` or `declare`; None to detect it."""
        self._last: GradientState | None = None
        self._warned: set[str] = set()

    @property
    def needs_local_gradients(self) -> bool:
        """Whether an option needs each replica's gradients before the reduction."""
        return bool(self.needing)

    @property
    def may_be_local(self) -> bool:
        """Whether gradients can arrive unreduced and undivided (`LOCAL`)."""
        return self._options.gradients in ("auto", "local") and self.declared_state in (None, GradientState.LOCAL)

    def declare(self, state: GradientState | None) -> None:
        """Set how later gradients arrive (reduced or not), unless the argument `gradients` does; None to detect it."""
        if self._options.gradients == "auto":
            self.declared_state = state

    def classify(self, step: Step, comm: Communicator) -> Step:
        """Return the step with its field `gradient_state` set.

        Raises:
            ValueError: if an option needs each replica's gradients, but these arrive reduced.
        """
        check_groups(self._options.group_assignment, comm)
        state = step.gradient_state or self.find(step, comm)
        if self.needing and comm.num_replicas > 1 and not state.is_local:
            self._raise_reduced(state, comm.num_replicas)
        return step.replace(gradient_state=state)

    def find(self, step: Step, comm: Communicator) -> GradientState:
        """Return how the gradients of `step` arrive, as declared or as detected by the backend."""
        if self.declared_state is not None:
            for doubt in _evidence_of(comm, self.declared_state).doubts if self._options.gradients != "auto" else ():
                self._warn_once(doubt)
            return self.declared_state
        state = comm.gradient_state(step.grads, step.variables)
        is_of_this_step, doubts = _evidence_of(comm)
        if not is_of_this_step and self._last is GradientState.LOCAL_PRESCALED:
            # TensorFlow detects divided losses only while it traces them. If nothing was traced in this step, assume
            # that the loss is divided as before.
            state, doubts = GradientState.LOCAL_PRESCALED, [_DIVIDED_BEFORE]
        self._last = state
        for doubt in doubts:
            self._warn_once(doubt)
        return state

    def advice(self, state: GradientState) -> str:
        """Return how to get each replica's gradients, for gradients that arrive averaged or summed (`state`)."""
        advice = _SUMMED_ADVICE if state is GradientState.SUMMED else _GLOBAL_ADVICE
        is_set = self._options.gradients != "auto"
        return f"Leave `gradients={self._options.gradients!r}` out. {advice}" if is_set else advice

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            warn(words)

    def _raise_reduced(self, state: GradientState, num_replicas: int) -> None:
        rule = f"`{self.needing[0].partition('=')[0]}` needs the gradients of each replica, before they are reduced."
        if state is GradientState.SUMMED:
            received = "gradients that `shard_map` has already summed over the replicas"
            advice = _SUMMED_ADVICE
        else:
            received = f"gradients that are already averaged over {num_replicas} replicas"
            in_groups = "group_assignment" in self.needing[0]
            advice = _GROUPS_ADVICE if in_groups else _GLOBAL_ADVICE
        raise ValueError(f"{rule} Received: {', '.join(self.needing)}, and {received}. {advice}")


def refuse_local_gradients_inside(optimizer: Optimizer) -> None:
    """Raise ValueError if `optimizer`, which is inside a `CrossShard`, needs each replica's unreduced gradients."""
    finder = getattr(optimizer, "state_finder", None)
    if isinstance(finder, GradientStateFinder):
        if getattr(optimizer, "accumulation", None) is not None:
            raise ValueError(
                "`gradient_accumulation_steps` must be passed to the outer `CrossShard`. In the inner optimizer, each "
                f"micro-batch would communicate. Received: inner_optimizer={optimizer!r}."
            )
        if finder.needs_local_gradients or getattr(optimizer, "group_assignment", None):
            raise ValueError(
                "`group_assignment`, `replica_clipnorm`, `replica_transform`, `compression`, and some `extensions` and "
                "`stages` need each replica's gradients, but inside another `CrossShard` gradients are already "
                f"averaged over the replicas. Received: inner_optimizer={optimizer!r}. Pass these arguments to the "
                "outer `CrossShard`."
            )
    for inner in children(optimizer):
        refuse_local_gradients_inside(inner)

"""`VirtualReplicas` makes results independent of the number of replicas: it sums parts of batches in a fixed order.

The number of replicas changes the rounding of a gradient in two ways: kernels sum a different number of rows, and the
all-reduce sums a different number of replicas. Therefore every batch is divided into a fixed number of parts. A replica
computes its parts one after another, with the same shapes, and all parts are summed in one binary tree (`Tree`).

A trainer declares its current part (`VirtualReplica`) with `batch_shared`. On PyTorch it calls `apply` for each part.
The other code of an optimizer handles parts like micro-batches: only the last part updates, with the gradients of all
parts. On other backends, the trainer sums parts itself and calls `apply` once.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.extensions.equal_bits.parts import current_part, parts_of_each, parts_of_replica
from keras_shardopt.extensions.equal_bits.tree import Subtrees, Tree
from keras_shardopt.numerics import Tensor, Variable, dense, overwrites_variable
from keras_shardopt.update.all_reduce import AllReduce
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.parts import PartOfBatch
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.step import Proceed, Step
from keras_shardopt.update.transport import Transport


class SumOfParts(ExtensionStage):
    """Sums the gradients of this replica's parts of a batch, then continues the update with the sum over replicas."""

    keeps_bits = True

    def __init__(self, num_parts: int, context: StageContext) -> None:
        self.num_parts = num_parts
        self._context = context
        self._optimizer = context.optimizer
        self._reducer: AllReduce | None = None
        self._subtrees = Subtrees()
        self._found: Any = None
        self._next: int | None = None

    def _check_outside(self, outer: Any) -> None:
        """Raise ValueError, because `outer`, a loss-scaling optimizer, must be inside `CrossShard`, not around it."""
        name = type(outer).__name__
        raise ValueError(
            f"`{name}` must be inside a `CrossShard` with `VirtualReplicas`, not around the `CrossShard`. Outside, "
            f"`{name}` would skip single parts of a batch, and change the loss scale after each part. Received: "
            f"inner_optimizer={outer.inner!r}. Use `CrossShard({name}(inner_optimizer), "
            "extensions=[VirtualReplicas(...)])`."
        )

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Add the gradients of one part of the batch to a sum. After the last part, call `proceed`, the update."""
        if self._optimizer.pipeline.resumed.is_reduced:  # a trainer has already called `reduced`
            proceed(step)
        else:
            runtime.no_compile(self._collect, step, proceed)

    def _collect(self, step: Step, proceed: Proceed) -> None:
        comm, part = runtime.communicator(self._optimizer.axis_name), current_part()
        parts_of_each(self.num_parts, comm.num_replicas)
        if part is None or part.num_replicas != self.num_parts or step.is_reduced:
            raise ValueError(
                "`VirtualReplicas` needs `fit` or `train_on_batch` of a model passed to `keras_shardopt.prepare`, "
                f"because these methods divide batches into parts. Received: {self._optimizer!r} in another step. Call "
                "`keras_shardopt.prepare(model)` after `compile`. In a custom training loop, remove `VirtualReplicas`."
            )
        own = parts_of_replica(self.num_parts, comm)
        if part.replica_id == own[0]:
            self._subtrees, self._found, self._next = Subtrees(), None, own[0]
        if self._next != part.replica_id:
            raise ValueError(
                "`VirtualReplicas` needs a `train_step` that updates once, as the built-in one does. Received: several "
                f"updates, or none, in part {self._next} of a batch. Remove `VirtualReplicas`."
            )
        self._next = part.replica_id + 1
        # With one replica, `comm` would treat the gradients of a part as already reduced. `part` treats them as local.
        state = self._optimizer.state_finder.find(step, part if comm.num_replicas == 1 else comm)
        if state is not GradientState.LOCAL:
            raise ValueError(
                "`VirtualReplicas` needs each replica's own gradients. Received: gradients that are already averaged "
                "over the replicas. Remove `DistributedDataParallel`."
            )
        grads, found = self.of_part(step, part)
        if found is not None:
            self._found = found if self._found is None else first_found(self._found, found)
        self._subtrees.add(grads)
        if part.replica_id == own[-1]:
            found, self._found = self._found, None
            proceed(self.reduced(step.replace(grads=self._subtrees.take(), found_inf=found), comm))

    def of_part(self, step: Step, part: PartOfBatch, keeps_empty: bool = False) -> tuple[list[Any], Tensor | None]:
        """Run `local` of all stages, such as clipping, on one part of the batch. Return gradients and `Step.found_inf`.

        Gradients are 0 if the part has no rows, except with `keeps_empty`.
        """
        step = step.replace(gradient_state=GradientState.LOCAL)
        for stage in self._optimizer.pipeline.stages:
            step = stage.local(step, part)
        step = zero_without_rows(step.replace(row_share=1.0) if keeps_empty else step)
        return [_dense(grad, variable) for grad, variable in zip(step.grads, step.variables)], step.found_inf

    def reduced(self, step: Step, comm: Communicator) -> Step:
        """Sum the gradients of `step` over replicas. On each replica, these are sums over its parts of the batch."""
        if self._reducer is None:  # not earlier: the optimizer is complete only after all of its stages
            self._reducer = AllReduce(self._context, self._optimizer._options, Transport())
        whole = step.replace(gradient_state=GradientState.LOCAL, weight=1.0, row_share=1.0)
        return self._reducer.reduce(whole, Tree(comm, self.num_parts)).replace(is_reduced=True)

    def reset(self) -> None:
        """Forget which part of an unfinished batch is next."""
        self._next = None


def _dense(grad: Tensor | None, variable: Variable) -> Tensor | None:
    if grad is not None and overwrites_variable(variable):
        raise ValueError(
            "`VirtualReplicas` does not support float8, because values of float8 variables cannot be summed as "
            f"gradients. Received: the float8 variable `{variable.path}`. Remove `VirtualReplicas`."
        )
    return None if grad is None else dense(grad, variable)


def first_found(found: Tensor, next_one: Tensor) -> Tensor:
    """Combine the positions of the first non-finite gradient in two parts of a batch (0: all gradients are finite)."""
    return ops.where(found > 0, found, next_one)

"""Reduces gradients during the backward pass.

Gradients are sent in flat buckets: blocks of memory, filled in the order in which a backward pass computes gradients. A
full bucket is sent at once. The last bucket waits for the end of the backward pass, because it also sends flags that
show which gradients this rank has. After `loss.backward()`, `.grad` is the mean or sum over all ranks.

A rank sends during the backward pass only in the step of Keras' trainer, because this step calls `scale_loss`,
`backward` and `apply` in this order. Otherwise, `reduce` sends the same buckets afterwards.

With sharded state, each rank gets its slices of the sums (`sliced_bucket.py`). A gradient is freed once it is sent, and
`.grad` is then NaN.

With gradient accumulation, a rank sends only in the last micro-batch of an update: the mean over all micro-batches.

Private names of Keras touched here (a test checks that each exists):
    `Model.train_step` of the torch trainer - scales the loss, frees gradients, computes new ones, and passes `.grad` of
        the trainable weights to the optimizer.
Private names of PyTorch: `Variable._execution_engine.queue_callback` - calls a function after a backward pass;
`torch._C._current_graph_task_id` - the running backward pass.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from torch.autograd import Variable as _Autograd

from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.torch.bucket import Bucket
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.gradient_hooks import GradientHooks
from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.process_group import exchanges_statistics
from keras_shardopt.backends.torch.rank_sums import RankSums
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import Gradients, Optimizer, Tensor, Variable

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Contribution = Callable[[int, "Tensor | None"], "Tensor | None"]
"""Maps a variable's position and its gradient in the last micro-batch to the gradient that this rank sends."""


class Buckets:
    """Reduces gradients over all ranks, during the backward pass if possible. All ranks must make the same calls."""

    def __init__(self, sums: RankSums) -> None:
        self._sums = sums
        self._places = {id(variable): i for i, variable in enumerate(sums.variables)}
        self._hooks = GradientHooks()
        self._overlaps = True
        self._finished: list[Tensor | None] | None = None  # the sums, if the backward pass has reduced the gradients
        self._returned: list[Tensor | None] = []  # the tensors that are then in `.grad`

    def __reduce__(self) -> Any:
        return type(None), ()  # None in a copy of an optimizer, because the copy creates new buckets

    def follow(self, loss: Any, optimizer: Optimizer, counts: bool, contribution: Contribution | None = None) -> None:
        """Send gradients during the backward pass of `loss`, if Keras' `train_step` has called `scale_loss`.

        `counts` is false if this rank has no rows and sends zeros. `contribution` replaces each gradient by its mean
        over all micro-batches.
        """
        if not self._overlaps or torch.compiler.is_compiling():
            return
        if not torch.is_tensor(loss) or not loss.requires_grad:
            return
        if getattr(caller_instance(further_out=2, code=_STEP), "optimizer", None) is not optimizer:
            return
        buckets_ref = weakref.ref(self)

        def start(_: Tensor) -> None:
            buckets = buckets_ref()
            if buckets is not None:
                buckets._start(contribution if counts else _zeros)

        loss.register_hook(start)

    @torch.no_grad()
    def _start(self, contribution: Contribution | None) -> None:
        sums, hooks = self._sums, self._hooks
        if not sums.ranks.are_current():
            return
        self._begin()
        hooks.follow(values_of(sums.variables))
        if any(parameter.grad is not None for parameter in hooks.parameters):
            return  # the program accumulates gradients in `.grad`, so only `reduce` can send them
        if not sums.can_resend and (hooks.have_others() or exchanges_statistics()):
            # Send after the backward pass. Sending early would free `.grad`, which other hooks read. If layers exchange
            # statistics, ranks could deadlock: one rank waits for a bucket, and the other for statistics.
            return
        hooks.receiver = BackwardPass(sums, hooks, contribution)
        _Autograd._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        backward, self._hooks.receiver = self._hooks.receiver, None
        if backward is None:
            return
        try:
            found = backward.finish()
        finally:
            self._overlaps &= not backward.is_late
        # Detach, because functions such as `Module.to` replace the memory of `.grad`, and must not replace a bucket's.
        self._finished = [None if grad is None else grad.detach() for grad in found]
        parameters = self._hooks.parameters
        self._returned = self._finished if self._sums.can_resend else [*map(_freed, parameters, self._finished)]
        for parameter, grad in zip(parameters, self._returned):
            parameter.grad = grad

    def _begin(self) -> None:
        self._sums.begin()
        self._hooks.receiver, self._finished, self._returned = None, None, []

    @torch.compiler.disable
    @torch.no_grad()
    def reduce(self, grads: Gradients, variables: Sequence[Variable], counts: bool, weight: float) -> Gradients:
        """Return the sum or mean of all ranks' gradients. Reduce `grads` now, unless the backward pass has done so.

        The next call overwrites the memory of the result. If `counts` is false, this rank has no rows and sends zeros.
        Otherwise, this rank sends its gradients times `weight`.

        Raises:
            ValueError: on all ranks, if ranks differ in updates or trained variables. On this rank only, if `grads` are
                not the tensors that the backward pass has left in `.grad`.
        """
        places = [self._places[id(variable)] for variable in variables]
        finished, self._finished = self._finished, None
        if finished is None:
            own: list[Tensor | None] = [None] * len(self._sums.variables)
            trained = [False] * len(own)
            for i, grad in zip(places, grads):
                own[i], trained[i] = grad if counts and weight != 0 else _zeros(i, grad), True
            self._begin()
            finished = self._sums.sum_now(own, trained, weight)
        elif any(grad is not self._returned[i] for i, grad in zip(places, grads)):
            raise ValueError(
                "This step reduced the gradients during its backward pass, so `apply` must receive the `.grad` tensors "
                "of the weights. Received: other tensors as gradients. Use `CrossShard(..., "
                "torch=TorchSpeed(overlap=False))`, or change gradients in a `keras_shardopt.Stage`."
            )
        self._sums.num_updates += 1
        return [finished[i] for i in places]

    @torch.no_grad()
    def join_uneven_inputs(self) -> None:
        """Send zeros and a flag, because this rank has ended training. Raise ValueError if other ranks continue."""
        self._begin()
        self._sums.sum_now([None] * len(self._sums.variables), None, trains=False)
        self.release()

    def release(self) -> None:
        """Free memory of the last reduction that the next reduction does not need."""
        self._returned = []
        self._sums.queue.release()

    @property
    def transfer(self) -> Any:
        """The object that encoded the gradients of the last reduction, until `release`. None if sent unencoded."""
        return self._sums.queue.transfer

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """The collectives of the last update, with the tensors sent."""
        return [sent for bucket in self for sent in bucket.sent]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._sums.queue)

    @property
    def found_inf(self) -> tuple[int, int, int] | None:
        """(1 if the last result of `reduce` is not finite, rank, gradient's position). None if not checked."""
        return self._sums.found_inf

    @property
    def has_finished(self) -> bool:
        """Whether the backward pass has reduced the gradients, so `reduce` only needs to return them."""
        return self._finished is not None


class BackwardPass:
    """The running backward pass: sends its gradients as they are computed, and the remaining ones at its end.

    Without a `contribution`, this rank sends its gradients unchanged.
    """

    def __init__(self, sums: RankSums, hooks: GradientHooks, contribution: Contribution | None) -> None:
        self._sums, self._queue, self._can_resend = sums, sums.queue, sums.can_resend
        self._parameters, self._trainable, self._contribution = hooks.parameters, hooks.trainable, contribution
        self._task = torch._C._current_graph_task_id()
        self._taken: dict[int, tuple[Any, int]] = {}  # the sent gradients (None if freed), and their versions
        self.is_late = False
        """Whether a gradient has changed after it was sent. This rank must then send after backward passes."""
        self._queue.start()

    def take(self, i: int, parameter: Tensor) -> None:
        """Send the gradient of variable `i`, which the backward pass has computed."""
        # Do not send a second gradient of a weight, or one from a nested backward pass (reentrant checkpoints), because
        # `.grad` is complete only at the end.
        if i in self._taken or torch._C._current_graph_task_id() != self._task:
            self.is_late |= self._can_resend  # if gradients were freed, `_late_gradients` records this
            return
        grad = parameter.grad
        assert grad is not None
        self._taken[i] = (grad if self._can_resend else None), grad._version
        if self._contribution is not None:
            grad = self._contribution(i, grad)
        if not self._can_resend:
            parameter.grad = None
        self._queue.put_early(i, grad)

    def finish(self) -> list[Tensor | None]:
        """Send the remaining gradients, and again all that have changed on some rank. Return the sums."""
        own = [parameter.grad for parameter in self._parameters]
        present = [i in self._taken for i in range(len(own))]
        for i in self._queue.unsent_places():
            if i not in self._taken:
                grad = self._sent_for(i, own[i])
                present[i] = grad is not None
                self._queue.put(i, grad)
        left = self._late_gradients(own)

        def all_own() -> Gradients:
            return [self._sent_for(i, grad) for i, grad in enumerate(own)]

        found = self._sums.complete(present, all_own, self._trainable, is_late=self.is_late)
        if found is not None:
            return found
        if self._can_resend:
            return self._sums.sum_now(all_own(), self._trainable)
        return self._sums.sum_now(left, self._trainable, present=present, adds=True)

    def _late_gradients(self, own: Gradients) -> list[Tensor | None]:
        """Record whether gradients changed after sending. If gradients were freed, return those that arrived later."""
        left: list[Tensor | None] = [None] * len(own)
        for i, (grad, version) in self._taken.items():
            if self._can_resend:
                self.is_late |= own[i] is not grad or grad._version != version
            elif own[i] is not None:
                self.is_late = True
                of_other_batches = self._sent_for(i, None)
                late = self._sent_for(i, own[i])
                left[i] = late if of_other_batches is None else late - of_other_batches
        return left

    def _sent_for(self, i: int, grad: Tensor | None) -> Tensor | None:
        return grad if self._contribution is None else self._contribution(i, grad)


def _zeros(i: int, grad: Tensor | None) -> Tensor | None:
    """Return the zeros that a rank without rows sends, or None for None. Zeros let an encoder send its residual."""
    del i
    if grad is None:
        return None
    return torch.zeros_like(grad) if grad.is_sparse else grad.new_zeros(()).expand_as(grad)  # takes no memory


def _freed(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the new `.grad` of a weight after its gradient was freed: NaN in the weight's shape."""
    return None if grad is None else parameter.new_full((), math.nan).expand(parameter.shape)


_STEP = inspect.unwrap(keras.Model.train_step).__code__


@torch.compiler.disable
def buckets_among(replicas: Any, variables: Sequence[Variable], *arguments: Any) -> Buckets | None:
    """Return `Buckets` for `RankSums` of these arguments, or None if impossible. All processes must make this call."""
    tensors = [variable.value for variable in variables]
    can_send = all(tensor.dtype in _DTYPES and tensor.device.type in ("cpu", "cuda") for tensor in tensors)
    if not isinstance(replicas, TorchProcessGroup) or not can_send or replicas.ddps.owner_of(variables[0]) is not None:
        return None
    return Buckets(RankSums(replicas, variables, *arguments))

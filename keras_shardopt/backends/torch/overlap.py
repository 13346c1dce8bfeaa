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
`torch._C._current_graph_task_id` - the running backward pass; `Tensor._post_accumulate_grad_hooks` - the hooks of a
tensor by the `id` of their handles.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch.autograd import Variable as _Autograd

from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.side_channel import NUM_FLAGS, SideChannel
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.flat_bucket import flat_buckets
from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.nonfinite import first_not_finite
from keras_shardopt.backends.torch.process_group import UPDATE, exchanges_statistics, naming_missing_ranks, wait_for
from keras_shardopt.backends.torch.sliced_bucket import Slices, sliced_buckets
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ALL_FINITE, UNKNOWN, Gradients, Optimizer, ReduceOp, Tensor, Variable

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Buckets:
    """Reduces gradients over all ranks, during the backward pass if possible. All ranks must make the same calls.

    Args:
        ranks: the ranks of the default process group (`TorchProcessGroup`).
        variables: all trainable variables that can have gradients.
        takes_mean: whether sums are divided by the number of ranks.
        bucket_bytes: the size limit of a bucket. A larger gradient has its own bucket.
        compression: None, "float16" or "bfloat16", the dtype of float32 and float64 when sent and summed.
        checks_finite: whether to find non-finite gradients.
        slices: with sharded state, the slices of each rank. Otherwise None.
        made: with compression by a codec, a function that creates the buckets, and a function that creates the encoder
            of each reduction (`update/transport.py`). Otherwise (None, None).
    """

    def __init__(
        self,
        ranks: Any,
        variables: Sequence[Variable],
        takes_mean: bool,
        bucket_bytes: float,
        compression: str | None,
        checks_finite: bool,
        slices: Slices | None,
        made: tuple[Any, Any],
    ) -> None:
        self._ranks = ranks
        make, self._begin_transfer = made
        self.transfer: Any = None
        """The object that encoded the gradients of the last reduction, until `release`. None if sent unencoded."""
        self._checks_finite = checks_finite
        self.found_inf: tuple[int, int, int] | None = None
        """(1 if the last result of `reduce` is not finite, rank, gradient's position). None without `checks_finite`."""
        self._num_ranks = int(ranks.num_replicas)
        self._variables = list(variables)
        self._places = {id(variable): i for i, variable in enumerate(self._variables)}
        self._overlaps = True
        self._under_way: list[Any] = []
        tensors = [variable.value for variable in self._variables]
        num_flags = len(tensors) + NUM_FLAGS + (3 if slices is None else 4)
        op: ReduceOp = "mean" if takes_mean else "sum"
        self._buckets: Sequence[Any]
        if make is not None:
            self._buckets = make(ranks, tensors, bucket_bytes, op, num_flags, self._under_way)
        elif slices is None:
            self._buckets = flat_buckets(tensors, bucket_bytes, op, self._num_ranks, compression, num_flags)
        else:
            self._buckets = sliced_buckets(tensors, slices, op, ranks.replica_id, compression, num_flags, checks_finite)
        self._can_resend = self._buckets[0].can_resend
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.places}
        self._flags = self._buckets[-1].flags
        self._parameters: list[Tensor] = []
        self._trainable: list[bool] = []
        self._hooks: list[tuple[dict[int, Any], int]] = []
        # The number of updates with this object's gradients. If it differs between ranks, a rank has skipped an update.
        self._num_taken = 0
        self._num_sent: int = 0
        self._forget()

    def _begin(self) -> None:
        failure = next((bucket.failure for bucket in self._buckets if bucket.failure), "")
        if failure:
            raise RuntimeError(
                "Training cannot continue, because the gradients of an earlier step were not sent to all ranks: "
                f"{failure}. Restart the job."
            )
        if self._num_sent % len(self._buckets):
            # This rank's previous backward pass failed, and other ranks still wait for its remaining buckets. Send
            # them. If gradients can be sent again, the other ranks then repeat the step together with this rank.
            self._was_late, self._has_lost = True, not self._can_resend
            self._reduced([False] * len(self._variables), [None] * len(self._variables), None)
        self._forget()

    def _forget(self) -> None:
        self._is_running, self._task = False, -1
        self._was_late = self._has_lost = False
        self._taken: dict[int, tuple[Any, int]] = {}
        self._num_sent = self._num_received = 0
        self._under_way.clear()
        self._adds = False
        self._finished: list[Tensor | None] | None = None
        self._returned: list[Tensor | None] = []
        self._window: Window | None = None

    # Use `__del__`, because `torch.compile` would recompile when the registry of `weakref.finalize` changes.
    def __del__(self) -> None:
        _remove_hooks(getattr(self, "_hooks", []))

    def __reduce__(self) -> Any:
        return type(None), ()  # None in a copy of an optimizer, because the copy creates new buckets

    # -- during the backward pass ------------------------------------------------------------------------------------

    def follow(self, loss: Any, optimizer: Optimizer, counts: bool, window: Window | None = None) -> None:
        """Send gradients during the backward pass of `loss`, if Keras' `train_step` has called `scale_loss`.

        `counts` is false if this rank has no rows and sends zeros. `window` replaces each gradient by its mean over all
        micro-batches.
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
                buckets._start(counts, window)

        loss.register_hook(start)

    @torch.no_grad()
    def _start(self, counts: bool, window: Window | None) -> None:
        if not self._ranks.are_current():
            return
        self._begin()
        parameters = values_of(self._variables)
        # Compare with the previous step, because layers can be frozen or unfrozen between steps.
        trainable = [parameter.requires_grad for parameter in parameters]
        if trainable != self._trainable or any(a is not b for a, b in zip(parameters, self._parameters)):
            self._add_hooks(parameters, trainable)
        if any(parameter.grad is not None for parameter in parameters):
            return  # the program accumulates gradients in `.grad`, so only `reduce` can send them
        if not self._can_resend and (self._has_other_hooks() or exchanges_statistics()):
            # Send after the backward pass. Sending early would free `.grad`, which other hooks read. If layers exchange
            # statistics, ranks could deadlock: one rank waits for a bucket, and the other for statistics.
            return
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.places)
        self._rewind()
        self._counts, self._window = counts, window
        self._task = torch._C._current_graph_task_id()
        self._is_running = True
        _Autograd._execution_engine.queue_callback(self._finish)

    def _has_other_hooks(self) -> bool:
        of_each = [p._post_accumulate_grad_hooks or {} for p in self._parameters]
        return any(not isinstance(hook, _Listener) for hooks in of_each for hook in hooks.values())

    def _add_hooks(self, parameters: list[Tensor], trainable: list[bool]) -> None:
        _remove_hooks(self._hooks)
        buckets_ref = weakref.ref(self)
        self._parameters, self._trainable = parameters, trainable
        for i, parameter in enumerate(parameters):
            if trainable[i]:
                handle = parameter.register_post_accumulate_grad_hook(_Listener(buckets_ref, i))
                self._hooks.append((parameter._post_accumulate_grad_hooks, handle.id))

    def _take(self, i: int, parameter: Tensor) -> None:
        bucket = self._bucket_of[i]
        # Do not send a second gradient of a weight, or one from a nested backward pass (reentrant checkpoints), because
        # `.grad` is complete only at the end.
        if i in self._taken or torch._C._current_graph_task_id() != self._task:
            self._was_late |= self._can_resend  # if gradients were freed, `_late_gradients` records this
            return
        assert parameter.grad is not None
        self._taken[i] = (parameter.grad if self._can_resend else None), parameter.grad._version
        grad = parameter.grad if self._window is None else self._window(i, parameter.grad)
        self._put(i, grad)
        if not self._can_resend:
            parameter.grad = None
        bucket.num_missing -= 1
        while self._num_sent < len(self._buckets) - 1 and not self._buckets[self._num_sent].num_missing:
            self._send()

    @torch.no_grad()
    def _finish(self) -> None:
        if not self._is_running:
            return
        self._is_running = False
        own = [parameter.grad for parameter in self._parameters]
        present = [i in self._taken for i in range(len(own))]
        for bucket in self._buckets[self._num_sent :]:
            for i in bucket.places:
                if i not in self._taken:
                    grad = self._of_window(i, own[i])
                    present[i] = grad is not None
                    self._put(i, grad)
        left = self._late_gradients(own)

        def given() -> Gradients:
            return [self._of_window(i, grad) for i, grad in enumerate(own)]

        found = self._reduced(present, given, self._trainable)
        if found is None:  # on some rank, a gradient has changed after it was sent
            # Send again. If the gradient changed on this rank, this rank sends only after backward passes from now on.
            self._overlaps = not self._was_late
            if self._can_resend:
                found = self._reduced_at_the_end(given(), self._counts, self._trainable)
            else:
                found = self._reduced_at_the_end(left, self._counts, self._trainable, present=present, adds=True)
        self._taken = {}
        # Detach, because functions such as `Module.to` replace the memory of `.grad`, and must not replace a bucket's.
        found = [None if grad is None else grad.detach() for grad in found]
        self._returned = found if self._can_resend else [*map(_freed, self._parameters, found)]
        for parameter, grad in zip(self._parameters, self._returned):
            parameter.grad = grad
        self._finished = found

    def _late_gradients(self, own: Gradients) -> list[Tensor | None]:
        """Record whether gradients changed after sending. If gradients were freed, return those that arrived later."""
        left: list[Tensor | None] = [None] * len(own)
        for i, (grad, version) in self._taken.items():
            if self._can_resend:
                self._was_late |= own[i] is not grad or grad._version != version
            elif own[i] is not None:
                self._was_late = True
                of_other_batches = None if self._window is None else self._window(i, None)
                late = self._of_window(i, own[i])
                left[i] = late if of_other_batches is None else late - of_other_batches
        return left

    def _of_window(self, i: int, grad: Tensor | None) -> Tensor | None:
        return grad if self._window is None else self._window(i, grad)

    # -- after the backward pass -----------------------------------------------------------------------------------

    @torch.compiler.disable
    @torch.no_grad()
    def reduce(self, grads: Gradients, variables: Sequence[Variable], counts: bool, weight: float) -> Gradients:
        """Return the sum or mean of all ranks' gradients. Reduce `grads` now, unless the backward pass has done so.

        The next call overwrites the memory of the result. If `counts` is false, this rank has no rows and sends zeros.
        Otherwise, this rank sends its gradients times `weight`.

        Raises:
            ValueError: on all ranks, if ranks differ in updates or trained variables, or if `grads` are other gradients
                than the backward pass has reduced.
        """
        places = [self._places[id(variable)] for variable in variables]
        finished, self._finished = self._finished, None
        if finished is None:
            own: list[Tensor | None] = [None] * len(self._variables)
            trained = [False] * len(self._variables)
            for i, grad in zip(places, grads):
                own[i], trained[i] = grad, True
            self._begin()
            finished = self._reduced_at_the_end(own, counts and weight != 0, trained, weight)
        elif any(grad is not self._returned[i] for i, grad in zip(places, grads)):
            raise ValueError(
                "This step reduced the gradients during its backward pass, so `apply` must receive the `.grad` tensors "
                "of the weights. Received: other tensors as gradients. Use `CrossShard(..., "
                "torch=TorchSpeed(overlap=False))`, or change gradients in a `keras_shardopt.Stage`."
            )
        self._num_taken += 1
        return [finished[i] for i in places]

    @torch.no_grad()
    def join_uneven_inputs(self) -> None:
        """Send zeros and a flag, because this rank has ended training. Raise ValueError if other ranks continue."""
        self._begin()
        self._reduced_at_the_end([None] * len(self._variables), True, None, trains=False)
        self.release()

    def release(self) -> None:
        """Free memory of the last reduction that the next reduction does not need."""
        self.transfer, self._returned = None, []
        for bucket in self._buckets:
            bucket.release()

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """The collectives of the last update, with the tensors sent."""
        return [sent for bucket in self._buckets for sent in bucket.sent]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._buckets)

    @property
    def has_finished(self) -> bool:
        """Whether the backward pass has reduced the gradients, so `reduce` only needs to return them."""
        return self._finished is not None

    # -- during and after the backward pass ------------------------------------------------------------------------

    def _put(self, i: int, grad: Tensor | None, weight: float = 1.0) -> None:
        # A rank without rows sends zeros, which `put` writes for None. With compression, pass zeros instead of None,
        # because the encoder adds the error of its last compression.
        if not self._counts:
            grad = None if grad is None or self._begin_transfer is None else torch.zeros_like(grad)
        self._bucket_of[i].put(i, grad, weight)

    def _reduced_at_the_end(
        self,
        own: Gradients,
        counts: bool,
        trained: Sequence[bool] | None,
        weight: float = 1.0,
        trains: bool = True,
        present: list[bool] | None = None,
        adds: bool = False,
    ) -> list[Tensor | None]:
        """Send all gradients, and again if one has changed on a rank. Return the sums, plus earlier sums if `adds`."""
        self._counts, self._adds = counts, adds
        has = [grad is not None for grad in own] if present is None else present
        while True:
            self._was_late = False
            self._rewind()
            for i, grad in enumerate(own):
                if grad is not None or not self._adds:
                    self._put(i, grad, weight)
            found = self._reduced(has, own, trained, trains)
            if found is not None:
                self._adds = False
                return found
            if not self._can_resend:
                own, self._adds = [None] * len(own), True

    def _send(self) -> None:
        bucket = self._buckets[self._num_sent]
        while self._num_sent - self._num_received >= bucket.num_under_way:
            self._receive()
        bucket.encode()
        with naming_missing_ranks(self._under_way, UPDATE):
            self._under_way.append(bucket.send())
        self._num_sent += 1

    def _receive(self) -> None:
        with naming_missing_ranks(self._under_way, UPDATE):
            wait_for(self._under_way[self._num_received], call=UPDATE)
        self._buckets[self._num_received].receive(self._adds)
        self._num_received += 1
        for bucket in self._buckets[self._num_received + 1 :][:1]:
            bucket.open()

    def _rewind(self) -> None:
        self._num_sent = self._num_received = 0
        if self._begin_transfer is not None:
            self.transfer = self._begin_transfer()
            for bucket in self._buckets:
                bucket.transfer = self.transfer
        for bucket in self._buckets[:2]:
            bucket.open()

    def _must_repeat(self, received: Any) -> bool:
        """Return whether any rank needs all gradients sent again. Raise an error if ranks make different calls."""
        received.check_all_train()
        num_late, num_odd, num_even, *lost = received.more
        if any(number > 0 for number in lost):
            raise ValueError(
                "With `shard_state=True`, the memory of sent gradients is freed, so training cannot continue after a "
                "failed backward pass. Received: a failed backward pass on at least one rank. To continue after "
                "errors, use `CrossShard(..., torch=TorchSpeed(overlap=False))`."
            )
        if num_odd > 0 and num_even > 0:
            raise ValueError(
                "All ranks must make the same updates, in the same order. Received: gradients of different updates on "
                "different ranks. Do not skip an update on some ranks only. A program that catches an exception of an "
                "update must catch it on all ranks."
            )
        # On a GPU, ranks with unchanged gradients do not read the flags, so they would not send these gradients again.
        if 0 < num_late < self._num_ranks and not received.all_read:
            raise RuntimeError(
                "On a GPU, sent gradients must not change, unless they change on all ranks. Received: a changed "
                f"gradient, a second gradient of a weight, or a failed backward pass, on {round(num_late)} of "
                f"{self._num_ranks} ranks. To send later, use `CrossShard(..., torch=TorchSpeed(overlap=False))`."
            )
        return bool(num_late > 0)

    def _reduced(
        self,
        present: list[bool],
        own: Gradients | Callable[[], Gradients],
        trained: Sequence[bool] | None,
        trains: bool = True,
    ) -> list[Tensor | None] | None:
        """Send the remaining buckets and wait. Return the reduced gradients, or None if ranks must send all again."""
        is_odd = self._num_taken % 2 == 1
        more = [self._was_late, trains and is_odd, trains and not is_odd]
        more += [] if self._can_resend else [self._has_lost]
        channel = SideChannel(self._ranks, self._variables, present, trained, trains, more)
        # Do not block: a blocking copy to an accelerator would wait for the backward pass.
        self._flags.copy_(torch.from_numpy(channel.flags_on_host()), non_blocking=True)
        while self._num_sent < len(self._buckets):
            self._send()
        while self._num_received < len(self._buckets):
            self._receive()
        for bucket in self._buckets:
            bucket.finish()
        self._under_way.clear()
        has = present
        received, _ = channel.unpack(self._flags, "sum", must_read=self._was_late)
        if received is not None:
            if self._must_repeat(received):
                return None
            received.check_same_variables()
            has = received.present
        found = [self._bucket_of[i].results[i] if is_there else None for i, is_there in enumerate(has)]
        if self._checks_finite:
            self.found_inf = self._not_finite(found, own)
        return found

    # -- finite checks ---------------------------------------------------------------------------------------------

    def _not_finite(self, found: Gradients, own: Gradients | Callable[[], Gradients]) -> tuple[int, int, int]:
        # First check one sum per bucket. The sum can overflow on some ranks only, because ranks can add in different
        # orders. So check each element before starting a collective: that result is equal on all ranks.
        device = self._flags.device
        is_finite = torch.stack([bucket.is_finite().to(device) for bucket in self._buckets]).all()
        if not self._can_resend:
            return self._not_finite_in_slices(found, is_finite)
        if bool(is_finite):
            return ALL_FINITE
        place = first_not_finite(found)
        if not place:
            return ALL_FINITE
        # Find the rank with the bad gradient: check own gradients outside the buckets' memory, which now holds sums.
        grads = (own() if callable(own) else own) if self._counts else []
        mine = first_not_finite([None if self._is_kept(grad) else grad for grad in grads])
        return self._source(mine, place)

    def _not_finite_in_slices(self, found: Gradients, is_finite: Tensor) -> tuple[int, int, int]:
        last = len(self._variables) + 1
        some = torch.logical_not(is_finite).to(torch.int32)
        with naming_missing_ranks():
            dist.all_reduce(some, dist.ReduceOp.MAX)
        if not bool(some):
            return ALL_FINITE
        mine = first_not_finite(found)
        first = torch.tensor(last - mine if mine else 0, dtype=torch.int32, device=is_finite.device)
        with naming_missing_ranks():
            dist.all_reduce(first, dist.ReduceOp.MAX)
        if not int(first):
            return ALL_FINITE
        places = [i for bucket in self._buckets for i in bucket.local_nonfinite()]
        return self._source(min(places) + 1 if places else 0, last - int(first))

    def _source(self, mine: int, place: int) -> tuple[int, int, int]:
        """Return (1, rank, position) of the first non-finite gradient, for `Step.found_inf`.

        `mine` is its position among this rank's gradients, and `place` among the sums, counted from 1. 0 means none.
        """
        first = torch.zeros(self._num_ranks, dtype=torch.int32, device=self._flags.device)
        first[self._ranks.replica_id] = mine
        with naming_missing_ranks():
            dist.all_reduce(first)
        places = first.tolist()
        rank = next((rank for rank, theirs in enumerate(places) if theirs), UNKNOWN)
        return 1, rank, (place if rank == UNKNOWN else places[rank]) - 1

    def _is_kept(self, grad: Tensor | None) -> bool:
        if grad is None or grad.is_sparse:
            return False
        memory = grad.untyped_storage().data_ptr()
        return any(memory == t.untyped_storage().data_ptr() for b in self._buckets for t in b.memory)


def _freed(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the new `.grad` of a weight after its gradient was freed: NaN in the weight's shape."""
    return None if grad is None else parameter.new_full((), math.nan).expand(parameter.shape)


class _Listener:
    """The hook that passes a weight's gradient to `Buckets`."""

    def __init__(self, buckets: weakref.ref[Buckets], i: int) -> None:
        self._buckets, self._i = buckets, i

    def __call__(self, parameter: Tensor) -> None:
        buckets = self._buckets()
        if buckets is not None and buckets._is_running:
            # Gradients are enabled here only if the backward pass is differentiated. Otherwise skip `no_grad`.
            take = torch.no_grad()(buckets._take) if torch.is_grad_enabled() else buckets._take
            take(self._i, parameter)


Window = Callable[[int, "Tensor | None"], "Tensor | None"]
"""Maps a variable's position and its gradient in the last micro-batch to the mean gradient over all micro-batches."""


def _remove_hooks(hooks_and_keys: list[tuple[dict[int, Any], int]]) -> None:
    # Do not call `handle.remove()`: a handle has only a weak reference to its hooks, which the garbage collector can
    # clear while the parameters still exist.
    for hooks, key in hooks_and_keys:
        hooks.pop(key, None)
    hooks_and_keys.clear()


_STEP = inspect.unwrap(keras.Model.train_step).__code__


def can_bucket(variables: Sequence[Variable]) -> bool:
    """Return whether `Buckets` supports the dtypes and devices of these variables."""
    return all(v.value.dtype in _DTYPES and v.value.device.type in ("cpu", "cuda") for v in variables)


@torch.compiler.disable
def buckets_among(replicas: Any, variables: Sequence[Variable], *arguments: Any) -> Buckets | None:
    """Return `Buckets` of these arguments, or None if `Buckets` cannot use them. All processes must make this call."""
    if not isinstance(replicas, TorchProcessGroup) or not can_bucket(variables):
        return None
    return None if replicas.is_reduced_by_ddp(variables[0]) else Buckets(replicas, variables, *arguments)

"""Gradients reduced during the backward pass, while it computes others.

Gradients travel in flat buckets, in the order in which a backward pass makes them. A full bucket is sent at once. The
last bucket waits for the end of the backward pass and carries which gradients this rank has. After `loss.backward()`,
`.grad` is global.

`reduce` at the end sends the same buckets, so each rank decides at each step when to send. It sends early only in the
step of Keras' own trainer, which calls `scale_loss`, `backward` and `apply` in this order.

With sharded state, each rank gets its slices of the sums (`sliced_bucket.py`). A gradient is gone once it is sent: a
later one of the same variable is sent separately and added. `.grad` is NaN then.

With accumulation, only the last micro-batch sends: the mean of all. Finite checks take one sum per bucket. If a sum is
not finite, all ranks together check each gradient.

Private names of Keras touched here (a test holds them):
    `Model.train_step` of the torch trainer - scales the loss, lets gradients go, computes new ones,
        and hands `.grad` of the trainable weights to the optimizer.
Private names of PyTorch: `Variable._execution_engine.queue_callback` - calls at the end of a backward pass, which DDP
    does, too; `torch._C._current_graph_task_id` - which backward pass is running;
    `Tensor._post_accumulate_grad_hooks` - the hooks of a tensor by the `id` of their handles.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch.autograd import Variable as _Autograd

from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.side_channel import NUM_FLAGS, SideChannel
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.flat_bucket import CALL, laid_out
from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.nonfinite import first_not_finite
from keras_shardopt.backends.torch.process_group import exchanges_statistics, explaining_failures, wait_for
from keras_shardopt.backends.torch.sliced_bucket import Slices, cut_up
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ALL_FINITE, UNKNOWN, Gradients, Optimizer, ReduceOp, Tensor, Variable

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Buckets:
    """Reduces the gradients of some variables over all ranks, which make the same calls with the same arguments.

    Args:
        ranks: the ranks of the default process group (`TorchProcessGroup`).
        variables: the trainable variables, all that gradients may be of.
        takes_mean: bool. Whether sums are divided by the number of ranks.
        bucket_bytes: float. How large buckets may be; a gradient that is larger has one of its own.
        compression: None, "float16" or "bfloat16": the dtype in which float32 and float64 are sent and added up.
        checks_finite: bool. Whether to look for what is not finite.
        slices: None, or how gradients are cut, of which each rank gets its slices.
        made: a function that makes other buckets or None, and one that begins a `Transfer` for each reduction.
    """

    def __init__(
        self,
        ranks: Any,
        variables: Sequence[Variable],
        takes_mean: bool,
        bucket_bytes: float,
        compression: str | None,
        checks_finite: bool = False,
        slices: Slices | None = None,
        made: tuple[Any, Any] = (None, None),
    ) -> None:
        self._ranks = ranks
        make, self._begin_transfer = made
        self.transfer: Any = None
        """What has taken the gradients that `reduce` has returned last, until `release`; None for usual buckets."""
        self._checks_finite = checks_finite
        self.found_inf: tuple[int, int, int] | None = None
        """Of the gradients that `reduce` has returned last, as `Step.found_inf`; None where nobody asks."""
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
            self._buckets = laid_out(tensors, bucket_bytes, op, self._num_ranks, compression, num_flags)
        else:
            self._buckets = cut_up(tensors, slices, op, ranks.replica_id, compression, num_flags, checks_finite)
        self._can_resend = self._buckets[0].can_resend
        self._of = {i: bucket for bucket in self._buckets for i in bucket.places}
        self._flags = self._buckets[-1].flags
        self._parameters: list[Tensor] = []
        self._trainable: list[bool] = []
        self._heard: list[tuple[dict[int, Any], int]] = []
        # How often gradients were taken from here: equal on all ranks, or one of them has left out an update.
        self._num_taken = 0
        self._num_sent: int = 0
        self._forget()

    def _begin(self) -> None:
        failure = next((bucket.failure for bucket in self._buckets if bucket.failure), "")
        if failure:
            raise RuntimeError(
                "Each rank must send its gradients in each step. Received: an earlier step, in which "
                f"{failure}. Start the job again."
            )
        if self._num_sent % len(self._buckets):
            # The backward pass before has ended with an error. Others wait for the rest of its gradients, and then
            # do it all once more, along with what this rank sends next; if they still can.
            self._was_late, self._has_lost = True, not self._can_resend
            self._reduced([False] * len(self._variables), [None] * len(self._variables), None)
        self._forget()

    def _forget(self) -> None:
        self._is_running, self._task = False, -1
        self._was_late = self._has_lost = False
        self._seen: dict[int, tuple[Any, int]] = {}
        self._num_sent = self._num_received = 0
        self._under_way.clear()
        self._adds = False
        self._finished: list[Tensor | None] | None = None
        self._handed: list[Tensor | None] = []
        self._window: Window | None = None

    # Not `weakref.finalize`, whose registry `torch.compile` would guard on.
    def __del__(self) -> None:
        _let_go(getattr(self, "_heard", []))

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of an optimizer makes its own

    # -- early -----------------------------------------------------------------------------------------------------

    def follow(self, loss: Any, optimizer: Optimizer, counts: bool, window: Window | None = None) -> None:
        """Sends gradients while `loss` is differentiated, if the `scale_loss` that asks is called by Keras' own step.

        Args:
            loss: what `scale_loss` returns.
            optimizer: whose `scale_loss` that is.
            counts: whether this rank has rows, so that its gradients count.
            window: what makes of a gradient, or of None, that of several micro-batches, of which this is the last.
        """
        if not self._overlaps or torch.compiler.is_compiling():
            return
        if not torch.is_tensor(loss) or not loss.requires_grad:
            return
        if getattr(caller_instance(further_out=2, code=_STEP), "optimizer", None) is not optimizer:
            return
        mine = weakref.ref(self)

        def start(_: Tensor) -> None:
            buckets = mine()
            if buckets is not None:
                buckets._start(counts, window)

        loss.register_hook(start)

    @torch.no_grad()
    def _start(self, counts: bool, window: Window | None) -> None:
        if not self._ranks.are_current():
            return
        self._begin()
        parameters = values_of(self._variables)
        trainable = [parameter.requires_grad for parameter in parameters]  # layers are frozen, and no longer
        if trainable != self._trainable or any(a is not b for a, b in zip(parameters, self._parameters)):
            self._listen_to(parameters, trainable)
        if any(parameter.grad is not None for parameter in parameters):
            return  # somebody adds gradients up
        if not self._can_resend and (self._others_listen() or exchanges_statistics()):
            # Who are to find gradients where they were. And a bucket waits here for the one before it to come from all
            # ranks, of which one that sends at the end may wait in a layer for this one.
            return
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.places)
        self._rewind()
        self._counts, self._window = counts, window
        self._task = torch._C._current_graph_task_id()
        self._is_running = True
        _Autograd._execution_engine.queue_callback(self._finish)

    def _others_listen(self) -> bool:
        of_each = [p._post_accumulate_grad_hooks or {} for p in self._parameters]
        return any(not isinstance(hook, _Listener) for hooks in of_each for hook in hooks.values())

    def _listen_to(self, parameters: list[Tensor], trainable: list[bool]) -> None:
        _let_go(self._heard)
        mine = weakref.ref(self)
        self._parameters, self._trainable = parameters, trainable
        for i, parameter in enumerate(parameters):
            if trainable[i]:
                handle = parameter.register_post_accumulate_grad_hook(_Listener(mine, i))
                self._heard.append((parameter._post_accumulate_grad_hooks, handle.id))

    def _take(self, i: int, parameter: Tensor) -> None:
        """One gradient is there."""
        bucket = self._of[i]
        # A second time, or in a backward pass within this one, as with reentrant checkpoints: `.grad` has all of it
        # in the end.
        if i in self._seen or torch._C._current_graph_task_id() != self._task:
            self._was_late |= self._can_resend  # else only what is left over in the end is late
            return
        assert parameter.grad is not None
        self._seen[i] = (parameter.grad if self._can_resend else None), parameter.grad._version
        grad = parameter.grad if self._window is None else self._window(i, parameter.grad)
        self._put(i, grad)
        if not self._can_resend:
            parameter.grad = None
        bucket.num_missing -= 1
        while self._num_sent < len(self._buckets) - 1 and not self._buckets[self._num_sent].num_missing:
            self._send()

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward pass is over: all gradients are there that will be."""
        if not self._is_running:
            return
        self._is_running = False
        own = [parameter.grad for parameter in self._parameters]
        present = [i in self._seen for i in range(len(own))]
        for bucket in self._buckets[self._num_sent :]:
            for i in bucket.places:
                if i not in self._seen:
                    grad = self._of_window(i, own[i])
                    present[i] = grad is not None
                    self._put(i, grad)
        left = self._left(own)

        def given() -> Gradients:
            return [self._of_window(i, grad) for i, grad in enumerate(own)]

        found = self._reduced(present, given, self._trainable)
        if found is None:  # somewhere one came after it was sent
            # All of it anew, and from now on at the end: here if this rank was late, or else on that one.
            self._overlaps = not self._was_late
            if self._can_resend:
                found = self._reduced_at_the_end(given(), self._counts, self._trainable)
            else:
                found = self._reduced_at_the_end(left, self._counts, self._trainable, present=present, adds=True)
        self._seen = {}
        # Not the buckets' own views, which would lie elsewhere once `Module.to` or the like has moved `.grad`.
        found = [None if grad is None else grad.detach() for grad in found]
        self._handed = found if self._can_resend else [*map(_gone, self._parameters, found)]
        for parameter, grad in zip(self._parameters, self._handed):
            parameter.grad = grad
        self._finished = found

    def _left(self, own: Gradients) -> list[Tensor | None]:
        """What has come by a hook of somebody else, or another part of the backward pass, after the gradient was taken.

        Where gradients are let go it is all of `.grad`.
        """
        left: list[Tensor | None] = [None] * len(own)
        for i, (grad, version) in self._seen.items():
            if self._can_resend:
                self._was_late |= own[i] is not grad or grad._version != version
            elif own[i] is not None:
                self._was_late = True
                of_others = None if self._window is None else self._window(i, None)
                late = self._of_window(i, own[i])
                left[i] = late if of_others is None else late - of_others
        return left

    def _of_window(self, i: int, grad: Tensor | None) -> Tensor | None:
        return grad if self._window is None else self._window(i, grad)

    # -- at the end ------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    @torch.no_grad()
    def reduce(self, grads: Gradients, variables: Sequence[Variable], counts: bool, weight: float = 1.0) -> Gradients:
        """The global gradients: those that are reduced already, if they are what is given, or reduced now.

        They lie in memory that the next call overwrites.

        Args:
            grads: this rank's, one tensor or None per variable.
            variables: their variables.
            counts: whether this rank has rows; else zeros stand for its gradients.
            weight: a factor for this rank's gradients.

        Raises:
            ValueError: on all ranks, if not all have made equally many updates, or train the same variables; if other
                gradients come than the backward pass has reduced.
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
        elif any(grad is not self._handed[i] for i, grad in zip(places, grads)):
            raise ValueError(
                "The gradients of this step were reduced while they were computed, and others have come. "
                "Received: gradients that are not `.grad` of the weights. Use `torch=TorchSpeed(overlap=False)`, or "
                "change gradients inside it."
            )
        self._num_taken += 1
        if self.found_inf is not None and self.found_inf[2] >= 0:
            is_bad, rank, place = self.found_inf
            self.found_inf = is_bad, rank, places.index(place) if place in places else -1
        return [finished[i] for i in places]

    @torch.no_grad()
    def join_uneven_inputs(self) -> None:
        """Tells the other ranks that this one has ended training: sends zeros, as if it were one more update.

        Raises:
            ValueError: on all ranks, if some have ended and others have not.
        """
        self._begin()
        self._reduced_at_the_end([None] * len(self._variables), True, None, trains=False)
        self.release()

    def release(self) -> None:
        """Lets go of what the last reduction has left, which the next one does not need."""
        self.transfer, self._handed = None, []
        for bucket in self._buckets:
            bucket.release()

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """What was sent in the last update, and by which collectives, until `release`."""
        return [sent for bucket in self._buckets for sent in bucket.sent]

    @property
    def has_finished(self) -> bool:
        """Whether `.grad` of the weights is global, and `reduce` has only to be given it."""
        return self._finished is not None

    # -- what both do ----------------------------------------------------------------------------------------------

    def _put(self, i: int, grad: Tensor | None, weight: float = 1.0) -> None:
        if not self._counts:  # with zeros a codec sends what it has kept back until now, with None it would not
            grad = None if grad is None or self._begin_transfer is None else torch.zeros_like(grad)
        self._of[i].put(i, grad, weight)

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
        """Sends all, as often as some rank asks for it; with `adds` on top of what has come."""
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
        with explaining_failures(self._under_way, CALL):
            self._under_way.append(bucket.send())
        self._num_sent += 1

    def _receive(self) -> None:
        with explaining_failures(self._under_way, CALL):
            wait_for(self._under_way[self._num_received])
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

    def _must_repeat(self, heard: Any) -> bool:
        """Whether some rank asks to send all gradients again. Raises an error if the ranks do not match."""
        heard.check_all_train()
        num_late, num_odd, num_even, *lost = heard.more
        if any(number > 0 for number in lost):
            raise ValueError(
                "With `shard_state=True` gradients are gone once they are sent. Received: on some rank a backward "
                "pass that ended with an error, after which the program went on. Use "
                "`torch=TorchSpeed(overlap=False)` to continue after such errors."
            )
        if num_odd > 0 and num_even > 0:
            raise ValueError(
                "All replicas must make the same updates, in the same order. Received: gradients of other updates "
                "on some ranks. Was an update left out on one rank, by an error that the program went on after?"
            )
        if 0 < num_late < self._num_ranks and not heard.all_look:  # then others do not look either, and go on
            raise RuntimeError(
                "On a GPU gradients that are sent must not change any more on some ranks only. Received: on "
                f"{round(num_late)} of {self._num_ranks} ranks one that came or was changed afterwards, or a "
                "backward pass that ended with an error. Use `torch=TorchSpeed(overlap=False)`."
            )
        return bool(num_late > 0)

    def _reduced(
        self,
        present: list[bool],
        own: Gradients | Callable[[], Gradients],
        trained: Sequence[bool] | None,
        trains: bool = True,
    ) -> list[Tensor | None] | None:
        """Sends what is not sent yet, and waits for all; None if some rank asks to do it all once more."""
        is_odd = self._num_taken % 2 == 1
        more = [self._was_late, trains and is_odd, trains and not is_odd]
        more += [] if self._can_resend else [self._has_lost]
        channel = SideChannel(self._ranks, self._variables, present, trained, trains, more)
        self._flags.copy_(torch.from_numpy(channel.told()), non_blocking=True)  # else it waits for the backward pass
        while self._num_sent < len(self._buckets):
            self._send()
        while self._num_received < len(self._buckets):
            self._receive()
        for bucket in self._buckets:
            bucket.finish()
        self._under_way.clear()
        has = present
        heard, _ = channel.unpack(self._flags, "sum", must_look=self._was_late)
        if heard is not None:
            if self._must_repeat(heard):
                return None
            heard.check_same_variables()
            has = heard.present
        found = [self._of[i].results[i] if is_there else None for i, is_there in enumerate(has)]
        if self._checks_finite:
            self.found_inf = self._not_finite(found, own)
        return found

    # -- what is not finite ----------------------------------------------------------------------------------------

    def _not_finite(self, found: Gradients, own: Gradients | Callable[[], Gradients]) -> tuple[int, int, int]:
        """What of the global gradients is not finite, and whose that was."""
        # What is not finite makes the sum so; a sum may overflow by itself. Each rank has the same bits, but adds them
        # up in an order of its own: only what elements say is sure to be the same on all, and leads to a collective.
        device = self._flags.device
        is_finite = torch.stack([bucket.is_finite().to(device) for bucket in self._buckets]).all()
        if not self._can_resend:
            return self._not_finite_in_slices(found, is_finite)
        if bool(is_finite):
            return ALL_FINITE
        place = first_not_finite(found)
        if not place:
            return ALL_FINITE
        # Memory of buckets holds those of all ranks by now.
        grads = (own() if callable(own) else own) if self._counts else []
        mine = first_not_finite([None if self._is_kept(grad) else grad for grad in grads])
        return self._source(mine, place)

    def _not_finite_in_slices(self, found: Gradients, is_finite: Tensor) -> tuple[int, int, int]:
        # Each rank sees its own slices only.
        last = len(self._variables) + 1
        some = torch.logical_not(is_finite).to(torch.int32)
        with explaining_failures():
            dist.all_reduce(some, dist.ReduceOp.MAX)
        if not bool(some):
            return ALL_FINITE
        mine = first_not_finite(found)
        first = torch.tensor(last - mine if mine else 0, dtype=torch.int32, device=is_finite.device)
        with explaining_failures():
            dist.all_reduce(first, dist.ReduceOp.MAX)
        if not int(first):
            return ALL_FINITE
        places = [i for bucket in self._buckets for i in bucket.own_not_finite()]
        return self._source(min(places) + 1 if places else 0, last - int(first))

    def _source(self, mine: int, place: int) -> tuple[int, int, int]:
        """`Step.found_inf`, of what is not finite of this rank's own gradients and of the sum (from 1; 0 for none)."""
        told = torch.zeros(self._num_ranks, dtype=torch.int32, device=self._flags.device)
        told[self._ranks.replica_id] = mine
        with explaining_failures():
            dist.all_reduce(told)
        places = told.tolist()
        rank = next((rank for rank, theirs in enumerate(places) if theirs), UNKNOWN)
        return 1, rank, (place if rank == UNKNOWN else places[rank]) - 1

    def _is_kept(self, grad: Tensor | None) -> bool:
        if grad is None or grad.is_sparse:
            return False
        memory = grad.untyped_storage().data_ptr()
        return any(memory == t.untyped_storage().data_ptr() for b in self._buckets for t in b.memory)


def _gone(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """What `.grad` is once the gradient is gone: NaN, in the memory of one number."""
    return None if grad is None else parameter.new_full((), math.nan).expand(parameter.shape)


class _Listener:
    """A hook of `Buckets`, by which it is known from those of others."""

    def __init__(self, buckets: weakref.ref[Buckets], i: int) -> None:
        self._buckets, self._i = buckets, i

    def __call__(self, parameter: Tensor) -> None:
        buckets = self._buckets()
        if buckets is not None and buckets._is_running:
            # They are on only in a backward pass that is differentiated itself.
            take = torch.no_grad()(buckets._take) if torch.is_grad_enabled() else buckets._take
            take(self._i, parameter)


Window = Callable[[int, "Tensor | None"], "Tensor | None"]
"""`(place, grad) -> grad`."""


def _let_go(heard: list[tuple[dict[int, Any], int]]) -> None:
    # Not `handle.remove()`: a handle finds its hooks through a weak reference, which the garbage collector clears
    # along with a cycle that has parameters in it, even if these live on.
    for hooks, key in heard:
        hooks.pop(key, None)
    heard.clear()


_STEP = inspect.unwrap(keras.Model.train_step).__code__


def can_bucket(variables: Sequence[Variable]) -> bool:
    """Whether gradients of these variables can travel in buckets that are kept."""
    return all(v.value.dtype in _DTYPES and v.value.device.type in ("cpu", "cuda") for v in variables)


@torch.compiler.disable
def buckets_among(replicas: Any, variables: Sequence[Variable], *arguments: Any) -> Buckets | None:
    """The buckets of these variables; None where they cannot be. All processes call it together.

    Args:
        replicas: a communicator.
        variables: as of `Buckets`.
        arguments: the further ones of `Buckets`.
    """
    if not isinstance(replicas, TorchProcessGroup) or not can_bucket(variables):
        return None
    return None if replicas.is_reduced_by_ddp(variables[0]) else Buckets(replicas, variables, *arguments)

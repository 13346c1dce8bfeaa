"""Sends flags between replicas with separate programs: numbers that a reduction sums together with the gradients.

All replicas must reduce the same list of tensors, or a collective pairs wrong tensors or hangs. So a replica sends
zeros in place of a gradient of None. Flags state which gradients it has, which variables it trains, and whether it has
ended training.

If only one replica froze a layer, its weights would differ from those of other replicas after the next update. Each
replica therefore sends a hash of the set of its trained variables: it sets 10 of 20 flags, the marks. Different sets
have different marks, except for one pair in 184,756. The sum of the marks then shows a difference, even if half
precision makes the sum inexact.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.arguments import listed
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import ReduceOp, Tensor, Variable, cast

NUM_MARKS = 20

NUM_FLAGS = NUM_MARKS + 2
"""The number of flags besides one per gradient: the marks, and two for whether the replica still trains."""

_OF_ALL = [True] * (NUM_MARKS // 2) + [False] * (NUM_MARKS // 2)


@dataclasses.dataclass(frozen=True)
class SideChannel:
    """The flags that this replica sends in one reduction of gradients."""

    replicas: Communicator
    variables: Sequence[Variable]
    """The trainable variables, in the same order on all replicas."""

    present: Sequence[bool]
    """For each variable, whether this replica has a gradient."""

    trained: Sequence[bool] | None = None
    """Whether this replica trains each variable. None if all variables are trained."""

    trains: bool = True
    """Whether this replica still trains. False if it has ended training."""

    more: Sequence[bool] = ()
    """Further flags, whose meaning the caller of this class defines."""

    def flags_on_host(self) -> np.ndarray:
        """Return the flags on the host, as float32."""
        flags = [*self.present, *marks(self.trained), self.trains, not self.trains, *self.more]
        return np.array(flags, "float32")  # `convert_to_tensor` is slower: Keras checks each element of a list

    def pack(self, dtype: str, numbers: Tensor | None = None) -> Tensor:
        """Return a flat tensor to be summed over replicas: this object's flags, then `numbers`."""
        flags = ops.convert_to_tensor(self.flags_on_host(), dtype)
        return flags if numbers is None else ops.concatenate([flags, ops.cast(numbers, dtype)])

    def unpack(self, sums: Tensor, op: ReduceOp, must_read: bool = False) -> tuple[ReceivedFlags | None, Tensor]:
        """Return all replicas' flags, and the reduced `numbers`. `sums` is the result of `pack`, reduced with `op`.

        The flags are None if this replica has all gradients and reading would wait for a device, unless `must_read`.
        """
        size = len(self.present) + NUM_FLAGS + len(self.more)
        flags, numbers = sums[:size], sums[size:]
        all_read = runtime.is_cheap_to_read(flags) or not self.trains
        if all(self.present) and not all_read and not must_read:
            return None, numbers
        factor = self.replicas.num_replicas if op == "mean" else 1
        counts = [count * factor for count in ops.convert_to_numpy(cast(flags, "float32")).tolist()]
        return ReceivedFlags(self, counts, all_read), numbers


@dataclasses.dataclass(frozen=True)
class ReceivedFlags:
    """The flags of all replicas, summed in one reduction of gradients."""

    own: SideChannel
    counts: Sequence[float]
    """The number of replicas on which each flag is set. Approximate, because flags can be summed in half precision."""

    all_read: bool
    """Whether all replicas read the flags. Replicas can then communicate once more, to describe an error."""

    @property
    def present(self) -> list[bool]:
        """For each variable, whether any replica has a gradient."""
        return [count > 0 for count in self.counts[: len(self.own.present)]]

    @property
    def more(self) -> Sequence[float]:
        """For each flag in `SideChannel.more`, the number of replicas that have set this flag."""
        return self.counts[len(self.own.present) + NUM_FLAGS :]

    def check_all_train(self) -> None:
        """Raise ValueError if some replicas still train and others have ended."""
        num_training, num_ended = self.counts[len(self.own.present) + NUM_MARKS :][:2]
        if (num_ended if self.own.trains else num_training) > 0:
            does = "continues" if self.own.trains else "has ended training"
            size = self.own.replicas.num_replicas
            raise ValueError(
                f"All replicas must make the same number of updates. Received: this replica {does}, and only "
                f"{round(num_training)} of {size} replicas continue. Pass the same number of batches on each replica, "
                "or call `keras_shardopt.prepare(model)`, which allows different numbers."
            )

    def check_same_variables(self) -> None:
        """Raise ValueError on this replica if the replicas train different variables."""
        own, replicas = self.own, self.own.replicas
        marked = self.counts[len(own.present) :][:NUM_MARKS]
        if not any(count > 0 and not mine for count, mine in zip(marked, marks(own.trained))):
            return
        size, me = int(replicas.num_replicas), int(replicas.replica_id)
        frozen = np.zeros((size, len(own.variables)), "float32")
        if own.trained is not None:
            frozen[me] = [not is_trained for is_trained in own.trained]
        seen = [me]
        if self.all_read:
            (rows,) = replicas.all_reduce([ops.convert_to_tensor(frozen.reshape(-1))], "max")
            frozen = ops.convert_to_numpy(rows).reshape(size, -1)
            seen = list(range(size))
        received = [
            f"{_names(frozen[i], own.variables)} {'not ' if frozen[i].any() else ''}"
            f"trained on replica {replicas.members[i]}"
            for i in seen
        ]
        advice = "" if self.all_read else " The other replicas continue, because they cannot detect this error."
        raise ValueError(
            f"All replicas must train the same variables. Received: {'; '.join(received)}. Freeze and unfreeze layers "
            f"on all replicas, before the same batch.{advice}"
        )


def marks(trained: Sequence[bool] | None) -> list[bool]:
    """Return 20 bools, a hash of the set of trained variables. `trained` has a bool per variable. None means all."""
    if trained is None or all(trained):
        return _OF_ALL
    chosen = random.Random(hashlib.sha256(bytes(trained)).digest()).sample(range(NUM_MARKS), NUM_MARKS // 2)
    return [i in chosen for i in range(NUM_MARKS)]


def _names(frozen: Any, variables: Sequence[Variable]) -> str:
    return listed([f"`{getattr(v, 'path', i)}`" for i, v in enumerate(variables) if frozen[i]], ", ") or "all"

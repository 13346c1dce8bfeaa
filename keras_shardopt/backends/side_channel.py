"""What replicas that each run their own program send along with their gradients, as numbers that add up.

A branch taken on one replica and not on another leaves None where others have a gradient, and a list that is shorter on
one of them pairs the wrong tensors or hangs. So all send zeros for None, and along with them a few 0s and 1s: which
gradients they have, which variables they train, and whether they go on training at all.

A replica that has frozen a layer would leave its gradients out of the mean, and keep its weights while others move
theirs. So each marks, in twenty flags, which variables it trains. It marks ten of them, so of two sets of variables
each has a mark that the other lacks (but for one pair in 184,756), and every replica sees in the sum of all marks,
which need not be exact, whether somebody trains other variables than itself.
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
"""How many flags there are, apart from those that say which gradients a replica has."""

_OF_ALL = [True] * (NUM_MARKS // 2) + [False] * (NUM_MARKS // 2)


@dataclasses.dataclass(frozen=True)
class SideChannel:
    """What this replica sends along in one reduction."""

    replicas: Communicator
    variables: Sequence[Variable]
    """The trainable variables, equal on all replicas."""

    present: Sequence[bool]
    """For each of them, whether this replica has a gradient."""

    trained: Sequence[bool] | None = None
    """For each of them, whether this replica trains it; None for all."""

    trains: bool = True
    """Whether this replica goes on training, and has not ended."""

    more: Sequence[bool] = ()
    """Further flags."""

    def told(self) -> np.ndarray:
        """The flags on the host, as float32."""
        told = [*self.present, *marks(self.trained), self.trains, not self.trains, *self.more]
        return np.array(told, "float32")  # of a list Keras looks at each element

    def pack(self, dtype: str, numbers: Tensor | None = None) -> Tensor:
        """The flags, and after them any other numbers, as a flat tensor to be added up over replicas."""
        flags = ops.convert_to_tensor(self.told(), dtype)
        return flags if numbers is None else ops.concatenate([flags, ops.cast(numbers, dtype)])

    def unpack(self, sums: Tensor, op: ReduceOp, must_look: bool = False) -> tuple[Heard | None, Tensor]:
        """What all replicas have sent.

        Args:
            sums: what `pack` has returned, reduced over replicas.
            op: "sum" or "mean": how.
            must_look: bool. Whether flags are read even if that is to wait for a device.

        Returns:
            Their flags, or None where this replica has all gradients and to read flags is to wait; and the reduced
            `numbers`.
        """
        size = len(self.present) + NUM_FLAGS + len(self.more)
        flags, numbers = sums[:size], sums[size:]
        all_look = runtime.is_cheap_to_read(flags) or not self.trains
        if all(self.present) and not all_look and not must_look:
            return None, numbers
        factor = self.replicas.num_replicas if op == "mean" else 1
        counts = [count * factor for count in ops.convert_to_numpy(cast(flags, "float32")).tolist()]
        return Heard(self, counts, all_look), numbers


@dataclasses.dataclass(frozen=True)
class Heard:
    """What all replicas have sent along in one reduction."""

    own: SideChannel
    counts: Sequence[float]
    """On how many replicas each flag is set, about: they may have been added up in half precision."""

    all_look: bool
    """Whether all replicas read this, so that they can exchange more."""

    @property
    def present(self) -> list[bool]:
        """For each variable, whether some replica has a gradient."""
        return [count > 0 for count in self.counts[: len(self.own.present)]]

    @property
    def more(self) -> Sequence[float]:
        """On how many replicas each further flag is set."""
        return self.counts[len(self.own.present) + NUM_FLAGS :]

    def check_all_train(self) -> None:
        """Raises ValueError where some replicas go on training and others have ended."""
        num_training, num_ended = self.counts[len(self.own.present) + NUM_MARKS :][:2]
        if (num_ended if self.own.trains else num_training) > 0:
            does = "goes on" if self.own.trains else "has ended training"
            size = self.own.replicas.num_replicas
            raise ValueError(
                "All replicas must make the same number of updates. "
                f"Received: this one {does}, and only {round(num_training)} of {size} go on. Give all of them as "
                "many batches, or call `keras_shardopt.prepare(model)`, after which the numbers need not be equal."
            )

    def check_same_variables(self) -> None:
        """Raises ValueError, on every replica that calls it, if not all train the same variables.

        It names the variables and, where all look, the replicas.
        """
        own, replicas = self.own, self.own.replicas
        marked = self.counts[len(own.present) :][:NUM_MARKS]
        if not any(count > 0 and not mine for count, mine in zip(marked, marks(own.trained))):
            return
        size, me = int(replicas.num_replicas), int(replicas.replica_id)
        frozen = np.zeros((size, len(own.variables)), "float32")
        if own.trained is not None:
            frozen[me] = [not is_trained for is_trained in own.trained]
        seen = [me]
        if self.all_look:
            (rows,) = replicas.all_reduce([ops.convert_to_tensor(frozen.reshape(-1))], "max")
            frozen = ops.convert_to_numpy(rows).reshape(size, -1)
            seen = list(range(size))
        received = [
            f"{_names(frozen[i], own.variables)} {'not ' if frozen[i].any() else ''}"
            f"trained on replica {replicas.members[i]}"
            for i in seen
        ]
        advice = "" if self.all_look else " Others have gone on, as they look at no gradients on this device."
        raise ValueError(
            "All replicas must train the same variables. "
            f"Received: {'; '.join(received)}. "
            f"Freeze and unfreeze layers on all replicas, before the same batch.{advice}"
        )


def marks(trained: Sequence[bool] | None) -> list[bool]:
    """The marks of a set of variables: for each variable, whether it is trained (None: all of them)."""
    if trained is None or all(trained):
        return _OF_ALL
    chosen = random.Random(hashlib.sha256(bytes(trained)).digest()).sample(range(NUM_MARKS), NUM_MARKS // 2)
    return [i in chosen for i in range(NUM_MARKS)]


def _names(frozen: Any, variables: Sequence[Variable]) -> str:
    return listed([f"`{getattr(v, 'path', i)}`" for i, v in enumerate(variables) if frozen[i]], ", ") or "all"

"""How gradients become smaller on their way between replicas: codecs, and the reductions that use them.

Hides the bytes. A reduction of coded gradients has two legs: each replica sends every other one its part, coded; each
adds up its part in float32, codes the sum, and sends it to all. So bytes per replica do not grow with their number, and
all replicas decode the same bytes. What rounding leaves over, in both legs, goes to the caller, who adds it to the next
gradients: *error feedback* (Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import Kind, recording
from keras_shardopt.numerics import Tensor, Variable

__all__ = ["BFloat16", "Compression", "Float16", "Int4", "Int8", "PowerSGD", "get"]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__"]


class Reduced(NamedTuple):
    """What a coded reduction returns."""

    sums: list[Tensor]
    """Over replicas, equal on all of them to the bit."""

    along: list[Tensor]
    """The sums of what was sent as it is."""

    unsent: list[Tensor]
    """What of this replica's tensors is not in the sums. Those of all replicas add up to what is missing there."""

    factors: list[Tensor]
    """What the next reduction starts from, equal on all replicas."""


Legs = Generator["tuple[Kind, Sequence[Tensor]]", "list[Tensor]", Reduced]
"""A reduction that yields each collective that it needs, a sum where it is an all-reduce, and gets what comes of it."""


class Compression:
    """Base class: what is done to gradients so that replicas send fewer bytes.

    Args:
        error_feedback: bool. Whether each replica keeps what it could not send, and adds it to its next gradients.
    """

    sum_dtype: str | None = None
    """The dtype in which gradients are added up on their way, where that is all there is to it."""

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = check.flag("error_feedback", error_feedback)

    def start(self, variable: Variable, position: int) -> np.ndarray | None:
        """What is kept for this trainable variable from one reduction to the next, equal on all replicas."""
        del variable, position
        return None

    def legs(
        self,
        tensors: Sequence[Tensor],
        along: Sequence[Tensor],
        num_replicas: int,
        replica_id: Any,
        update: Any,
        factors: Sequence[Tensor | None],
    ) -> Legs:
        """Adds up float32 tensors over replicas, coded, whoever runs the collectives.

        Args:
            tensors: of this replica.
            along: tensors that are sent as they are.
            num_replicas: how many replicas there are.
            replica_id: which of them this is.
            update: how many updates there were: an int or an integer tensor.
            factors: what the last reduction has left for each tensor, or `start`.
        """
        raise NotImplementedError

    def reduce(
        self,
        tensors: Sequence[Tensor],
        along: Sequence[Tensor],
        comm: Communicator,
        update: Any,
        factors: Sequence[Tensor | None],
    ) -> Reduced:
        """As `legs`, with the collectives of `comm`, one after the other."""
        legs = self.legs(tensors, along, comm.num_replicas, comm.replica_id, update, factors)
        found: Any = None
        while True:
            try:
                kind, sent = legs.send(found)
            except StopIteration as end:
                reduced: Reduced = end.value
                return reduced
            found = comm.all_reduce(sent, "sum") if kind == "all_reduce" else getattr(comm, kind)(sent)

    def get_config(self) -> dict[str, Any]:
        """The arguments of its constructor, for files."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Compression:
        """The reverse of `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        given = [f"{k}={v!r}" for k, v in self.get_config().items() if v != defaults[k].default]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.get_config().items())))


class CodedInTwoLegs(Compression):
    """Codes float32 vectors, blocks of whose elements are coded together."""

    block: int = 1

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """What is sent for a vector of whole blocks. The `key` of ints makes random numbers."""
        raise NotImplementedError

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """The vector, or several one after another, as a receiver has it in float32."""
        raise NotImplementedError

    def legs(
        self,
        tensors: Sequence[Tensor],
        along: Sequence[Tensor],
        num_replicas: int,
        replica_id: Any,
        update: Any,
        factors: Sequence[Tensor | None],
    ) -> Legs:
        """See `Compression.legs`."""
        size, me = num_replicas, replica_id
        flat = joined(tensors, size * self.block)
        sent = self.encode(flat, (update, me, 0))
        received = yield "all_to_all", sent
        total = ops.sum(ops.reshape(self.decode(received), (size, -1)), axis=0)
        again = self.encode(total, (update, me, 1))
        result = self.decode((yield "all_gather", again))
        unsent = ops.reshape(flat - self.decode(sent), (size, -1))
        # What the second leg leaves over is this replica's, as if it had not sent it in the first.
        mine = ops.equal(ops.arange(size, dtype="int32"), ops.cast(me, "int32"))[:, None]
        unsent = ops.where(mine, unsent + (total - self.decode(again))[None], unsent)
        sums = (yield "all_reduce", along) if along else []
        return Reduced(parted(result, tensors), sums, parted(ops.reshape(unsent, (-1,)), tensors), [])


class _Half(CodedInTwoLegs):
    _dtype: str

    def __init__(self, error_feedback: bool = False) -> None:
        super().__init__(error_feedback)
        if not self.error_feedback:
            self.sum_dtype = self._dtype

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """See `CodedInTwoLegs.encode`."""
        return [ops.cast(values, self._dtype)]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """See `CodedInTwoLegs.decode`."""
        return ops.cast(sent[0], "float32")


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Float16(_Half):
    """Two bytes for each element, with 11 significant bits, up to 65504.

    Args:
        error_feedback: bool, False by default: gradients are then added up in float16 on their way, as with
            `compression="float16"`. With True each replica keeps what it could not send, and sums are in float32.

    Example:
        >>> import keras_shardopt as ks
        >>> codec = ks.compression.Float16(error_feedback=True)
        >>> ks.CrossShard("sgd", compression=codec).compression
        Float16(error_feedback=True)
    """

    _dtype = "float16"


@keras.saving.register_keras_serializable(package="keras_shardopt")
class BFloat16(_Half):
    """Two bytes for each element, with 8 significant bits and the range of float32.

    Args:
        error_feedback: bool, False by default: gradients are then added up in bfloat16 on their way, as with
            `compression="bfloat16"`. With True each replica keeps what it could not send, and sums are in float32.

    Example:
        >>> import keras_shardopt as ks
        >>> codec = ks.compression.BFloat16(error_feedback=True)
        >>> ks.CrossShard("sgd", compression=codec).compression
        BFloat16(error_feedback=True)
    """

    _dtype = "bfloat16"


class _Quantized(CodedInTwoLegs):
    """Integers from `-largest` to `largest`, and one scale for each block."""

    largest: int

    def __init__(self, block: int, rounding: Literal["nearest", "stochastic"], seed: int, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        self.block = check.integer("block", block, at_least=8)
        if self.block % 8:
            raise ValueError(f"`block` must be a multiple of 8. Received: block={block!r}")
        self.rounding = check.one_of("rounding", rounding, ("nearest", "stochastic"))
        self.seed = check.integer("seed", seed, at_least=0)

    def quantized(self, values: Tensor, key: Sequence[Any] = ()) -> tuple[Tensor, Tensor]:
        """The integers as float32 of shape `[blocks, block]`, and the scales in bfloat16.

        NaN or infinity in a block makes its scale NaN.
        """
        rows = ops.reshape(values, (-1, self.block))
        sizes = ops.abs(rows)
        # A maximum may pass over a NaN, and a sum does not.
        total = ops.sum(sizes, axis=1)
        # A little larger, so that rounding does not make it too small for the largest element.
        scales = ops.max(sizes, axis=1) * ((1 + 2.0**-8) / self.largest)
        scales = ops.cast(scales + 0.0 * total, "bfloat16")
        wide = ops.cast(scales, "float32")[:, None]
        steps = rows / ops.where(ops.equal(wide, 0), ops.ones_like(wide), wide)
        if self.rounding == "nearest":
            return ops.round(steps), scales
        noise = ops.reshape(random_numbers(int(np.prod(values.shape)), (self.seed, *key)), (-1, self.block))
        return ops.clip(ops.floor(steps + noise), -self.largest, self.largest), scales


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Int8(_Quantized):
    r"""One byte for each element: an integer from -127 to 127 times a scale that a block of elements has in common.

    The scale of a block is $1.004 \max \lvert x \rvert / 127$ in bfloat16, whose range is that of float32.

    Args:
        block: int, a multiple of 8. How many elements have one scale. 256 by default: 1.008 bytes for each element.
        rounding: "nearest" (default), or "stochastic": up or down at random, so that the mean is exact.
        seed: int >= 0. Of stochastic rounding. The same seed gives the same numbers, on every backend.
        error_feedback: bool, True by default: each replica adds what it could not send to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if one has a wrong value.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.CrossShard("sgd", compression="int8").compression  # the short form
        Int8()
        >>> codec = ks.compression.Int8(rounding="stochastic", seed=7)
        >>> ks.CrossShard("sgd", compression=codec).compression
        Int8(rounding='stochastic', seed=7)

    References:
        Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016; error feedback: Karimireddy et al.,
        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
    """

    largest = 127

    def __init__(
        self,
        block: int = 256,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(block, rounding, seed, error_feedback)

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """See `CodedInTwoLegs.encode`."""
        steps, scales = self.quantized(values, key)
        return [ops.cast(ops.reshape(steps, (-1,)), "int8"), scales]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """See `CodedInTwoLegs.decode`."""
        rows = ops.reshape(ops.cast(sent[0], "float32"), (-1, self.block))
        return ops.reshape(rows * ops.cast(sent[1], "float32")[:, None], (-1,))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Int4(_Quantized):
    """Half a byte for each element: an integer from -7 to 7 times a scale that a block of elements has in common.

    Args:
        block: int, a multiple of 8. How many elements have one scale. 64 by default: 0.531 bytes for each element. With
            256 it is 0.508, and a language model lost five times as much.
        rounding: "nearest" (default), or "stochastic": up or down at random, so that the mean is exact.
        seed: int >= 0. Of stochastic rounding. The same seed gives the same numbers, on every backend.
        error_feedback: bool, True by default: each replica adds what it could not send to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if one has a wrong value.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.CrossShard("sgd", compression="int4").compression  # the short form
        Int4()
    """

    largest = 7

    def __init__(
        self,
        block: int = 64,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(block, rounding, seed, error_feedback)

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """See `CodedInTwoLegs.encode`."""
        steps, scales = self.quantized(values, key)
        half = self.block // 2
        # Of a NaN nothing is known, and its scale is NaN anyway.
        steps = ops.where(ops.isfinite(steps), steps, ops.zeros_like(steps))
        pairs = (steps[:, :half] + 8) + 16 * (steps[:, half:] + 8)
        return [ops.cast(ops.reshape(pairs, (-1,)), "uint8"), scales]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """See `CodedInTwoLegs.decode`."""
        pairs = ops.reshape(ops.cast(sent[0], "float32"), (-1, self.block // 2))
        high = ops.floor(pairs / 16)
        rows = ops.concatenate([pairs - 16 * high - 8, high - 8], axis=1)
        return ops.reshape(rows * ops.cast(sent[1], "float32")[:, None], (-1,))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class PowerSGD(Compression):
    r"""Two thin matrices for each gradient that is a matrix: its best approximation of a low rank, nearly.

    With $M$ the sum over replicas of gradients, of shape $n \times m$ (all dimensions but the last are one), and $Q$ of
    the update before, $P = M Q$ and $Q' = M^\top \hat P$ are added up over replicas, where $\hat P$ has orthonormal
    columns, and $\hat P Q'^\top$ takes the place of $M$. Tensors that this would not make smaller are sent whole. It is
    made for SGD with momentum. Next to Adam a language model lost 17 % of its loss, and a warning says so.

    Args:
        rank: int >= 1. How many columns $P$ and $Q$ have.
        warmup_steps: int >= 0. For how many updates everything is sent whole at first. On TensorFlow it must be 0.
        seed: int >= 0. Of the first $Q$.
        error_feedback: bool, True by default: each replica adds what it could not send to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if one has a wrong value.

    Example:
        >>> import keras_shardopt as ks
        >>> codec = ks.compression.PowerSGD(rank=2, warmup_steps=0)
        >>> ks.CrossShard("sgd", compression=codec).compression
        PowerSGD(rank=2, warmup_steps=0)

    References:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
    """

    def __init__(self, rank: int = 4, warmup_steps: int = 1000, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.rank = check.integer("rank", rank)
        self.warmup_steps = check.integer("warmup_steps", warmup_steps, at_least=0)
        self.seed = check.integer("seed", seed, at_least=0)

    def start(self, variable: Variable, position: int) -> np.ndarray | None:
        """The first $Q$; None for what is sent whole."""
        shape = tuple(variable.shape)
        if len(shape) < 2:
            return None
        columns, rows = int(shape[-1]), int(np.prod(shape[:-1]))
        if self.rank * (rows + columns) >= rows * columns:
            return None
        return np.random.default_rng([self.seed, position]).normal(size=(columns, self.rank)).astype("float32")

    def legs(
        self,
        tensors: Sequence[Tensor],
        along: Sequence[Tensor],
        num_replicas: int,
        replica_id: Any,
        update: Any,
        factors: Sequence[Tensor | None],
    ) -> Legs:
        """See `Compression.legs`."""
        low = [i for i, factor in enumerate(factors) if factor is not None]
        before = [factors[i] for i in low]
        if not low or (self.warmup_steps and update < self.warmup_steps):
            sums = yield "all_reduce", [*tensors, *along]
            nothing = [ops.zeros_like(tensor) for tensor in tensors]
            return Reduced(sums[: len(tensors)], sums[len(tensors) :], nothing, list(before))
        matrices = [ops.reshape(tensors[i], (-1, tensors[i].shape[-1])) for i in low]
        products = [ops.matmul(m, q) for m, q in zip(matrices, before)]
        rest = [i for i in range(len(tensors)) if i not in low]
        sums = yield "all_reduce", [*products, *[tensors[i] for i in rest], *along]
        bases = [ops.qr(p, mode="reduced")[0] for p in sums[: len(low)]]
        after = yield "all_reduce", [ops.matmul(ops.transpose(m), b) for m, b in zip(matrices, bases)]
        result = dict(zip(rest, sums[len(low) :]))
        unsent = {i: ops.zeros_like(tensors[i]) for i in rest}
        for i, m, basis, q in zip(low, matrices, bases, after):
            total = ops.matmul(basis, ops.transpose(q))
            result[i] = ops.reshape(total, tensors[i].shape)
            unsent[i] = ops.reshape(m - total / num_replicas, tensors[i].shape)
        every = range(len(tensors))
        return Reduced([result[i] for i in every], sums[len(tensors) :], [unsent[i] for i in every], after)

    def reduce(
        self,
        tensors: Sequence[Tensor],
        along: Sequence[Tensor],
        comm: Communicator,
        update: Any,
        factors: Sequence[Tensor | None],
    ) -> Reduced:
        """See `Compression.reduce`."""

        def reduce(update: Any) -> Reduced:
            return super(PowerSGD, self).reduce(tensors, along, comm, update, factors)

        if not self.warmup_steps or runtime.is_concrete(update) or all(factor is None for factor in factors):
            return reduce(update)

        def not_recorded() -> Reduced:
            with recording():
                return reduce(0)

        reduced: Reduced = ops.cond(update < self.warmup_steps, not_recorded, lambda: reduce(self.warmup_steps))
        return reduced


_SHORT = {"float16": Float16, "bfloat16": BFloat16, "int8": Int8, "int4": Int4, "powersgd": PowerSGD}


def get(identifier: Any) -> Compression | None:
    """The `Compression` that a value of the argument `compression` stands for; None for None.

    Args:
        identifier: None, a `Compression`, or "float16", "bfloat16", "int8", "int4" or "powersgd".

    Raises:
        ValueError: if it is something else.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.compression.get("int4")
        Int4()
    """
    if identifier is None or isinstance(identifier, Compression):
        return identifier
    if isinstance(identifier, str) and identifier in _SHORT:
        return _SHORT[identifier]()
    names = ", ".join(f'"{name}"' for name in list(_SHORT)[:-1])
    raise ValueError(
        f'`compression` must be None, {names} or "powersgd", or an object of `keras_shardopt.compression`. '
        f"Received: compression={identifier!r}"
    )


def joined(tensors: Sequence[Tensor], unit: int) -> Tensor:
    """The elements of all tensors in one vector, with zeros at its end up to a multiple of `unit`."""
    flat = [ops.reshape(tensor, (-1,)) for tensor in tensors]
    missing = -sum(int(np.prod(tensor.shape)) for tensor in tensors) % unit
    return ops.concatenate([*flat, ops.zeros((missing,), "float32")] if missing or not flat else flat)


def parted(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The reverse of `joined`."""
    parts, start = [], 0
    for tensor in tensors:
        stop = start + int(np.prod(tensor.shape))
        parts.append(ops.reshape(flat[start:stop], tensor.shape))
        start = stop
    return parts


def random_numbers(count: int, key: Sequence[Any]) -> Tensor:
    """Numbers from 0 to below 1, the same for the same ints on every backend: hashes of their places.

    Keras' own random numbers differ between backends, and take no seed that is a tensor.
    """
    seed = ops.zeros((), "int32")
    for part in key:
        seed = _hashed(ops.cast(part, "int32") + _int32(0x9E3779B9) * (seed + 1))
    words = _hashed(ops.arange(count, dtype="int32") * _int32(0x9E3779B1) + seed)
    return ops.cast(ops.bitwise_and(words, _int32(0xFFFFFF)), "float32") * 2.0**-24


def _hashed(words: Tensor) -> Tensor:
    # The last steps of MurmurHash3. A shift of signed numbers repeats the sign, which the mask takes away.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        shifted = ops.bitwise_and(ops.bitwise_right_shift(words, _int32(shift)), _int32((1 << (32 - shift)) - 1))
        words = ops.bitwise_xor(words, shifted) * _int32(factor)
    return words


def _int32(bits: int) -> Tensor:
    return ops.convert_to_tensor(bits - 2**32 if bits >= 2**31 else bits, "int32")

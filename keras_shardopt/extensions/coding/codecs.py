"""Gradient codecs, and the reductions that use them.

A reduction of encoded gradients has two phases (legs). First, an all-to-all gives each replica one slice of the encoded
gradients of all replicas, which it sums in float32. Second, an all-gather sends the encoded sums to all replicas. The
bytes per replica thus do not depend on the number of replicas, and all replicas decode equal bytes. The rounding errors
of both legs are added to the next gradients: *error feedback* (Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

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
from keras_shardopt.update.extension import Configured

__all__ = ["BFloat16", "Compression", "Float16", "Int4", "Int8", "PowerSGD", "Reduced", "get"]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__"]


class Reduced(NamedTuple):
    """The result of a reduction of encoded tensors."""

    sums: list[Tensor]
    """The sums over replicas, bitwise equal on all replicas."""

    along: list[Tensor]
    """The sums over replicas of the tensors that are sent without encoding."""

    unsent: list[Tensor]
    """This replica's rounding errors of compression. Their sum over replicas is the exact sum minus `sums`."""

    factors: list[Tensor]
    """The matrices $Q$ of `PowerSGD` for the next reduction, equal on all replicas. Empty for other codecs."""


Legs = Generator["tuple[Kind, Sequence[Tensor]]", "list[Tensor]", Reduced]
"""A generator that yields each collective of a reduction as (kind, tensors), and receives the collective's result."""


class Compression(Configured):
    """Base class of gradient codecs, which compress gradients before replicas exchange them.

    Args:
        error_feedback: bool, True by default. Whether each replica adds its compression errors to its next gradients.
    """

    sum_dtype: str | None = None
    """The dtype of the all-reduce, for a codec that only casts gradients to this dtype. None for other codecs."""

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = check.flag("error_feedback", error_feedback)

    def start(self, variable: Variable, position: int) -> np.ndarray | None:
        """Return the first matrix $Q$ of `PowerSGD` for the variable at `position`. Other codecs return None."""
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
        """Encode float32 tensors and sum them over replicas. The caller runs the yielded collectives.

        Args:
            tensors: the tensors of this replica to encode.
            along: tensors to sum over replicas without encoding.
            num_replicas: the number of replicas.
            replica_id: the id of this replica.
            update: the number of updates so far: an int or an integer tensor.
            factors: for each tensor, its matrix in `Reduced.factors` of the last reduction. At first, that of `start`.
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
        """Sum encoded tensors over replicas: run `legs` with these arguments, and each collective that it yields."""
        legs = self.legs(tensors, along, comm.num_replicas, comm.replica_id, update, factors)
        found: Any = None
        while True:
            try:
                kind, sent = legs.send(found)
            except StopIteration as end:
                reduced: Reduced = end.value
                return reduced
            found = comm.all_reduce(sent, "sum") if kind == "all_reduce" else getattr(comm, kind)(sent)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.get_config().items())))


class CodedInTwoLegs(Compression):
    """Base class of codecs that encode vectors in blocks, and sum them by all-to-all and all-gather (the two legs)."""

    block: int = 1

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """Encode a float32 vector. Its length is a multiple of `block`. The ints in `key` seed stochastic rounding."""
        raise NotImplementedError

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """Return the float32 vector that was encoded. Several encoded vectors, concatenated, can be decoded at once."""
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
        """Sum encoded tensors in two legs: an all-to-all of slices, then an all-gather of their sums."""
        size, me = num_replicas, replica_id
        flat = joined(tensors, size * self.block)
        sent = self.encode(flat, (update, me, 0))
        received = yield "all_to_all", sent
        total = ops.sum(ops.reshape(self.decode(received), (size, -1)), axis=0)
        again = self.encode(total, (update, me, 1))
        result = self.decode((yield "all_gather", again))
        unsent = ops.reshape(flat - self.decode(sent), (size, -1))
        # The all-gather sends encoded sums. Add the rounding error of this replica's slice of them to its other errors.
        mine = ops.equal(ops.arange(size, dtype="int32"), ops.cast(me, "int32"))[:, None]
        unsent = ops.where(mine, unsent + (total - self.decode(again))[None], unsent)
        sums = (yield "all_reduce", along) if along else []
        return Reduced(split(result, tensors), sums, split(ops.reshape(unsent, (-1,)), tensors), [])


class _Half(CodedInTwoLegs):
    _dtype: str

    def __init__(self, error_feedback: bool = False) -> None:
        super().__init__(error_feedback)
        if not self.error_feedback:
            self.sum_dtype = self._dtype

    def encode(self, values: Tensor, key: Sequence[Any] = ()) -> list[Tensor]:
        """Cast to half precision."""
        return [ops.cast(values, self._dtype)]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """Cast to float32."""
        return ops.cast(sent[0], "float32")


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Float16(_Half):
    """Sends two bytes per element, with 11 significant bits, up to 65504.

    Args:
        error_feedback: bool, False by default: an all-reduce sums in float16, like `compression="float16"`. True: sums
            are in float32, and each replica adds its rounding errors to its next gradients.

    Example:
        >>> import keras_shardopt as ks
        >>> codec = ks.compression.Float16(error_feedback=True)
        >>> ks.CrossShard("sgd", compression=codec).compression
        Float16(error_feedback=True)
    """

    _dtype = "float16"


@keras.saving.register_keras_serializable(package="keras_shardopt")
class BFloat16(_Half):
    """Sends two bytes per element, with 8 significant bits and the range of float32.

    Args:
        error_feedback: bool, False by default: an all-reduce sums in bfloat16, like `compression="bfloat16"`. True:
            sums are in float32, and each replica adds its rounding errors to its next gradients.

    Example:
        >>> import keras_shardopt as ks
        >>> codec = ks.compression.BFloat16(error_feedback=True)
        >>> ks.CrossShard("sgd", compression=codec).compression
        BFloat16(error_feedback=True)
    """

    _dtype = "bfloat16"


class _Quantized(CodedInTwoLegs):
    """Base class of codecs that send integers from `-largest` to `largest`, and one scale per block."""

    largest: int

    def __init__(self, block: int, rounding: Literal["nearest", "stochastic"], seed: int, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        self.block = check.integer("block", block, at_least=8)
        if self.block % 8:
            raise ValueError(f"`block` must be a multiple of 8. Received: block={block!r}")
        self.rounding = check.one_of("rounding", rounding, ("nearest", "stochastic"))
        self.seed = check.integer("seed", seed, at_least=0)

    def quantized(self, values: Tensor, key: Sequence[Any] = ()) -> tuple[Tensor, Tensor]:
        """Return the integers as float32 of shape `[blocks, block]`, and the scales in bfloat16.

        The scale of a block with NaN or infinity is NaN. The ints in `key` seed stochastic rounding.
        """
        rows = ops.reshape(values, (-1, self.block))
        sizes = ops.abs(rows)
        # Adding `0.0 * total` makes the scale NaN for NaN or infinity, because `ops.max` ignores NaN on some backends.
        total = ops.sum(sizes, axis=1)
        # Rounding to bfloat16 could make a scale too small for the largest element. The factor 1 + 2**-8 prevents this.
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
    r"""Sends one byte per element: an integer from -127 to 127 times the scale of its block.

    The scale of a block is $1.004 \max \lvert x \rvert / 127$ in bfloat16, with the range of float32.

    Args:
        block: int, a multiple of 8. Number of elements per scale. 256 by default: 1.008 bytes per element.
        rounding: "nearest" (default), or "stochastic": up or down at random, with the exact value as mean.
        seed: int >= 0, 0 by default. Seed of stochastic rounding, with the same random numbers on every backend.
        error_feedback: bool, True by default: each replica adds its rounding errors to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument has an invalid value.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.CrossShard("sgd", compression="int8").compression  # "int8" is short for Int8()
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
        """Return one int8 per element, and the scales of blocks. The ints in `key` seed stochastic rounding."""
        steps, scales = self.quantized(values, key)
        return [ops.cast(ops.reshape(steps, (-1,)), "int8"), scales]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """Multiply each integer by the scale of its block."""
        rows = ops.reshape(ops.cast(sent[0], "float32"), (-1, self.block))
        return ops.reshape(rows * ops.cast(sent[1], "float32")[:, None], (-1,))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Int4(_Quantized):
    """Sends half a byte per element: an integer from -7 to 7 times the scale of its block.

    Args:
        block: int, a multiple of 8. Number of elements per scale. 64 by default: 0.531 bytes per element. 256
            needs 0.508 bytes, but increased the loss of a language model five times as much as 64.
        rounding: "nearest" (default), or "stochastic": up or down at random, with the exact value as mean.
        seed: int >= 0, 0 by default. Seed of stochastic rounding, with the same random numbers on every backend.
        error_feedback: bool, True by default: each replica adds its rounding errors to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument has an invalid value.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.CrossShard("sgd", compression="int4").compression  # "int4" is short for Int4()
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
        """Return one uint8 per two elements, and the scales of blocks. The ints in `key` seed stochastic rounding."""
        steps, scales = self.quantized(values, key)
        half = self.block // 2
        # Integers cannot represent NaN or infinity, so send 0. The block's scale is NaN, so the block decodes to NaN.
        steps = ops.where(ops.isfinite(steps), steps, ops.zeros_like(steps))
        pairs = (steps[:, :half] + 8) + 16 * (steps[:, half:] + 8)
        return [ops.cast(ops.reshape(pairs, (-1,)), "uint8"), scales]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """Take the two integers out of each byte, and multiply them by the scale of their block."""
        pairs = ops.reshape(ops.cast(sent[0], "float32"), (-1, self.block // 2))
        high = ops.floor(pairs / 16)
        rows = ops.concatenate([pairs - 16 * high - 8, high - 8], axis=1)
        return ops.reshape(rows * ops.cast(sent[1], "float32")[:, None], (-1,))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class PowerSGD(Compression):
    r"""Sends each gradient matrix as two thin matrices: a low-rank approximation, close to the best one.

    Let $M$ be the sum of a gradient over replicas, as an $n \times m$ matrix (all dimensions but the last flattened).
    Replicas sum $P = M Q$, with $Q$ of the previous update, and orthonormalize its columns to $\hat P$. Then they sum
    $Q' = M^\top \hat P$, and $\hat P Q'^\top$ replaces $M$. Tensors that this would not shrink are sent unchanged.
    Use this codec with SGD and momentum. `CrossShard` warns of Adam: it made a language model's loss 17 % higher.

    Args:
        rank: int >= 1, 4 by default. Number of columns of $P$ and $Q$.
        warmup_steps: int >= 0, 1000 by default. Number of initial uncompressed updates. Must be 0 on TensorFlow.
        seed: int >= 0, 0 by default. Seed of the first $Q$.
        error_feedback: bool, True by default: each replica adds its approximation errors to its next gradients.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument has an invalid value.

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
        """Return the first matrix $Q$ for the variable at `position`. None if its gradients are sent unchanged."""
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
        """Sum two thin matrices in place of each gradient matrix; in the warm-up, sum the gradients unchanged."""
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
        """Encode and sum tensors. If `update`, the number of updates, is traced, compile warm-up and later updates."""

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
    """Resolve a value of the argument `compression` to a `Compression`, or None.

    Args:
        identifier: None, a `Compression`, or "float16", "bfloat16", "int8", "int4" or "powersgd".

    Raises:
        ValueError: if `identifier` is invalid.

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
    """Flatten and concatenate tensors, padded with zeros to a multiple of `unit` elements."""
    flat = [ops.reshape(tensor, (-1,)) for tensor in tensors]
    missing = -sum(int(np.prod(tensor.shape)) for tensor in tensors) % unit
    return ops.concatenate([*flat, ops.zeros((missing,), "float32")] if missing or not flat else flat)


def split(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors with the shapes of `tensors`: the reverse of `joined`."""
    parts, start = [], 0
    for tensor in tensors:
        stop = start + int(np.prod(tensor.shape))
        parts.append(ops.reshape(flat[start:stop], tensor.shape))
        start = stop
    return parts


def random_numbers(count: int, key: Sequence[Any]) -> Tensor:
    """Return `count` numbers in [0, 1), equal on all backends. Each is a hash of its position and the ints of `key`.

    `keras.random` gives different numbers on each backend, and cannot be seeded with a tensor.
    """
    seed = ops.zeros((), "int32")
    for part in key:
        seed = _hashed(ops.cast(part, "int32") + _int32(0x9E3779B9) * (seed + 1))
    words = _hashed(ops.arange(count, dtype="int32") * _int32(0x9E3779B1) + seed)
    return ops.cast(ops.bitwise_and(words, _int32(0xFFFFFF)), "float32") * 2.0**-24


def _hashed(words: Tensor) -> Tensor:
    # The finalizer of MurmurHash3. A right shift of a signed int repeats its sign bit; the mask removes these bits.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        shifted = ops.bitwise_and(ops.bitwise_right_shift(words, _int32(shift)), _int32((1 << (32 - shift)) - 1))
        words = ops.bitwise_xor(words, shifted) * _int32(factor)
    return words


def _int32(bits: int) -> Tensor:
    return ops.convert_to_tensor(bits - 2**32 if bits >= 2**31 else bits, "int32")

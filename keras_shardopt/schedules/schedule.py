"""The base classes of schedules, and `get`.

A subclass stores its arguments in attributes of the same names, for `get_config`, and computes its rate in `rate_at`.
"""

from __future__ import annotations

import inspect
from numbers import Real
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.numerics import Tensor
from keras_shardopt.schedules.step_count import StepCount


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate per update, for the `learning_rate` argument of any Keras optimizer.

    A call takes a step: an int, an integer tensor of any shape, or a `keras.Variable`, counted from 0. It returns a
    tensor of the step's shape in `keras.config.floatx()`. The arithmetic is at least float32, even if `floatx` is
    float16 or bfloat16.
    """

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate, in `steps.dtype`. Subclasses implement this method."""
        raise NotImplementedError

    def __call__(self, step: Any) -> Tensor:
        """Returns the rate at `step`."""
        floatx = keras.config.floatx()
        return ops.cast(self.rate_at(StepCount(step, at_least_float32(floatx))), floatx)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments. Schedules among them are serialized."""
        return {name: _serialized(getattr(self, name)) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        arguments = (f"{name}={getattr(self, name)!r}" for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({', '.join(arguments)})"

    def plot(self, num_steps: int, ax: Any = None, **line: Any) -> Any:
        """Draws the rate over the first `num_steps` updates with matplotlib.

        Args:
            num_steps: int >= 1, in optimizer updates. At most 1000 evenly spaced steps are evaluated.
            ax: a matplotlib `Axes`, or None (default) for the current one.
            **line: passed to `Axes.plot`. `label` defaults to the name of the class.

        Returns:
            The `Axes`.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if `num_steps` is less than 1.
        """
        import matplotlib.pyplot as plt  # optional, slow to import

        num_steps = check.count("num_steps", num_steps, 1)
        steps = [num_steps * i // 1000 for i in range(1000)] if num_steps > 1000 else list(range(num_steps))
        ax = plt.gca() if ax is None else ax
        # Pass one step at a time, because a schedule of Keras inside this schedule may accept only scalars.
        rates = [float(ops.convert_to_numpy(ops.cast(self(step), "float32"))) for step in steps]
        ax.plot(steps, rates, **{"label": type(self).__name__, **line})
        ax.set_xlabel("update")
        ax.set_ylabel("learning rate")
        return ax


class Policy(Schedule):
    """A schedule that implements a learning-rate policy of OpenSeq2Seq."""

    @classmethod
    def from_run(
        cls,
        total_steps: int | None = None,
        *,
        num_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        **arguments: Any,
    ) -> Any:
        r"""Creates the schedule for a training run of known length, and computes begin and length of its decay.

        OpenSeq2Seq's model class did so for the policies in its configs. With $n$ = `total_steps`, or
        `num_epochs * steps_per_epoch`, and without `decay_steps` among `arguments`,

        - `begin_decay_at` becomes $b$ = `max(begin_decay_at, warmup_steps)`: decay begins after warm-up,
        - `decay_steps` becomes $n - b$: decay ends with the run.

        Of these two, a policy gets only those that its constructor has. If the run is given in epochs, a policy with
        `steps_per_epoch` (`PiecewiseConstant`) gets this argument, and its boundaries are epochs. An explicit
        `decay_steps` disables both replacements, as in OpenSeq2Seq.

        Args:
            total_steps: int >= 1 or None. The length of the run, in optimizer updates.
            num_epochs: int >= 1 or None. The length of the run in epochs, instead of `total_steps`.
            steps_per_epoch: int >= 1 or None. Updates per epoch; only with `num_epochs`.
            **arguments: the constructor's other arguments.

        Returns:
            The schedule.

        Raises:
            ValueError: if the length is missing or ambiguous, or if decay would begin after the end of the run.

        Example:
            >>> import keras_shardopt as ks
            >>> ks.schedules.PolyDecay.from_run(total_steps=1000, learning_rate=0.1, warmup_steps=200)
            PolyDecay(learning_rate=0.1, decay_steps=800, power=1.0, begin_decay_at=200, ...)
        """
        in_epochs = num_epochs is not None and steps_per_epoch is not None
        if in_epochs == (total_steps is not None) or (num_epochs is None) != (steps_per_epoch is None):
            raise ValueError(
                "The length of the run must be given once: `total_steps`, or `num_epochs` with `steps_per_epoch`. "
                f"Received: total_steps={total_steps!r}, num_epochs={num_epochs!r}, steps_per_epoch={steps_per_epoch!r}"
            )
        parameters = inspect.signature(cls).parameters
        if in_epochs:
            num_epochs = check.count("num_epochs", num_epochs, 1)
            steps_per_epoch = check.count("steps_per_epoch", steps_per_epoch, 1)
            total_steps = num_epochs * steps_per_epoch
            if "steps_per_epoch" in parameters:
                arguments["steps_per_epoch"] = steps_per_epoch
        total_steps = check.count("total_steps", total_steps, 1)
        if "decay_steps" in parameters and arguments.get("decay_steps") is None:
            begin = 0
            if "begin_decay_at" in parameters:
                begin = check.count("begin_decay_at", arguments.get("begin_decay_at", 0), 0)
                if "warmup_steps" in parameters:
                    begin = max(begin, check.count("warmup_steps", arguments.get("warmup_steps", 0), 0))
                arguments["begin_decay_at"] = begin
            if begin >= total_steps:
                raise ValueError(
                    f"Decay must begin before the run ends. Received: a run of {total_steps} updates, and a decay that "
                    f"begins at {begin} (the larger of `begin_decay_at` and `warmup_steps`). Shorten the warm-up, or "
                    "use FixedLR."
                )
            arguments["decay_steps"] = total_steps - begin
        return cls(**arguments)


def get(identifier: Any, **arguments: Any) -> keras.optimizers.schedules.LearningRateSchedule:
    """Finds or creates a schedule.

    Args:
        identifier: one of

            - a schedule of this package or of Keras: returned unchanged,
            - a number: a fixed rate,
            - a name: "PolyDecay", OpenSeq2Seq's "poly_decay", or the name of a schedule of Keras. This package has
              priority (`CosineDecay`). `arguments` are those of the constructor,
            - a config from `keras.optimizers.schedules.serialize`, or a short one:
              `{"class_name": "PolyDecay", "config": {...}}`.
        **arguments: only with a name.

    Returns:
        A `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        TypeError: if `identifier` has another type.
        ValueError: if the name is unknown, or if `arguments` come without a name.

    Example:
        >>> import keras_shardopt as ks
        >>> arguments = dict(learning_rate=0.1, decay_steps=10, decay_rate=0.5)
        >>> ks.schedules.get("exp_decay", **arguments, use_staircase_decay=True)
        ExpDecay(learning_rate=0.1, decay_steps=10, decay_rate=0.5, use_staircase_decay=True, ...)
    """
    if isinstance(identifier, str):
        kind = _named(identifier)
        try:
            inspect.signature(kind).bind(**arguments)
        except TypeError as error:
            raise TypeError(
                f"If `identifier` is a name, pass the arguments of that schedule too. Received: {identifier!r}: {error}"
            ) from None
        return kind(**arguments)
    if arguments:
        raise ValueError(
            f"Arguments can be passed only with the name of a schedule. Received: identifier={identifier!r} and "
            f"{sorted(arguments)}"
        )
    if isinstance(identifier, keras.optimizers.schedules.LearningRateSchedule):
        return identifier
    if isinstance(identifier, Real) and not isinstance(identifier, bool):
        return _named("FixedLR")(check.number("identifier", identifier, at_least=0))
    if isinstance(identifier, dict) and "class_name" in identifier:
        if identifier.get("module") is None and identifier.get("registered_name") is None:
            return _named(identifier["class_name"]).from_config(identifier.get("config", {}))
        try:
            return keras.optimizers.schedules.deserialize(identifier)
        except Exception as error:
            raise ValueError(
                f"`identifier` must be the config of a schedule if it is a dict. Received: {identifier!r}"
            ) from error
    raise TypeError(
        "`identifier` must be a `LearningRateSchedule`, a number, a name (with keyword arguments), or a config with a "
        f'"class_name". Received: {identifier!r} of type {type(identifier).__name__}'
    )


def part(argument: str, identifier: Any) -> keras.optimizers.schedules.LearningRateSchedule:
    """Returns `get(identifier)`, for a schedule that is an argument of another schedule. Errors name the argument."""
    try:
        return get(identifier)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{argument}` must be a schedule. {error}") from None


def at_least_float32(dtype: str) -> str:
    """Returns "float64" for "float64", and "float32" for the other float dtypes."""
    # Do not use `keras.backend.result_type`, because it returns float32 for float64 on JAX and PyTorch.
    return dtype if dtype == "float64" else "float32"


_PACKAGE = __name__.rpartition(".")[0]


def _named(name: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"`identifier` must have a str as its class name. Received: class_name={name!r}")
    classes = [*Schedule.__subclasses__(), *Policy.__subclasses__()]
    # Keep only classes of this package, because a user's subclass can have the same name.
    classes = [cls for cls in classes if cls is not Policy and cls.__module__.startswith(_PACKAGE)]
    ours = {cls.__name__.lower(): cls for cls in classes}
    name = name.removeprefix("keras_shardopt>")
    found = ours.get(name.replace("_", "").lower()) or getattr(keras.optimizers.schedules, name, None)
    if not inspect.isclass(found) or found is keras.optimizers.schedules.LearningRateSchedule:
        names = sorted(cls.__name__ for cls in ours.values())
        raise ValueError(f"`identifier` must name one of {names} or a schedule of Keras. Received: {name!r}")
    return found


def _serialized(value: Any) -> Any:
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return keras.optimizers.schedules.serialize(value)
    return [_serialized(item) for item in value] if isinstance(value, list) else value

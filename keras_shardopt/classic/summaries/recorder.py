"""What happens inside updates, as TensorBoard event files.

Hides where in a chain of optimizers a number is to be had, how it gets out of a compiled step, and who writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.active import processes
from keras_shardopt.classic.summaries.event_file import event_writer
from keras_shardopt.classic.summaries.observer import Observer
from keras_shardopt.classic.summaries.tags import PREFIX, checked_summaries, dynamic_loss_scale, rates
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import descendants
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class Recorder:
    """Sees every so many updates of an optimizer, and writes what was asked for.

    Args:
        optimizer: a `keras.optimizers.Optimizer` that is built. Of one that no wrapper of this package is around, only
            the learning rate can be seen.
        log_dir: path or None. Rank 0 writes event files there; None writes nothing.
        summaries: names out of `SUMMARIES`, or None.
        every: int >= 1, in updates.
        prefix: what all tags of this optimizer begin with.
        colocate_with: another recorder, into whose files this one writes.
        looks_inside: bool. Whether the updates themselves can be seen; else only what can be read between them.

    Raises:
        ValueError: if what is asked for cannot be seen.
        ImportError: if files are to be written and `tensorboardX` is not installed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        log_dir: Any,
        summaries: Sequence[str] | None,
        every: int,
        *,
        prefix: str = "",
        colocate_with: Recorder | None = None,
        looks_inside: bool = True,
    ) -> None:
        names = checked_summaries(summaries)
        self.optimizer = optimizer
        self._prefix = prefix
        self.every = every
        self._names = names
        self._observer: Observer | None = None
        if not looks_inside:
            pass
        elif isinstance(optimizer, OptimizerWrapper):
            if set(names) - {"loss_scale"}:
                self._observer = Observer(optimizer, names, every)
        elif summaries is not None and set(names) - {"learning_rate"}:
            raise ValueError(
                "`summaries` of gradients can be had of the optimizers of this package only. Received: "
                f"summaries={list(names)}, with {type(optimizer).__name__}. "
                f"Use `CrossShard({type(optimizer).__name__}())`, which changes nothing with one replica."
            )
        self._write: Callable[[dict[str, Any] | None, int], None] | None = None
        if colocate_with is not None:
            self._write = colocate_with._write
        elif log_dir is not None and not processes.process()[1]:
            self._write = event_writer(log_dir)
        self._last_step = -1

    @property
    def num_micro_batches(self) -> int:
        """How many gradients make an update."""
        chain = [self.optimizer, *descendants(self.optimizer)]
        steps = [getattr(o, "gradient_accumulation_steps", None) for o in chain if isinstance(o, OptimizerWrapper)]
        return next((k for k in steps if k), 1)

    def expect(self, is_due: bool | None) -> None:
        """Says before a step, where steps are run line by line, whether what it does will be asked for.

        None stands for each `every`-th update, which is then found by reading their number.
        """
        if self._observer is not None:
            self._observer.is_due = is_due

    def values(self) -> tuple[int, dict[str, Any]]:
        """The number of the update that was seen last, and what was seen, by tag: floats, and arrays for histograms."""
        optimizer = self.optimizer
        tags: dict[str, Any] = {}
        if self._observer is not None:
            step, tags = self._observer.values()
        else:
            step = int(ops.convert_to_numpy(optimizer.iterations))
            if "learning_rate" in self._names:
                tags.update(rates(optimizer))
        if "loss_scale" in self._names and (scale := dynamic_loss_scale(optimizer)) is not None:
            tags[f"{PREFIX}loss_scale"] = scale
        return step, tags

    def record(self, more: Callable[[], dict[str, float]] = dict) -> bool:
        """Writes what was seen since the last time, if anything, and what `more` returns. Returns whether it has."""
        if self._write is None or not self._names:
            return False
        step, tags = self.values()
        if step <= self._last_step or step <= 0:
            return False
        self._last_step = step
        self._write({**{f"{self._prefix}{tag}": value for tag, value in tags.items()}, **more()}, step)
        return True

    def close(self) -> None:
        """Looks no longer, and ends the file. A compiled step must be compiled anew."""
        if self._observer is not None:
            self._observer.leave()
        if self._write is not None:
            self._write(None, 0)
            self._write = None

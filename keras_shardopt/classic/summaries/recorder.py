"""Records summaries of an optimizer's updates in TensorBoard event files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.active import processes
from keras_shardopt.classic.summaries.event_file import event_writer
from keras_shardopt.classic.summaries.observer import Observer
from keras_shardopt.classic.summaries.tags import PREFIX, checked_summaries, dynamic_loss_scale, rates
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class Recorder:
    """Measures every n-th update of an optimizer, and writes the summaries.

    Args:
        optimizer: a built `keras.optimizers.Optimizer`. Without a wrapper of this package in it, only its learning
            rate is available.
        log_dir: path or None. Directory for event files, written by rank 0. None writes no files.
        summaries: list of names from `SUMMARIES`, or None for `DEFAULT_SUMMARIES`.
        every: int >= 1. Number of updates from one summary to the next.
        prefix: str. Prefix of all tags.
        colocate_with: another `Recorder`, to write to its file, or None.
        looks_inside: bool. False measures nothing in updates, and records only values that can be read between them.

    Raises:
        ValueError: if a summary is not available.
        ImportError: with `log_dir`, if `tensorboardX` is not installed.
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
                "`summaries` of gradients require an optimizer of this package. Received: "
                f"summaries={list(names)}, with {type(optimizer).__name__}. "
                f"Use `CrossShard({type(optimizer).__name__}())`, which changes nothing with one replica."
            )
        self._log_dir = log_dir
        self._write: Callable[[dict[str, Any] | None, int], None] | None = None
        self._last_step = -1
        self._open(colocate_with)

    def _open(self, colocate_with: Recorder | None) -> None:
        if colocate_with is not None:
            self._write = colocate_with._write
        elif self._log_dir is not None and not processes.process()[1]:
            self._write = event_writer(self._log_dir)

    @property
    def can_reopen(self) -> bool:
        """Whether `reopen` is possible, and steps compiled before `close` are valid again after it."""
        return self._observer is None or not self._observer.has_stages

    def reopen(self, colocate_with: Recorder | None) -> None:
        """Measure again after `close`, with the same variables, and write to a new file."""
        if self._observer is not None:
            self._observer.attach()
        self._open(colocate_with)

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches per update."""
        chain = chain_of(self.optimizer)
        steps = [getattr(o, "gradient_accumulation_steps", None) for o in chain if isinstance(o, OptimizerWrapper)]
        return next((k for k in steps if k), 1)

    def expect(self, is_due: bool | None) -> None:
        """Set whether the next eager step measures its update. None: the step reads the update counter to decide."""
        if self._observer is not None:
            self._observer.is_due = is_due

    def values(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the last measured update, and its values by tag: floats, and arrays for histograms."""
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
        """If an update was measured since the last call, write its values and those of `more()`, and return True."""
        if self._write is None or not self._names:
            return False
        step, tags = self.values()
        if step in (self._last_step, 0):
            return False
        self._last_step = step
        self._write({**{f"{self._prefix}{tag}": value for tag, value in tags.items()}, **more()}, step)
        return True

    def close(self) -> None:
        """Stop measuring, and close the file. Until `reopen`, steps compiled while measuring must not run."""
        if self._observer is not None:
            self._observer.detach()
        if self._write is not None:
            self._write(None, 0)
            self._write = None

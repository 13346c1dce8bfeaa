"""The hooks of a stage that plugs into more than the update: files, backups, and weights that differ among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from keras_shardopt.backends.traffic import Collective
from keras_shardopt.numerics import Variable
from keras_shardopt.update.step import Stage


class Extension(Stage):
    """A stage of `extensions/`. All hooks do nothing unless a subclass overrides them."""

    keeps_state: ClassVar[bool] = False
    """Whether files and backups hold state of it."""

    keeps_bits: ClassVar[bool] = False
    """Whether results must not depend on the number of replicas, to the last bit."""

    reducer: Any = None
    """The reducer in place of the usual one, or None."""

    optimizers: Sequence[Any] = ()
    """The optimizers that it updates with, besides the inner one."""

    lasting: Sequence[Variable] = ()
    """The variables that optimizer files hold."""

    private: Sequence[Variable] = ()
    """The variables that differ among replicas, besides those of `replica_state`."""

    are_apart: bool = False
    """Whether replicas have different weights now."""

    settles_skips: bool = False
    """Whether it restores what a skipped update has changed on each replica."""

    def check_outside(self, outer: Any) -> None:
        """Raise ValueError if `outer`, an optimizer that scales losses, must not be around this one."""

    def before_look(self) -> None:
        """Called by all processes before somebody reads or saves weights."""

    def sent(self, collectives: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives of a report, and the number of updates that they serve."""
        return list(collectives), 1

    def save_state(self) -> list[np.ndarray]:
        """Return the state of all replicas for a backup, if `keeps_state`. All processes call it together."""
        raise NotImplementedError

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the arrays of `save_state`."""
        raise NotImplementedError

"""The hooks of a stage that affects more than the update: files, backups, and weights that differ among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from keras_shardopt.backends.traffic import Collective
from keras_shardopt.numerics import Variable
from keras_shardopt.update.step import Stage


class Extension(Stage):
    """Base class of the stages in `extensions/`. All hooks do nothing by default."""

    keeps_state: ClassVar[bool] = False
    """Whether files and backups contain its state."""

    keeps_bits: ClassVar[bool] = False
    """Whether results must be bitwise independent of the number of replicas."""

    reducer: Any = None
    """The reducer that replaces the usual one, or None."""

    optimizers: Sequence[Any] = ()
    """Its optimizers, in addition to the inner one."""

    lasting: Sequence[Variable] = ()
    """Its variables in optimizer files."""

    private: Sequence[Variable] = ()
    """The variables that differ among replicas, in addition to `replica_state`."""

    are_apart: bool = False
    """Whether replicas have different weights now."""

    settles_skips: bool = False
    """Whether it restores the changes of a skipped update on each replica."""

    def check_outside(self, outer: Any) -> None:
        """Raise ValueError if a loss-scaling optimizer `outer` must not wrap this one."""

    def before_look(self) -> None:
        """Prepare weights for reading or saving. All processes call it together."""

    def sent(self, collectives: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives for a traffic report, and the number of updates that share them."""
        return list(collectives), 1

    def save_state(self) -> list[np.ndarray]:
        """Return the state of all replicas for a backup, if `keeps_state`. All processes call it together."""
        raise NotImplementedError

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the arrays of `save_state`."""
        raise NotImplementedError

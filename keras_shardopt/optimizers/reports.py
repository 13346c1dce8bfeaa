"""The reports of `CrossShard`."""

from __future__ import annotations

from keras_shardopt.optimizers.communication import ReportsCommunication
from keras_shardopt.optimizers.memory import ReportsMemory
from keras_shardopt.optimizers.nonfinite_report import ReportsNonFinite


class Reports(ReportsNonFinite, ReportsCommunication, ReportsMemory):
    """Reports memory, communication, and gradients that are not finite."""

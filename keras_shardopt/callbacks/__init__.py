"""Callbacks that compare replicas or runs, save checkpoints, stop at NaN, and write TensorBoard summaries."""

from keras_shardopt.callbacks.fingerprints import Fingerprints, first_difference
from keras_shardopt.callbacks.heartbeat import Heartbeat
from keras_shardopt.callbacks.nonfinite import StopOnNonFinite
from keras_shardopt.callbacks.replicas import CheckReplicas, SyncReplicas
from keras_shardopt.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_shardopt.callbacks.step_report import StepReport
from keras_shardopt.callbacks.summaries import TrainingSummaries
from keras_shardopt.callbacks.throughput import Throughput
from keras_shardopt.checkpoint.backup import BackupAndRestore
from keras_shardopt.checkpoint.model_checkpoint import ModelCheckpoint

__all__ = [
    "BackupAndRestore",
    "CheckReplicas",
    "Fingerprints",
    "Heartbeat",
    "ModelCheckpoint",
    "ShardedCheckpoint",
    "StepReport",
    "StopOnNonFinite",
    "SyncReplicas",
    "Throughput",
    "TrainingSummaries",
    "first_difference",
]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__"]

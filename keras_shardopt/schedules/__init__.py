"""OpenSeq2Seq's learning-rate policies as Keras schedules, and schedules that combine schedules."""

from keras_shardopt.schedules.composition import Join, PerUpdate, ScaledByReplicas, Warmup
from keras_shardopt.schedules.policies import (
    CosineDecay,
    ExpDecay,
    FixedLR,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)
from keras_shardopt.schedules.schedule import get

__all__ = [
    "CosineDecay",
    "ExpDecay",
    "FixedLR",
    "InvPolyDecay",
    "Join",
    "PerUpdate",
    "PiecewiseConstant",
    "PolyDecay",
    "ScaledByReplicas",
    "TransformerPolicy",
    "Warmup",
    "get",
]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__"]

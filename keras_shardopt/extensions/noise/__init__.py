"""The gradient noise scale: a stage for `CrossShard(stages=...)`, and a summary of that name."""

from keras_shardopt.classic.summaries.tags import register
from keras_shardopt.extensions.noise.stage import GradientNoise

__all__ = ["GradientNoise"]

register(
    "gradient_noise_scale",
    GradientNoise,
    {"gradient_noise_scale": "in_rows", "gradient_noise_scale_in_batches": "in_batches"},
)

"""What `print(optimizer)` shows: the chain, with what was given and what is not as usual."""

import keras
import pytest

import keras_shardopt as ks

SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ks.CrossShard(SGD()), "CrossShard(SGD, reduction='mean')"),
        (
            lambda: ks.CrossShard(ks.LossScaling(SGD(), 8.0), "sum", gradients="local", axis_name="data"),
            "CrossShard(LossScaling(SGD, loss_scaling=8.0), reduction='sum', gradients='local', axis_name='data')",
        ),
        (
            lambda: ks.CrossShard(SGD(), gradient_accumulation_steps=2, shard_state=True, replica_clipnorm=1.0),
            "CrossShard(SGD, reduction='mean', gradient_accumulation_steps=2, shard_state=True, replica_clipnorm=1.0)",
        ),
        (lambda: ks.GradientClipping(SGD(), 1.0), "GradientClipping(SGD, clip_gradients=1.0)"),
        (lambda: ks.LARC(SGD(), 0.02), "LARC(SGD, larc_eta=0.02, larc_mode='clip')"),
        (
            lambda: ks.LARC(SGD(), 0.02, "scale", min_update=0.0, faithful=True),
            "LARC(SGD, larc_eta=0.02, larc_mode='scale', min_update=0.0, faithful=True)",
        ),
        (lambda: ks.MixedPrecision(SGD()), "MixedPrecision(SGD, loss_scale=None)"),
        (
            lambda: ks.VariableClipping(SGD(), {".*kernel": [0]}, 3.0),
            "VariableClipping(SGD, vars_to_clip_dims={'.*kernel': [0]}, max_norm=3.0)",
        ),
        (
            lambda: ks.CrossShard(keras.optimizers.LossScaleOptimizer(SGD())),
            "CrossShard(LossScaleOptimizer(SGD), reduction='mean')",
        ),
        (lambda: ks.Tower(ks.CrossShard("sgd")), "Tower(CrossShard(SGD, reduction='mean'))"),
    ],
)
def test_the_chain_is_shown(make, expected):
    assert repr(make()) == expected


def test_a_tower_is_shown_without_being_used():
    made = []
    keras.utils.clear_session()
    tower = ks.Tower(lambda: made.append(1) or SGD())
    assert repr(tower).startswith("Tower(<function ") and not made and not ks.Tower.has_been_used()
    assert int(tower.iterations) == 0
    assert repr(tower) == "Tower(SGD)" and len(made) == 1

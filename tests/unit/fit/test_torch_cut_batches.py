"""PyTorch: what a prepared model remembers of batches that are cut into parts, and when it looks anew."""

import keras
import pytest

from keras_shardopt import CrossShard

pytestmark = pytest.mark.backends("torch")


class WithHead(keras.layers.Dense):
    """A layer with another one, which is built with the first step."""

    def __init__(self, units):
        super().__init__(units)
        self.head = keras.layers.BatchNormalization()


@pytest.fixture
def session():
    from keras_shardopt.fit.torch.session import Phase, Session

    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2), WithHead(1)])
    model.compile(CrossShard("sgd", virtual_replicas=4), "mse")
    session = Session(model)
    session.call = Phase.TRAIN_BATCH
    return session


@pytest.fixture
def cut(session):
    from keras_shardopt.extensions.equal_bits.torch_batches import KeptState

    return KeptState(session.model)


def test_another_optimizer_in_a_running_call_has_another_number_of_parts(session):
    assert session.step.num_parts_of(2) == 4
    session.model.compile(CrossShard("sgd"), "mse")
    assert session.step.num_parts_of(2) == 2


def test_the_optimizer_is_asked_once_in_each_call(session, monkeypatch):
    from keras_shardopt.fit.torch import session as module

    asked, real = [], module.step_of
    monkeypatch.setattr(module, "step_of", lambda *arguments: asked.append(1) or real(*arguments))
    steps = []
    for _ in range(2):
        session.begin_call()
        steps += [session.step for _ in range(3)]
    assert len(asked) == 2 and all(step is steps[0] for step in steps)  # which keeps what it knows of batches
    session.call = None
    assert session.step is session.step is steps[0] and len(asked) == 4


def test_layers_that_the_first_step_builds_are_found_before_the_second(cut):
    size = len(cut.state(is_in_call=True))
    cut._model.layers[2].head.build((None, 3))
    assert len(cut.state(is_in_call=True)) == size + 2


def test_layers_are_gone_through_twice_in_each_call(cut, monkeypatch):
    from keras_shardopt.extensions.equal_bits import torch_batches as cut_batches

    looks, real = [], cut_batches.changed_by_forward_passes
    monkeypatch.setattr(cut_batches, "changed_by_forward_passes", lambda models: looks.append(1) or real(models))
    for _ in range(2):
        cut.begin_call()
        found = [cut.state(is_in_call=True) for _ in range(5)]
    assert len(looks) == 4 and found[4] == found[1]
    cut.state(is_in_call=False)
    assert len(looks) == 5

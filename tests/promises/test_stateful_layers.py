"""Each replica carries the states of its own rows: stateful RNNs train on replicas as in one process."""

import functools
import re

import pytest
from conftest import BACKEND
from promises.problems import carrying, uneven
from support import problem
from support.suites import some

import keras_shardopt as ks

CASES = {
    "jax": ["each replica's gradients", "apart", "whole batch", "Bidirectional"],
    "tensorflow": ["whole batch", "rows of one replica", "layer of your own", "Bidirectional"],
    "torch": ["whole batch", "rows of one replica", "layer of your own", "Bidirectional"],
}[BACKEND]
BY_DEFAULT = {"jax": ["apart", "whole batch"], "tensorflow": ["layer of your own"], "torch": CASES}[BACKEND]


@functools.cache
def alone(case):
    return carrying.run(None, case)


@pytest.mark.parametrize("case", some(CASES, BY_DEFAULT))
def test_updates_and_logs_are_those_of_one_process(world, case):
    start = carrying.trained(carrying.model(carrying.BATCH_SIZE, carrying.CASES[case][1].get("layer", "SimpleRNN")))
    uneven.assert_same(world.run(carrying.run, 2, case, of=CASES), alone(case), start)


EXPLAINED = {
    "uneven": "a batch of 4 rows, .* leave out the rows of a smaller last batch",
    "other rows": "a batch of 6 rows, .*with 4 states in layer 'simple_rnn.*Give `keras.Input",
    "parts": "Received: layer 'simple_rnn.* with `stateful=True`. Remove `VirtualReplicas`",
}


@pytest.mark.parametrize("case", carrying.REFUSED)
def test_what_cannot_be_divided_names_the_fix(world, case):
    text, difference = world.run(carrying.refused, 2, case, of=carrying.REFUSED)
    assert re.search(EXPLAINED[case], text), text
    assert not difference


@pytest.mark.backends("tensorflow")
def test_batches_of_unknown_size_are_checked_when_they_come():
    import tensorflow as tf

    with ks.data_parallel(2) as replicas:
        model = carrying.model(carrying.BATCH_SIZE // 2)
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(carrying.data(22)).batch(carrying.BATCH_SIZE)
    model.fit(dataset.take(3), shuffle=False, verbose=0)
    with pytest.raises(ValueError, match="^A stateful layer .* the number of rows of one replica, .* last batch.$"):
        model.fit(dataset, shuffle=False, verbose=0)
    replicas.close()

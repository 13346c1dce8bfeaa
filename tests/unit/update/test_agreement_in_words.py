"""What processes exchange about what they train, and the error where it differs."""

import gc

import keras
import pytest
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.update.agreement import check_agreement, described


def description(make):
    model = problem.model()
    optimizer = make()
    optimizer.build(model.trainable_variables)
    return described(optimizer, model.trainable_variables), optimizer, model.trainable_variables


def clipping(limit=1.0, momentum=0.9, **arguments):
    sgd = keras.optimizers.SGD(0.1, momentum=momentum)
    return lambda: ks.CrossShard(ks.GradientClipping(sgd, limit), **arguments)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"reduction": "sum"},
            "`reduction` of optimizer 0 (CrossShard): 'mean' on processes 0 and 2, 'sum' on process 1",
        ),
        (
            {"limit": 2.0},
            "`clip_gradients` of optimizer 1 (GradientClipping): 1.0 on processes 0 and 2, 2.0 on process 1",
        ),
        ({"momentum": 0.5}, "`momentum` of optimizer 2 (SGD): 0.9 on processes 0 and 2, 0.5 on process 1"),
    ],
)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_differs_is_named_at_any_depth(monkeypatch, other, words):
    mine, odd = description(clipping()), description(clipping(**other))
    for each in (mine, odd):
        others = [mine[0], odd[0], mine[0]]
        digests = iter([["one", "another", "one"], ["one", "another", "one"], others])
        monkeypatch.setattr(processes, "gather_objects", lambda value: next(digests))  # noqa: B023
        with pytest.raises(ValueError) as caught:
            check_agreement(*each)
        assert words in str(caught.value), str(caught.value)


def test_equal_ones_pass_after_one_exchange(monkeypatch):
    exchanged = []
    monkeypatch.setattr(processes, "gather_objects", lambda value: exchanged.append(value) or [value] * 3)
    check_agreement(*description(clipping()))
    check_agreement(*description(clipping()))
    assert len(exchanged) == 2 and exchanged[0] == exchanged[1]


@pytest.mark.exhaustive("jax")
def test_another_order_is_another_training(monkeypatch):
    mine, *arguments = description(clipping())
    other = dict(reversed(mine.items()))
    exchanged = []
    monkeypatch.setattr(processes, "gather_objects", lambda value: exchanged.append(value) or [value] * 2)
    check_agreement(mine, *arguments)
    check_agreement(other, *arguments)
    assert exchanged[0] != exchanged[1]
    everyones = iter([exchanged, exchanged, [mine, other]])
    monkeypatch.setattr(processes, "gather_objects", lambda value: next(everyones))
    with pytest.raises(ValueError, match="Received order: .* on process 0, .* on process 1"):
        check_agreement(mine, *arguments)


def test_garbage_is_collected_only_where_descriptions_differ(monkeypatch):
    """A model that nothing holds any more, and that the other process has got rid of, makes no difference."""
    exchanged, collected, real = [], [], gc.collect
    monkeypatch.setattr(processes, "gather_objects", lambda value: exchanged.append(value) or [value] * 2)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(real()))
    model, optimizer = problem.model(), clipping()()
    model.compile(optimizer, "mse")
    arguments = optimizer, model.trainable_variables
    check_agreement(described(*arguments), *arguments)
    assert len(exchanged) == 1 and not collected
    of_other = exchanged.pop()
    monkeypatch.setattr(processes, "gather_objects", lambda value: exchanged.append(value) or [value, of_other])
    gc.disable()
    try:
        dropped = keras.Model(model.inputs, model.outputs)
        dropped.compile(optimizer, "mae")
        del dropped
        mine = described(*arguments)
        check_agreement(mine, *arguments)
    finally:
        gc.enable()
    first, second = exchanged
    assert first != of_other == second and len(collected) == 1

"""Into what updates may be divided is found by trying, for optimizers that nobody here has heard of, too."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_shardopt as ks
from keras_shardopt.sharding import separability as cutting
from keras_shardopt.wrapping.slots import slot_prefix

pytestmark = pytest.mark.backends("torch")  # the only one that cuts so far


def variables():
    shapes = {"embedding/table": (9, 4), "hidden/kernel": (4, 5), "hidden/bias": (5,), "top/gain": ()}
    made = []
    for path, shape in shapes.items():
        scope, name = path.split("/")
        with keras.name_scope(scope):
            made.append(keras.Variable(np.ones(shape, "float32"), name=name))
    return made


class Own(keras.optimizers.Optimizer):
    """The signs of gradients, with some memory, at the same rate everywhere."""

    def build(self, variables):
        super().build(variables)
        self.memory = [self.add_variable_from_reference(v, name="memory") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        memory = self.memory[self._get_variable_index(variable)]
        self.assign(memory, 0.5 * memory + gradient)
        self.assign_sub(variable, learning_rate * ops.sign(memory) * self.size_of(memory))

    def size_of(self, memory):
        return 1.0


class OwnPerVariable(Own):
    """Steps as large as the mean of the memory."""

    def size_of(self, memory):
        return ops.mean(ops.abs(memory))


class OwnTogether(Own):
    """Steps as large as the largest memory of all variables so far."""

    def build(self, variables):
        super().build(variables)
        self.largest = self.add_variable((), name="largest")

    def size_of(self, memory):
        size = ops.mean(ops.abs(memory))
        self.largest.assign(ops.maximum(self.largest, size))
        return ops.convert_to_tensor(self.largest)


class OwnRandom(Own):
    def size_of(self, memory):
        return float(np.random.default_rng().normal())


class OwnNameless(Own):
    """State that was not made like its variable: whose it is, nobody can say."""

    def build(self, variables):
        super().build(variables)
        self.more = [self.add_variable(v.shape, name=f"more{i}") for i, v in enumerate(variables)]

    def size_of(self, memory):
        return 2.0


class OwnFactored(Own):
    """Keeps one number for each row of large matrices."""

    def build(self, variables):
        super().build(variables)
        for i, variable in enumerate(variables):
            if len(variable.shape) == 2 and min(variable.shape) >= 128:
                self.add_variable((variable.shape[0], 1), name=slot_prefix(variable) + f"rows{i}")


class OwnConfig(Own):
    """Its constructor takes nothing of Keras' arguments but the rate."""

    def __init__(self, learning_rate=0.1):
        super().__init__(learning_rate=learning_rate)

    def get_config(self):
        return {"learning_rate": float(self.learning_rate)}


def test_what_may_be_cut():
    found = cutting.are_elementwise
    assert found(keras.optimizers.SGD(0.1, momentum=0.9), variables()) == [True] * 4
    assert found(Own(0.1), variables()) == [True] * 4
    assert found(OwnConfig(), variables()) == [True] * 4
    assert found(OwnPerVariable(0.1), variables()) == [False, False, False, True]
    assert found(OwnNameless(0.1), variables()) == [False] * 4
    assert found(keras.optimizers.SGD(0.1, clipnorm=1.0), variables())[:3] == [False] * 3
    assert found(ks.NovoGrad(0.01), variables())[:3] == [False] * 3


def test_next_values_are_not_cut_and_others_as_without_them():
    made = variables()
    made[1].overwrite_with_gradient = True
    assert cutting.are_elementwise(Own(0.1), made) == [True, False, True, True]
    assert cutting.are_elementwise(OwnPerVariable(0.1), made) == [False, False, False, True]


def warm_up():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.0, 0.1])


@pytest.mark.parametrize(
    "arguments", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}], ids=lambda arguments: next(iter(arguments))
)
@pytest.mark.parametrize(
    "make",
    [
        lambda **a: keras.optimizers.Adam(0.01, gradient_accumulation_steps=8, **a),
        lambda **a: keras.optimizers.Adam(warm_up(), **a),
        lambda **a: keras.optimizers.Adam(lambda: 0.0, **a),
        lambda **a: keras.optimizers.Lion(0.01, **a),
    ],
    ids=["long windows", "schedule from 0", "function", "signs"],
)
def test_what_hides_an_update_does_not_hide_what_it_depends_on(make, arguments):
    if "clipnorm" in arguments:
        assert cutting.are_elementwise(make(**arguments), variables())[:3] == [False] * 3
    else:
        with pytest.raises(ValueError, match="depends on other variables"):
            cutting.are_elementwise(make(**arguments), variables())


def test_state_of_large_variables_may_be_another_kind():
    shapes = {"a": (130, 140), "b": (20, 30), "c": (7,)}
    large = [keras.Variable(np.ones(shape, "float32"), name=name) for name, shape in shapes.items()]
    assert cutting.are_elementwise(OwnFactored(0.1), large) == [False, True, True]


@pytest.mark.skipif(not hasattr(keras.optimizers, "Muon"), reason="not in this Keras")
def test_each_variable_is_tried_by_its_name_and_rank():
    # Muon takes embeddings, and what is no matrix, for Adam.
    assert cutting.are_elementwise(keras.optimizers.Muon(0.01), variables()) == [True, False, True, True]
    # As a matrix, a bias would be updated by the rule of matrices.
    assert cutting.are_elementwise(keras.optimizers.Muon(0.01), variables(), 2) == [True, False, False, False]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=100.0), "depends on other variables"),
        (lambda: OwnTogether(0.1), "depends on"),
        (lambda: OwnRandom(0.1), "nondeterministic updates"),
    ],
)
@pytest.mark.parametrize("num_variables", [1, 4])
def test_what_depends_on_more_is_refused(optimizer, words, num_variables):
    with pytest.raises(ValueError, match=words):
        cutting.are_elementwise(optimizer(), variables()[:num_variables])


def test_an_optimizer_that_cannot_be_made_again_is_refused():
    class NoConfig(Own):
        def __init__(self, something):
            super().__init__(learning_rate=0.1)

    with pytest.raises(ValueError, match="creatable from its config"):
        cutting.are_elementwise(NoConfig(1), variables())


def test_nothing_of_the_optimizer_or_the_variables_changes():
    optimizer, mine = keras.optimizers.Adam(), variables()
    cutting.are_elementwise(optimizer, mine)
    assert not optimizer.built and len(optimizer.variables) == 2
    assert all((keras.ops.convert_to_numpy(v) == 1).all() for v in mine)


def test_state_that_starts_with_the_weights_is_noticed():
    assert not cutting.holds_weights(keras.optimizers.Adam(), variables())
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        assert cutting.holds_weights(keras.optimizers.ScheduleFreeAdamW(), variables())

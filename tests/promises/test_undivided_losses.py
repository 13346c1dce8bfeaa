"""TensorFlow: losses that Keras divides by the number of replicas, and losses that it does not.

Compared with one process that trains with the whole batch, with momentum and different rows on each replica.
"""

import itertools
import warnings

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")
tf = pytest.importorskip("tensorflow", reason="about TensorFlow, which is not installed")

STEPS = 3
DOUBT = "cannot determine"


class BareMean(keras.Model):
    """A `train_step` as in Keras' guide of a variational autoencoder: its loss is a mean over the rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def scalar(y, outputs):
    return keras.ops.mean(keras.ops.square(outputs - y))


def replicas(num_replicas):
    tf.distribute.MirroredStrategy._collective_key_base += 100_000  # as `data_parallel` does
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def made(kind, penalty=None):
    model = problem.model()
    model.layers[0].kernel_regularizer = model.layers[0].kernel.regularizer = penalty
    return BareMean(model.inputs, model.outputs) if kind == "train_step" else model


def fitted(model, prepare=False, **arguments):
    if prepare:
        ks.prepare(model)
    model.fit(*problem.data(STEPS), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0, **arguments)
    return model.get_weights()


def compiled(kind, optimizer, **arguments):
    model = made(kind, arguments.pop("penalty", None))
    model.compile(optimizer, loss=scalar if kind == "scalar" else "mse", **arguments)
    return model


@pytest.fixture(scope="module")
def one_process():
    return fitted(compiled("scalar", problem.sgd_momentum(), jit_compile=False))


def check(weights, reference):
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


UNDER_FIT = [("train_step", False, 2), ("scalar", True, 2), ("train_step", True, 4), ("scalar", False, 4)]


@pytest.mark.parametrize(
    ("kind", "prepare", "num_replicas"),
    some(UNDER_FIT, [("train_step", False, 2), ("scalar", True, 2)]),
)
def test_under_fit_an_undivided_loss_is_local(kind, prepare, num_replicas, one_process):
    with replicas(num_replicas).scope():
        model = compiled(kind, ks.CrossShard(problem.sgd_momentum()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(fitted(model, prepare), one_process)


@pytest.mark.parametrize("kind", some(["train_step", "scalar"], ["train_step"]))
def test_undivided_gradients_are_accumulated(kind):
    with replicas(2).scope():
        model = compiled(kind, ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=STEPS))
    weights = fitted(model)
    alone = compiled(
        "scalar", keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=STEPS), jit_compile=False
    )
    check(weights, fitted(alone))


class LogsADividedLoss(BareMean):
    def train_step(self, data):
        x, y = data
        logged = self.compute_loss(x, y, self(x, training=True))
        return {**super().train_step(data), "logged": logged}


def test_so_are_gradients_that_are_reduced_inside_a_condition(one_process):
    """`LossScaling` outside `CrossShard` reduces in a condition. A divided loss that is only logged does not count."""
    with replicas(2).scope():
        model = problem.model()
        model = LogsADividedLoss(model.inputs, model.outputs)
        scaled = ks.LossScaling(ks.CrossShard(problem.sgd_momentum()), "Backoff", {"scale_max": 1.0})
        model.compile(scaled, "mse")
    check(fitted(model), one_process)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.exhaustive
def test_losses_of_keras_count_as_ever(reduction):
    def make():
        return keras.losses.MeanSquaredError(reduction=reduction)

    def inner():
        return keras.optimizers.SGD(0.01 if reduction == "sum" else 0.1, momentum=0.9)

    with replicas(2).scope():
        model = problem.model()
        model.compile(ks.CrossShard(inner()), loss=make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = fitted(model)
    alone = problem.model()
    alone.compile(inner(), loss=make(), jit_compile=False)
    check(weights, fitted(alone))


def loop(num_replicas, loss_of, compiled, gradients="auto"):
    """A custom training loop, with the loss of a replica's outputs, targets and strategy."""
    strategy = replicas(num_replicas)
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), gradients=gradients)
        optimizer.build(model.trainable_variables)
    variables = model.trainable_variables

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), y, strategy)
        optimizer.apply(tape.gradient(loss, variables), variables)

    def step(x, y):
        strategy.run(on_replica, args=(x, y))

    step = tf.function(step) if compiled else step
    data = tf.data.Dataset.from_tensor_slices(problem.data(STEPS)).batch(problem.BATCH_SIZE)
    for batch in strategy.experimental_distribute_dataset(data):
        step(*batch)
    return model.get_weights()


def rows(outputs, y):
    return tf.reduce_mean(tf.square(outputs - y), axis=1)


def of_whole_batch(outputs, y, strategy):
    return tf.nn.compute_average_loss(rows(outputs, y), global_batch_size=problem.BATCH_SIZE)


def of_replica_times_their_number(outputs, y, strategy):
    return tf.nn.compute_average_loss(rows(outputs, y))


def as_a_penalty(outputs, y, strategy):
    return tf.nn.scale_regularization_loss(tf.reduce_mean(rows(outputs, y)))


def by_hand(outputs, y, strategy):
    return tf.reduce_mean(rows(outputs, y)) / strategy.num_replicas_in_sync


def of_keras(outputs, y, strategy):
    return keras.losses.MeanSquaredError()(y, outputs)


DIVIDING = [of_whole_batch, of_replica_times_their_number, as_a_penalty, by_hand, of_keras]


@pytest.mark.parametrize(
    ("divided", "num_replicas", "compiled"),
    some(
        [(divided, *how) for divided in DIVIDING for how in ((2, True), (4, False))],
        lambda case: case[2] and case[0] in (of_whole_batch, by_hand),
    ),
)
def test_what_divides_in_a_custom_loop_is_seen(divided, num_replicas, compiled, one_process):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(loop(num_replicas, divided, compiled), one_process)


@pytest.mark.parametrize("compiled", some([True, False], [True]))
def test_a_bare_mean_in_a_custom_loop_is_local_and_said_to_be_once(compiled, one_process):
    def bare(outputs, y, strategy):
        return tf.reduce_mean(rows(outputs, y))

    with pytest.warns(UserWarning, match=DOUBT) as caught:
        check(loop(2, bare, compiled), one_process)
    said = [str(w.message) for w in caught if DOUBT in str(w.message)]
    assert len(said) == 1 and '"local"' in said[0] and '"prescaled"' in said[0]


@pytest.mark.parametrize("gradients", ["local", "prescaled"])
@pytest.mark.exhaustive
def test_who_says_how_gradients_arrive_is_not_asked(gradients, one_process):
    def loss_of(outputs, y, strategy):
        return tf.reduce_sum(rows(outputs, y)) / (8 if gradients == "local" else 16)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(loop(2, loss_of, True, gradients), one_process)


SAID = [
    ("local", "keras", False),
    ("local", "scalar", True),
    ("prescaled", "keras", True),
    ("prescaled", "scalar", False),
]
SAID += [("local", "train_step", prepare) for prepare in (False, True)]


@pytest.mark.parametrize(
    ("gradients", "kind", "prepare"),
    some(SAID, [("local", "keras", False), ("local", "train_step", True)]),
)
def test_what_is_said_of_gradients_holds_or_is_contradicted(gradients, kind, prepare, one_process):
    with replicas(2).scope():
        model = compiled(kind, ks.CrossShard(problem.sgd_momentum(), gradients=gradients))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = fitted(model, prepare)
    said = [str(w.message) for w in caught if f'`gradients="{gradients}"`' in str(w.message)]
    is_divided = kind == "keras" or (kind == "scalar" and prepare)
    if is_divided == (gradients == "prescaled"):
        assert not said
        check(weights, one_process)
    else:
        (words,) = said
        assert ("too small" if is_divided else "too large") in words and "Omit `gradients`" in words
        assert problem.relative_difference(weights, one_process) > 0.1  # it is worth saying


def test_a_loss_that_was_traced_before_counts_as_it_did(one_process):
    """In the second eager step nothing is seen of a loss in a `tf.function` of its own."""

    @tf.function
    def traced(outputs, y):
        return keras.losses.MeanSquaredError()(y, outputs)

    def loss_of(outputs, y, strategy):
        return traced(outputs, y)

    with pytest.warns(UserWarning, match="cannot be detected"):
        check(loop(2, loss_of, False), one_process)


def test_a_scalar_beside_what_keras_divides_is_said_once():
    def make():
        with replicas(2).scope():
            return compiled("scalar", ks.CrossShard(problem.sgd_momentum()), penalty=keras.regularizers.L2(0.1))

    alone = compiled("scalar", problem.sgd_momentum(), penalty=keras.regularizers.L2(0.1), jit_compile=False)
    reference = fitted(alone)
    model = make()
    with pytest.warns(UserWarning, match="one value for each row") as caught:
        fitted(model)
    assert sum("one value for each row" in str(w.message) for w in caught) == 1
    # The fix that is named: then Keras divides both.
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(fitted(model, prepare=True), reference)


class WithTerm(keras.Model):
    """A loss of Keras, and a term of the step's own: bare, or divided as the warning says."""

    divided = False

    def term(self, outputs):
        mean = keras.ops.mean(keras.ops.square(outputs))
        return mean / tf.distribute.get_strategy().num_replicas_in_sync if self.divided else mean

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * self.term(y_pred)


class WithTermInStep(WithTerm):
    compute_loss = keras.Model.compute_loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.optimizer.scale_loss(self.compute_loss(x, y, outputs) + 0.1 * self.term(outputs))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("kind", "prepare"),
    some(itertools.product([WithTerm, WithTermInStep], [False, True]), [(WithTermInStep, True)]),
)
def test_a_bare_term_beside_what_keras_divides_is_said_once(kind, prepare):
    def make(optimizer, divided):
        model = problem.model()
        model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
        model = kind(model.inputs, model.outputs)
        model.divided = divided
        # A loss scaling multiplies the sum of all terms.
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    reference = fitted(make(problem.sgd_momentum(), True))
    for divided in (True, False):
        with replicas(2).scope():
            inner = keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=8.0)
            model = make(ks.CrossShard(inner), divided)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = fitted(model, prepare)
        said = [w for w in caught if "all terms of a loss" in str(w.message)]
        assert len(said) == (0 if divided else 1)
        if divided:
            check(weights, reference)


@pytest.mark.exhaustive
def test_a_loss_may_have_any_number_of_terms():
    """Keras adds penalties one by one."""
    from keras_shardopt.backends.tensorflow import losses as tf_losses

    with tf.Graph().as_default():
        terms = [tf.random.uniform(()) for _ in range(2000)]
        loss = sum(terms)
        assert tf_losses._terms(loss, {terms[0].name}, 2) == {tf_losses.DIVIDED, tf_losses.BARE_TERM}
        assert not tf_losses._adds_up_rows(loss)


class OverWholeBatch(keras.Model):
    """A `train_step` with a loss of TensorFlow's guides: the sum over rows, divided by the rows of the whole batch."""

    def loss_of(self, values):
        return tf.reduce_sum(values) * (1.0 / problem.BATCH_SIZE)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(keras.ops.mean(keras.ops.square(self(x, training=True) - y), axis=-1))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class OverReplica(OverWholeBatch):
    """A mean over the replica's rows, written as a sum, and a penalty: nothing to be said."""

    def loss_of(self, values):
        penalty = tf.add_n([tf.reduce_sum(tf.square(v)) for v in self.trainable_variables])
        return tf.reduce_sum(values) / tf.cast(tf.shape(values)[0], values.dtype) + 0.0 * penalty


@pytest.mark.parametrize(
    ("kind", "says"), some([(OverWholeBatch, True), (OverReplica, False)], [(OverWholeBatch, True)])
)
def test_a_sum_over_rows_in_a_train_step_is_said_once(kind, says, one_process):
    for gradients in ("auto", "prescaled") if says else ("auto",):
        with replicas(2).scope():
            model = problem.model()
            model = kind(model.inputs, model.outputs)
            model.compile(ks.CrossShard(problem.sgd_momentum(), gradients=gradients), jit_compile=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = fitted(model)
        said = [str(w.message) for w in caught if DOUBT in str(w.message)]
        is_doubtful = says and gradients == "auto"
        assert len(said) == is_doubtful and all('"prescaled"' in text for text in said)
        if not is_doubtful:
            check(weights, one_process)


class Reading(keras.Model):
    """Reads the number of replicas: for the logs, or to divide in a way that the loss itself does not show at once."""

    kind = "logs"

    def train_step(self, data):
        x, y = data
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = scalar(y, self(x, training=True))
            if self.kind == "rows":
                rows = keras.ops.cast(keras.ops.shape(x)[0] * num_replicas, loss.dtype)
                loss = keras.ops.sum(keras.ops.mean(keras.ops.square(self(x, training=True) - y), axis=1)) / rows
        variables = self.trainable_variables
        grads = tape.gradient(loss, variables)
        if self.kind == "gradients":
            grads = [grad / num_replicas for grad in grads]
        self.optimizer.apply(grads, variables)
        return {"loss": loss, "rows": keras.ops.shape(x)[0] * num_replicas}


READING = list(itertools.product(["logs", "rows", "gradients"], [2, 4]))


@pytest.mark.parametrize(("kind", "num_replicas"), some(READING, [("logs", 2)]))
def test_who_reads_the_number_of_replicas_need_not_divide_by_it(kind, num_replicas, one_process):
    with replicas(num_replicas).scope():
        model = problem.model()
        model = Reading(model.inputs, model.outputs)
        model.kind = kind
        model.compile(ks.CrossShard(problem.sgd_momentum()), jit_compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(fitted(model), one_process)
    said = [str(w.message) for w in caught if "reads the number of replicas" in str(w.message)]
    assert len(said) == (kind == "logs") and all('gradients="local"' in text for text in said)


class WithFunction(keras.Model):
    @tf.function
    def loss_of(self, x, y):
        return keras.losses.MeanSquaredError()(y, self(x, training=True))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_a_prepared_loss_in_a_function_of_its_own_is_refused_with_the_fix(one_process):
    def make():
        with replicas(2).scope():
            model = problem.model()
            model = WithFunction(model.inputs, model.outputs)
            model.compile(ks.CrossShard(problem.sgd_momentum()), jit_compile=False)
        return model

    with pytest.raises(RuntimeError, match=r"Remove `@tf.function` from functions that the step calls"):
        fitted(make(), prepare=True)
    WithFunction.loss_of, kept = WithFunction.loss_of.python_function, WithFunction.loss_of
    try:
        check(fitted(make(), prepare=True), one_process)
    finally:
        WithFunction.loss_of = kept


class LossesApart(keras.Model):
    """Two losses in one step, a bare mean and one that Keras divides: each has weights of its own, or one is logged."""

    kind = "logged"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            bare, divided = scalar(y, outputs), keras.losses.MeanSquaredError()(y, outputs)
        first, last = self.trainable_variables[:2], self.trainable_variables[2:]
        for loss, variables in {
            "logged": [(bare, first + last)],
            "divided first": [(divided, first), (bare, last)],
            "bare first": [(bare, last), (divided, first)],
        }[self.kind]:
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": divided}


STEPS_OF_TWO_LOSSES = [
    ("logged", False, False),
    ("logged", True, True),
    ("divided first", True, False),
    ("divided first", False, True),
    ("bare first", False, False),
]


@pytest.mark.parametrize(
    ("kind", "prepare", "run_eagerly"),
    some(STEPS_OF_TWO_LOSSES, [("divided first", False, True), ("bare first", False, False)]),
)
def test_each_loss_of_a_step_counts_as_it_came(kind, prepare, run_eagerly):
    """What Keras has divided for the logs, or for another optimizer, says nothing of a bare mean."""

    def make(optimizer):
        model = problem.model()
        model = LossesApart(model.inputs, model.outputs)
        model.kind = kind
        model.compile(optimizer, jit_compile=False, run_eagerly=run_eagerly)
        optimizer.build(model.trainable_variables)
        return model

    reference = fitted(make(problem.sgd_momentum()))
    with replicas(2).scope():
        model = make(ks.CrossShard(problem.sgd_momentum()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(fitted(model, prepare), reference)


@pytest.mark.exhaustive
def test_each_loss_of_a_window_counts_as_it_came():
    def make(optimizer):
        model = problem.model()
        model = LossesApart(model.inputs, model.outputs)
        model.compile(optimizer, jit_compile=False)
        return model

    reference = fitted(make(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=STEPS)))
    with replicas(2).scope():
        model = make(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), gradient_accumulation_steps=STEPS))
    check(fitted(model), reference)


def test_a_mean_over_weights_of_one_replica_is_said(one_process):
    def make(optimizer):
        model = problem.model()
        model.compile(optimizer, keras.losses.MeanSquaredError("mean_with_sample_weight"), jit_compile=False)
        return model

    weights = np.linspace(0.1, 2, STEPS * problem.BATCH_SIZE).astype("float32")
    reference = fitted(make(problem.sgd_momentum()), sample_weight=weights)
    for prepare in (False, True):
        with replicas(2).scope():
            model = make(ks.CrossShard(problem.sgd_momentum()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fitted(model, prepare, sample_weight=weights)
        said = [w for w in caught if "mean_with_sample_weight" in str(w.message)]
        assert len(said) == (0 if prepare else 1)
        if prepare:
            check(found, reference)
        else:
            assert problem.relative_difference(found, reference) > 1e-2  # it is worth saying
            assert "prepare" in str(said[0].message)

"""Keras' callbacks see through every wrapper, also where it sits inside or around others."""

import keras
import numpy as np
import pytest
from keras import callbacks
from support import catalogue, problem
from support.suites import some

o = keras.optimizers


def _in_multi(optimizer):
    return o.MultiOptimizer(o.OptimizerMap(optimizer, {".*bias": o.SGD(0.02)}))


def chains():
    """Chains of optimizers by name: functions of the wrapper and of a function that makes the innermost."""
    yield "{}", lambda wrap, make: wrap(make())
    yield "{} of LossScaleOptimizer", lambda wrap, make: wrap(o.LossScaleOptimizer(make()))
    yield "LossScaleOptimizer of {}", lambda wrap, make: o.LossScaleOptimizer(wrap(make()))
    if hasattr(o, "MultiOptimizer"):
        yield "{} of MultiOptimizer", lambda wrap, make: wrap(_in_multi(make()))
        yield "MultiOptimizer of {}", lambda wrap, make: _in_multi(wrap(make()))


ONE_OF_EACH_CLASS = {type(wrap(o.SGD())): wrapper for wrapper, wrap in catalogue.WRAPPERS.items()}.values()
INSIDE = ("LossScaleOptimizer of {}", "GradientClipping")
# The wrapper that everybody uses, in the chain in which there is most to see through.
BY_DEFAULT = ("{} of MultiOptimizer", "CrossShard") if hasattr(o, "MultiOptimizer") else INSIDE
EXHAUSTIVE = pytest.mark.exhaustive("jax", "tensorflow")
each_chain = pytest.mark.parametrize(
    ("chain", "wrapper"),
    [
        pytest.param(chain, wrap, id=name.format(wrapper), marks=[] if (name, wrapper) == BY_DEFAULT else EXHAUSTIVE)
        for wrapper, wrap in catalogue.WRAPPERS.items()
        for name, chain in chains()
        if not (wrapper in catalogue.REFUSES_LOSS_SCALING and name.startswith("LossScale"))
        # All forward by the same code: each class once, and one of them in every chain.
        and ((name == "{}" and wrapper in ONE_OF_EACH_CLASS) or wrapper == "CrossShard" or (name, wrapper) == INSIDE)
    ],
)


def fit(optimizer, *with_callbacks, epochs=3):
    x, y = problem.data(num_steps=2)
    model = problem.model()
    model.compile(optimizer, "mse", **catalogue.COMPILE)
    optimizer.build(model.trainable_variables)
    arguments = dict(batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0, validation_data=(x, y))
    history = model.fit(x, y, epochs=epochs, callbacks=list(with_callbacks), **arguments)
    return model, history.history


def adam():
    return o.Adam(0.01)


@each_chain
def test_learning_rate_callbacks_reach_the_update(chain, wrapper):
    halve = callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.5)
    _, history = fit(chain(wrapper, adam), halve)
    rates = next(values for key, values in history.items() if "learning_rate" in key and "sgd" not in key)
    np.testing.assert_allclose(rates, [0.005, 0.0025, 0.00125], rtol=1e-6)


@each_chain
def test_reduce_on_plateau(chain, wrapper):
    plateau = callbacks.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=1, min_delta=100.0)
    _, history = fit(chain(wrapper, adam), plateau)
    rates = next(values for key, values in history.items() if "learning_rate" in key and "sgd" not in key)
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.001], rtol=1e-5)


@each_chain
@pytest.mark.parametrize("swap_on_epoch", some([True, False], [True], "jax", "tensorflow"))
def test_swap_ema_weights(chain, wrapper, swap_on_epoch):
    def ema():
        return o.Adam(0.01, use_ema=True, ema_momentum=0.5)

    def ema_everywhere(optimizer):
        for part in getattr(optimizer, "optimizers", []):
            part.use_ema = True
        return optimizer

    def run(wrap):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        model, history = fit(ema_everywhere(chain(wrap, ema)), swap, epochs=1)
        return model.get_weights(), history

    weights, history = run(wrapper)
    plain_weights, plain_history = run(lambda optimizer: optimizer)
    assert history == plain_history
    for a, b in zip(weights, plain_weights):
        np.testing.assert_array_equal(a, b)


@each_chain
def test_tensorboard_finds_the_learning_rate(chain, wrapper):
    model, _ = fit(chain(wrapper, adam), epochs=1)
    # Past its constructor, which wants TensorFlow on every backend.
    callback = callbacks.TensorBoard.__new__(callbacks.TensorBoard)
    callback._model = model
    found = callback._collect_learning_rate({})
    rates = [float(keras.ops.convert_to_numpy(v)) for v in found.values()]
    assert any(rate == pytest.approx(0.01) for rate in rates)


@pytest.mark.backends("tensorflow")
@each_chain
def test_tensorboard_writes_its_files(chain, wrapper, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorFlow writes summaries with TensorBoard, which is not installed")
    fit(chain(wrapper, adam), callbacks.TensorBoard(tmp_path, write_steps_per_second=True))
    written = b"".join(file.read_bytes() for file in tmp_path.glob("train/events*"))
    assert b"epoch_learning_rate" in written or b"learning_rate_" in written


@each_chain
@pytest.mark.exhaustive("tensorflow")
def test_backup_and_restore_resumes(chain, wrapper, tmp_path):
    class Stop(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(chain(wrapper, adam), callbacks.BackupAndRestore(tmp_path), Stop())
    resumed, _ = fit(chain(wrapper, adam), callbacks.BackupAndRestore(tmp_path))
    uninterrupted, _ = fit(chain(wrapper, adam))
    for a, b in zip(resumed.get_weights(), uninterrupted.get_weights()):
        np.testing.assert_array_equal(a, b)


@each_chain
def test_model_checkpoint_and_state_tree(chain, wrapper, tmp_path):
    model, _ = fit(chain(wrapper, adam), callbacks.ModelCheckpoint(tmp_path / "model.keras"))
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(catalogue.state_of(loaded.optimizer), catalogue.state_of(model.optimizer)):
        np.testing.assert_array_equal(a, b)
    tree = model.get_state_tree(value_format="numpy_array")["optimizer_variables"]
    assert len(_flat(tree)) == len({v.path for v in model.optimizer.variables})


def _flat(tree):
    return [leaf for branch in tree.values() for leaf in (_flat(branch) if isinstance(branch, dict) else [branch])]

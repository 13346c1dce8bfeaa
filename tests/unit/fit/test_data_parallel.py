import datetime
import os
import sys
import warnings

import keras
import numpy as np
import pytest
from support import launch, problem, suites

import keras_shardopt as ks
from keras_shardopt.optimizers.made import collected


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_wrong_number_is_refused_at_once(wrong, error):
    with pytest.raises(error, match="`num_replicas`"):
        ks.data_parallel(wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("10", TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (datetime.timedelta(0), ValueError),
        (datetime.timedelta(days=1000), ValueError),
    ],
)
def test_a_wrong_timeout_is_refused_at_once(wrong, error):
    with pytest.raises(error, match="`timeout` must be"):
        ks.data_parallel(timeout=wrong)


@pytest.mark.parametrize("timeout", [5, 0.5, datetime.timedelta(minutes=1)])
def test_one_process_has_nobody_to_wait_for(timeout):
    with ks.data_parallel(1, timeout=timeout) as scope:
        assert scope.num_processes == 1


@pytest.mark.backends("torch")
@pytest.mark.parametrize(
    "given",
    [
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": ""},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ""},
    ],
)
def test_half_a_launcher_is_refused(given, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    received = ", ".join(f"{name}={given[name]!r}" for name in ("WORLD_SIZE", "RANK") if name in given)
    with pytest.raises(ValueError, match=f"must set WORLD_SIZE, RANK, .* Received: {received}.*unset these variables"):
        ks.data_parallel(timeout=5).__enter__()


def test_it_is_entered_once():
    scope = ks.data_parallel(1)
    with pytest.raises(RuntimeError, match="with data_parallel"):
        scope.num_replicas  # noqa: B018
    with scope:
        assert (scope.num_replicas, scope.replica_id, scope.is_chief) == (1, 0, True)
        assert (scope.num_processes, scope.process_id) == (1, 0)
    with pytest.raises(RuntimeError, match="entered before"), scope:
        pass


def test_its_repr_names_replicas_process_and_devices(backend):
    scope = ks.data_parallel(1)
    assert repr(scope) == "<data_parallel: not entered>"
    with scope:
        assert repr(scope) == f"<data_parallel: 1 replica, process 0 of 1, devices {DEVICE_0[backend]}>"
    if backend != "torch":
        with ks.data_parallel(2) as scope:
            assert repr(scope) == "<data_parallel: 2 replicas, process 0 of 1, devices cpu:0, cpu:1>"


DEVICE_0 = {"torch": "cpu", "jax": "cpu:0", "tensorflow": "cpu:0"}


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("num_replicas", [None, 2, 3])
def test_devices_of_one_process(num_replicas, backend):
    with ks.data_parallel(num_replicas) as scope:
        expected = num_replicas or {"tensorflow": 4, "jax": 8}[backend]
        assert scope.num_replicas == expected
        assert (scope.replica_id, scope.is_chief, scope.num_processes) == (0, True, 1)


@pytest.mark.backends("tensorflow", "jax")
def test_more_replicas_than_devices_is_an_error_that_says_how(backend):
    wanted = {"tensorflow": "set_logical_device_configuration", "jax": "xla_force_host_platform_device_count"}
    with pytest.raises((ValueError, RuntimeError), match=wanted[backend]), ks.data_parallel(9):
        pass


@pytest.mark.backends("jax")
def test_jax_restores_the_distribution():
    mine = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:2])
    keras.distribution.set_distribution(mine)
    with ks.data_parallel(4):
        assert keras.distribution.distribution().device_mesh.devices.size == 4
    assert keras.distribution.distribution() is mine
    with pytest.raises(KeyError), ks.data_parallel(4):
        kept = ks.CrossShard("sgd")
        raise KeyError
    assert keras.distribution.distribution() is mine
    del kept


@pytest.mark.backends("jax")
def test_jax_keeps_the_distribution_for_fit_after_the_block_until_closed():
    x, y = problem.data(num_steps=2)
    with ks.data_parallel(4) as scope:
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
    model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    assert keras.distribution.distribution().device_mesh.devices.size == 4
    assert scope.largest_difference(model) == 0
    scope.close()
    assert keras.distribution.distribution() is None
    scope.close()  # once is enough, twice does no harm
    model.compile(model.optimizer, "mse")  # a new trace
    with pytest.raises(ValueError, match="no distribution is active"):
        model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)


@pytest.mark.backends("jax")
def test_jax_scopes_follow_each_other_without_being_closed():
    x, y = problem.data(num_steps=1)
    models = []
    for num_replicas in (4, 2, 1):
        with ks.data_parallel(num_replicas) as scope:
            models.append(problem.model())
            models[-1].compile(ks.CrossShard("sgd"), "mse")
        models[-1].fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
        assert len(models[-1].trainable_variables[0].value.devices()) == scope.num_replicas == num_replicas
    scope.close()
    assert keras.distribution.distribution() is None


@pytest.mark.backends("jax")
def test_jax_a_model_that_was_made_elsewhere_is_refused_with_the_reason():
    x, y = problem.data(num_steps=1)
    model = problem.model()
    with ks.data_parallel(2) as scope:
        model.compile(ks.CrossShard("sgd"), "mse")
        with (
            warnings.catch_warnings(),
            pytest.raises(ValueError, match="a variable made before the active distribution"),
        ):
            warnings.simplefilter("ignore")  # newer Keras suspects it too
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    scope.close()


@pytest.mark.backends("jax")
@pytest.mark.parametrize("num_replicas", [None, 1])
def test_jax_layouts_of_a_model_are_not_replaced(num_replicas):
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], keras.distribution.list_devices()[:4])
    mine = keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch")
    keras.distribution.set_distribution(mine)
    with pytest.raises(ValueError, match=r"Received: <ModelParallel.*Omit `data_parallel\(\)`"):
        ks.data_parallel(num_replicas).__enter__()
    assert keras.distribution.distribution() is mine


class Batches(keras.utils.PyDataset):
    """One batch that divides, and one that does not."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        x, y = problem.data(num_steps=1)
        return (x[:8], y[:8]) if index == 0 else (x[:5], y[:5])


X, Y = problem.data(num_steps=1)
UNEVEN = {
    "fit": (13, lambda model: model.fit(X[:13], Y[:13], batch_size=13, verbose=0)),
    "fit, last batch": (5, lambda model: model.fit(X[:13], Y[:13], batch_size=8, verbose=0)),
    "fit, batches": (5, lambda model: model.fit(Batches(), shuffle=False, verbose=0)),
    "validation": (5, lambda model: model.fit(X, Y, validation_data=(X[:5], Y[:5]), verbose=0)),
    "evaluate": (5, lambda model: model.evaluate(X[:13], Y[:13], batch_size=8, verbose=0)),
    "predict": (5, lambda model: model.predict(X[:13], batch_size=8, verbose=0)),
    "predict, one batch": (3, lambda model: model.predict(X[:3], verbose=0)),
    "train_on_batch": (3, lambda model: model.train_on_batch(X[:3], Y[:3])),
    "test_on_batch": (3, lambda model: model.test_on_batch(X[:3], Y[:3])),
}


@pytest.mark.backends("jax")
def test_jax_batches_that_do_not_divide_are_refused_with_what_to_do():
    with ks.data_parallel(4, prepare=False) as scope:
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
    for name, (num_rows, call) in UNEVEN.items():
        wanted = rf"a batch of {num_rows} rows, for 4 replicas. Call `keras_shardopt.prepare\(model\)`"
        with pytest.raises(ValueError, match=wanted):
            call(model)
            raise AssertionError(name)
    model.fit(X, Y, batch_size=8, verbose=0)  # nothing is lost
    assert model.predict(X, batch_size=8, verbose=0).shape == Y.shape
    ks.prepare(model)
    for _, call in UNEVEN.values():
        call(model)
    scope.close()


@pytest.mark.backends("jax")
@pytest.mark.parametrize("given", [((None, True), {}), ((), {"is_super_batch": True})])
def test_jax_rows_of_stacked_batches_are_not_their_number(given, monkeypatch):
    """As Keras 3.16 hands over the batches of one execution."""
    from keras_shardopt.fit.jax import batches as jax_fit

    monkeypatch.setattr(jax_fit, "_distribute_in_keras", lambda data, *args, **kwargs: data)
    stacked = np.zeros((3, 8, 1))
    with ks.data_parallel(4):
        assert jax_fit._distribute_data(stacked, *given[0], **given[1]) is stacked
        with pytest.raises(ValueError, match="a batch of 3 rows"):
            jax_fit._distribute_data(stacked, None)


@pytest.mark.backends("jax")
def test_jax_steps_that_end_before_the_last_rows_need_not_divide():
    with ks.data_parallel(4, prepare=False) as scope:
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
    model.fit(X[:13], Y[:13], batch_size=8, steps_per_epoch=1, verbose=0)
    assert int(model.optimizer.iterations) == 1
    scope.close()


@pytest.mark.backends("tensorflow")
def test_tensorflow_a_model_that_was_made_elsewhere_is_refused_with_the_reason():
    model = problem.model()
    with ks.data_parallel(2, prepare=False):
        model.compile(ks.CrossShard("sgd"), "mse")
    with pytest.raises(ValueError, match=r"was made outside the strategy .* 2 replicas\. Build or load the model"):
        model.fit(*problem.data(num_steps=1), batch_size=problem.BATCH_SIZE, verbose=0)


@pytest.mark.backends("tensorflow")
def test_tensorflow_uses_an_open_strategy_and_leaves_its_own():
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        with ks.data_parallel() as scope:
            assert scope.num_replicas == 2
            assert tf.distribute.get_strategy() is strategy
        with pytest.raises(ValueError, match="strategy with 2 replicas"), ks.data_parallel(4):
            pass
    with ks.data_parallel(2):
        assert tf.distribute.get_strategy().num_replicas_in_sync == 2
    assert not tf.distribute.has_strategy()


@pytest.mark.backends("torch")
def test_torch_asks_for_torchrun():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"), ks.data_parallel(4):
        pass


# Where the test of several processes has made a process that others are forked from.
with_processes = pytest.mark.xdist_group("processes")


@with_processes
@pytest.mark.backends("tensorflow", "jax")
def test_cpu_devices_are_made_in_a_fresh_process(backend):
    program = (
        "import keras, keras_shardopt as ks\n"
        "with ks.data_parallel(3) as scope:\n"
        "    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "    model.compile(ks.CrossShard('sgd'), 'mse')\n"
        "model.fit(keras.ops.ones((6, 2)), keras.ops.ones((6, 1)), batch_size=6, verbose=0)\n"
        "print('replicas', scope.num_replicas, 'difference', scope.largest_difference(model))\n"
    )
    environment = {name: value for name, value in launch.variables(backend).items() if name != "XLA_FLAGS"}
    output = launch.program(backend, program, environment=environment)
    assert "replicas 3 difference 0.0" in output


FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
THREADS = [
    ({}, "2 4", "16 None"),
    ({}, "2 6", "24 None"),
    ({}, "16 4", "None None"),  # the cores are enough
    ({}, "2 1", "None None"),
    ({}, "2", "None None"),
    (FLAGS, "2", "16 None"),
    ({"NPROC": "5"}, "2 4", "5 None"),
    ({"PJRT_NPROC": "5"}, "2 4", "None 5"),
]


@with_processes
@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("given", "arguments", "expected"), suites.some(THREADS, lambda case: case[:2] in [({}, "2 6"), ({}, "16 4")])
)
def test_jax_gets_threads_for_its_devices_unless_the_user_has_said_how_many(given, arguments, expected):
    program = (
        "import os, sys, keras, keras_shardopt as ks\n"
        "from unittest import mock\n"
        "cores = mock.patch.object(os, 'sched_getaffinity', lambda process: range(int(sys.argv[1])), create=True)\n"
        "with cores, ks.data_parallel(*map(int, sys.argv[2:]), timeout=20) as scope:\n"
        "    assert [scope.num_replicas] == list(map(int, sys.argv[2:])) or len(sys.argv) == 2\n"
        "    print('threads', os.environ.get('NPROC'), os.environ.get('PJRT_NPROC'))\n"
    )
    names = ("XLA_FLAGS", "NPROC", "PJRT_NPROC")
    environment = {name: value for name, value in launch.variables("jax").items() if name not in names}
    output = launch.program("jax", program, *arguments.split(), environment={**environment, **given})
    assert f"threads {expected}" in output, output


TRANSFORMER = """
import keras, numpy as np, keras_shardopt as ks
layers = keras.layers
with ks.data_parallel(4):
    ids = keras.Input((32,), dtype="int32")
    x = layers.Embedding(90, 64)(ids)
    for _ in range(2):
        a = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 32)(a, a, use_causal_mask=True)
        x = x + layers.Dense(64)(layers.Dense(128, activation="relu")(layers.LayerNormalization()(x)))
    model = keras.Model(ids, layers.Dense(90)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ks.CrossShard(keras.optimizers.Adam(2e-3)), loss)
rows = np.random.default_rng(0).integers(0, 90, (400 * 64, 33), "int32")
model.fit(rows[:, :-1], rows[:, 1:], batch_size=64, shuffle=False, verbose=0)
print("updates", int(model.optimizer.iterations))
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
@pytest.mark.backends("jax")
def test_jax_trains_on_more_devices_than_cores():
    """XLA aborted the process within 400 steps where collectives had taken all of its threads."""
    names = ("XLA_FLAGS", "NPROC", "PJRT_NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    assert "updates 400" in launch.run([sys.executable, "-c", TRANSFORMER], 600, environment)


@pytest.mark.backends("tensorflow")
def test_tensorflow_that_runs_already_is_an_error_that_says_how():
    with pytest.raises(RuntimeError, match=r"Enter `data_parallel\(num_replicas=9\)` before"), ks.data_parallel(9):
        pass


@pytest.mark.backends("torch")
def test_prepare_switches_the_ddp_of_newer_keras_off():
    class Newer(keras.Sequential):
        """As Keras 3.16, whose trainer calls this before training."""

        def _initialize_ddp(self):
            raise AssertionError("DDP would reduce gradients a second time")

    model = Newer(problem.model().layers)
    model.compile(ks.CrossShard("sgd"), "mse")
    ks.prepare(model)
    assert model._initialize_ddp() is None


@pytest.mark.backends("torch")
def test_training_goes_on_alone_once_the_group_is_closed(tmp_path):
    import torch.distributed as dist

    from keras_shardopt.backends.torch.communicator import TorchProcessGroup

    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    model.optimizer.build(model.trainable_variables)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ranks = TorchProcessGroup()
        model.optimizer.peers.started = ranks
        assert model.optimizer.pipeline.reducer.buckets_among(ranks) is not None
        assert ranks.are_current()
    finally:
        dist.destroy_process_group()
    assert not ranks.are_current()
    x, y = problem.data(2)
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_a_scope_inside_another_that_has_seen_the_same_optimizers_ends_by_itself():
    with collected() as outer:
        with collected() as inner:
            first = ks.CrossShard("sgd")
        second = ks.CrossShard("sgd")
    assert list(inner) == [first]
    assert set(map(id, outer)) == {id(first), id(second)}

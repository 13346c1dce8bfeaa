import datetime
import sys
import warnings

import keras
import pytest
from support import launch, problem

import keras_shardopt as ks


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


def test_it_is_entered_once():
    scope = ks.data_parallel(1)
    with pytest.raises(RuntimeError, match="with data_parallel"):
        scope.num_replicas  # noqa: B018
    with scope:
        assert (scope.num_replicas, scope.replica_id, scope.is_chief) == (1, 0, True)
        assert (scope.num_processes, scope.process_id) == (1, 0)
    with pytest.raises(RuntimeError, match="entered before"), scope:
        pass


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
        with warnings.catch_warnings(), pytest.raises(ValueError, match="was made before the active distribution"):
            warnings.simplefilter("ignore")  # newer Keras suspects it too
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    scope.close()


@pytest.mark.backends("tensorflow")
def test_tensorflow_a_model_that_was_made_elsewhere_is_refused_with_the_reason():
    model = problem.model()
    with ks.data_parallel(2):
        model.compile(ks.CrossShard("sgd"), "mse")
    with pytest.raises(ValueError, match=r"was made outside the strategy .* 2 replicas\. Build the model inside"):
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
    import os

    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    output = launch.run([sys.executable, "-c", program], 100, {**environment, "KERAS_BACKEND": backend})
    assert "replicas 3 difference 0.0" in output


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

    from keras_shardopt.replica.torch_distributed import Ranks

    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    model.optimizer.build(model.trainable_variables)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ranks = Ranks()
        model.optimizer._have_started(ranks)
        assert model.optimizer._buckets_among(ranks) is not None
        assert ranks.are_current()
    finally:
        dist.destroy_process_group()
    assert not ranks.are_current()
    x, y = problem.data(2)
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 1

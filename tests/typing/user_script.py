"""What a user's program is told about types: checked by mypy and pyright, and never run.

Keras itself is not typed for mypy, so a type that is one of Keras' is Any there; pyright reads Keras' sources.
"""

import keras
import numpy as np
from typing_extensions import assert_type

import keras_shardopt as ks
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.classic.steps.optimize_loss import TrainingStep
from keras_shardopt.sharding.report import MemoryReport
from keras_shardopt.update.step import Proceed, Step

Array = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Net(keras.Model):
    size: int = 3


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3


class Centralize(ks.Stage):
    def local(self, step: Step, comm: Communicator) -> Step:
        assert_type(comm.num_replicas, int)
        assert_type(step.notes.get("norm") is None, bool)
        return step.replace(grads=comm.all_reduce(step.grads, "mean"))

    def commit(self, step: Step, proceed: Proceed) -> None:
        proceed(step)


def data(x: Array, y: Array, labels: list[str], batches: Batches) -> None:
    assert_type(ks.shard_data(x), Array)
    assert_type(ks.shard_data(x, labels, shuffle=True), tuple[Array, list[str]])
    assert_type(ks.shard_data({"image": x}, y, y), tuple[dict[str, Array], Array, Array])
    print(ks.shard_data(x, y, batch_size=4).num_batches)
    ks.shard_data(batches, seed=1).on_epoch_end()
    own_x, _ = ks.shard_data(x, y)
    assert_type(own_x.shape, tuple[int, int])


def optimizer() -> ks.CrossShard:
    clipped = ks.GradientClipping(keras.optimizers.SGD(0.1, momentum=0.9), 1.0)
    scaled = ks.LossScaling(clipped, ks.AutomaticLossScaler("Backoff"))
    made = ks.CrossShard(scaled, "sum", on_nonfinite="skip", stages=[Centralize(), ks.GradientNoise(0.1)])
    assert_type(made, ks.CrossShard)
    assert_type(made.reduction, str)
    assert_type(made.shard_state, bool)
    assert_type(made.replica_clipnorm, float | None)
    assert_type(made.last_nonfinite, tuple[int | None, str | None] | None)
    assert_type(made.gradient_accumulation_steps, int | None)
    assert_type(made.memory_report(), MemoryReport)
    assert_type(made.memory_report().ideal, float)
    assert_type(ks.CrossShard.from_config(made.get_config()), ks.CrossShard)
    print(made.skipped_steps, made.loss_scale, made.inner.name)
    return made


def spellings() -> None:
    new = ks.CrossShard("adam", extensions=[ks.LocalSGD(every=50)], torch=ks.TorchSpeed(overlap=False))
    deprecated = ks.CrossShard("adam", sync_every=50, overlap=False)
    assert_type(new, ks.CrossShard)
    assert_type(deprecated, ks.CrossShard)


def schedules() -> None:
    decay = ks.schedules.PolyDecay(0.1, decay_steps=1000, power=2.0)
    assert_type(decay, ks.schedules.PolyDecay)
    assert_type(ks.schedules.Join([decay, 0.1], [100]), ks.schedules.Join)
    keras.optimizers.Adam(decay)  # pyright: ignore[reportArgumentType] # it takes the default, a float, for the type of a rate
    print(float(decay(3)))


def train(model: Net, x: Array, y: Array) -> None:
    with ks.data_parallel(num_replicas=2) as replicas:
        assert_type(replicas, ks.data_parallel)
        assert_type(ks.synchronize_batch_normalization(model), Net)
        model.compile(optimizer(), loss="mse")
        assert_type(ks.prepare(model, auto_shard=False), Net)
    assert_type(replicas.num_replicas, int)
    assert_type(replicas.is_chief, bool)
    assert_type(replicas.largest_difference(model), float)
    callbacks = [ks.callbacks.CheckReplicas(every=3), ks.callbacks.BackupAndRestore("backup")]
    model.fit(x, y, callbacks=callbacks)
    ks.save_model(model, "model.keras")


def square(x: float) -> float:
    return x * x


def steps(model: Net, x: Array) -> None:
    step = ks.optimize_loss(lambda batch: model(batch), "SGD", learning_rate_decay_fn=0.1, model=model)
    assert_type(step, TrainingStep)
    print(float(step(x)), step.summaries())
    assert_type(ks.replicate(square, 2)(1.0), float)
    print(ks.build_optimizer("Adam", cross_shard=True).name)

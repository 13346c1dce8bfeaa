"""Ray Train starts the workers, keeps the checkpoints, and restarts after a failure.

    pip install "ray[train]" pandas pyarrow
    KERAS_BACKEND=torch python examples/ray_train.py --workers 2
    KERAS_BACKEND=jax python examples/ray_train.py --workers 2 --fail
    python examples/ray_train.py --shared /mnt/job

Each worker is a process of `data_parallel()`. After each epoch, worker 0 gives its backup
to Ray. With `--fail`, the last worker dies in the third epoch. Ray starts all workers
again, and the weights are those of a run without the failure. `--shared` is a folder of all
machines: each worker writes its part of a backup there, and Ray's storage gets only the
trained model. On PyTorch and JAX, the optimizer's state is then sharded. Prints the folder
with the trained model.
"""

import argparse
import os
import pathlib
import signal
import tempfile
import time

import numpy as np
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

FIT = dict(batch_size=16, epochs=4, shuffle=False, verbose=0)


def make_model(shard_state=False):
    import keras  # in functions only: Ray sets KERAS_BACKEND for the workers

    import keras_shardopt as ks

    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="tanh")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(ks.CrossShard(optimizer, shard_state=shard_state), "mse")
    return model


def make_data():
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True))


def train(config):
    """Runs in each worker, on every backend."""
    import keras

    import keras_shardopt as ks

    shared = config["shared"]
    with ks.data_parallel() as replicas:
        divides = shared and keras.config.backend() != "tensorflow"
        model = make_model(shard_state=bool(divides))
    x, y = make_data()
    folder = pathlib.Path(shared or tempfile.mkdtemp())  # or on this machine
    latest = ray.train.get_checkpoint()  # None, unless Ray has started this job again
    if latest is not None:
        latest.to_directory(folder)
    again = folder.exists() and any(folder.iterdir())

    def report(metrics, given):  # all workers must call it
        mine = Checkpoint.from_directory(given) if replicas.is_chief and given else None
        ray.train.report(metrics, checkpoint=mine)

    def report_epoch(epoch, logs):
        report({"epoch": epoch, "loss": logs["loss"]}, None if shared else folder)

    def fail(epoch, logs):
        is_last = replicas.process_id == replicas.num_processes - 1
        if config["fail"] and not again and epoch == 2 and is_last:
            time.sleep(6)  # Ray reads the reports of workers every 2 seconds
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [
        ks.callbacks.BackupAndRestore(
            folder, delete_checkpoint=False, sharded=bool(shared)
        ),
        keras.callbacks.LambdaCallback(on_epoch_begin=fail, on_epoch_end=report_epoch),
    ]
    history = model.fit(x, y, callbacks=callbacks, **FIT)
    loss = model.evaluate(x, y, verbose=0)
    final = pathlib.Path(tempfile.mkdtemp())
    ks.save_model(model, final / "model.keras")
    first = history.epoch[0]  # 2 if Ray has started this job again
    numbers = {"loss": loss, "replicas": replicas.num_replicas, "first epoch": first}
    report(numbers, final)


def trainer_of(backend, variables):
    """Ray's trainer for this backend, and the arguments that only this trainer has."""
    if backend == "jax":
        from ray.train.v2.jax import JaxConfig, JaxTrainer

        # JaxTrainer connects processes with `use_gpu` or `use_tpu` only, also on CPUs.
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        return JaxTrainer, {"jax_config": JaxConfig(use_gpu=True)}
    if backend == "tensorflow":
        from ray.train.tensorflow import TensorflowTrainer

        return TensorflowTrainer, {}
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer, {"torch_config": TorchConfig(backend="gloo")}  # on GPUs: "nccl"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fail", action="store_true", help="kill a worker")
    parser.add_argument(
        "--storage", default=os.path.join(tempfile.gettempdir(), "ray_train")
    )
    parser.add_argument("--shared", help="a folder of all machines, for sharded backups")
    arguments = parser.parse_args()
    backend = os.environ.get("KERAS_BACKEND", "torch")
    variables = {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    trainer, further = trainer_of(backend, variables)
    result = trainer(
        train,
        train_loop_config={"fail": arguments.fail, "shared": arguments.shared},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            storage_path=arguments.storage,  # a folder that all machines share, or a bucket
            failure_config=FailureConfig(max_failures=1),
            worker_runtime_env={"env_vars": variables},
        ),
        **further,
    ).fit()
    print(f"backend      {backend}")
    for name in ("replicas", "first epoch", "loss"):
        print(f"{name:12} {result.metrics[name]}")
    print(f"checkpoint   {result.checkpoint.path}")


if __name__ == "__main__":
    main()

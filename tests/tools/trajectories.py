"""The bits of some short trainings: recorded before a change of the code that must not change them, compared after it.

    KERAS_BACKEND=jax python tests/tools/trajectories.py old.json
    ... change the code ...
    KERAS_BACKEND=jax python tests/tools/trajectories.py new.json --compare old.json

A record has, for each run and after each batch, one SHA-256 of the weights, one of the optimizer's state as files have
it, one of the variables that are not trained, and one of what wrappers count. Where replicas have copies of their own,
all of them are in it. The comparison names the first run, batch and group that differ, and exits with 1. Bits are those
of one machine with one installation: record anew elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras
import numpy as np
from keras import optimizers as o
from promises.problems import accumulating, at_work, styles
from support import launch, problem

import keras_shardopt as ks

BACKEND = keras.config.backend()
NUM_BATCHES = 8


# -- what is trained -------------------------------------------------------------------------------------------------


def rows():
    return problem.data(NUM_BATCHES)


def words():
    x, y = accumulating.words()
    return x[: NUM_BATCHES * problem.BATCH_SIZE], y[: NUM_BATCHES * problem.BATCH_SIZE]


def weighted():
    """Batches that do not divide, the last one the smallest, and sample weights."""
    x, y = problem.data(NUM_BATCHES)
    return x[:-5], y[:-5], np.linspace(0.1, 3.0, len(x) - 5, dtype="float32")


def with_a_nan():
    """In a row of the last replica."""
    x, y = problem.data(NUM_BATCHES)
    x[3 * problem.BATCH_SIZE - 1, 1] = np.nan
    return x, y


def model_with_state():
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    layers = [keras.layers.BatchNormalization(momentum=0.5), hidden, keras.layers.Dropout(0.25, seed=5)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers, keras.layers.Dense(problem.NUM_OUTPUTS)])


def model_with_penalties():
    model = problem.model()
    for layer in model.layers:
        layer.kernel.regularizer = keras.regularizers.L2(0.05)
    return model


def own_step():
    model = problem.model()
    return styles.CustomStep(model.inputs, model.outputs)


# -- what trains it --------------------------------------------------------------------------------------------------


def adam(**arguments):
    return o.Adam(0.01, **arguments)


def halved(grads, variables):
    return [None if g is None else g / 2 for g in grads]


def backoff(inner):
    return ks.LossScaling(inner, "Backoff", {"scale_max": 64.0, "step_window": 3})


def masters(inner):
    return ks.MixedPrecision(inner, ks.AutomaticLossScaler("Backoff", {"scale_max": 64.0}))


def layerwise(inner):
    return ks.GradientClipping(ks.LARC(inner, 0.02), at_work.LIMIT)


def decaying():
    optimizer = o.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def clipping_rows():
    return ks.VariableClipping(problem.sgd_momentum(), {".*embeddings": [1]}, 0.08)


def several():
    return o.MultiOptimizer(o.OptimizerMap(adam(), {".*bias": problem.sgd_momentum()}))


def scheduled():
    return ks.NovoGrad(ks.schedules.PolyDecay(0.02, decay_steps=10, warmup_steps=3), weight_decay=0.01)


def extended(extension, inner=problem.sgd_momentum, **arguments):
    return lambda: ks.CrossShard(inner(), extensions=[extension()], **arguments)


def diloco():
    return ks.LocalSGD(3, outer_optimizer=o.SGD(0.7, momentum=0.9), fragments=2, warmup=2)


def local(every):
    return lambda: ks.LocalSGD(every)


def virtual(number):
    return lambda: ks.VirtualReplicas(number)


def of_replicas(make=problem.sgd_momentum, **arguments):
    return lambda: ks.CrossShard(make(), **arguments)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: Callable[[], Any] | None
    num_replicas: int = 1
    model: Callable[[], Any] = problem.model
    data: Callable[[], Any] = rows
    prepares: tuple[str, ...] = ()  # the backends on which `prepare` is called
    backends: tuple[str, ...] = ("jax", "tensorflow", "torch")
    policy: str = "float32"
    how: str = "fit"


EVERYWHERE = ("jax", "tensorflow", "torch")
JAX, NOT_JAX, TORCH = ("jax",), ("tensorflow", "torch"), ("torch",)
GROUPS = [[0, 3], [1, 2]]

RUNS = {
    # One replica.
    "adam": Run(of_replicas(adam)),
    "adam without PyTorch's kernels": Run(of_replicas(adam, fused=False), backends=TORCH),
    "micro-batches": Run(of_replicas(adam, gradient_accumulation_steps=2)),
    "loss scaling": Run(lambda: backoff(adam()), data=with_a_nan),
    "master weights": Run(lambda: masters(adam()), policy="float16", data=with_a_nan),
    "clipping, LARC": Run(lambda: layerwise(problem.sgd_momentum())),
    "variable clipping of an embedding": Run(clipping_rows, model=accumulating.embedding_model, data=words),
    "NovoGrad with a schedule": Run(scheduled),
    "decay, moving average": Run(of_replicas(decaying)),
    "several optimizers": Run(of_replicas(several)),
    "towers": Run(lambda: ks.Tower(problem.sgd_momentum()), how="towers"),
    "optimize_loss": Run(None, how="optimize_loss"),
    # Several replicas.
    "momentum on 2": Run(of_replicas(), 2),
    "adam on 4": Run(of_replicas(adam), 4),
    "sum on 2": Run(of_replicas(reduction="sum"), 2),
    "own step on 2": Run(of_replicas(), 2, model=own_step),
    "train_on_batch on 2": Run(of_replicas(adam), 2, how="train_on_batch"),
    "batch statistics, dropout on 2": Run(of_replicas(), 2, model=model_with_state),
    "groups on 4": Run(of_replicas(group_assignment=GROUPS), 4, backends=NOT_JAX),
    "micro-batches on 2": Run(of_replicas(adam, gradient_accumulation_steps=3), 2, prepares=JAX),
    "clipped by replica on 2": Run(of_replicas(replica_clipnorm=problem.CLIPNORM), 2, prepares=JAX),
    "transformed by replica on 2": Run(
        of_replicas(replica_transform=halved, gradient_accumulation_steps=2), 2, prepares=JAX
    ),
    "skipping on 2": Run(of_replicas(adam, on_nonfinite="skip"), 2, data=with_a_nan),
    "skipping windows on 4": Run(
        of_replicas(on_nonfinite="skip", gradient_accumulation_steps=2), 4, data=with_a_nan, prepares=JAX
    ),
    "shards of adam on 2": Run(of_replicas(adam, shard_state=True), 2),
    "shards of sums, windows on 4": Run(
        of_replicas(adam, reduction="sum", shard_state=True, gradient_accumulation_steps=2), 4, prepares=JAX
    ),
    "shards of Lamb on 2": Run(of_replicas(lambda: o.Lamb(0.01), shard_state=True), 2, backends=("jax", "torch")),
    "shards, clipping, skipping on 2": Run(
        of_replicas(lambda: ks.GradientClipping(adam(), 0.1), shard_state=True, on_nonfinite="skip"),
        2,
        data=with_a_nan,
    ),
    "bfloat16 on the way on 2": Run(of_replicas(compression="bfloat16"), 2, prepares=JAX),
    "float16 on the way, groups on 4": Run(
        of_replicas(compression="float16", group_assignment=GROUPS), 4, backends=NOT_JAX
    ),
    "loss scaling on 2": Run(lambda: ks.CrossShard(backoff(problem.sgd_momentum())), 2, data=with_a_nan),
    "master weights on 2": Run(
        lambda: ks.CrossShard(masters(adam())), 2, model=model_with_penalties, policy="bfloat16", data=with_a_nan
    ),
    "clipping, LARC on 2": Run(lambda: ks.CrossShard(layerwise(problem.sgd_momentum())), 2),
    "variable clipping of an embedding on 2": Run(
        lambda: ks.CrossShard(clipping_rows()), 2, model=accumulating.embedding_model, data=words
    ),
    "NovoGrad with a schedule on 2": Run(of_replicas(scheduled), 2),
    "uneven batches on 2": Run(of_replicas(adam), 2, data=weighted, prepares=EVERYWHERE),
    "uneven batches, state, windows on 2": Run(
        of_replicas(gradient_accumulation_steps=2), 2, model=model_with_state, data=weighted, prepares=EVERYWHERE
    ),
    "small buckets on 2": Run(of_replicas(adam, bucket_mib=1e-4), 2, backends=TORCH),
    "nothing sent early on 2": Run(of_replicas(adam, overlap=False, fused=False), 2, backends=TORCH),
    "optimize_loss on 2": Run(None, 2, how="optimize_loss"),
    # Extensions.
    "local SGD on 2": Run(extended(local(2)), 2, prepares=EVERYWHERE),
    "local SGD, state, uneven batches on 2": Run(
        extended(local(3), decaying), 2, model=model_with_state, data=weighted, prepares=EVERYWHERE
    ),
    "DiLoCo in fragments on 2": Run(
        extended(diloco, adam),
        2,
        prepares=EVERYWHERE,
    ),
    "local SGD, skipping, windows on 2": Run(
        extended(local(2), on_nonfinite="skip", gradient_accumulation_steps=2),
        2,
        model=model_with_state,
        data=with_a_nan,
        prepares=EVERYWHERE,
    ),
    "local SGD, int8 on 2": Run(extended(local(2), adam, compression="int8"), 2, prepares=EVERYWHERE),
    "virtual replicas on 2": Run(
        extended(virtual(4), adam), 2, model=model_with_state, data=weighted, prepares=EVERYWHERE
    ),
    "virtual replicas, skipping, windows on 2": Run(
        extended(virtual(2), on_nonfinite="skip", gradient_accumulation_steps=2),
        2,
        data=with_a_nan,
        prepares=EVERYWHERE,
    ),
    "int4, windows on 2": Run(
        of_replicas(compression=ks.compression.Int4(block=8, rounding="stochastic"), gradient_accumulation_steps=2),
        2,
        prepares=EVERYWHERE,
    ),
    "int8, shards, skipping on 2": Run(
        of_replicas(adam, compression="int8", shard_state=True, on_nonfinite="skip"),
        2,
        data=with_a_nan,
        prepares=EVERYWHERE,
    ),
    "PowerSGD on 2": Run(
        of_replicas(compression=ks.compression.PowerSGD(rank=1, warmup_steps=0)), 2, prepares=EVERYWHERE
    ),
    "gradient noise on 2": Run(of_replicas(stages=[ks.GradientNoise()]), 2, prepares=EVERYWHERE),
    "sharded weights on 2": Run(
        extended(ks.ShardedWeights, adam, shard_state=True),
        2,
        model=model_with_state,
        prepares=EVERYWHERE,
        backends=TORCH,
    ),
}


# -- what is recorded ------------------------------------------------------------------------------------------------


def bits(value):
    """The arrays of a tensor, one for each copy."""
    if BACKEND == "torch":
        import torch

        value = value.detach()
        return [(value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()]
    return [np.asarray(copy) for copy in getattr(value, "values", [value])]


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


class Recording(keras.callbacks.Callback):
    """Notes what there is after each batch."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.note(self.model, self.model.optimizer)

    def note(self, model, optimizer):
        stored = []
        for part in (optimizer, getattr(optimizer, "wrapper_state", None)):
            store = {}
            if part is not None:
                part.save_own_variables(store)
            stored += [keras.ops.convert_to_numpy(array) for array in store.values()]
        counted = [getattr(optimizer, name, 0) for name in ("loss_scale", "skipped_steps", "iterations")]
        self.batches.append(
            {
                "weights": digest([array for v in model.trainable_variables for array in bits(v.value)]),
                "slots": digest(stored),
                "other variables": digest([array for v in model.non_trainable_variables for array in bits(v.value)]),
                "counters": digest([np.asarray(keras.ops.convert_to_numpy(number)) for number in counted]),
            }
        )


def trained(run, replicas):
    """What was noted in a run, by this process."""
    recording = Recording()
    keras.utils.set_random_seed(1)
    data = run.data()
    size = problem.BATCH_SIZE
    if BACKEND == "torch" and replicas is not None:
        if len(data) == 2:
            data = [problem.rows_of_replica(a, replicas.replica_id, replicas.num_replicas) for a in data]
        else:  # by turns, so that some ranks have more
            data = [a[replicas.replica_id :: replicas.num_replicas] for a in data]
        size //= replicas.num_replicas
    keras.config.set_dtype_policy(run.policy)
    model = run.model()
    keras.config.set_dtype_policy("float32")
    if run.how == "optimize_loss":
        return by_optimize_loss(model, data, size, replicas, recording)
    # Compiled by XLA takes long, and once is enough.
    compiled = {"jit_compile": run is RUNS["adam"]} if BACKEND == "tensorflow" else {}
    model.compile(run.optimizer(), "mse", **compiled)
    if BACKEND == "tensorflow" and run.policy == "bfloat16":
        model.optimizer.build(model.trainable_variables)  # as `MixedPrecision` asks for, where there are penalties
    if run.how == "towers":
        model.train_step = ks.replicate(model.train_step, 2, "mean")
    if BACKEND in run.prepares:
        ks.prepare(model, auto_shard=False)
    if run.how == "train_on_batch":
        for start in range(0, len(data[0]), size):
            model.train_on_batch(*[a[start : start + size] for a in data])
            recording.note(model, model.optimizer)
        return recording.batches
    x, y, *weights = data
    weights = weights[0] if weights else None
    model.fit(x, y, sample_weight=weights, batch_size=size, shuffle=False, verbose=0, callbacks=[recording])
    return recording.batches


def by_optimize_loss(model, data, size, replicas, recording):
    def loss(x, y):
        return keras.ops.mean(keras.ops.square(model(x, training=True) - y))

    scaling = {"loss_scaling": "Backoff", "loss_scaling_params": {"scale_max": 64.0}}
    arguments = {"clip_gradients": 0.5, "iter_size": 2, "tf1_defaults": True, **scaling}
    step = ks.optimize_loss(
        loss, "Momentum", {"momentum": 0.9}, 0.1, on_horovod=replicas is not None, model=model, **arguments
    )
    for start in range(0, len(data[0]), size):
        step(*[a[start : start + size] for a in data])
        recording.note(model, step.optimizer)
    return recording.batches


def recorded(name, ranks=None):
    """What was noted in the run of that name, by all processes; `ranks` is their scope on PyTorch."""
    run = RUNS[name]
    if run.num_replicas == 1:
        return trained(run, None)
    if ranks is None:
        with ks.data_parallel(run.num_replicas, prepare=False) as replicas:
            found = trained(run, replicas)
        replicas.close()
        return found
    found = trained(run, ranks)
    import torch.distributed as dist

    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return [
        {group: digest_of_ranks(group, batch) for group in mine}
        for mine, batch in zip(max(everyones, key=len), itertools.zip_longest(*everyones, fillvalue={}))
    ]


def digest_of_ranks(group, batch):
    return hashlib.sha256(" ".join(of_rank.get(group, "none") for of_rank in batch).encode()).hexdigest()


def record(names, file, ranks=None):
    """Writes what was noted in some runs, one after the other; None for one that fails."""
    found = {}
    for name in names:
        start = time.process_time()
        try:
            found[name] = recorded(name, ranks)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            found[name] = None
        number = "failed" if found[name] is None else f"{len(found[name])} batches"
        print(f"{time.process_time() - start:6.1f} s  {number}  {name}", flush=True)
        pathlib.Path(file).write_text(json.dumps(found))


def record_all(names, file):
    """As `record`, with ranks on PyTorch where there are several replicas."""
    found = {}
    names = [name for name in names if BACKEND in RUNS[name].backends]
    for number in sorted({RUNS[name].num_replicas for name in names}):
        some = [name for name in names if RUNS[name].num_replicas == number]
        part = pathlib.Path(f"{file}.{number}")
        if BACKEND == "torch" and number > 1:
            print(launch.torchrun(__file__, number, "--ranks", part, *some, timeout=400), end="")
        else:
            record(some, part)
        found |= json.loads(part.read_text())
        part.unlink()
    failed = [name for name in names if found[name] is None]
    whole = {name: found[name] for name in names if name not in failed}
    pathlib.Path(file).write_text(json.dumps(whole, indent=1))
    if failed:
        raise SystemExit(f"not recorded: {failed}")


def first_difference(old, new):
    """In words; None where all runs of `old` are the same in `new`."""
    for name, batches in old.items():
        if name not in new:
            return f"run {name!r} is missing"
        for i, (before, after) in enumerate(itertools.zip_longest(batches, new[name])):
            for group in before or after:
                if (before or {}).get(group) != (after or {}).get(group):
                    return f"run {name!r}, batch {i}, {group}"
    return None


def set_up():
    warnings.filterwarnings("ignore")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        configuration = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], configuration)
    elif BACKEND == "torch":
        import torch

        torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where to write the record")
    parser.add_argument("names", nargs="*", help="runs, if not all")
    parser.add_argument("--compare", metavar="OLD", help="a record to compare with")
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)  # this is one of several ranks
    given = parser.parse_args()
    set_up()
    if given.ranks:
        with ks.data_parallel(prepare=False) as ranks:
            record(given.names, given.file if ranks.is_chief else os.devnull, ranks)
        ranks.close()
        return 0
    record_all(given.names or list(RUNS), given.file)
    if given.compare is None:
        return 0
    old, new = (json.loads(pathlib.Path(file).read_text()) for file in (given.compare, given.file))
    if given.names:
        old = {name: old[name] for name in given.names if name in old}
    difference = first_difference(old, new)
    print(f"different: {difference}" if difference else f"equal: {len(old)} runs")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())

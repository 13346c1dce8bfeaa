"""A process of a job, of which one process at a time is slow.

Arguments: the phase, seconds of delay, and the number of fits.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
import warnings

import keras
import numpy as np

import keras_shardopt as ks

warnings.filterwarnings("ignore")
PHASE, SECONDS, NUM_FITS = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
WIDTH, NUM_STEPS = 128, 70
is_slow = mmap.mmap(-1, 1)  # 0 or 1; shared with the process that forwards messages


def sleep(phase):
    if is_slow[0] and phase == PHASE:
        time.sleep(SECONDS)


def slept(value):
    sleep("forward")
    return np.zeros((), "float32")


def forwarded(address):
    """An address on this machine whose bytes travel to and from `address`, later while this process is slow."""
    listener, parent = socket.create_server(("127.0.0.1", 0)), os.getpid()
    # In a process of its own, because TensorFlow holds Python's lock while it connects.
    if os.fork() == 0:
        try:
            forward(listener, address, parent)
        finally:
            os._exit(0)
    return f"127.0.0.1:{listener.getsockname()[1]}"


def forward(listener, address, parent):
    host, _, port = address.rpartition(":")
    listener.settimeout(0.5)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            near, _ = listener.accept()
            far = None
            while far is None and os.getppid() == parent:
                try:
                    far = socket.create_connection((host, int(port)))
                except ConnectionRefusedError:  # until process 0 listens
                    time.sleep(0.05)
            if far is None:
                return
            for ends in ((near, far), (far, near)):
                threading.Thread(target=carry, args=ends, daemon=True).start()


def carry(origin, target):
    with contextlib.suppress(OSError):
        while data := origin.recv(2**16):
            time.sleep(SECONDS * is_slow[0])
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def forward_messages():
    """Put a slow line between this process and process 0, where all processes read from a store."""
    if keras.backend.backend() == "torch":
        if os.environ["RANK"] != "0":
            os.environ["MASTER_PORT"] = forwarded("127.0.0.1:" + os.environ["MASTER_PORT"]).rpartition(":")[2]
    elif keras.backend.backend() == "jax":
        if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] != "0":
            name = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
            os.environ[name] = forwarded(os.environ[name])
    else:
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["index"] != 0:
            workers = config["cluster"]["worker"]
            workers[0] = forwarded(workers[0])
            os.environ["TF_CONFIG"] = json.dumps(config)


def throttle():
    """Let this process run for a fourth of the time only while it is slow, as on a throttled or swapping machine."""
    parent = os.getpid()
    if os.fork() == 0:
        try:
            while os.getppid() == parent:
                if is_slow[0]:
                    os.kill(parent, signal.SIGSTOP)
                    time.sleep(3 * SECONDS)
                    os.kill(parent, signal.SIGCONT)
                time.sleep(SECONDS)
        finally:
            os._exit(0)


class Layer(keras.layers.Layer):
    """Sleeps in each forward pass of the slow process."""

    def call(self, inputs):
        if keras.backend.backend() == "torch":
            sleep("forward")
            return inputs
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            zero = tf.numpy_function(slept, [tf.constant(0.0)], tf.float32)
            zero.set_shape([])
            return inputs + zero
        import jax
        from jax.sharding import PartitionSpec

        def on_device(rows):
            shape = jax.ShapeDtypeStruct((), "float32")
            return rows + jax.pure_callback(slept, shape, jax.lax.stop_gradient(rows[0, 0]))

        distribution = keras.distribution.distribution()
        if distribution is None or isinstance(inputs, keras.KerasTensor):
            return inputs
        # All rows of a step are on several processes, those of a forward pass of one process are not.
        spec = PartitionSpec("batch" if inputs.shape[0] == len(x) else None)
        mesh = distribution.device_mesh.backend_mesh
        return jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(inputs)

    def compute_output_shape(self, shape):
        return shape


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return NUM_STEPS

    def __getitem__(self, index):
        sleep("input")
        return x, x[:, :1]


class Sleeps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        sleep("callbacks")


if PHASE == "message":
    forward_messages()
if PHASE == "throttled":
    throttle()
keras.utils.set_random_seed(1)
with ks.data_parallel() as scope:
    model = keras.Sequential([keras.Input((WIDTH,)), Layer(), keras.layers.Dense(WIDTH), keras.layers.Dense(1)])
    model.compile(ks.CrossShard(keras.optimizers.Adam(1e-4)), loss="mse")
x = np.random.default_rng(0).normal(size=(24 * scope.num_processes, WIDTH)).astype("float32")
for i in range(NUM_FITS):
    slow = 1 + i % (scope.num_processes - 1) if PHASE == "message" else i % scope.num_processes
    is_slow[0] = slow == scope.process_id
    report = ks.callbacks.StepReport(every=20)
    model.fit(Batches(), verbose=0, callbacks=[Sleeps(), report])
    found = None if report.slow is None else (report.slow.rank, report.slow.phase)
    expected = {
        "none": None,
        "forward": (slow, "step" if keras.backend.backend() == "torch" else "forward pass"),
        "throttled": (slow, "step"),  # the longest of its phases
    }.get(PHASE, (slow, PHASE))
    assert found == expected, (i, report.slow, expected)
scope.close()

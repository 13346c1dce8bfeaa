"""A process of a job, of which the last one hangs for a while in its second step. Arguments: a directory, seconds."""

import sys
import time

import keras
from support import problem

import keras_shardopt as ks

DIRECTORY, SECONDS = sys.argv[1], float(sys.argv[2])

with ks.data_parallel() as replicas:
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")


def hangs_here():
    time.sleep(SECONDS)


class Hangs(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and replicas.process_id == replicas.num_processes - 1:
            hangs_here()


heartbeat = ks.callbacks.Heartbeat() if DIRECTORY == "watched" else ks.callbacks.Heartbeat(DIRECTORY, timeout=1)
x, y = problem.data()
model.fit(x[:48], y[:48], batch_size=16, verbose=0, callbacks=[heartbeat, Hangs()])
print("trained to the end")

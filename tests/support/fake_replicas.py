"""N replicas in N threads of one process, with collectives that count their calls.

They run the neutral policy on whichever framework Keras uses, without any of its distribution.
"""

from __future__ import annotations

import threading

import keras
import numpy as np
from support.patience import patient

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.update.step import Step

_REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max}


class FakeReplicas(Communicator):
    def __init__(self, world, replica_id):
        self._threads = world
        self.num_replicas = world.num_replicas
        self.replica_id = replica_id
        self.is_spmd = world.is_spmd
        self.calls = []

    def gradient_state(self, grads, variables):
        return self._threads.arrives

    def split(self, groups):
        part = super().split(groups)
        part.replica_id = list(part.members).index(self.replica_id)
        return part

    def _exchange(self, tensors):
        """Of each tensor those of all members."""
        mine = [keras.ops.convert_to_numpy(t) for t in tensors]
        everyones = self._threads.exchange(self.world.replica_id, mine)
        return zip(*[everyones[r] for r in self.members])

    def all_reduce(self, tensors, op):
        self.calls.append(("all_reduce", op, len(tensors)))
        columns = self._exchange(tensors)
        return [keras.ops.convert_to_tensor(_REDUCE[op](np.stack(column), axis=0)) for column in columns]

    def all_gather(self, tensors):
        return [keras.ops.convert_to_tensor(np.concatenate(column)) for column in self._exchange(tensors)]


class FakeWorld:
    """Runs a function once per replica, all at a time."""

    def __init__(self, num_replicas, arrives=GradientState.LOCAL, is_spmd=True, timeout=20.0):
        self.num_replicas = num_replicas
        self.arrives = arrives
        self.is_spmd = is_spmd
        self.replicas = [FakeReplicas(self, r) for r in range(num_replicas)]
        self._running = threading.local()
        self._posted = [None] * num_replicas
        self._barrier = threading.Barrier(num_replicas, timeout=patient(timeout))

    def exchange(self, replica_id, arrays):
        self._posted[replica_id] = arrays
        self._barrier.wait()
        everyones = list(self._posted)
        self._barrier.wait()
        assert len({len(arrays) for arrays in everyones}) == 1, "replicas exchange lists of different lengths"
        assert len({tuple(a.dtype for a in arrays) for arrays in everyones}) == 1, "replicas exchange other dtypes"
        return everyones

    def hold(self, monkeypatch):
        """Makes every optimizer that runs inside `run` see these replicas."""
        monkeypatch.setattr(runtime, "communicator", lambda axis_name: self._running.replicas)
        return self

    def run(self, function):
        """`[function(replicas) for each replica]`; raises what any of them raised."""
        results, errors = [None] * self.num_replicas, []

        def work(replicas):
            self._running.replicas = replicas
            try:
                results[replicas.replica_id] = function(replicas)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(replicas,), daemon=True) for replicas in self.replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def reduced(optimizer, grads, variables, weight=1.0):
    """What the stages of a `CrossShard`, and its reduction, make of gradients."""
    return optimizer.pipeline.reduce(Step(grads, variables, weight=weight)).grads

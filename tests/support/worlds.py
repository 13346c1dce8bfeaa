"""How tests come by replicas and processes: as threads of one process, as its devices, or as processes of their own.

`FakeWorld` runs the neutral policy in N threads on whichever framework Keras uses, without any of its distribution, and
counts collectives. `Processes` are threads that take themselves for processes; of an optimizer `InParts` each process
holds a part of the state. What a model learns under `fit` on the replicas of a backend, whatever they are there, a test
asks the fixture `world` for: its `kind` is "devices" of this process or "processes" (ranks of PyTorch).
"""

from __future__ import annotations

import contextlib
import pickle
import threading

import keras
import numpy as np
from support import launch
from support.launch import patient

import keras_shardopt as ks
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.update.step import Step
from keras_shardopt.wrapping.stored_state import named_store
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

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


@keras.saving.register_keras_serializable("keras_shardopt_tests")
class InParts(OptimizerWrapper):
    """Keeps every N-th element of each slot on each of N processes, and NaN in place of the others."""

    _saving_needs_all_replicas = True

    def forget(self):
        """Leaves this process its part only."""
        for variable in self._slots_here():
            variable.assign(self._part(keras.ops.convert_to_numpy(variable)))

    def save_own_variables(self, store):
        store = named_store(self, store)
        here = {id(v) for v in self._slots_here()}
        for i, variable in enumerate(self._inner_state):
            mine = np.array(keras.ops.convert_to_numpy(variable))
            # One exchange for each, which all processes must enter.
            everyones = processes.gather_objects(mine)
            if id(variable) in here:
                for process, theirs in enumerate(everyones):
                    mine.reshape(-1)[process :: len(everyones)] = theirs.reshape(-1)[process :: len(everyones)]
            store[str(i)] = mine

    def load_own_variables(self, store):
        super().load_own_variables(store)
        if self.built:
            self.forget()

    def _slots_here(self):
        return [v for v in self._inner_state if len(v.shape)]

    def _part(self, array):
        num_processes, process_id = processes.process()
        part = np.full_like(array, np.nan)
        part.reshape(-1)[process_id::num_processes] = array.reshape(-1)[process_id::num_processes]
        return part


class Processes:
    """Threads that take themselves for processes; one that waits in vain for the others fails after some seconds."""

    def __init__(self, monkeypatch, number, patience=20.0):
        self.number = number
        self._here = threading.local()
        self._barrier = threading.Barrier(number, timeout=patient(patience))
        self._said = [None] * number
        self.num_exchanges = 0
        monkeypatch.setattr(processes, "process", lambda: (number, getattr(self._here, "rank", 0)))
        monkeypatch.setattr(processes, "gather_objects", self._gather)

    def _gather(self, value):
        rank = self._here.rank
        self._said[rank] = value
        self._barrier.wait()
        everyones = list(self._said)
        self.num_exchanges += rank == 0
        self._barrier.wait()
        return everyones

    def run(self, function):
        """What `function(rank)` returns in each process, or the error that it raises there."""
        results = [None] * self.number
        self._barrier.reset()

        def work(rank):
            self._here.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    @contextlib.contextmanager
    def being(self, rank):
        """A block in which this thread is one of the processes, and exchanges nothing."""
        self._here.rank = rank
        try:
            yield
        finally:
            del self._here.rank


class Devices:
    """Replicas of one program, on devices of this process."""

    kind = "devices"

    def run(self, job, num_replicas, name, of=()):
        """What `job(replicas, name)` returns in a `data_parallel` scope of so many replicas.

        Args:
            job: a function at the top of a module that other processes can import.
            num_replicas: how many.
            name: what is run.
            of: all names that tests ask for: where there are ranks, one spawn runs them all.
        """
        with ks.data_parallel(num_replicas) as replicas:
            assert replicas.num_replicas == num_replicas
            found = job(replicas, name)
        replicas.close()
        return found


class Ranks:
    """Replicas that are processes, forked for the purpose; `run` returns what rank 0 has."""

    kind = "processes"

    def __init__(self, make_folder):
        self._make_folder = make_folder
        self._outcomes = {}

    def run(self, job, num_replicas, name, of=()):
        """As that of `Devices`."""
        key = job, num_replicas, tuple(of or [name])
        if key not in self._outcomes:
            self._outcomes[key] = self._spawned(*key)
        outcome = self._outcomes[key]
        if isinstance(outcome, launch.WorkersFailed):  # remembered: one spawn that fails is enough
            raise outcome
        return outcome[name]

    def _spawned(self, job, num_replicas, names):
        file = self._make_folder() / "results.pickle"
        try:
            launch.torchrun("rank_job.py", num_replicas, file, f"{job.__module__}:{job.__name__}", *names, timeout=200)
        except launch.WorkersFailed as failure:
            return failure
        return pickle.loads(file.read_bytes())

"""Processes without processes, and an optimizer of whose state each process holds a part."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
from support.patience import patient

from keras_shardopt.backends.active import processes
from keras_shardopt.wrapping.stored_state import named_store
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


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

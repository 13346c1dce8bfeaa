"""Kills or stops a rank at a random moment of training, again and again, and looks at how the others end.

Every round forks the ranks from one process that has imported everything, so that a round takes a second or two. A
rank dies by its own hand just before a collective, inside it or just after it, or is hit from outside at any time. In
further rounds a rank dies while all save a sharded checkpoint after each batch.

Arguments: how many rounds, of these while saving, and a seed. `python tests/promises/processes/rank_deaths.py 50 20 1`
is the long run (with tests/ and the repository on PYTHONPATH, KERAS_BACKEND=torch). Prints one JSON object per round.
"""

import itertools
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings

import keras
import torch
import torch._dynamo  # what else every rank would import in its first step
import torch.distributed as dist
from support import launch, problem
from support.launch import patient

import keras_shardopt as ks
from keras_shardopt.checkpoint.sharded import pieces

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

TIMEOUT = 4.0  # more than ranks need to find each other on a busy machine
PLACES = ["before", "inside", "after", "any time"]
HOWS = ["kill", "stop"]


class Dying(keras.callbacks.Callback):
    """Ends this rank at a batch, at a place of its first collective."""

    def __init__(self, batch, place, end):
        super().__init__()
        self.batch, self.place, self.end = batch, place, end

    def on_train_batch_begin(self, batch, logs=None):
        if self.params["steps"] is None or batch < self.batch or self.place == "saving":
            return
        real = dist.all_reduce

        def all_reduce(*args, **kwargs):
            if self.place == "before":
                self.end()
            work = real(*args, **kwargs)
            if self.place == "after":
                work.wait()
            self.end()
            return work

        if self.place == "any time":
            self.end()
        dist.all_reduce = all_reduce


def compiled():
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    return model


def train(rank, case, report):
    """What one rank does; it writes how that ended."""

    def end():
        report.with_suffix(".end").write_text(str(time.monotonic()))
        if case["place"] != "any time":
            os.kill(os.getpid(), signal.SIGKILL if case["how"] == "kill" else signal.SIGSTOP)

    ended = {}
    try:
        with ks.data_parallel(timeout=case["timeout"], prepare=False):
            model = compiled()
        if case["prepared"]:
            ks.prepare(model, auto_shard=False)
        x, y = (problem.rows_of_replica(a, rank % 2, 2) for a in problem.data(40))
        is_saving = case["place"] == "saving"
        callbacks = [ks.callbacks.ShardedCheckpoint(report.parent / "saves", 1)] if is_saving else []
        if rank == case["victim"]:
            callbacks.append(Dying(case["batch"], case["place"], end))
            if is_saving:
                die_while_saving(case, end)
        model.fit(x, y, batch_size=2, epochs=1000, shuffle=False, verbose=0, callbacks=callbacks)
    except BaseException as error:
        ended = {"time": time.monotonic(), "class": type(error).__name__, "message": str(error)}
        if not isinstance(error, RuntimeError):
            traceback.print_exc()
    report.write_text(json.dumps(ended))


def die_while_saving(case, end):
    """Makes this rank end in its save of a number, before or after a file gets its name."""
    real, count = pieces._finish, itertools.count(1)

    def finish(path):
        place = next(count)
        if place == case["file"] and case["before"]:
            end()
        real(path)
        if place == case["file"]:
            end()

    pieces._finish = finish


class TookTooLong(Exception):
    """A rank was late before any of them was hit: on a busy machine the time limit is short."""


def round_of(case, folder):
    """Runs the ranks of one case. Returns, by surviving rank, how it ended and how long after the death.

    Also the step of the checkpoint that loads afterwards, if ranks have saved any.
    """
    (port,) = launch.free_ports(1)
    reports = [folder / f"{rank}.json" for rank in range(case["size"])]
    children = []
    for rank, report in enumerate(reports):
        child = os.fork()
        if not child:
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(case["size"]), RANK=str(rank)
            )
            try:
                train(rank, case, report)
            finally:
                os._exit(0)
        children.append(child)
    victim = case["victim"]
    death = reports[victim].with_suffix(".end")
    survivors = [rank for rank in range(case["size"]) if rank != victim]
    limit = time.monotonic() + patient(60)
    alive = set(survivors)
    try:
        while not death.exists() or not death.read_text():
            if time.monotonic() > limit or all(report.exists() for report in reports):
                told = [report.read_text() for report in reports if report.exists()]
                raise TookTooLong(f"the ranks did not train: {case} {told}")
            time.sleep(0.002)
        died = float(death.read_text())
        if case["place"] == "any time":
            time.sleep(case["delay"])
            died = time.monotonic()
            os.kill(children[victim], signal.SIGKILL if case["how"] == "kill" else signal.SIGSTOP)
        limit = died + case["timeout"] + patient(10)
        while alive and time.monotonic() < limit:
            alive -= {rank for rank in alive if os.waitpid(children[rank], os.WNOHANG)[0]}
            time.sleep(0.01)
    finally:
        for rank in alive | {victim}:
            os.kill(children[rank], signal.SIGKILL)
            os.waitpid(children[rank], 0)
    checkpoint = ks.load_sharded(compiled(), folder / "saves").step if case["place"] == "saving" else None
    ends = {rank: json.loads(reports[rank].read_text()) if reports[rank].exists() else {} for rank in survivors}
    ends = {
        rank: {"hangs": rank in alive, "seconds": end.get("time", limit) - died, **end} for rank, end in ends.items()
    }
    return {"case": case, "ends": ends, "checkpoint": checkpoint}


def cases(num_rounds, seed):
    chosen = random.Random(seed)
    for number in range(num_rounds):
        size = chosen.choice([2, 3, 4])
        yield {
            "size": size,
            # Every other time the rank that hosts the store and, stopped, answers nobody.
            "victim": 0 if number % 4 == 1 else chosen.randrange(size),
            "how": HOWS[number % 2],
            "place": PLACES[number // 2 % 4],
            "batch": chosen.randrange(1, 30),
            "delay": chosen.uniform(0, 0.1),
            "prepared": chosen.random() < 0.5,
            "timeout": patient(TIMEOUT),
        }


def saving_cases(num_rounds, seed):
    chosen = random.Random(seed)
    for number in range(num_rounds):
        size = (2, 4)[number % 2]
        victim = chosen.randrange(size)
        case = {"size": size, "victim": victim, "how": "kill", "place": "saving", "batch": 0, "prepared": True}
        # Rank 0 finishes three files per save, others two. The first save is complete.
        num_files = 2 if victim else 3
        case |= {"file": chosen.randrange(num_files + 1, 6 * num_files), "before": chosen.random() < 0.5}
        yield {**case, "files_per_save": num_files, "timeout": patient(TIMEOUT)}


def main():
    num_rounds, num_saving, seed = map(int, sys.argv[1:])
    keras.saving.serialize_keras_object(keras.optimizers.SGD())  # imports TensorFlow if it is installed, as ranks would
    for case in [*cases(num_rounds, seed), *saving_cases(num_saving, seed)]:
        for attempt in range(3):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = round_of(case, pathlib.Path(folder))
                except TookTooLong:
                    if attempt == 2:
                        raise
                    continue
            print(json.dumps({**found, "attempts": attempt + 1}), flush=True)
            break


main()

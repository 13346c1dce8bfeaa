"""Training on data that every process has whole, which several processes and one do alike."""

import importlib.util
import random

import keras
import numpy as np
from support import problem

X, Y = (rows[:61] for rows in problem.data())  # in batches of 16, of which the last one does not divide
VALIDATION = tuple(rows[61:90] for rows in problem.data())
WEIGHTS = np.linspace(0.1, 2, 61, dtype="float32")
BATCH = 16


class Batches(keras.utils.PyDataset):
    """Batches in an order that they draw."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(61)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows] + np.random.normal() * 0.1, Y[rows], WEIGHTS[rows]

    def on_epoch_begin(self):
        random.shuffle(self.order)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Unweighted(Batches):
    def __getitem__(self, index):
        return super().__getitem__(index)[:2]


def endless():
    while True:
        rows = np.random.randint(0, 61, BATCH)
        yield X[rows], Y[rows], WEIGHTS[rows]


CASES = {
    "arrays": lambda: ((X, Y), {"batch_size": BATCH, "validation_data": VALIDATION}),
    "split": lambda: ((X, Y), {"batch_size": BATCH, "validation_split": 0.2, "sample_weight": WEIGHTS}),
    "in batches": lambda: ((X, Y), {"batch_size": BATCH, "shuffle": "batch", "sample_weight": WEIGHTS}),
    "PyDataset": lambda: ((Batches(),), {"validation_data": (*VALIDATION, np.ones(29))}),
    "generator": lambda: ((endless(),), {"steps_per_epoch": 3, "shuffle": False}),
}


def loader(process_id):
    """Drawn with a seed of each process's own."""
    import torch

    torch.manual_seed(3 + process_id)
    rows = torch.utils.data.TensorDataset(*map(torch.tensor, (X, Y, WEIGHTS)))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)


def dataset():
    import tensorflow as tf

    tf.random.set_seed(3)  # alike, as ranks do not share the random numbers of TensorFlow
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(61, seed=5).batch(BATCH)


def other_cases():
    """Of what is installed here; `shuffle` is for arrays."""
    weights = {0: 0.2, 1: 3.0, 2: 0.5}  # of the largest output
    cases = {
        "class weights": lambda _: ((X, Y), {"batch_size": BATCH, "class_weight": weights, "validation_split": 0.1}),
        "class weights of a PyDataset": lambda _: ((Unweighted(),), {"class_weight": weights}),
    }
    if importlib.util.find_spec("torch"):
        more = {"validation_data": VALIDATION, "shuffle": False}
        cases["DataLoader"] = lambda process_id: ((loader(process_id),), more)
    if importlib.util.find_spec("tensorflow"):
        cases["tf.data"] = lambda _: ((dataset(),), {"class_weight": weights, "shuffle": False})
    return cases


def compiled(around=lambda optimizer: optimizer):
    model = problem.model()
    model.compile(around(problem.sgd_momentum()), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def outcomes(model, process_id=0, others=None):
    """By case (CASES, or `others`): the logs, the weights, what random numbers come next; and what the model says."""
    start = [(v, keras.ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]]
    found = {}
    for name, make in (others or CASES).items():
        for variable, value in start:
            variable.assign(value)
        keras.utils.set_random_seed(3 + process_id)
        data, more = make(process_id) if others else make()
        history = model.fit(*data, epochs=2, verbose=0, **more).history
        drawn = random.random(), np.random.random()
        found[name] = history, model.get_weights(), drawn
    metrics = model.evaluate(X, Y, batch_size=BATCH, return_dict=True, verbose=0)
    predicted = model.predict(X, batch_size=BATCH, verbose=0)
    return found, metrics, predicted

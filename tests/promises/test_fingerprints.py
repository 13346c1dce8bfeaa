"""Fingerprints of weights after each update, and the first difference of two runs."""

import keras
import numpy as np
import pytest
from support import problem

import keras_shardopt as ks

pytestmark = pytest.mark.exhaustive("jax", "tensorflow")


class Changing(keras.callbacks.Callback):
    """Changes one bit of one weight after some batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            weight = self.model.weights[1]
            value = np.array(keras.ops.convert_to_numpy(weight))
            value.reshape(-1).view("uint32")[0] ^= 1
            weight.assign(value)


def written(file, *callbacks, model=None, every=1, epochs=1, **options):
    keras.utils.set_random_seed(3)
    if model is None:
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), **options), "mse")
    prints = ks.callbacks.Fingerprints(file, every=every)
    x, y = problem.data(4)
    arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0, "epochs": epochs}
    model.fit(x, y, callbacks=[*callbacks, prints], **arguments)
    return model


def test_the_first_update_and_variable_that_differ_are_named(tmp_path):
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    model = written(one)
    written(other)
    assert ks.callbacks.first_difference(one, other) is None
    written(third, Changing(2))
    found = ks.callbacks.first_difference(one, third)
    assert found == (3, found.variable) and found.variable.endswith(model.weights[1].name)
    assert len(one.read_text().splitlines()) == 5  # and the names


def test_only_updates_are_noted_and_only_each_so_many(tmp_path):
    written(tmp_path / "second", every=2)
    written(tmp_path / "accumulated", gradient_accumulation_steps=2)
    for name, updates in (("second", ["2", "4"]), ("accumulated", ["1", "2"])):
        lines = (tmp_path / name).read_text().splitlines()[1:]
        assert [line.partition(": ")[2].partition(",")[0] for line in lines] == updates


def test_a_fit_that_goes_on_adds_to_the_file_and_a_line_that_was_cut_off_is_left_out(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    written(whole, epochs=2)
    written(parts, model=written(parts))
    assert ks.callbacks.first_difference(whole, parts) is None
    assert len(parts.read_text().splitlines()) == 10
    with open(parts, "a") as file:
        file.write('{"update": 8, "fingerp')
    assert ks.callbacks.first_difference(whole, parts) is None


def test_files_that_cannot_be_compared_are_refused(tmp_path):
    written(tmp_path / "all")
    for name, lines in (("names", '{"variables": ["other"]}\n'), ("none", (tmp_path / "all").read_text()[:-5])):
        (tmp_path / name).write_text(lines.partition('{"update"')[0])
    with pytest.raises(ValueError, match="files that differ in"):
        ks.callbacks.first_difference(tmp_path / "all", tmp_path / "names")
    with pytest.raises(ValueError, match="must contain at least one update with the same number"):
        ks.callbacks.first_difference(tmp_path / "all", tmp_path / "none")
    (tmp_path / "text").write_text("something else\n")
    for name in ("nowhere", "text"):
        with pytest.raises(ValueError, match="`b` must be a file that `Fingerprints` has written"):
            ks.callbacks.first_difference(tmp_path / "all", tmp_path / name)

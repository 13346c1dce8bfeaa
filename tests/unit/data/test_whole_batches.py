"""Parts of batches that every process has whole, and the random numbers with which they are drawn."""

import random
import time

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from keras_shardopt.data import shared_draws, split_data
from keras_shardopt.data.shared_draws import SharedDraws
from keras_shardopt.data.whole_batches import checksum, first_rows, part_of_batch, rows_of_parts

pytestmark = pytest.mark.neutral


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 13])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_are_those_of_array_split(num_rows, num_parts):
    rows = rows_of_parts(num_rows, num_parts)
    expected = np.array_split(np.arange(num_rows), num_parts)
    assert rows == [len(part) for part in expected]
    batch = {"x": np.arange(num_rows), "more": [np.arange(num_rows)[:, None], None, 0.5], "of": (np.arange(num_rows),)}
    for index, mine in enumerate(expected):
        part = part_of_batch(batch, rows, index)
        mine = mine if len(mine) else np.arange(num_rows)[:1]  # to go through the model with
        for leaf in (part["x"], part["more"][0][:, 0], *part["of"]):
            np.testing.assert_array_equal(leaf, mine)
        assert part["more"][1:] == [None, 0.5] and type(part["of"]) is tuple


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows. Received: a batch of 4 rows, .* \(3, 2\)"):
        part_of_batch((np.zeros(4), np.zeros((3, 2))), [2, 2], 0)


def test_checksums_differ_where_batches_do():
    x = np.arange(6, dtype="float32")
    batches = [x, x + 1e-6 * (x == 1), x.astype("float64"), x.reshape(2, 3), (x, x), x[:5], np.array(["a", None])]
    found = [checksum(batch) for batch in batches]
    assert len(set(found)) == len(found)
    assert checksum((x.copy(), keras.ops.convert_to_tensor(x))) == checksum((x, x)) != 0
    assert checksum((x, None)) == checksum(x)
    large = np.zeros((1000, 1000), "float32")
    before = checksum(large)
    large[500] = 1
    assert checksum(large) != before == checksum(np.zeros((1000, 1000), "float32"))


class Table:
    """As a table of pandas: with positions, and no `dtype`."""

    def __init__(self, rows):
        self.rows = rows
        self.shape = rows.shape

    def __getitem__(self, column):
        raise KeyError(column)

    def to_numpy(self):
        return self.rows

    iloc = property(lambda self: Rows(self.rows))


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, rows):
        return Table(self.rows[rows])


def test_checksums_of_first_rows_differ_where_tables_and_sparse_matrices_do():
    sparse = pytest.importorskip("scipy.sparse")
    x = np.eye(100, 3)
    for make in (Table, sparse.csr_matrix, sparse.coo_matrix, sparse.csc_array):
        same, other = (checksum(first_rows((make(rows), None))) for rows in (x, 2 * x))
        assert other != same == checksum(first_rows((x, None))), make


def test_split_data_is_recognized_by_identity():
    x, y = np.zeros(4), np.zeros(4)
    assert split_data.mark_as_split({"x": x, "none": None})["x"] is x
    assert split_data.is_split([x, None]) and split_data.is_split(y, {"x": x})
    assert not split_data.is_split(y, None, [1, "a"]) and not split_data.is_split(x[:2])


def drawn():
    return random.random(), np.random.random()


@pytest.mark.parametrize("is_same", [True, False])
def test_what_is_drawn_in_a_block_is_what_process_0_draws(monkeypatch, is_same):
    names = ("python", "numpy")
    keras.utils.set_random_seed(1)
    of_process_0 = {name: shared_draws._GENERATORS[name][0]() for name in names}
    expected = [drawn() for _ in range(4)]
    keras.utils.set_random_seed(1 if is_same else 2)
    own = [drawn() for _ in range(3)]
    keras.utils.set_random_seed(1 if is_same else 2)
    monkeypatch.setattr(shared_draws, "_states_of_process_0", lambda: of_process_0)
    draws = SharedDraws()
    with draws.drawing():
        assert drawn() == expected[0]
    if is_same:  # goes on behind what was drawn, as one process does
        assert drawn() == expected[1]
    else:
        assert drawn() == own[0]
    with draws.drawing():
        assert drawn() == expected[1]
    assert drawn() == (expected[2] if is_same else own[1])
    draws.forget()
    with draws.drawing():
        assert drawn() == expected[0]
        with draws.drawing():
            assert drawn() == expected[1]
        assert drawn() == expected[2]


@pytest.mark.parametrize(("is_shared", "draws"), [(False, True), (True, False)])
def test_a_block_that_is_off_neither_exchanges_nor_changes_anything(monkeypatch, is_shared, draws):
    monkeypatch.setattr(shared_draws, "_states_of_process_0", lambda: pytest.fail("processes communicate"))
    keras.utils.set_random_seed(1)
    expected = [drawn() for _ in range(2)]
    keras.utils.set_random_seed(1)
    with SharedDraws(is_shared).drawing(draws):
        assert drawn() == expected[0]
    assert drawn() == expected[1]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full((2, 1), index)


def test_the_thread_of_workers_draws_before_anything_goes_on(monkeypatch):
    """Also where it takes its time: a batch left over from before would let training go on."""
    drawn = []
    monkeypatch.setattr(random, "shuffle", lambda order: time.sleep(0.05) or drawn.append(order))
    adapter = PyDatasetAdapter(Batches(workers=2), shuffle=True)
    shared_draws.wait_for_batch_order(adapter)
    for epoch in range(2):
        adapter.on_epoch_begin()
        assert len(drawn) == epoch + 1
        adapter.enqueuer.start()  # which starts nothing once more
        adapter.on_epoch_end()
    plain = PyDatasetAdapter(Batches(), shuffle=True)
    shared_draws.wait_for_batch_order(plain)
    assert plain.enqueuer is None

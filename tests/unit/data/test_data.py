"""`shard_data` with a process id that is made up; test_shard_data_ranks.py has ranks that exist."""

import contextlib
import json
import pickle
import random
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.data import dispatch as data
from keras_shardopt.data import py_dataset, torch_loader

BACKEND = keras.config.backend()
NUM_ROWS = 23
NUM_PROCESSES = [2, 3]

each_number = pytest.mark.parametrize("num_processes", NUM_PROCESSES)


@pytest.fixture
def process(monkeypatch):
    def become(num_processes, process_id):
        monkeypatch.setattr(processes, "process", lambda: (num_processes, process_id))

    return become


def parts_of(process, num_processes, make, **arguments):
    """What each process gets of the data that `make` makes anew in each of them."""
    found = []
    for process_id in range(num_processes):
        process(num_processes, process_id)
        # Processes do not agree on random numbers by themselves.
        random.seed(process_id)
        np.random.seed(process_id)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(process_id)
        made = make()
        found.append(ks.shard_data(*made if isinstance(made, tuple) else (made,), **arguments))
    return found


def rows_of(batch):
    """The rows of a batch of any kind, as a list of numbers."""
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    return [int(value) for value in np.asarray(x).reshape(len(x), -1)[:, 0]]


def epoch_of(batches):
    """The batches of one epoch, as Keras runs through it."""
    if isinstance(batches, keras.utils.PyDataset):
        batches.on_epoch_begin()
        rows = [rows_of(batches[i]) for i in range(len(batches))]
        batches.on_epoch_end()
        return rows
    return [rows_of(batch) for batch in batches]


def together(epochs):
    """The t-th batches of all processes together, sorted."""
    steps = max(len(epoch) for epoch in epochs)
    return [sorted(row for epoch in epochs if t < len(epoch) for row in epoch[t]) for t in range(steps)]


def assert_each_row_once(epochs, rows=range(NUM_ROWS)):
    assert sorted(row for epoch in epochs for batch in epoch for row in batch) == sorted(rows)


def in_order(batch_size, num_rows=NUM_ROWS):
    return [list(range(i, min(i + batch_size, num_rows))) for i in range(0, num_rows, batch_size)]


# -- arrays


def array_kinds():
    table = np.arange(NUM_ROWS * 2, dtype="float32").reshape(NUM_ROWS, 2) // 2
    kinds = {"numpy": table, "native": ops.convert_to_tensor(table)}
    scipy_sparse = pytest.importorskip("scipy.sparse")
    kinds["scipy csr"] = scipy_sparse.csr_matrix(table + 1)
    kinds["scipy coo"] = scipy_sparse.coo_matrix(table + 1)
    return kinds


@each_number
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "native", "scipy csr", "scipy coo"])
def test_arrays(process, kind, shuffle, num_processes):
    array = array_kinds()[kind]
    parts = parts_of(process, num_processes, lambda: (array, np.arange(NUM_ROWS)), shuffle=shuffle)
    rows = []
    for x, y in parts:
        if kind == "native":
            assert ops.is_tensor(x)
        dense = x.toarray() - 1 if kind.startswith("scipy") else ops.convert_to_numpy(x)
        np.testing.assert_array_equal(dense[:, 0], y)
        rows.append([[int(row)] for row in y])
    assert_each_row_once(rows)
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    process(1, 0)
    _, whole = ks.shard_data(array, np.arange(NUM_ROWS), shuffle=shuffle)
    steps = [sorted(whole[i : i + num_processes]) for i in range(0, NUM_ROWS, num_processes)]
    assert together(rows) == steps
    assert (steps == in_order(num_processes)) == (not shuffle)


def test_nests_of_arrays(process):
    process(2, 1)
    x = {"a": np.arange(6), "b": [np.arange(6) * 10, (np.arange(12).reshape(6, 2), None)]}
    part, y, weight = ks.shard_data(x, [np.arange(6)], np.arange(6) / 10)
    np.testing.assert_array_equal(part["a"], [1, 3, 5])
    np.testing.assert_array_equal(part["b"][0], [10, 30, 50])
    np.testing.assert_array_equal(part["b"][1][0], [[2, 3], [6, 7], [10, 11]])
    assert part["b"][1][1] is None
    np.testing.assert_array_equal(y[0], [1, 3, 5])
    np.testing.assert_array_equal(weight, [0.1, 0.3, 0.5])
    np.testing.assert_array_equal(ks.shard_data(np.arange(6)), [1, 3, 5])
    x, y, weight = ks.shard_data(np.arange(6), sample_weight=np.arange(6))
    assert y is None and list(weight) == [1, 3, 5]


def test_a_single_process_gets_back_what_it_gave(process):
    process(1, 0)
    x, y, weight = np.arange(3), np.arange(3), np.arange(3)
    assert ks.shard_data(x) is x
    assert all(a is b for a, b in zip(ks.shard_data(x, y, weight), (x, y, weight), strict=True))
    numbers = Numbers()
    assert ks.shard_data(numbers) is numbers


@each_number
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_in_batches(process, shuffle, num_processes):
    make = lambda: (np.arange(NUM_ROWS), -np.arange(NUM_ROWS))  # noqa: E731
    parts = parts_of(process, num_processes, make, batch_size=3, shuffle=shuffle)
    process(1, 0)
    whole = ks.shard_data(*make(), batch_size=3 * num_processes, shuffle=shuffle)
    epochs = []
    for _ in range(2):
        epochs.append([epoch_of(part) for part in parts])
        assert_each_row_once(epochs[-1])
        assert together(epochs[-1]) == [sorted(batch) for batch in epoch_of(whole)]
    assert (epochs[0] != epochs[1]) == shuffle
    x, y = parts[0][0]
    np.testing.assert_array_equal(x, -y)
    np.testing.assert_array_equal(parts[0][len(parts[0]) - 1][0], parts[0][-1][0])
    with pytest.raises(IndexError):
        parts[0][len(parts[0])]


def test_seeds_choose_the_order(process):
    process(2, 0)
    rows = np.arange(50)
    first = [list(ks.shard_data(rows, shuffle=True, seed=seed)) for seed in (None, 0, 1)]
    assert first[0] == first[1] != first[2]


# -- PyDataset


class Numbers(keras.utils.PyDataset):
    """Shuffles its rows at the end of an epoch, with NumPy's global random numbers."""

    def __init__(self, shuffles=False, batch_size=2, **arguments):
        super().__init__(**arguments)
        self.rows, self.shuffles, self.batch_size = np.arange(NUM_ROWS), shuffles, batch_size

    def __len__(self):
        return -(-NUM_ROWS // self.batch_size)

    def __getitem__(self, index):
        rows = self.rows[index * self.batch_size : (index + 1) * self.batch_size]
        return rows.astype("float32")[:, None], rows[:, None]

    def on_epoch_end(self):
        if self.shuffles:
            np.random.shuffle(self.rows)


class Drawing(Numbers):
    """Draws the order of its rows anew for every epoch, at its beginning or at the end of the one before."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def draw(self):
        self.rows = np.random.permutation(NUM_ROWS)

    def on_epoch_begin(self):
        if self.when == "begin":
            self.draw()

    def on_epoch_end(self):
        if self.when == "end":
            self.draw()


@each_number
@pytest.mark.parametrize("when", ["begin", "end", "never"])
def test_py_dataset_in_an_order_of_its_own_in_each_epoch(process, when, num_processes):
    """A seed that forgets the epoch would draw the same order again, and one that forgets itself any order."""
    make = lambda: Drawing(when)  # noqa: E731
    first, again = (parts_of(process, num_processes, make, shuffle=when == "never") for _ in range(2))
    other = parts_of(process, num_processes, make, shuffle=when == "never", seed=7)
    epochs = [[epoch_of(part) for part in first] for _ in range(4)]
    for epoch in epochs:
        assert_each_row_once(epoch)  # disjoint, and all of them
    drawn = epochs if when != "end" else epochs[1:]  # the first epoch ends before it draws
    assert all(drawn[i] != drawn[j] for i in range(len(drawn)) for j in range(i))
    assert [[epoch_of(part) for part in again] for _ in range(4)] == epochs
    assert [[epoch_of(part) for part in other] for _ in range(4)][-1] != epochs[-1]


@each_number
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shuffles", [False, True])
def test_py_dataset(process, shuffles, shuffle, num_processes):
    parts = parts_of(process, num_processes, lambda: Numbers(shuffles), shuffle=shuffle)
    seen = []
    for epoch in range(3):
        state = np.random.get_state()[1].copy()
        epochs = [epoch_of(part) for part in parts]
        np.testing.assert_array_equal(np.random.get_state()[1], state)
        assert_each_row_once(epochs)
        assert max(map(len, epochs)) - min(map(len, epochs)) <= 1
        if not shuffle and (not shuffles or epoch == 0):
            assert together(epochs) == in_order(2 * num_processes)
        seen.append(epochs)
    assert (seen[1] != seen[2]) == (shuffle or shuffles)


@pytest.mark.parametrize("make", [lambda: Numbers(shuffles=True), lambda: loader("shuffled")])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_without_common_random_numbers_rows_are_lost(process, monkeypatch, make):
    """That the tests above can fail."""
    pytest.importorskip("torch")
    for module in (py_dataset, torch_loader):
        monkeypatch.setattr(module, "same_random_numbers", lambda *key, generators=(): contextlib.nullcontext())
    parts = parts_of(process, 2, make)
    for _ in range(2):
        epochs = [epoch_of(part) for part in parts]
    with pytest.raises(AssertionError):
        assert_each_row_once(epochs)


def test_py_dataset_keeps_its_settings_and_may_have_no_end(process):
    process(3, 2)
    part = ks.shard_data(Numbers(workers=3, use_multiprocessing=True, max_queue_size=5))
    assert (part.workers, part.use_multiprocessing, part.max_queue_size) == (3, True, 5)
    assert rows_of(pickle.loads(pickle.dumps(part))[1]) == [10, 11]

    class Endless(Numbers):
        num_batches = None

        def __getitem__(self, index):
            return np.array([[index]])

    endless = ks.shard_data(Endless())
    assert endless.num_batches is None
    assert rows_of(endless[100]) == [302]
    with pytest.raises(TypeError, match="no length"):
        len(endless)
    with pytest.raises(ValueError, match="infinite PyDataset"):
        ks.shard_data(Endless(), shuffle=True)


# -- torch DataLoader


class Stream:
    """The base class of an IterableDataset; each of several workers gives a part of the rows."""

    first = 0

    def __iter__(self):
        import torch

        worker = torch.utils.data.get_worker_info()
        step, start = (1, 0) if worker is None else (worker.num_workers, worker.id)
        return iter(range(self.first + start, NUM_ROWS, step))


def stream(sized=False):
    import torch

    members = {"__len__": lambda self: NUM_ROWS} if sized else {}
    return type("Rows", (Stream, torch.utils.data.IterableDataset), members)()


def loader(kind, **arguments):
    import torch
    from torch.utils import data as torch_data

    rows = torch_data.TensorDataset(torch.arange(NUM_ROWS))
    if kind == "in order":
        return torch_data.DataLoader(rows, batch_size=2, **arguments)
    if kind == "shuffled":
        return torch_data.DataLoader(rows, batch_size=2, shuffle=True, **arguments)
    if kind == "generator":
        generator = torch.Generator()
        generator.seed()
        return torch_data.DataLoader(rows, batch_size=2, shuffle=True, generator=generator, **arguments)
    if kind == "single rows":
        return torch_data.DataLoader(rows, batch_size=None, collate_fn=lambda row: row[0][None], **arguments)
    if kind == "batch sampler":
        batches = torch_data.BatchSampler(torch_data.RandomSampler(rows), 2, drop_last=False)
        return torch_data.DataLoader(rows, batch_sampler=batches, **arguments)
    return torch_data.DataLoader(stream(kind == "sized stream"), batch_size=2, **arguments)


LOADERS = ["in order", "shuffled", "generator", "single rows", "batch sampler", "stream", "sized stream"]


@each_number
@pytest.mark.parametrize("kind", LOADERS)
def test_data_loader(process, kind, num_processes):
    pytest.importorskip("torch")
    parts = parts_of(process, num_processes, lambda: loader(kind))
    seen = []
    for _ in range(2):
        epochs = [epoch_of(part) for part in parts]
        assert_each_row_once(epochs)
        if kind != "stream":
            assert [len(epoch) for epoch in epochs] == [len(part) for part in parts]
        if kind in ("in order", "stream", "sized stream"):
            assert together(epochs) == in_order(2 * num_processes)
        seen.append(epochs)
    assert (seen[0] != seen[1]) == (kind in ("shuffled", "generator", "batch sampler"))
    assert all(max(map(len, epoch)) <= 2 for epoch in seen[0])


def test_data_loader_shuffled_by_us(process):
    pytest.importorskip("torch")
    for kind in ("in order", "batch sampler"):
        parts = parts_of(process, 2, lambda kind=kind: loader(kind), shuffle=True)
        first, second = ([epoch_of(part) for part in parts] for _ in range(2))
        assert_each_row_once(first)
        assert_each_row_once(second)
        assert first != second


def test_drawing_restores_random_numbers(process):
    torch = pytest.importorskip("torch")
    process(2, 0)
    made = loader("generator")
    part = ks.shard_data(made)
    before = torch.get_rng_state(), made.generator.get_state(), random.getstate()
    list(part.sampler)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(made.generator.get_state(), before[1])
    assert random.getstate() == before[2]


def test_rows_drawn_with_weights_are_drawn_alike(process):
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))

    def make():
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * NUM_ROWS, 40)
        return torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler)

    parts = parts_of(process, 2, make)
    whole = parts_of(process, 1, make, shuffle=False)[0]
    assert whole.sampler.num_samples == 40
    drawn = together([epoch_of(part) for part in parts])
    process(1, 0)
    expected = epoch_of(data.part_of_loader(make(), False, 0, data.Part(1, 0)))
    flat = [row for batch in expected for row in batch]
    assert drawn == [sorted(flat[i : i + 8]) for i in range(0, 40, 8)]


def test_data_loader_keeps_its_settings(process):
    torch = pytest.importorskip("torch")
    process(2, 1)

    class Mine(torch.utils.data.DataLoader):
        pass

    def double(rows):
        return torch.stack([row[0] for row in rows]) * 2

    rows = torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))
    made = Mine(rows, batch_size=2, collate_fn=double, drop_last=True, pin_memory=False, timeout=0)
    part = ks.shard_data(made)
    assert type(part) is Mine and part is not made
    assert epoch_of(part) == [[2, 6], [10, 14], [18, 22], [26, 30], [34, 38]]  # 42 is dropped, as asked
    assert epoch_of(made)[0] == [0, 2]


def set_first(worker):
    import torch

    # As in the documentation of PyTorch: what a worker sets must reach the dataset itself.
    torch.utils.data.get_worker_info().dataset.first = 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_data_loader_with_workers(process):
    torch = pytest.importorskip("torch")
    if BACKEND == "jax":
        pytest.skip("JAX does not survive a fork")

    def make(**arguments):
        return torch.utils.data.DataLoader(PickledStream(), batch_size=2, num_workers=2, **arguments)

    class PickledStream(Stream, torch.utils.data.IterableDataset):
        def __len__(self):
            return NUM_ROWS

    parts = parts_of(process, 2, make)
    assert_each_row_once([epoch_of(part) for part in parts])
    with pytest.raises(TypeError):
        len(parts[0])  # it depends on how workers divide the rows
    parts = parts_of(process, 2, lambda: make(worker_init_fn=set_first))
    assert_each_row_once([epoch_of(part) for part in parts], range(1, NUM_ROWS))
    rows = torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))
    parts = parts_of(
        process, 2, lambda: torch.utils.data.DataLoader(rows, 2, True, num_workers=1, persistent_workers=True)
    )
    for _ in range(2):
        assert_each_row_once([epoch_of(part) for part in parts])


def test_what_has_been_split_is_not_split_again(process):
    torch = pytest.importorskip("torch")
    process(2, 0)
    rows = torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=0)
    batches = torch.utils.data.BatchSampler(sampler, 2, False)
    for arguments in ({"sampler": sampler}, {"batch_sampler": batches}):
        with pytest.raises(ValueError, match="DistributedSampler"):
            ks.shard_data(torch.utils.data.DataLoader(rows, **arguments))
    parts = [ks.shard_data(loader(kind)) for kind in LOADERS]
    parts += [ks.shard_data(Numbers()), ks.shard_data(np.arange(8), batch_size=2)]
    for part in parts:
        with pytest.raises(ValueError, match="split only once"):
            ks.shard_data(part)


# -- tf.data


@each_number
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_tf_dataset(process, shuffled, batched, num_processes):
    tf = pytest.importorskip("tensorflow")

    def make():
        made = tf.data.Dataset.range(NUM_ROWS)
        made = made.shuffle(NUM_ROWS, seed=3) if shuffled else made
        return made.batch(2) if batched else made

    parts = parts_of(process, num_processes, make)
    parts = [part if batched else part.batch(2) for part in parts]
    seen = []
    for _ in range(2):
        epochs = [epoch_of(part) for part in parts]
        assert_each_row_once(epochs)
        if not shuffled:
            assert together(epochs) == in_order(2 * num_processes)
        seen.append(epochs)
    assert (seen[0] != seen[1]) == shuffled
    assert seen[0][0][0] != seen[0][1][0]
    options = parts[0].options()
    assert options.deterministic
    assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF


def test_tf_datasets_without_a_common_order_are_refused(process):
    tf = pytest.importorskip("tensorflow")
    process(2, 0)
    tf.random.set_seed(None)
    rows = tf.data.Dataset.range(NUM_ROWS)
    inside = lambda i: tf.data.Dataset.range(i).shuffle(4)  # noqa: E731
    for wrong in (
        rows.shuffle(4),
        rows.shuffle(4).batch(2).prefetch(1),
        tf.data.Dataset.zip(rows, rows.shuffle(4)),
        rows.interleave(inside, cycle_length=2),
        rows.flat_map(inside),
    ):
        with pytest.raises(ValueError, match="shuffles without a seed"):
            ks.shard_data(wrong)
    with pytest.raises(ValueError, match="`deterministic=False`"):
        ks.shard_data(rows.map(lambda row: row, num_parallel_calls=2, deterministic=False))
    with pytest.raises(ValueError, match="`shuffle` is not for"):
        ks.shard_data(rows, shuffle=True)
    with pytest.raises(ValueError, match="1 elements for 2 processes"):
        ks.shard_data(rows.batch(NUM_ROWS))
    unsorted = tf.data.Options()
    unsorted.deterministic = False
    assert ks.shard_data(rows.with_options(unsorted)).options().deterministic
    ks.shard_data(rows.interleave(lambda i: tf.data.Dataset.range(i).shuffle(4, seed=1)).repeat())
    tf.random.set_seed(3)
    ks.shard_data(rows.shuffle(4))


# -- all kinds, through Keras


def columns(kind):
    """The numbers from 0 as rows of one column."""
    x = np.arange(NUM_ROWS, dtype="float32")[:, None]
    if kind == "arrays":
        return x
    if kind == "PyDataset":
        return Numbers()
    if kind == "DataLoader":
        torch = pytest.importorskip("torch")
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.as_tensor(x)), batch_size=2)
    tf = pytest.importorskip("tensorflow")
    if kind == "tf tensors":
        return tf.constant(x)
    return tf.data.Dataset.from_tensor_slices(x).batch(2)


KINDS = ["arrays", "batches", "PyDataset", "DataLoader", "tf.data"]


@pytest.mark.parametrize("kind", KINDS)
def test_keras_takes_every_kind_on_every_backend(process, kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear")])
    arguments = {"batch_size": 2} if kind == "batches" else {}
    parts = parts_of(process, 2, lambda: columns("arrays" if kind == "batches" else kind), **arguments)
    predicted = [model.predict(part, verbose=0)[:, 0] for part in parts]
    assert sorted(np.concatenate(predicted)) == list(range(NUM_ROWS))
    assert abs(len(predicted[0]) - len(predicted[1])) <= 2


def test_fit_on_parts_is_one_process_on_the_whole(process):
    """Each rank's gradient is the mean over its rows; with equal batches their mean is that of one process."""
    x = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
    y = x @ np.array([[1.0], [2.0]], "float32")

    def trained(*parts):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        for part in parts:
            model.fit(part, shuffle=False, verbose=0)
        return model.get_weights()

    parts = parts_of(process, 2, lambda: (x, y), batch_size=12, shuffle=True)
    process(1, 0)
    whole = ks.shard_data(x, y, batch_size=24, shuffle=True)
    moved = [np.mean(pair, axis=0) for pair in zip(trained(parts[0]), trained(parts[1]))]
    for got, expected in zip(moved, trained(whole)):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_tensors_of_another_framework(process):
    torch, tf = pytest.importorskip("torch"), pytest.importorskip("tensorflow")
    process(2, 1)
    for made in (torch.arange(6), tf.range(6)):
        for shuffle in (False, True):
            part = ks.shard_data(made, shuffle=shuffle)
            assert type(part) is type(made) and len(part) == 3
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    assert ks.shard_data(ragged).to_list() == [[2, 3], [4]]


class Table:
    """As much of a pandas.DataFrame as is needed."""

    def __init__(self, rows):
        self.rows, self.shape = rows, (len(rows), 1)

    def __getitem__(self, column):
        raise KeyError(column)

    iloc = property(lambda self: self.rows)


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_tables_and_files(process, shuffle, tmp_path):
    h5py = pytest.importorskip("h5py")
    rows = np.arange(NUM_ROWS)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = rows
        for data_of in (lambda: Table(rows), lambda: file["x"]):
            parts = parts_of(process, 2, lambda data_of=data_of: (data_of(), rows), shuffle=shuffle)
            for x, y in parts:
                np.testing.assert_array_equal(x, y)
        batches = parts_of(process, 2, lambda: file["x"], batch_size=2, shuffle=True)
        assert_each_row_once([epoch_of(part) for part in batches])


@pytest.mark.backends("jax", "tensorflow")
def test_one_process_with_several_devices_gets_its_input():
    x, y = np.arange(5), np.arange(5)
    with ks.data_parallel(2) as scope:
        assert (scope.num_replicas, scope.num_processes) == (2, 1)
        assert all(a is b for a, b in zip(ks.shard_data(x, y), (x, y), strict=True))
        numbers = Numbers()
        assert ks.shard_data(numbers) is numbers


# -- errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2, 3],), TypeError, r"`x` must be an array.*Received: an int inside a list.*numpy.asarray"),
        ((3,), TypeError, "`x` must be an array"),
        ((None,), TypeError, "`x` must hold an array"),
        ((np.float32(3),), TypeError, "`x` must be an array"),
        ((iter([]),), TypeError, "islice"),
        ((np.zeros(4), "labels"), TypeError, "`y` must be an array"),
        ((np.zeros(4), np.zeros(5)), ValueError, r"same number of rows.*'x': \[4\], 'y': \[5\]"),
        (([np.zeros(4), np.zeros(5)],), ValueError, r"same number of rows.*'x': \[4, 5\]"),
        ((np.zeros(1),), ValueError, "1 rows for 2 processes"),
        ((Numbers(batch_size=100),), ValueError, "1 batches for 2 processes"),
        ((Numbers(), np.zeros(4)), ValueError, "`y` requires arrays"),
    ],
)
def test_wrong_data_is_refused_by_every_process(process, arguments, error, message):
    for process_id in range(2):
        process(2, process_id)
        with pytest.raises(error, match=message):
            ks.shard_data(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be >= 1"),
        ({"batch_size": 2.0}, TypeError, "`batch_size` must be an int"),
        ({"seed": -1}, ValueError, "`seed` must be >= 0"),
        ({"seed": "a"}, TypeError, "`seed` must be an int"),
        ({"shuffle": 1}, TypeError, "`shuffle` must be a bool"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ks.shard_data(np.zeros(4), **arguments)


def test_wrong_loaders_are_refused(process):
    torch = pytest.importorskip("torch")
    process(2, 0)
    with pytest.raises(ValueError, match="IterableDataset"):
        ks.shard_data(loader("stream"), shuffle=True)
    with pytest.raises(ValueError, match="`batch_size` requires arrays"):
        ks.shard_data(loader("in order"), batch_size=2)
    with pytest.raises(TypeError, match="into a `DataLoader` first"):
        ks.shard_data(torch.utils.data.TensorDataset(torch.arange(4)))
    with pytest.raises(ValueError, match="1 rows for 2 processes"):
        ks.shard_data(torch.utils.data.DataLoader([1]))
    endless = type("Endless", (), {"__iter__": lambda self: iter([0])})()
    with pytest.raises(ValueError, match="without `__len__`"):
        ks.shard_data(torch.utils.data.DataLoader([1, 2, 3], sampler=endless))


# -- which process this is


def test_this_process_is_alone():
    assert processes.process() == (1, 0)


@pytest.mark.backends("torch")
def test_ranks_are_known_before_their_group_is_open(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert processes.process() == (4, 3)
    assert list(ks.shard_data(np.arange(9))) == [3, 7]


@pytest.mark.backends("jax")
def test_processes_of_jax(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(processes, "gather_objects", lambda fact: [fact, fact])
    assert list(ks.shard_data(np.arange(5))) == [1, 3]


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("task", "expected"),
    [(("worker", 1), (2, 1)), (("worker", 0), (2, 0)), (("evaluator", 0), (1, 0))],
)
def test_tasks_of_a_cluster(monkeypatch, task, expected):
    cluster = {"worker": ["localhost:1", "localhost:2"], "evaluator": ["localhost:3"]}
    description = {"cluster": cluster, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(description))
    assert processes.process() == expected


@pytest.mark.backends("tensorflow")
def test_the_chief_is_the_first_of_the_workers(monkeypatch):
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    for kind, expected in (("chief", (2, 0)), ("worker", (2, 1))):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}))
        assert processes.process() == expected


# -- private names


def test_private_name_of_data_loader():
    torch = pytest.importorskip("torch")
    assert torch.utils.data.DataLoader([1])._iterator is None


def test_private_names_of_tf_data():
    tf = pytest.importorskip("tensorflow")
    tf.random.set_seed(None)
    rows = tf.data.Dataset.range(4)
    shuffled = rows.shuffle(4)
    assert shuffled._inputs() == [rows]
    assert int(shuffled._seed) == int(shuffled._seed2) == 0
    assert int(rows.shuffle(4, seed=0)._seed2) != 0 or int(rows.shuffle(4, seed=0)._seed) != 0
    assert rows.map(lambda row: row, num_parallel_calls=2, deterministic=False)._deterministic == "false"
    assert rows.flat_map(lambda i: rows)._map_func.function.graph.get_operations()

"""Each codec against NumPy, on replicas in threads: what is added up, what is left over, and the bytes."""

import keras
import numpy as np
import pytest
from keras import ops
from support.suites import some
from support.worlds import FakeReplicas, FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.traffic import Collective, note, recording
from keras_shardopt.extensions.coding.codecs import random_numbers

SHAPES = [(40, 30), (7,), (), (3, 5, 20)]
NUM_REPLICAS = 3
NUM_UPDATES = 6

CODECS = {
    "int8": ks.compression.Int8(block=64),
    "int8 stochastic": ks.compression.Int8(block=64, rounding="stochastic", seed=3),
    "int4": ks.compression.Int4(block=32),
    "int4 stochastic": ks.compression.Int4(rounding="stochastic"),
    "float16": ks.compression.Float16(error_feedback=True),
    "bfloat16": ks.compression.BFloat16(error_feedback=True),
    "powersgd": ks.compression.PowerSGD(rank=2, warmup_steps=2),
}


def gradients(replica, update):
    random = np.random.default_rng([replica, update])
    return [(random.normal(size=s) * 10.0 ** random.integers(-6, 3)).astype("float32") for s in SHAPES]


# -- in NumPy ----------------------------------------------------------------------------------------------------------


def as_bfloat16(values):
    words = np.asarray(values, "float32").view("uint32")
    return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).astype("uint32").view("float32")


def hashed(words):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = ((words ^ (words >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return words


def noise(count, key):
    seed = np.uint64(0)
    for part in key:
        seed = hashed((np.uint64(part) + np.uint64(0x9E3779B9) * (seed + np.uint64(1))) & np.uint64(0xFFFFFFFF))
    words = hashed((np.arange(count, dtype="uint64") * np.uint64(0x9E3779B1) + seed) & np.uint64(0xFFFFFFFF))
    return ((words & np.uint64(0xFFFFFF)).astype("float32") * np.float32(2.0**-24)).astype("float32")


def rounded(codec, flat, key):
    """What the receiver of a vector has."""
    if isinstance(codec, ks.compression.Float16):
        return flat.astype("float16").astype("float32")
    if isinstance(codec, ks.compression.BFloat16):
        return as_bfloat16(flat)
    rows = flat.reshape(-1, codec.block)
    scales = as_bfloat16(np.abs(rows).max(1) * np.float32((1 + 2.0**-8) / codec.largest))[:, None]
    steps = rows / np.where(scales == 0, 1, scales).astype("float32")
    if codec.rounding == "nearest":
        return (np.rint(steps) * scales).reshape(-1)
    steps = np.floor(steps + noise(flat.size, (codec.seed, *key)).reshape(rows.shape))
    return (steps.clip(-codec.largest, codec.largest) * scales).reshape(-1)


def two_legs(codec, update, everyones):
    """The sum over replicas of lists of tensors, and what each is left with."""
    flat = [np.concatenate([t.reshape(-1) for t in tensors]) for tensors in everyones]
    size = flat[0].size
    flat = [np.pad(f, (0, -size % (len(flat) * codec.block))) for f in flat]
    sent = [rounded(codec, f, (update, r, 0)) for r, f in enumerate(flat)]
    unsent = [(f - s).reshape(len(flat), -1) for f, s in zip(flat, sent)]
    totals = np.sum(sent, axis=0, dtype="float32").reshape(len(flat), -1)
    results = []
    for r, total in enumerate(totals):
        results.append(rounded(codec, total, (update, r, 1)))
        unsent[r][r] += total - results[r]

    def cut(values):
        values, parts = values.reshape(-1)[:size], []
        for shape in SHAPES:
            parts.append(values[: int(np.prod(shape))].reshape(shape))
            values = values[int(np.prod(shape)) :]
        return parts

    return cut(np.concatenate(results)), [cut(u) for u in unsent]


def of_low_rank(codec, update, everyones, factors):
    """As `two_legs`; `factors` are overwritten."""
    sums = [np.sum(each, axis=0, dtype="float64") for each in zip(*everyones)]
    unsent = [[np.zeros_like(t) for t in tensors] for tensors in everyones]
    for i, factor in enumerate(factors) if update >= codec.warmup_steps else ():
        if factor is not None:
            matrix = sums[i].reshape(-1, SHAPES[i][-1])
            basis = np.linalg.qr(matrix @ factor)[0]
            factors[i] = matrix.T @ basis
            sums[i] = (basis @ factors[i].T).reshape(SHAPES[i])
            for own, tensors in zip(unsent, everyones):
                own[i] = tensors[i] - sums[i] / len(everyones)
    return sums, unsent


@pytest.mark.parametrize("name", some(CODECS, lambda name: not name.startswith("int"), "jax"))
@pytest.mark.exhaustive("tensorflow")
def test_sums_and_what_is_left_over_are_those_of_numpy(name):
    codec = CODECS[name]
    variables = [keras.Variable(np.zeros(s, "float32")) for s in SHAPES]
    start = [codec.start(v, i) for i, v in enumerate(variables)]

    def work(replicas):
        left, factors, found = None, list(start), []
        for update in range(NUM_UPDATES):
            mine = [ops.convert_to_tensor(g) for g in gradients(replicas.replica_id, update)]
            mine = mine if left is None else [m + e for m, e in zip(mine, left)]
            given = [None if f is None else ops.convert_to_tensor(f) for f in factors]
            along = [ops.convert_to_tensor([1.0, float(replicas.replica_id)])]
            step = ops.convert_to_tensor(update, "int32")
            sums, along, left, factors = codec.reduce(mine, along, replicas, step, given)
            factors = iter(factors)
            factors = [None if f is None else next(factors) for f in given]
            assert ops.convert_to_numpy(along[0]).tolist() == [3.0, 3.0]
            found.append([[ops.convert_to_numpy(t) for t in tensors] for tensors in (sums, left)])
        return found

    found = FakeWorld(NUM_REPLICAS, is_spmd=False).run(work)
    left = [[np.zeros(s, "float32") for s in SHAPES] for _ in range(NUM_REPLICAS)]
    factors = [None if f is None else f.astype("float64") for f in start]
    for update in range(NUM_UPDATES):
        everyones = [[g + e for g, e in zip(gradients(r, update), left[r])] for r in range(NUM_REPLICAS)]
        if name == "powersgd":
            sums, left = of_low_rank(codec, update, everyones, factors)
        else:
            sums, left = two_legs(codec, update, everyones)
        for r in range(NUM_REPLICAS):
            for mine, theirs, expected in zip(found[r][update][0], found[0][update][0], sums):
                assert mine.tobytes() == theirs.tobytes(), "bits differ between replicas"
                np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))
            for mine, expected, total in zip(found[r][update][1], left[r], sums):
                np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6 * np.max(np.abs(total)))
    assert max(np.max(np.abs(e)) for own in left for e in own) > 0, "nothing was lost that could be fed back"


# Each operation of random rounding is a call of its own here.
OFTEN = ["powersgd"] if keras.config.backend() == "tensorflow" else ["int8", "int4 stochastic", "powersgd"]


@pytest.mark.parametrize("name", some(CODECS, OFTEN))
@pytest.mark.exhaustive("jax")
def test_what_was_sent_and_what_is_left_over_add_up_to_all_gradients(name):
    """Error feedback loses nothing, in 30 updates."""
    codec = CODECS[name]
    variables = [keras.Variable(np.zeros(s, "float32")) for s in SHAPES]

    def steady(replica, update):
        random = np.random.default_rng([replica, update])
        return [random.normal(size=s).astype("float32") for s in SHAPES]

    def work(replicas):
        left, sent = [np.zeros(s, "float32") for s in SHAPES], [np.zeros(s) for s in SHAPES]
        given = [codec.start(v, i) for i, v in enumerate(variables)]
        for update in range(30):
            mine = [ops.convert_to_tensor(g + e) for g, e in zip(steady(replicas.replica_id, update), left)]
            factors = [None if f is None else ops.convert_to_tensor(f) for f in given]
            reduced = codec.reduce(mine, [], replicas, ops.convert_to_tensor(update, "int32"), factors)
            after = iter(reduced.factors)
            given = [None if f is None else ops.convert_to_numpy(next(after)) for f in given]
            left = [ops.convert_to_numpy(t) for t in reduced.unsent]
            sent = [s + ops.convert_to_numpy(t) for s, t in zip(sent, reduced.sums)]
        return sent, left

    found = FakeWorld(2, is_spmd=False, timeout=60.0).run(work)
    for i in range(len(SHAPES)):
        everything = sum(steady(r, u)[i].astype("float64") for r in range(2) for u in range(30))
        together = found[0][0][i] + found[0][1][i] + found[1][1][i]
        np.testing.assert_allclose(together, everything, rtol=0, atol=1e-5 * np.max(np.abs(everything)))


@pytest.mark.parametrize("codec", [ks.compression.Int8(), ks.compression.Int4(256, rounding="stochastic")], ids=repr)
def test_a_scale_holds_for_tiny_and_for_huge_gradients_and_shows_what_is_not_finite(codec):
    rows = np.random.default_rng(0).normal(size=(5, 256)).astype("float32")
    rows *= np.array([1e-30, 1e-7, 0.0, 1e6, 1e30], "float32")[:, None]
    back = ops.convert_to_numpy(codec.decode(codec.encode(ops.convert_to_tensor(rows.reshape(-1))))).reshape(rows.shape)
    largest = np.max(np.abs(rows), axis=1)
    assert (np.max(np.abs(back - rows), axis=1) <= 1.01 * largest / codec.largest).all()
    for bad in (np.nan, np.inf, -np.inf):
        rows[1, 5] = bad
        with np.errstate(all="ignore"):
            back = codec.decode(codec.encode(ops.convert_to_tensor(rows.reshape(-1))))
        is_bad = ~np.isfinite(ops.convert_to_numpy(back).reshape(rows.shape))
        assert is_bad.all(axis=1).tolist() == [False, True, False, False, False] and is_bad.sum() == 256


def test_random_numbers_are_uniform_and_the_same_on_every_backend():
    found = ops.convert_to_numpy(random_numbers(100_000, (1, ops.convert_to_tensor(2, "int32"), 3)))
    np.testing.assert_array_equal(found, noise(100_000, (1, 2, 3)))
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, 50, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-squared of 49 degrees of freedom: above once in 40,000 times
    other = ops.convert_to_numpy(random_numbers(100_000, (1, 3, 3)))
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.02 and abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02


def test_bytes_of_collectives():
    assert Collective("all_reduce", ("float32",), 100, 4).bytes_sent == 150
    assert Collective("all_gather", ("int8",), 100, 4).bytes_sent == 300
    assert Collective("all_to_all", ("int8",), 100, 4).bytes_sent == 75
    note("all_reduce", [np.zeros(3, "float32")], 2)  # nobody records
    with recording() as found:
        note("all_to_all", [np.zeros((3, 2), "int8"), np.zeros(5, "float16"), np.zeros(1, "float64")], 2)
        note("broadcast", [], 2)
    assert found == [Collective("all_to_all", ("int8", "float16", "float64"), 24, 2)]


def test_arguments_and_configs():
    for name, codec in CODECS.items():
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(codec))
        assert again == codec and hash(again) == hash(codec) and eval(f"ks.compression.{codec!r}") == codec, name
    assert ks.compression.Int8() != ks.compression.Int4() != ks.compression.Int4(seed=1)
    for wrong, error, words in (
        ({"block": 12}, ValueError, "`block` must be a multiple of 8"),
        ({"block": 0}, ValueError, "`block`"),
        ({"rounding": "up"}, ValueError, "`rounding`"),
        ({"seed": -1}, ValueError, "`seed`"),
        ({"error_feedback": 1}, TypeError, "`error_feedback`"),
    ):
        with pytest.raises(error, match=words):
            ks.compression.Int8(**wrong)
    for wrong in ({"rank": 0}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
            ks.compression.PowerSGD(**wrong)
    for short, kind in (("int8", "Int8"), ("int4", "Int4"), ("powersgd", "PowerSGD"), ("float16", "Float16")):
        assert ks.compression.get(short) == getattr(ks.compression, kind)()
    assert ks.compression.get(None) is None


def test_power_sgd_next_to_adam_is_warned_of():
    with pytest.warns(UserWarning, match="`PowerSGD` is made for SGD with momentum.*Received: AdamW"):
        ks.CrossShard(ks.GradientClipping(keras.optimizers.AdamW(), 1.0), compression="powersgd")
    ks.CrossShard(keras.optimizers.SGD(momentum=0.9), compression="powersgd")


# -- through an optimizer ----------------------------------------------------------------------------------------------


def applied(world, given, **arguments):
    """The weights of each replica after updates with its gradients `given(replica, update)`, and its optimizer."""

    def work(replicas):
        mine = [keras.Variable(np.zeros(s, "float32"), name=f"w{i}") for i, s in enumerate(SHAPES)]
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradients="local", **arguments)
        optimizer.build(mine)
        optimizer.peers.started = replicas
        for update in range(NUM_UPDATES):
            grads = [None if g is None else ops.convert_to_tensor(g) for g in given(replicas.replica_id, update)]
            optimizer.apply(grads, mine)
        return [ops.convert_to_numpy(v) for v in mine], optimizer

    return world.run(work)


def balance(found, members):
    """Of the replicas in `members`: what the weights lost, and what was not sent, per replica."""
    weights = [found[members[0]][0][i] for i in range(len(SHAPES))]
    left = [sum(ops.convert_to_numpy(found[r][1].pipeline.carried[i]) for r in members) for i in range(len(SHAPES))]
    return [-w + e / len(members) for w, e in zip(weights, left)]


def unit(replica, update):
    return [np.random.default_rng([replica, update]).normal(size=s).astype("float32") for s in SHAPES]


def check(found, members, given, updates=range(NUM_UPDATES), share=1.0):
    for r in members:
        for mine, theirs in zip(found[r][0], found[members[0]][0]):
            assert mine.tobytes() == theirs.tobytes(), "bits differ between replicas"
    for i, total in enumerate(balance(found, members)):
        addends = [given(r, u)[i] for r in members for u in updates]
        expected = share * sum(a.astype("float64") for a in addends if a is not None) / len(members)
        np.testing.assert_allclose(total, expected, rtol=0, atol=2e-6 * max(1, np.max(np.abs(expected))))


threads = pytest.mark.backends("torch", "tensorflow")


@threads
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("groups", some([None, [[0, 3], [1, 2]]], [None]), ids=str)
@pytest.mark.exhaustive("tensorflow")
def test_nothing_is_lost_and_all_replicas_agree(monkeypatch, name, groups):
    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)
    codec = ks.compression.PowerSGD(rank=2, warmup_steps=0) if name == "powersgd" else CODECS[name]
    monkeypatch.setattr("keras_shardopt.extensions.coding.transport._strategies", None)
    found = applied(world, unit, compression=codec, group_assignment=groups)
    for members in groups or [list(range(4))]:
        check(found, members, unit)


@threads
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.exhaustive("tensorflow")
def test_gradients_that_a_replica_lacks_wait(monkeypatch):
    """Also of a variable that has none on any replica, for a while."""

    def given(replica, update):
        lacks = {1: (0, 2), 3: (1,)}.get(replica, ())
        return [
            None if (i in lacks and update % 2) or (i == 3 and update in (2, 3)) else g
            for i, g in enumerate(unit(replica, update))
        ]

    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)
    check(applied(world, given, compression="int4"), range(4), given)


@threads
@pytest.mark.parametrize("groups", [None, [[0, 3], [1, 2]]], ids=str)
@pytest.mark.parametrize("how", ["skips", "scales"])
@pytest.mark.exhaustive("tensorflow")
def test_of_a_skipped_update_nothing_is_left(monkeypatch, how, groups):
    def given(replica, update):
        grads = unit(replica, update)
        if replica == 2 and update in (1, 4):
            grads[0][3, 2] = np.nan
        return grads

    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)
    if how == "skips":
        found = applied(world, given, compression="int4", on_nonfinite="skip", group_assignment=groups)
    else:
        real, scale = keras.optimizers.SGD, 8.0
        scales = [scale, scale, scale / 2, scale / 2, scale / 2, scale / 4]  # halved after each overflow
        scaled = lambda r, u: [g * np.float32(scales[u]) for g in given(r, u)]  # noqa: E731
        scaler = lambda: ks.AutomaticLossScaler("Backoff", {"scale_max": scale, "step_window": 1000})  # noqa: E731
        monkeypatch.setattr(keras.optimizers, "SGD", lambda rate: ks.LossScaling(real(rate), scaler()))
        found = applied(world, scaled, compression="int4", group_assignment=groups)
    for members in groups or [list(range(4))]:
        check(found, members, given, updates=[0, 2, 3, 5])


@threads
def test_where_state_is_loaded_nothing_is_left_over(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)

    def work(replicas):
        weights = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.1), gradients="local", compression="int4")
        optimizer.build(weights)
        optimizer.apply([ops.convert_to_tensor(grad) for grad in unit(replicas.replica_id, 0)], weights)
        left = [np.abs(ops.convert_to_numpy(residual)).max() for residual in optimizer.pipeline.carried]
        store = {}
        optimizer.save_own_variables(store)
        optimizer.load_own_variables(store)
        return max(left), max(np.abs(ops.convert_to_numpy(residual)).max() for residual in optimizer.pipeline.carried)

    for before, after in world.run(work):
        assert before > 0 and after == 0


@threads
def test_means_are_divided_before_they_are_cast(monkeypatch):
    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)

    def work(replicas):
        weight = keras.Variable(np.zeros(64, "float16"), dtype="float16")
        optimizer = ks.CrossShard("sgd", gradients="local", compression=ks.compression.BFloat16(error_feedback=True))
        optimizer.build([weight])
        own = ops.full((64,), 61440.0, dtype="float16")  # the sum of two does not fit
        (mean,) = optimizer.pipeline.transport.means(replicas, [0], [own], 0)
        assert keras.backend.standardize_dtype(mean.dtype) == "float16"
        return ops.convert_to_numpy(mean)

    for found in world.run(work):
        np.testing.assert_array_equal(found, np.full(64, 61440.0, "float16"))


@threads
def test_a_window_is_compressed_once(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)
    calls = []
    real = ks.compression.Int8.encode
    monkeypatch.setattr(ks.compression.Int8, "encode", lambda *a: calls.append(1) or real(*a))
    found = applied(world, unit, compression="int8", gradient_accumulation_steps=3)
    check(found, range(2), unit, share=1 / 3)
    assert len(calls) == 2 * 2 * 2  # replicas, updates, legs


@threads
def test_the_report_counts_what_was_sent(monkeypatch):
    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)
    for method, kind in (("all_reduce", "all_reduce"), ("all_gather", "all_gather")):
        real = getattr(FakeReplicas, method)

        def noted(self, tensors, *op, real=real, kind=kind):
            note(kind, tensors, self.num_replicas)
            return real(self, tensors, *op)

        monkeypatch.setattr(FakeReplicas, method, noted)
    (_, optimizer), *_ = applied(world, unit, compression="int8")
    report = optimizer.communication_report()
    num_elements = sum(int(np.prod(s)) for s in SHAPES)
    assert report.float32_bytes == 2 * 3 / 4 * 4 * num_elements
    assert report.bytes_per_update == sum(c.bytes_sent for c in report.collectives) > 0
    assert report.ratio == report.bytes_per_update / report.float32_bytes
    assert "all_gather of int8, bfloat16" in str(report)

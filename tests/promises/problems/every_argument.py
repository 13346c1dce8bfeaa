"""All arguments of `CrossShard`, what is trained with them, and the reference to compare with.

Gradients are small multiples of 1/128, and of 3 where three micro-batches are an update: means, sums and shares of them
are exact in float32, in float16 and in bfloat16. So compression must not cost a bit, except where clipping comes
before it.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import ops
from promises.problems import pairwise
from support import references

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

NUM_REPLICAS = 4
NUM_UPDATES = 4
SHAPES = [(5, 3), (4,), (), (3, 2)]
GROUPS = [[3, 0], [1, 2]]
CLIPNORM = 1.5  # binds for some replicas only
LIMIT = 0.25  # of the transform
ROWS_OF_ALL = 16
TOLERANCE = 1e-6  # of the largest movement: float32 has 6e-8, and an update takes some ten operations


@keras.saving.register_keras_serializable(package="tests")
def limited(grads, variables):
    return [None if g is None else ops.clip(g, -LIMIT, LIMIT) for g in grads]


def momentum():
    return keras.optimizers.SGD(0.5, momentum=0.9)


def adam(**arguments):
    rate = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    # With an epsilon that does not blow up the last digits of small gradients, and decays that float32 holds exactly:
    # Keras corrects the bias by 1 - 0.999, which has some three digits less.
    return keras.optimizers.Adam(rate, beta_1=0.75, beta_2=0.75, weight_decay=0.1, epsilon=0.05, **arguments)


# Makes the inner optimizer, that of the reference, and whether it leaves out updates by itself.
Momentum, Adam = references.Momentum, references.Adam
INNERS = {
    "momentum": (momentum, Momentum, None),
    "adam": (adam, Adam, None),
    "adam clipnorm": (lambda: adam(clipnorm=0.5), lambda: Adam(clipnorm=0.5), None),
    "scaled": (
        lambda: ks.LossScaling(momentum(), "Backoff", {"scale_max": 8.0, "step_window": 2}),
        Momentum,
        "together",
    ),
    "static": (lambda: ks.LossScaling(momentum(), 4.0), Momentum, None),
    "stock": (
        lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=8.0, dynamic_growth_steps=2),
        Momentum,
        "in groups",
    ),
    "masters": (lambda: ks.MixedPrecision(momentum()), Momentum, None),
    "clipping": (lambda: ks.GradientClipping(adam(), 1.0), lambda: ClippedAdam(1.0), None),
    "larc": (
        lambda: ks.GradientClipping(ks.LARC(momentum(), larc_eta=1.0), 1.0),
        lambda: Momentum(clip_gradients=1.0, larc_eta=1.0),
        None,
    ),
}


class ClippedAdam(Adam):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def update(self, weights, grads):
        super().update(weights, references.clipped(grads, self.limit)[0])


class Passing(ks.Stage):
    """Hands everything on, and notes a number where replicas have gradients of their own."""

    needs_local_gradients = False
    takes_slices = True

    def collect(self, step, proceed):
        proceed(step.replace())

    def local(self, step, comm):
        return step.replace(notes={**step.notes, "one": keras.ops.ones(())})

    def commit(self, step, proceed):
        assert all(tuple(note.shape) == () for note in step.notes.values())
        proceed(step.replace(notes={}))


LEVELS = {
    "inner_optimizer": list(INNERS),
    "reduction": ["mean", "sum"],
    "group_assignment": [None, "two groups"],
    # What the argument says, and how they come.
    "gradients": [(said, state) for state in ("local", "prescaled", "summed", "global") for said in ("auto", state)],
    "gradient_accumulation_steps": [None, 1, 3],
    "replica_clipnorm": [None, CLIPNORM],
    "replica_transform": [None, "limited"],
    "on_nonfinite": ["ignore", "skip", "raise"],
    "shard_state": [False, True],
    "compression": [None, "float16", "bfloat16"],
    "fused": ["auto", False],
    "overlap": ["auto", False],
    "bucket_mib": [25.0, 1e-4],
    "stages": [(), "passing"],
    "axis_name": ["batch", "rows"],
    "name": [None, "mine"],
    # Not arguments: what is trained, and where.
    "program": ["one", "several"],
    "dtypes": ["float32", "and float64", "and float16"],
    # "some idle": replica 3 has no rows, and in every second micro-batch replica 2 has none either. "other start":
    # replicas 2 and 3 have computed their first gradients with weights that nobody has any more.
    "rows": ["even", "uneven", "some idle", "other start"],
    "missing": ["none", "sometimes", "always"],
    # "idle": in what does not count, as there are no rows or other weights.
    "bad": ["none", "NaN", "infinite", "idle"],
}
# Arguments that need a trainer, which is not here: `test_same_bits_ranks.py` and `test_local_sgd.py` have them.
OF_TRAINERS = {"virtual_replicas", "sync_every", "outer_optimizer", "sync_fragments", "sync_warmup"}
NOT_ARGUMENTS = {"program", "dtypes", "rows", "missing", "bad"}

_REDUCED = [(said, state) for said, state in LEVELS["gradients"] if state in ("summed", "global")]
_SKIPPING = ["scaled", "stock"]
# What is refused: when, with which words, and what of it.
REFUSED = [
    ("made", "Remove one of the two", {"shard_state": [True], "group_assignment": ["two groups"]}),
    ("made", "end training at the first overflow", {"on_nonfinite": ["raise"], "inner_optimizer": _SKIPPING}),
    ("made", "the optimizers inside receive only a part", {"shard_state": [True], "inner_optimizer": ["stock"]}),
    (
        "built",
        "every variable must allow updates in parts",
        {"shard_state": [True], "program": ["one"], "inner_optimizer": ["adam clipnorm", "larc"]},
    ),
    *[
        ("used", f"`{name}` needs the gradients of each replica", {name: LEVELS[name][1:], "gradients": _REDUCED})
        for name in ("group_assignment", "replica_clipnorm", "replica_transform", "compression")
    ],
]
# What there is not.
IMPOSSIBLE = [
    {"bad": ["idle"], "rows": ["even", "uneven"]},
    {"program": ["one"], "rows": ["other start"]},
    {"gradients": _REDUCED, "rows": ["other start"]},
    # Nothing to compare: all weights become NaN.
    *[
        {"on_nonfinite": ["ignore"], "bad": ["NaN", "infinite"], factor: levels}
        for factor, levels in (
            ("inner_optimizer", ["adam clipnorm", "clipping", "larc"]),
            ("replica_clipnorm", [CLIPNORM]),
        )
    ],
]
RULES = [rule for _, _, rule in REFUSED] + IMPOSSIBLE

DEFAULTS = {factor: levels[0] for factor, levels in LEVELS.items()}


def told(row):
    """What of a row is not the default."""
    return ", ".join(f"{factor}={level}" for factor, level in not_default(row))


def not_default(row):
    return [(factor, level) for factor, level in row.items() if level != DEFAULTS[factor]]


def rows(**limits):
    """Rows for replicas that cannot have all levels: those that are left of some factors."""
    return pairwise.covering_rows({**LEVELS, **limits}, RULES)


def threesomes(**limits):
    """Rows with three and more levels together that something has been wrong with, or may be."""
    levels = {**LEVELS, **limits}
    states = {state: (said, state) for said, state in reversed(levels["gradients"])}
    local, prescaled, summed, reduced = (states.get(s) for s in ("local", "prescaled", "summed", "global"))
    some = [
        *[{"gradients": state, "gradient_accumulation_steps": 3} for state in (local, prescaled)],
        *[
            {"gradients": state, "compression": dtype}
            for state in (local, prescaled)
            for dtype in ("float16", "bfloat16")
        ],
        {"gradients": prescaled, "missing": "always"},
        {"gradients": prescaled, "compression": "bfloat16", "gradient_accumulation_steps": 3},
    ]
    found = [{"reduction": "sum", "shard_state": True, **more} for more in some]
    # The divisor is that of the group.
    found += [
        {"group_assignment": "two groups", "compression": dtype, "gradients": state, "reduction": reduction}
        for dtype, state in (("float16", local), ("bfloat16", prescaled))
        for reduction in ("mean", "sum")
    ]
    # A replica without rows has NaN, which count for nothing.
    found += [
        {"rows": "some idle", "bad": "idle", "on_nonfinite": "skip", "gradient_accumulation_steps": k, **more}
        for k in (None, 3)
        for more in ({}, {"shard_state": True}, {"replica_clipnorm": CLIPNORM}, {"replica_transform": "limited"})
    ]
    # Reduced gradients are those of all rows also where there are none.
    found += [
        {"rows": "some idle", "gradients": state, "gradient_accumulation_steps": k}
        for state in (summed, reduced)
        for k in (None, 3)
    ]
    first = {factor: own[0] for factor, own in levels.items()}
    filled = [{**first, "program": program, **more} for more in found for program in levels["program"]]
    return [row for row in filled if all(row[factor] in levels[factor] for factor in levels)]


def cross_shard(row):
    given = {name: level for name, level in row.items() if name not in NOT_ARGUMENTS}
    given["inner_optimizer"] = INNERS[row["inner_optimizer"]][0]()
    given["group_assignment"] = None if row["group_assignment"] is None else GROUPS
    given["gradients"] = row["gradients"][0]
    given["replica_transform"] = None if row["replica_transform"] is None else limited
    given["stages"] = () if row["stages"] == () else [Passing()]
    return ks.CrossShard(**given)


def num_steps(row):
    return row["gradient_accumulation_steps"] or 1


def start():
    random = np.random.default_rng(3)
    return [(random.integers(-96, 96, size=shape) / 256).astype("float32") for shape in SHAPES]


def variables(row):
    other = {"float32": "float32", "and float64": "float64", "and float16": "float16"}[row["dtypes"]]
    dtypes = ["float32", other, other, "float32"]
    return [keras.Variable(w, dtype=d, name=f"w{i}") for i, (w, d) in enumerate(zip(start(), dtypes))]


def num_rows(row):
    """`[micro-batch][replica]`."""
    rows = {"uneven": [[8, 4, 2, 2]], "some idle": [[8, 4, 4, 0], [8, 8, 0, 0]]}.get(row["rows"], [[4, 4, 4, 4]])
    return [rows[s % len(rows)] for s in range(NUM_UPDATES * num_steps(row))]


def first_weights(row):
    return [2.0, 2.0, 0.0, 0.0] if row["rows"] == "other start" else None


def gradients(row):
    """`[micro-batch][replica][variable]` of each replica's own mean loss."""
    random = np.random.default_rng(5)
    found = [
        [[size * random.integers(-7, 8, size=s) * 3.0 / 64 for s in SHAPES] for size in (1, 0.5, 2, 1)]
        for _ in range(NUM_UPDATES * num_steps(row))
    ]
    second, third_ends = num_steps(row), 3 * num_steps(row) - 1
    for s, step in enumerate(found):
        for replica, mine in enumerate(step):
            if row["missing"] == "always" or (row["missing"] == "sometimes" and _is_missing(row, s, replica)):
                mine[3] = None
    if row["bad"] == "NaN":
        # On two replicas, on the first of them in two variables.
        for replica, i, element in ((1, 1, 0), (1, 2, ()), (3, 0, (0, 0))):
            found[second][replica][i] = np.array(found[second][replica][i])
            found[second][replica][i][element] = np.nan
    elif row["bad"] == "infinite":
        found[third_ends][3][0][2, 1] = -np.inf
    elif row["bad"] == "idle":
        for s, (step, rows) in enumerate(zip(found, num_rows(row))):
            for replica in range(NUM_REPLICAS):
                is_foreign = s == 0 and first_weights(row) is not None and not first_weights(row)[replica]
                if not rows[replica] or is_foreign:
                    step[replica] = [None if g is None else np.full_like(g, np.nan) for g in step[replica]]
    return found


def _is_missing(row, step, replica):
    """In the second update on one replica, in the third on all, in the last in the first of several micro-batches."""
    update, micro_step = divmod(step, num_steps(row))
    here = update == 1 or (update == 3 and micro_step == 0 and num_steps(row) > 1)
    return update == 2 or (here and (replica == 1 or row["program"] == "one"))


def shares(row):
    return (np.array(num_rows(row)) * NUM_REPLICAS / ROWS_OF_ALL).tolist()


def before_transform(row):
    """As `gradients`, in the state in which the row says that they come."""
    state = row["gradients"][1]
    found = []
    for step, weights in zip(gradients(row), shares(row)):
        counted = [[None if g is None else g * w for g in mine] for mine, w in zip(step, weights)]
        if state == "prescaled":
            counted = [[None if g is None else g / NUM_REPLICAS for g in mine] for mine in counted]
        elif state != "local":
            divisor = NUM_REPLICAS if state == "global" else 1
            columns = [[g for g, w in zip(c, weights) if g is not None and w] for c in zip(*counted)]
            counted = [[sum(column) / divisor if column else None for column in columns]] * NUM_REPLICAS
        found.append(counted)
    return found


@functools.cache
def _expected(items):
    row = dict(items)
    inner = INNERS[row["inner_optimizer"]][1]
    with np.errstate(all="ignore"):
        return references.trained(
            start(),
            gradients(row),
            shares(row),
            inner,
            first_weights=first_weights(row),
            reduction=row["reduction"],
            groups=None if row["group_assignment"] is None else GROUPS,
            num_steps=num_steps(row),
            clipnorm=row["replica_clipnorm"],
            transform=None if row["replica_transform"] is None else lambda g: np.clip(g, -LIMIT, LIMIT),
            on_nonfinite=row["on_nonfinite"],
            names_replicas=row["gradients"][1] in ("local", "prescaled"),
            inner_skips=_inner_skips(row),
        )


def _inner_skips(row):
    # Master weights are of half precision only where a weight is, and only float16 overflows.
    if row["inner_optimizer"] == "masters" and "float16" in row["dtypes"]:
        return "together"
    return INNERS[row["inner_optimizer"]][2]


def expected(row):
    """The `Outcome` of each replica."""
    return _expected(tuple(row.items()))


def train(row, replicas, mine, optimizer, replica_id):
    """All updates of one replica that runs by itself. Returns in which of them an error came, and its words."""
    errors = []
    for s, (step, rows) in enumerate(zip(before_transform(row), num_rows(row))):
        scale = float(ops.convert_to_numpy(optimizer.scale_loss(ops.convert_to_tensor(1.0))))
        pairs = zip(step[replica_id], mine)
        own = [None if g is None else ops.cast(np.asarray(g * scale, "float32"), v.dtype) for g, v in pairs]
        try:
            if row["rows"] in ("even", "other start"):
                optimizer.apply(own, mine)
            else:
                counts = rows[replica_id], ROWS_OF_ALL
                if row["program"] == "one":
                    counts = map(ops.convert_to_tensor, counts)
                with batch_shared(BatchShare(*counts, replicas, losses_are_divided=row["gradients"][1] == "prescaled")):
                    optimizer.apply(own, mine)
        except FloatingPointError as error:
            errors.append((s // num_steps(row), str(error)))
    return errors


def check(row, replica_id, weights, optimizer, errors=None):
    """Compares a replica with the reference."""
    reference = expected(row)[replica_id]
    movement = max(_largest(w - s) for w, s in zip(reference.weights, start()))
    assert movement > 0.1, "the reference did not train"
    is_inexact = row["compression"] and (
        row["replica_clipnorm"] or (row["replica_transform"] and row["rows"] == "some idle")
    )
    # What is clipped has digits that half precision has not: (N + 1) u of the docstring.
    unit = {None: 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[row["compression"]] if is_inexact else 0
    for i, (found, wanted) in enumerate(zip(weights, reference.weights)):
        tolerance = max(TOLERANCE, (NUM_REPLICAS + 1) * unit) * movement
        if str(found.dtype) == "float16":
            # Rounded are the weight alone, or clipped gradients and each update too.
            steps = 1 if row["inner_optimizer"] == "masters" and not row["replica_clipnorm"] else 8
            tolerance += steps * 2.0**-11 * _largest(wanted)
        message = f"variable {i} of replica {replica_id}"
        np.testing.assert_allclose(found.astype("float64"), wanted, rtol=0, atol=tolerance, err_msg=message)
    iterations, skipped_steps = (
        v if isinstance(v, int) else int(placement.replica_values(v)[0])  # nobody counts
        for v in (optimizer.iterations, optimizer.skipped_steps)
    )
    assert iterations == reference.iterations, (iterations, reference.iterations)
    counts = row["on_nonfinite"] != "ignore" or _inner_skips(row) == "together"
    assert skipped_steps == (reference.skipped_steps if counts else 0), (skipped_steps, reference.skipped_steps)
    who = reference.last_nonfinite
    if who is not None:
        who = (who[0], optimizer._trainable_variables[who[1]].path)
    assert optimizer.last_nonfinite == who, (optimizer.last_nonfinite, who)
    if errors is not None:
        assert [update for update, _ in errors] == (reference.bad_updates if row["on_nonfinite"] == "raise" else [])
        if who is not None and errors:
            assert who[1] in errors[-1][1] and (who[0] is None or f"replica {who[0]}" in errors[-1][1]), errors


def _largest(array):
    array = np.asarray(array)
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))

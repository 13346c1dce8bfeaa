"""PyTorch: updates in one pass over memory, and in pieces, are those of Keras' own arithmetic."""

import copy
import functools
import pickle
import warnings

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("torch")

o = keras.optimizers
NUM_STEPS = 40
# One with more elements than are worked on at a time, and with an end that fills no vector register.
SHAPES = [(7, 5), (5,), (), (257, 257), (0, 3)]
DECAYING = o.schedules.ExponentialDecay(0.01, 10, 0.5)

VARIANTS = {
    "SGD momentum": lambda: o.SGD(0.1, momentum=0.9),
    "SGD nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD tiny rate": lambda: o.SGD(1e-11, momentum=0.9),
    "SGD decay": lambda: o.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "SGD schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 10, 0.5), momentum=0.9),
    "Adagrad": lambda: o.Adagrad(0.05),
    "Adagrad epsilon": lambda: o.Adagrad(0.05, initial_accumulator_value=1e-3, epsilon=1e-2),
    "Adam": lambda: o.Adam(0.01),
    "Adam epsilon": lambda: o.Adam(0.01, epsilon=1e-2),
    "Adam betas": lambda: o.Adam(0.01, beta_1=0.0, beta_2=0.5),
    "Adam amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "Adam schedule": lambda: o.Adam(DECAYING),
    "Adam clipped": lambda: o.Adam(0.01, global_clipnorm=0.5),
    "Adam averaged": lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=7),
    "Adam accumulating": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
    "Adam loss_scale_factor": lambda: o.Adam(0.01, loss_scale_factor=8.0),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1),
    "Adam decaying": lambda: o.Adam(DECAYING, weight_decay=0.1, use_ema=True, ema_momentum=0.5),
    "AdamW rate 0": lambda: o.AdamW(o.schedules.PiecewiseConstantDecay([20], [0.0, 0.01]), weight_decay=0.1),
    "Lion": lambda: o.Lion(0.01),
    "Lion clipped": lambda: o.Lion(0.01, weight_decay=0.1, clipnorm=0.5, use_ema=True),
    "Nadam": lambda: o.Nadam(0.01),
    "Nadam schedule": lambda: o.Nadam(DECAYING, beta_1=0.5, epsilon=1e-2, weight_decay=0.1),
    "GradientClipping": lambda: ks.GradientClipping(o.Adam(0.01), 0.5),
    "LARC": lambda: ks.LARC(o.SGD(0.1, momentum=0.9), 0.01),
    "LossScaling": lambda: ks.LossScaling(o.Adam(0.01), "Backoff", {"scale_max": 8.0}),
    "MixedPrecision": lambda: ks.MixedPrecision(o.Adam(0.01)),
    "LossScaleOptimizer": lambda: o.LossScaleOptimizer(o.Adam(0.01), initial_scale=4.0),
    "MultiOptimizer": lambda: o.MultiOptimizer(o.OptimizerMap(o.Adam(0.01), {".*w1": o.SGD(0.1, momentum=0.9)})),
}
if not hasattr(o, "MultiOptimizer"):
    del VARIANTS["MultiOptimizer"]


def weights(dtype="float32"):
    # Not larger than what the updates move: the rounding of large weights would be all that is seen.
    random = np.random.default_rng(1)
    return [keras.Variable(0.05 * random.normal(size=s), dtype=dtype, name=f"w{i}") for i, s in enumerate(SHAPES)]


def grads(step, dtype="float32"):
    import torch

    return [torch.tensor(grad, dtype=getattr(torch, dtype)) for grad in random_grads(step)]


@functools.cache
def random_grads(step):
    random = np.random.default_rng(100 + step)
    return [0.1 * random.normal(size=s) for s in SHAPES]


def trained(optimizer, num_steps=NUM_STEPS, dtype="float32", grads_of=None, prepare=None):
    mine = weights(dtype)
    if prepare is not None:
        prepare(optimizer, mine)
    optimizer.build(mine)
    for step in range(num_steps):
        optimizer.apply((grads_of or grads)(step, dtype), mine)
    return arrays(mine), arrays(optimizer.variables)


def arrays(variables):
    return [keras.ops.convert_to_numpy(keras.ops.cast(v, "float64")) for v in variables]


def difference(found, expected, start):
    movement = max(float(np.max(np.abs(b - a), initial=0.0)) for a, b in zip(start, expected))
    return max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(found, expected)) / movement


def assert_alike(name, found, expected):
    assert difference(found[0], expected[0], arrays(weights())) <= 1e-6, name
    assert len(found[1]) == len(expected[1])
    for a, b in zip(found[1], expected[1]):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * max(1.0, np.max(np.abs(b), initial=0.0)), err_msg=name)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    from keras_shardopt.kernels.torch import pieces

    monkeypatch.setattr(pieces, "PIECE", 2**12)


@pytest.fixture
def without_keras_arithmetic(monkeypatch):
    """Fails if an optimizer with a kernel updates by Keras' own operations."""
    from keras_shardopt.kernels.torch import fused as torch_fused

    def refuse(*_):
        raise AssertionError("not fused")

    def install():
        for kind in torch_fused._RULES:
            monkeypatch.setattr(kind, "_parallel_update_step", refuse)

    return install


@pytest.mark.parametrize("name", VARIANTS)
def test_many_updates_are_those_of_keras(name, without_keras_arithmetic):
    expected = trained(ks.CrossShard(VARIANTS[name](), fused=False))
    without_keras_arithmetic()
    assert_alike(name, trained(ks.CrossShard(VARIANTS[name]())), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_small_models_keep_kerass_arithmetic_where_it_is_faster(name, without_keras_arithmetic, monkeypatch):
    from keras_shardopt.kernels.torch import pieces

    monkeypatch.setattr(pieces, "PIECE", 2**15)  # above a fourth of the weights
    leaf = name.split()[0]
    if leaf in ("Adagrad", "Lion") or name == "SGD nesterov":
        assert_equal_bits(trained(ks.CrossShard(VARIANTS[name]()), 5), trained(VARIANTS[name](), 5))
    else:
        without_keras_arithmetic()
        trained(ks.CrossShard(VARIANTS[name]()), 5)


def test_under_accumulation_and_in_float64(without_keras_arithmetic):
    for arguments, dtype in (({"gradient_accumulation_steps": 2}, "float32"), ({}, "float64")):
        expected = trained(ks.CrossShard(o.Adam(0.01), fused=False, **arguments), dtype=dtype)
        fused = ks.CrossShard(o.Adam(0.01), **arguments)
        assert_alike(dtype, trained(fused, dtype=dtype), expected)


def test_excluded_variables_and_constraints():
    def prepare(optimizer, variables):
        optimizer.exclude_from_weight_decay(var_names=["w1"], var_list=variables[:1])
        variables[3].constraint = keras.constraints.MaxNorm(2.0)

    make = lambda: o.AdamW(0.01, weight_decay=0.5)  # noqa: E731
    expected = trained(ks.CrossShard(make(), fused=False), prepare=prepare)
    assert_alike("AdamW", trained(ks.CrossShard(make()), prepare=prepare), expected)


def test_weights_decay_in_the_pass_of_the_update(monkeypatch):
    kind = type(o.AdamW())
    count = []
    real = kind._apply_weight_decay
    monkeypatch.setattr(kind, "_apply_weight_decay", lambda self, variables: count.append(real(self, variables)))
    trained(ks.CrossShard(o.AdamW(0.01, weight_decay=0.1)), 3)
    assert not count
    trained(ks.CrossShard(o.AdamW(0.01, weight_decay=0.1), fused=False), 3)
    assert len(count) == 3
    expected = trained(o.AdamW(0.01, weight_decay=0.1), 3, "bfloat16")
    assert_equal_bits(trained(ks.CrossShard(o.AdamW(0.01, weight_decay=0.1)), 3, "bfloat16"), expected)


def test_variables_without_gradient_stay():
    def grads_of(step, dtype):
        return [None, *grads(step, dtype)[1:]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(ks.CrossShard(o.Adam(0.01), fused=False), grads_of=grads_of)
        found = trained(ks.CrossShard(o.Adam(0.01)), grads_of=grads_of)
    assert_alike("Adam", found, expected)
    np.testing.assert_array_equal(found[0][0], arrays(weights())[0])


class MyAdam(type(o.Adam())):
    """Has a formula that looks at whole variables."""

    def _parallel_update_step(self, grads, variables, learning_rate):
        super()._parallel_update_step([g / (1 + g.abs().sum()) for g in grads], variables, learning_rate)


class MyRMSprop(o.RMSprop):
    """Has a formula that looks at whole variables."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / (1 + keras.ops.sum(keras.ops.abs(gradient))), variable, learning_rate)


def replaced():
    optimizer = o.SGD(0.1, momentum=0.9)
    optimizer.update_step = lambda *_: None
    return optimizer


def transposed(step, dtype):
    found = grads(step, dtype)
    return [g.t().contiguous().t() if len(g.shape) == 2 else g for g in found]


def sparse(step, dtype):
    found = grads(step, dtype)
    return [found[0].to_sparse(), *found[1:]]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (MyAdam, {}),
        (MyRMSprop, {}),
        (replaced, {}),
        (lambda: o.Adam(0.01), {"dtype": "bfloat16"}),
        (lambda: o.SGD(0.1), {"grads_of": sparse}),
    ],
    ids=["subclass", "subclass by Keras' name", "method replaced", "bfloat16", "sparse"],
)
def test_what_does_not_fit_is_updated_by_keras(make, arguments):
    expected = trained(make(), 3, **arguments)
    assert_equal_bits(trained(ks.CrossShard(make()), 3, **arguments), expected)
    assert_equal_bits(trained(ks.CrossShard(make(), fused=False), 3, **arguments), expected)


def test_gradients_that_lie_otherwise_in_memory(without_keras_arithmetic):
    expected = trained(ks.CrossShard(o.Adam(0.01), fused=False))
    without_keras_arithmetic()
    assert_alike("Adam", trained(ks.CrossShard(o.Adam(0.01)), grads_of=transposed), expected)


def test_gradients_are_left_as_they_are():
    for name in ("SGD momentum", "SGD nesterov", "Adagrad", "Adam"):
        mine, given = weights(), grads(0)
        before = [g.clone() for g in given]
        ks.CrossShard(VARIANTS[name]()).apply(given, mine)
        assert all((a == b).all() for a, b in zip(given, before)), name


def test_the_optimizer_is_left_as_it_is():
    inner = o.Adam(0.01)
    optimizer = ks.CrossShard(inner)
    trained(optimizer, 1)
    assert not any(callable(value) for value in inner.__dict__.values())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.get_config() == optimizer.get_config()
    assert keras.optimizers.deserialize(keras.optimizers.serialize(ks.CrossShard(o.SGD(), fused=False))).fused is False


EXACT = {
    "SGD": lambda: o.SGD(0.1),
    "SGD momentum": lambda: o.SGD(0.1, momentum=0.9),
    "SGD nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: o.RMSprop(0.01),
    "RMSprop centered": lambda: o.RMSprop(0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "Adam": lambda: o.Adam(DECAYING),
    "Adam amsgrad": lambda: o.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "Adamax": lambda: o.Adamax(0.01, clipvalue=0.1),
    "Nadam": lambda: o.Nadam(0.01),
    "Adadelta": lambda: o.Adadelta(0.1),
    "Adagrad": lambda: o.Adagrad(0.05, gradient_accumulation_steps=2),
    "Lion": lambda: o.Lion(0.01),
    "Ftrl": lambda: o.Ftrl(0.01, learning_rate_power=-0.3, l1_regularization_strength=0.01, beta=0.1),
    "MixedPrecision": lambda: ks.MixedPrecision(o.RMSprop(0.01)),
}
ALWAYS_EXACT = ["SGD", "RMSprop", "RMSprop centered", "Adamax", "Adadelta", "Lion", "Ftrl"]
"""For which there is no faster formula, or only one with the same bits."""


def assert_equal_bits(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture
def num_pieces(monkeypatch):
    """Counts the pieces in which an optimizer updates."""
    from keras_shardopt.kernels.torch import pieces

    count = [0]
    real = pieces._update_piece

    def counting(*args):
        count[0] += 1
        real(*args)

    monkeypatch.setattr(pieces, "_update_piece", counting)
    return count


@pytest.fixture
def num_threads(request):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_optimizer_of_keras_in_pieces_is_tried():
    from keras_shardopt.kernels.torch import pieces

    leaves = [make() for name, make in EXACT.items() if name != "MixedPrecision"]
    assert {type(leaf) for leaf in leaves} == set(pieces._SLOTS)
    assert not pieces.is_elementwise(o.Lamb()) and not pieces.is_elementwise(o.Adafactor())


@pytest.mark.parametrize(
    ("num_threads", "dtype"),
    some([(1, "float32"), (1, "float64"), (2, "float32"), (2, "float64")], lambda case: case != (2, "float64")),
    indirect=["num_threads"],
)
@pytest.mark.parametrize("name", EXACT)
def test_pieces_have_the_bits_of_keras(name, dtype, num_pieces, num_threads):
    inner = ks.MixedPrecision(o.RMSprop(0.01)) if name == "MixedPrecision" else EXACT[name]()
    expected = trained(inner, 4, dtype)
    assert num_pieces == [0]
    found = trained(ks.CrossShard(EXACT[name](), fused=False), 4, dtype)
    assert_equal_bits((found[0], found[1][: len(expected[1])]), expected)
    if name == "SGD":  # a single operation
        assert num_pieces == [0]
    else:
        assert num_pieces[0] >= 2 * 17 or (name == "Ftrl" and num_threads > 1)
    if name in ALWAYS_EXACT:
        assert_equal_bits(trained(ks.CrossShard(EXACT[name]()), 4, dtype), found)


def test_false_is_kerass_own_arithmetic_in_half_precision(num_pieces):
    for name in ("Adam", "Lion", "RMSprop"):
        found = trained(ks.CrossShard(EXACT[name](), fused=False), 3, "bfloat16")
        assert_equal_bits(found, trained(EXACT[name](), 3, "bfloat16"))
    assert num_pieces == [0]


SCALED = {
    "LossScaling": lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": 6.0, "step_factor": 3.0}),
    "LossScaling, 3": lambda inner: ks.LossScaling(inner, 3.0),
    "LossScaling, 8": lambda inner: ks.LossScaling(inner, 8.0),
    "LARC": lambda inner: ks.LARC(inner, 0.01),
    "LARC, scale": lambda inner: ks.LARC(inner, 0.01, "scale"),
    "GradientClipping": lambda inner: ks.GradientClipping(inner, 0.5),
    "GradientClipping, within": lambda inner: ks.GradientClipping(inner, 1e6),
    "all": lambda inner: ks.LossScaling(ks.GradientClipping(ks.LARC(inner, 0.01), 0.5)),
    "MixedPrecision": lambda inner: ks.MixedPrecision(inner, ks.AutomaticLossScaler("Backoff", {"scale_max": 6.0})),
}


def some_with_nan(step, dtype):
    found = grads(step, dtype)
    if step == 2:
        found[3][5, 5] = float("nan")
    return [None if step == 3 and i == 1 else grad for i, grad in enumerate(found)]


@pytest.fixture
def num_handed_over(monkeypatch):
    """Counts the updates that multiply gradients themselves."""
    from keras_shardopt.kernels.torch import fused as torch_fused
    from keras_shardopt.kernels.torch import pieces

    count = [0]
    real = pieces.columns_of

    def counting(*args):
        found = real(*args)
        count[0] += any(factor is not None for factor in found.factors)
        return found

    for module in (torch_fused, pieces):
        monkeypatch.setattr(module, "columns_of", counting)
    return count


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("inner", ["Adam", "SGD momentum", "Nadam", "RMSprop"])
@pytest.mark.parametrize("wrapper", SCALED)
def test_multiplied_in_the_update_has_the_bits_of_before(wrapper, inner, fused, monkeypatch, num_handed_over):
    from keras_shardopt.wrapping import wrapper as wrapping

    def found():
        made = ks.CrossShard(SCALED[wrapper]({**EXACT, **VARIANTS}[inner]()), fused=fused)
        return trained(made, 6, grads_of=some_with_nan)

    inside = found()
    assert (num_handed_over[0] > 1) == ("within" not in wrapper)  # once there is a NaN
    monkeypatch.setattr(wrapping, "_kernels", None)
    before = num_handed_over[0]
    assert_equal_bits(inside, found())
    assert num_handed_over[0] == before


@pytest.mark.parametrize("more", [{"clipnorm": 0.1}, {"gradient_accumulation_steps": 2}, {"loss_scale_factor": 4.0}])
def test_what_keras_does_with_gradients_comes_after(more, monkeypatch, num_handed_over):
    from keras_shardopt.wrapping import wrapper as wrapping

    def found():
        return trained(ks.CrossShard(ks.GradientClipping(o.Adam(0.01, **more), 0.5)), 4)

    inside = found()
    assert num_handed_over == [0]
    monkeypatch.setattr(wrapping, "_kernels", None)
    assert_equal_bits(inside, found())


def test_a_scale_that_bfloat16_rounds_to_one_is_one_to_divide_by():
    weight = keras.Variable([0.0, 0.0], dtype="bfloat16")
    optimizer = ks.CrossShard(ks.LossScaling(o.SGD(1.0), 1.003))
    optimizer.build([weight])
    grad = keras.ops.cast([1.0, 3.0], "bfloat16")
    optimizer.apply([grad])
    expected = keras.ops.cast(-(keras.ops.cast(grad, "float32") / 1.003), "bfloat16")
    np.testing.assert_array_equal(arrays([weight])[0], keras.ops.convert_to_numpy(keras.ops.cast(expected, "float64")))
    assert arrays([weight])[0][1] != -3.0


@pytest.mark.parametrize("scale", [2.0**-90, 0.5, 2.0**15, 2.0**90, 2.0**120, 3.0])
def test_a_product_takes_the_place_of_a_quotient_with_its_bits(scale):
    import torch

    random = torch.Generator().manual_seed(0)
    grad = torch.randn(4096, generator=random) * 2.0 ** torch.randint(-149, 127, (4096,), generator=random)
    weights = keras.Variable(np.zeros(4096)), keras.Variable(np.zeros(4096))
    for weight, wrapped in zip(weights, (True, False)):
        inner = o.SGD(1.0)
        optimizer = ks.CrossShard(ks.LossScaling(inner, scale) if wrapped else inner)
        optimizer.build([weight])
        optimizer.apply([grad.clone() if wrapped else grad / torch.tensor(scale)])
    assert_equal_bits(*([arrays([weight]), []] for weight in weights))


def test_quick_norms_and_factors_have_the_bits_of_the_general_ones(monkeypatch):
    import torch

    from keras_shardopt.backends import norms as general
    from keras_shardopt.backends.torch import norms

    values = [v.value for v in weights()] + [torch.randn(33, 7).T, torch.randn(64, 64).double()]
    for value in values:
        wide = value if value.dtype == torch.float64 else value.float()
        assert norms.sum_of_squares(value).equal(torch.square(wide).sum()), value.shape
    ratios = torch.tensor([0.0, 1e-9, 0.5, 2.0, float("inf"), float("nan")])
    quick = [general.bounded(ratios, 1e-7, high) for high in (None, 1.0)]
    quick.append(general.ones_where(ratios == 0, ratios))
    monkeypatch.setattr(general, "_direct", None)
    slow = [general.bounded(ratios, 1e-7, high) for high in (None, 1.0)]
    slow.append(general.ones_where(ratios == 0, ratios))
    for a, b in zip(quick, slow, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("worst", [1.0, 1e30, float("inf"), float("-inf"), float("nan")])
def test_a_look_at_sums_decides_as_one_at_elements(monkeypatch, worst):
    """1e30 overflows when it is squared, and is finite."""
    from keras_shardopt.backends import norms

    def found():
        weight = keras.Variable(np.zeros(5))
        optimizer = ks.CrossShard(ks.LossScaling(o.SGD(1.0), "Backoff", {"scale_max": 8.0}))
        optimizer.build([weight])
        for value in (1.0, worst, 2.0):
            optimizer.apply([keras.ops.convert_to_tensor([0.0, value, 1.0, 1.0, 1.0])])
        return arrays([weight]), arrays(optimizer.variables)

    quick, skipped = found(), int(not np.isfinite(worst))
    assert sum(skipped == v for v in quick[1][-3:]) and quick[1][0] == 3 - skipped
    monkeypatch.setattr(norms, "are_surely_finite", lambda _: False)
    assert_equal_bits(quick, found())


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_false_holds_further_in_and_further_out(inside):
    def nested(outer, inner):
        made = ks.CrossShard(o.AdamW(0.01, weight_decay=0.1), fused=inner)
        return trained(ks.CrossShard(made, fused=outer), 3)

    expected = trained(ks.CrossShard(o.AdamW(0.01, weight_decay=0.1), fused=False), 3)
    assert_equal_bits(nested("auto", False) if inside else nested(False, "auto"), expected)
    fused = nested("auto", "auto")
    assert any((a != b).any() for a, b in zip(fused[0], expected[0]))


@pytest.mark.skipif(not hasattr(o, "MultiOptimizer"), reason="this Keras has none")
def test_false_holds_for_a_part():
    def found(first, second):
        made = [ks.CrossShard(o.Adam(0.01), fused=first), ks.CrossShard(o.Adam(0.01), fused=second)]
        return trained(ks.CrossShard(o.MultiOptimizer(o.OptimizerMap(made[0], {".*w3": made[1]}))), 3)[0]

    exact, fused, mixed = found(False, False), found("auto", "auto"), found("auto", False)
    assert (mixed[3] == exact[3]).all() and (mixed[3] != fused[3]).any()
    assert (mixed[0] == fused[0]).all() and (mixed[0] != exact[0]).any()


def test_an_update_that_is_left_out_hands_nothing_on():
    optimizer = ks.CrossShard(ks.LossScaling(o.SGD(1.0), 4.0))
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])
    inner = optimizer.inner.inner
    optimizer.apply([keras.ops.convert_to_tensor([8.0, 8.0])])
    assert not any(callable(value) for value in inner.__dict__.values())
    inner.apply([keras.ops.convert_to_tensor([1.0, 1.0])])
    np.testing.assert_array_equal(arrays([weight])[0], [-2.0, -2.0])


def test_a_method_that_is_replaced_sees_multiplied_gradients():
    inner, norms = o.SGD(1.0), []
    optimizer = ks.CrossShard(ks.GradientClipping(inner, 0.5))
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])
    real = inner.apply
    inner.apply = lambda grads, variables=None: (norms.append(float(grads[0].norm())), real(grads, variables))
    optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])])
    assert norms == [pytest.approx(0.5)]


def test_nadam_counts_also_where_all_is_empty():
    """As on a rank that owns nothing of what is trained for a while."""
    found = []
    for fused in ("auto", False):
        inner = o.Nadam(0.1)
        optimizer = ks.CrossShard(inner, fused=fused)
        optimizer.build([keras.Variable(np.zeros((0,)))])
        for _ in range(3):
            optimizer.apply([keras.ops.zeros((0,))])
        found.append(keras.ops.convert_to_numpy(inner._u_product).item())
    assert found[0] == found[1] < 1


def test_lion_has_the_bits_of_keras_for_every_kind_of_number():
    import torch

    random = np.random.default_rng(3)
    kinds = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, -1e-39, 1e-38, 3e38, -3e38], "float32")

    def some():
        numbers = random.normal(size=(3, 12289)).astype("float32") * 10.0 ** random.integers(-44, 38, size=(3, 12289))
        chosen = random.random(numbers.shape) < 0.3
        return np.where(chosen, random.choice(kinds, numbers.shape), numbers).astype("float32")

    start, given = some(), [torch.from_numpy(some()) for _ in range(4)]
    found = []
    for wrapped in (lambda inner: inner, ks.CrossShard):
        inner, variable = o.Lion(0.01), keras.Variable(start)
        optimizer = wrapped(inner)
        optimizer.build([variable])
        momentum = inner._momentums[0].value.detach()
        for grad in given:
            optimizer.apply([grad], [variable])
            # What cancels out but for a rounding, whose sign is all that counts.
            optimizer.apply([-9 * momentum * (1 + 1e-7 * torch.sign(grad))], [variable])
        found.append([tensor.detach().numpy().view("int32") for tensor in (variable.value, momentum)])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


def test_lion_takes_variables_of_one_size_and_other_shapes():
    optimizer = ks.CrossShard(o.Lion(0.1))
    optimizer.build([keras.Variable([[1.0, 2.0]]), keras.Variable([1.0, 2.0])])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "An output with one or more elements was resized")
        optimizer.apply([keras.ops.ones((1, 2)), keras.ops.ones((2,))])


@pytest.mark.parametrize("wrong", [True, None, "always", 0, 1])
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match='`fused` must be "auto" or False. Received: fused='):
        ks.CrossShard("adam", fused=wrong)


def epsilon_not_divided(optimizer, rate, columns):
    """PyTorch's own formula, with Keras' epsilon."""
    import torch

    ((weights, grads, momentums, velocities),) = columns.lists()
    step = [torch.tensor(float(optimizer.iterations + 1))] * len(weights)
    betas = {"beta1": optimizer.beta_1, "beta2": optimizer.beta_2}
    rest = {"weight_decay": 0.0, "eps": optimizer.epsilon, "amsgrad": False, "maximize": False}
    torch._fused_adam_(weights, grads, momentums, velocities, [], step, lr=float(rate), **betas, **rest)


def rate_forgotten(optimizer, rate, columns):
    import torch

    ((weights, grads, momentums),) = columns.lists()
    rest = {"weight_decay": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(weights, grads, momentums, momentum=optimizer.momentum, lr=-1.0, dampening=1.0, **rest)


@pytest.mark.parametrize(
    ("variant", "rule", "fault"),
    [("Adam epsilon", "_adam", epsilon_not_divided), ("SGD momentum", "_momentum", rate_forgotten)],
)
def test_a_planted_fault_is_seen(monkeypatch, variant, rule, fault):
    from keras_shardopt.kernels.torch import fused as torch_fused

    expected = trained(ks.CrossShard(VARIANTS[variant](), fused=False))
    monkeypatch.setattr(torch_fused, rule, fault)
    found = trained(ks.CrossShard(VARIANTS[variant]()))
    assert difference(found[0], expected[0], arrays(weights())) > 1e-4


@pytest.mark.exhaustive
def test_fit_with_torch_compile():
    model = problem.InOneLayer()
    model.compile(ks.CrossShard(o.Adam(0.01)), "mse", jit_compile=True)
    reference = problem.model()
    reference.compile(o.Adam(0.01), "mse")
    x, y = problem.data(num_steps=10)
    for each in (model, reference):
        with problem.without_generated_code():
            each.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= 1e-5


def test_a_rate_too_small_to_be_added_to_one():
    weight = keras.Variable(np.zeros(4, "float32"))
    optimizer = ks.CrossShard(keras.optimizers.SGD(1e-12, momentum=0.5))
    optimizer.build([weight])
    for _ in range(2):
        optimizer.apply([keras.ops.ones(4)])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(weight), np.full(4, -2.5e-12), rtol=1e-6)


def test_an_attribute_of_an_inner_optimizer_is_no_setting_of_ours():
    from keras_shardopt.update.fused import _leaves

    adam = keras.optimizers.Adam()
    adam.fused = False
    assert list(_leaves(ks.CrossShard(adam), False)) == [(adam, False)]
    assert list(_leaves(ks.CrossShard(adam, torch=ks.TorchSpeed(fused=False)), False)) == [(adam, True)]


@pytest.mark.parametrize("make", [o.Adam, lambda: o.SGD(0.1, momentum=0.9), o.Adagrad, o.Lion])
def test_a_model_without_weights_and_gradients_of_another_shape(make):
    optimizer = ks.CrossShard(make())
    optimizer.build([])
    assert optimizer.built
    optimizer = ks.CrossShard(make())
    mine = weights()
    optimizer.build(mine)
    with pytest.raises(RuntimeError, match="size of tensor|must match|not broadcastable"):
        optimizer.apply(
            [grad[:1] if grad.ndim == 1 else grad.repeat(2, 1) if grad.ndim else grad for grad in grads(0)], mine
        )

"""Arguments of `CrossShard` that are objects now work in their old spelling for one more release."""

import copy
import pickle

import keras
import pytest

import keras_shardopt as ks


def sgd():
    return keras.optimizers.SGD(0.7, name="outer")


def arguments_of(optimizer):
    config = optimizer.get_config()
    return {name: value for name, value in config.items() if name not in ("name", "inner_optimizer")}


CASES = {
    "rounds": (
        lambda: {"sync_every": 3, "outer_optimizer": sgd(), "sync_fragments": 2, "sync_warmup": 4},
        lambda: {"extensions": [ks.LocalSGD(3, outer_optimizer=sgd(), fragments=2, warmup=4)]},
        "`sync_every` and `outer_optimizer` and `sync_fragments` and `sync_warmup` .* extensions=.LocalSGD.every=3, ",
    ),
    "parts": (
        lambda: {"virtual_replicas": 8},
        lambda: {"extensions": [ks.VirtualReplicas(8)]},
        r"`virtual_replicas` .*extensions=\[VirtualReplicas\(number=8\)\]",
    ),
    "speed": (
        lambda: {"fused": False, "overlap": False, "bucket_mib": 3},
        lambda: {"torch": ks.TorchSpeed(fused=False, overlap=False, bucket_mib=3.0)},
        r"`fused` and .* torch=TorchSpeed\(fused=False, overlap=False, bucket_mib=3.0\)",
    ),
}


@pytest.mark.neutral
@pytest.mark.parametrize("name", CASES)
def test_an_old_spelling_makes_the_same_and_names_the_new_one(name):
    old, new, words = CASES[name]
    with pytest.warns(DeprecationWarning, match=words) as caught:
        before = ks.CrossShard("adam", **old())
    assert [each.filename for each in caught if "next release" in str(each.message)] == [__file__]
    after = ks.CrossShard("adam", **new())  # warnings are errors
    assert arguments_of(before) == arguments_of(after) and repr(before) == repr(after)
    for argument, value in old().items():
        found = getattr(after, argument)
        assert found == value or found.get_config() == value.get_config()


@pytest.mark.neutral
@pytest.mark.parametrize("name", CASES)
def test_files_copies_and_pickles_hold_the_objects(name):
    optimizer = ks.CrossShard("adam", **CASES[name][1]())
    config = optimizer.get_config()
    assert config.keys() & CASES[name][1]().keys()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), ks.CrossShard.from_config(config)]
    assert [each.get_config() for each in copies] == [config] * 3


@pytest.mark.neutral
def test_a_default_is_said_to_go_too():
    with pytest.warns(DeprecationWarning, match="`fused='auto'` and `bucket_mib=25.0` of") as caught:
        optimizer = ks.CrossShard("sgd", fused="auto", bucket_mib=25.0)
    assert len(caught) == 1
    assert arguments_of(optimizer) == arguments_of(ks.CrossShard("sgd"))


@pytest.mark.neutral
@pytest.mark.filterwarnings("error:.* next release:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_files_with_old_arguments_load_without_a_warning(name):
    old, new, _ = CASES[name]
    written = {key: keras.saving.serialize_keras_object(value) for key, value in old().items()}
    plain = ks.CrossShard("adam").get_config()
    assert arguments_of(ks.CrossShard.from_config({**plain, **written})) == arguments_of(ks.CrossShard("adam", **new()))


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: {"sync_evry": 3}, r"unexpected keyword argument 'sync_evry'"),
        (
            lambda: {"sync_every": 3, "extensions": [ks.LocalSGD(2)]},
            "`sync_every` cannot be combined with a `LocalSGD`",
        ),
        (
            lambda: {"sync_every": 0},
            "`sync_every` must be valid for a `LocalSGD`. `every` must be .* Received: every=0",
        ),
        (
            lambda: {"virtual_replicas": "2"},
            "`virtual_replicas` must be valid for a `VirtualReplicas`. `number` must be",
        ),
        (lambda: {"fused": False, "torch": ks.TorchSpeed()}, "`fused` cannot be combined with a `TorchSpeed`"),
        (lambda: {"extensions": ks.LocalSGD(2)}, "`extensions` must be a list .* Received: extensions=LocalSGD"),
        (
            lambda: {"extensions": [ks.LocalSGD(2), ks.LocalSGD(3)]},
            "`extensions` must contain at most one object of each class",
        ),
        (lambda: {"torch": {"fused": False}}, "`torch` must be a `keras_shardopt.TorchSpeed` or None"),
    ],
)
def test_what_is_wrong_is_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        ks.CrossShard("sgd", **arguments())


@pytest.mark.neutral
def test_an_outer_optimizer_moves_the_weights_of_one_optimizer():
    rounds = ks.LocalSGD(2, outer_optimizer=sgd())
    ks.CrossShard("adam", extensions=[rounds]).build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="`outer_optimizer` must be a new Keras optimizer"):
        ks.CrossShard("adam", extensions=[rounds])


@pytest.mark.neutral
def test_an_unknown_attribute_is_an_error_of_python():
    with pytest.raises(AttributeError, match="'CrossShard' object has no attribute 'sync_evry'"):
        ks.CrossShard("sgd").sync_evry  # noqa: B018


def every_second(count):
    return 2


def halved(grads, variables):
    return [grad / 2 for grad in grads]


@pytest.mark.neutral
@pytest.mark.parametrize("is_scope", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{"replica_transform": halved}, {"extensions": [ks.LocalSGD(every_second)]}, {"sync_every": every_second}],
)
def test_custom_objects_reach_the_functions_in_a_file(arguments, is_scope, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", **arguments), "mse")
    model.save(tmp_path / "model.keras")
    custom = {"halved": halved, "every_second": every_second}
    with keras.saving.custom_object_scope(custom if is_scope else {}):
        loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=None if is_scope else custom)
    assert arguments_of(loaded.optimizer) == arguments_of(model.optimizer)


class Often(ks.CrossShard):
    def __init__(self, inner_optimizer, sync_every=10, fused=False, **kwargs):
        super().__init__(inner_optimizer, sync_every=sync_every, fused=fused, **kwargs)


@pytest.mark.neutral
def test_a_subclass_that_passes_old_arguments_is_loaded():
    optimizer = Often("adam", sync_every=5, sync_warmup=3, bucket_mib=5.0)
    loaded = Often.from_config(optimizer.get_config())
    assert arguments_of(loaded) == arguments_of(optimizer)
    plain = ks.CrossShard("adam").get_config()
    old = {**plain, "sync_every": 7, "fused": "auto", "overlap": False, "bucket_mib": 25.0}
    assert repr(Often.from_config(old)) == repr(ks.CrossShard("adam", sync_every=7, overlap=False)).replace(
        "CrossShard(Adam", "Often(Adam"
    )


@pytest.mark.neutral
@pytest.mark.parametrize("settings", [ks.LocalSGD(2), ks.VirtualReplicas(4), ks.TorchSpeed()], ids=repr)
def test_objects_cannot_be_changed(settings):
    for name in settings.get_config():
        with pytest.raises(
            AttributeError, match=f"`{name}` of a `.*` cannot be changed. Received: 3. Create a new object"
        ):
            setattr(settings, name, 3)


@pytest.mark.neutral
def test_a_subclass_of_settings_is_read_as_its_class():
    class Mine(ks.LocalSGD):
        pass

    assert ks.CrossShard("sgd", extensions=[Mine(5)]).sync_every == 5

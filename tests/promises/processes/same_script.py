"""A user's script: the same text on every backend, for any number of replicas and each kind of data.

Arguments: the number of replicas, a folder for all that it writes, the kind of data.
"""

import importlib.util
import json
import pathlib
import sys

import keras
import numpy as np

import keras_shardopt as ks

num_replicas, folder, kind = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
BATCH_SIZE = 64
NUM_ROWS = 353  # of which 317 train: four batches, and one of 61 rows
NUM_TRAINED = 317
CLASS_WEIGHT = {0: 1.0, 1: 3.0, 2: 0.5}

keras.utils.set_random_seed(3)
random = np.random.default_rng(3)
words = random.integers(0, 20, (NUM_ROWS, 5)).astype("int32")
numbers = random.normal(size=(NUM_ROWS, 6)).astype("float32")
labels = ((words.sum(axis=1) + 8 * numbers.sum(axis=1)).astype("int32") // 16 % 3).astype("int32")
x, y = {"words": words, "numbers": numbers}, labels


def rows(which):
    return {name: array[which] for name, array in x.items()}, y[which]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-NUM_TRAINED // BATCH_SIZE)

    def __getitem__(self, index):
        return rows(slice(index * BATCH_SIZE, min((index + 1) * BATCH_SIZE, NUM_TRAINED)))


def generator():
    batches = Batches()
    while True:
        yield from (batches[index] for index in range(len(batches)))


def loader():
    import torch

    torch.manual_seed(3)  # as Keras does on its backend only

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_TRAINED

        def __getitem__(self, index):
            return rows(index)

    return torch.utils.data.DataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True)


def dataset():
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices(rows(slice(NUM_TRAINED)))
    return whole.shuffle(NUM_TRAINED, seed=5).batch(BATCH_SIZE)


def build_model():
    inputs = {"words": keras.Input((5,), dtype="int32", name="words"), "numbers": keras.Input((6,), name="numbers")}
    hidden = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(inputs["words"]))
    hidden = keras.layers.Concatenate()([hidden, inputs["numbers"]])
    hidden = keras.layers.Dense(16, use_bias=False)(hidden)  # whose gradient would be nothing but rounding
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    hidden = keras.layers.Activation("tanh")(hidden)
    hidden = keras.layers.Dropout(0.0)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


def fit(model, **more):
    """With what the kind of data needs."""
    held_out = rows(slice(NUM_TRAINED, None))
    data = {
        "arrays": lambda: {"x": x, "y": y, "validation_split": 0.1},
        "PyDataset": lambda: {"x": Batches(), "validation_data": held_out},
        "generator": lambda: {"x": generator(), "steps_per_epoch": 5, "shuffle": False, "validation_data": held_out},
        "DataLoader": lambda: {"x": loader(), "validation_data": held_out},
        "tf.data": lambda: {"x": dataset(), "shuffle": False, "validation_data": held_out},
    }[kind]()
    data["batch_size" if kind == "arrays" else "validation_batch_size"] = BATCH_SIZE
    if kind not in ("generator", "DataLoader"):  # for which Keras has none
        data["class_weight"] = CLASS_WEIGHT
    return model.fit(**data, verbose=0, **more).history


def adamw(rate):
    # With an epsilon above the noise of rounding, or the first updates of weights with tiny gradients are noise.
    return ks.CrossShard(keras.optimizers.AdamW(rate, weight_decay=0.01, epsilon=1e-2))


def slots(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]


found, histories = {}, []
with ks.data_parallel(num_replicas=num_replicas) as replicas:
    model = build_model()
    model.compile(adamw(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
found["start"] = model.get_weights()

# Of arrays on two replicas, the metrics of one of them would reduce the rate an epoch before those of all rows do, and
# those of the other one restore the weights of another epoch.
callbacks = [
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.2),
    keras.callbacks.EarlyStopping("val_accuracy", patience=2, mode="max", restore_best_weights=True),
    keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
    keras.callbacks.CSVLogger(folder / "log.csv"),
]
if importlib.util.find_spec("tensorflow"):  # Keras' own callback needs it on every backend
    callbacks.append(keras.callbacks.TensorBoard(folder / "logs"))
histories.append(fit(model, epochs=6, callbacks=callbacks))
found["fitted"] = model.get_weights()
found["slots"] = slots(model)
found["rate"] = [keras.ops.convert_to_numpy(model.optimizer.learning_rate)]
found["evaluated"] = model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
found["predicted"] = [model.predict(x, batch_size=BATCH_SIZE, verbose=0)]
ks.save_model(model, folder / "model.keras")

with ks.data_parallel(num_replicas=num_replicas) as replicas:
    model = keras.saving.load_model(folder / "model.keras")
histories.append(fit(model, epochs=1))
found["continued"] = model.get_weights()

with ks.data_parallel(num_replicas=num_replicas) as replicas:
    model = keras.saving.load_model(folder / "best.keras")
    found["best"] = model.get_weights()
    model.compile(adamw(ks.schedules.CosineDecay(0.02, decay_steps=12)), "sparse_categorical_crossentropy")
histories.append(fit(model, epochs=2))
found["scheduled"] = model.get_weights()
found["slots scheduled"] = slots(model)
found["differs"] = [np.float64(replicas.largest_difference(model))]

if replicas.is_chief:
    arrays = {f"{name}/{i}": array for name, values in found.items() for i, array in enumerate(values)}
    np.savez(folder / "results.npz", **arrays)
    (folder / "histories.json").write_text(json.dumps(histories))
replicas.close()

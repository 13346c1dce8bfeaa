"""Ordinary models whose layers Keras names by counting, in every way in which models are put together.

As a program it loads, in a process that has made other layers before, what another one has saved. Arguments: the
folder, and the names of the models.
"""

import pathlib
import sys

import keras
import numpy as np

import keras_shardopt as ks

PACKAGE = "keras_shardopt_tests"
WIDTH = 4  # of everything: no shape tells layers apart


@keras.saving.register_keras_serializable(PACKAGE)
class FeedForward(keras.layers.Layer):
    """Holds layers without names of their own, as blocks of keras.io do."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.units = units
        self.first = keras.layers.Dense(units)
        self.second = keras.layers.Dense(units)

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return x + self.second(self.first(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(PACKAGE)
class TransformerBlock(keras.layers.Layer):
    """That of keras.io's text classification: attention, a `Sequential` of `Dense`, two normalisations."""

    def __init__(self, embed_dim, **arguments):
        super().__init__(**arguments)
        self.embed_dim = embed_dim
        self.att = keras.layers.MultiHeadAttention(num_heads=1, key_dim=embed_dim)
        self.ffn = keras.Sequential([keras.layers.Dense(embed_dim, activation="relu"), keras.layers.Dense(embed_dim)])
        self.layernorm1 = keras.layers.LayerNormalization()
        self.layernorm2 = keras.layers.LayerNormalization()

    def call(self, x):
        x = self.layernorm1(x + self.att(x, x))
        return self.layernorm2(x + self.ffn(x))

    def get_config(self):
        return {**super().get_config(), "embed_dim": self.embed_dim}


@keras.saving.register_keras_serializable(PACKAGE)
class FeatureCross(keras.layers.Layer):
    """As in keras-rs: a low-rank pair of `Dense`, made when it is built, one named after the layer's own name."""

    def build(self, shape):
        self.down = keras.layers.Dense(WIDTH, use_bias=False)
        self.up = keras.layers.Dense(shape[-1], name=f"{self.name}_up")
        self.down.build(shape)
        self.up.build((None, WIDTH))

    def call(self, x):
        return x * self.up(self.down(x)) + x


@keras.saving.register_keras_serializable(PACKAGE)
class Subclassed(keras.Model):
    """A model with everything as attributes."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.out = keras.layers.Dense(WIDTH)
        self.blocks = [FeedForward(WIDTH), FeedForward(WIDTH)]
        self.scale = keras.Variable(np.ones(WIDTH, "float32"))

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.scale)


def _dense():
    return keras.layers.Dense(WIDTH)


def _functional(*layers, shape=(WIDTH,), dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    x = inputs
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def subclassed():
    model = Subclassed()
    model(np.ones((1, WIDTH), "float32"))
    return model


def nested():
    def inner():
        return keras.Sequential([keras.Input((WIDTH,)), _dense(), _dense()])

    return _functional(_dense(), inner(), _functional(_dense(), inner()), _dense())


def shared():
    layer, block = _dense(), FeedForward(WIDTH)
    return _functional(layer, block, _dense(), layer, block)


def low_rank():
    layers = [_dense(), _dense(), FeedForward(WIDTH)]
    model = _functional(*layers)
    layers[0].enable_lora(2)  # not inside `FeedForward`, whose config does not say so: Keras cannot load that
    return model


def tied():
    embedding = keras.layers.ReversibleEmbedding(7, WIDTH) if hasattr(keras.layers, "ReversibleEmbedding") else None
    tokens = keras.Input((3,), dtype="int32")
    if embedding is None:  # an older Keras
        embedding = keras.layers.Embedding(7, WIDTH)
        return keras.Model(tokens, FeedForward(WIDTH)(embedding(tokens)))
    return keras.Model(tokens, embedding(FeedForward(WIDTH)(embedding(tokens)), reverse=True))


def transformer():
    return _functional(_dense(), TransformerBlock(WIDTH), TransformerBlock(WIDTH), _dense(), shape=(3, WIDTH))


def recurrent():
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(WIDTH // 2, return_sequences=True))
    return _functional(lstm, keras.layers.TimeDistributed(_dense()), keras.layers.GRU(WIDTH), shape=(3, WIDTH))


def twice():
    """The second of two that one program makes."""
    return [_functional(_dense(), FeedForward(WIDTH), _dense()) for _ in range(2)][1]


MODELS = {
    "an inner layer between two": lambda: keras.Sequential([keras.Input((WIDTH,)), _dense(), FeedForward(4), _dense()]),
    "subclassed": subclassed,
    "nested": nested,
    "shared layers": shared,
    "LoRA": low_rank,
    "tied embeddings": tied,
    "two copies of one block": lambda: _functional(FeedForward(WIDTH), _dense(), FeedForward(WIDTH), _dense()),
    "a transformer": transformer,
    "crossed features": lambda: _functional(_dense(), FeatureCross(), FeatureCross(), _dense()),
    "wrapped layers": recurrent,
    "made twice": twice,
}


def filled(model, optimizer):
    """The model, compiled, with another number in each array of the optimizer's state."""
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate(optimizer.variables[2:]):
        variable.assign(np.full(variable.shape, number + 1.0))
    optimizer.iterations.assign(3)
    return model


def adam():
    return keras.optimizers.Adam(0.01)


def state(model):
    return [keras.ops.convert_to_numpy(v).tolist() for v in model.optimizer.variables]


def expected(num_arrays):
    """What `filled` has put into so many arrays, each by one of its numbers."""
    return [3.0, None, *(i + 1.0 for i in range(num_arrays - 2))]


def numbers(model):
    """The number of which each array of the state is full, past the rate, which is nobody's concern."""
    found = [np.unique(keras.ops.convert_to_numpy(v)) for v in model.optimizer.variables]
    return [float(values[0]) if i != 1 and len(values) == 1 else None for i, values in enumerate(found)]


def main():
    folder, *names = sys.argv[1:]
    for i, name in enumerate(names):
        model = keras.saving.load_model(pathlib.Path(folder) / f"{i}.keras")
        assert isinstance(model.optimizer, ks.CrossShard)
        assert numbers(model) == expected(len(model.optimizer.variables)), name
        print(name)


if __name__ == "__main__":
    main()

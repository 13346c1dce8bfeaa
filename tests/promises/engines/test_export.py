"""`model.export` of a trained model, in every format that Keras has on a backend: the runtime predicts the same."""

import importlib.util
import os
import sys

import pytest
from support import launch

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
import sys
import keras
import numpy as np

import keras_shardopt as ks

kind, folder = sys.argv[1:]
torch = keras.config.backend() == "torch"
with ks.data_parallel(1 if torch else 2):
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(synchronized=True)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(ks.CrossShard("adam"), "mse")
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model.fit(x, x.sum(1, keepdims=True), verbose=0)
ks.save_model(model, f"{folder}/model.keras", portable=True)
loaded = keras.saving.load_model(f"{folder}/model.keras")
loaded(x)  # exporters of ONNX need a model that was called


def run_tf_saved_model(path):
    import tensorflow as tf

    artifact = tf.saved_model.load(path)  # its functions need it alive
    return artifact.serve(x).numpy()


def run_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def run_openvino(path):
    import openvino

    return openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]


def run_litert(path):
    if torch:
        from ai_edge_litert.interpreter import Interpreter
    else:
        import tensorflow as tf

        Interpreter = tf.lite.Interpreter
    interpreter = Interpreter(model_path=path)
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(result["index"])


def run_torch(path):
    import torch

    return torch.export.load(path).module()(torch.tensor(x)).detach().numpy()


endings = {"onnx": ".onnx", "openvino": ".xml", "litert": ".tflite", "torch": ".pt2"}
expected = model.predict(x, verbose=0)
for name, each in [("trained", model), ("loaded", loaded)]:
    path = f"{folder}/{name}{endings.get(kind, '')}"
    fixed = torch and kind in ("torch", "litert")
    signature = [keras.InputSpec(shape=(32, 4), dtype="float32")] if fixed else None
    each.export(path, format=kind, verbose=False, input_signature=signature)
    difference = np.max(np.abs(globals()[f"run_{kind}"](path) - expected))
    assert difference < 1e-5, (name, difference)
    print("exported", name)
"""
NEEDS = {"onnx": ["onnxruntime"], "openvino": ["openvino"], "tf_saved_model": ["tensorflow"]}
CASES = {
    "tensorflow": {"tf_saved_model": [], "onnx": ["tf2onnx"], "openvino": [], "litert": []},
    "jax": {"tf_saved_model": [], "onnx": ["jax2onnx"]},
    "torch": {"onnx": ["onnxscript"], "openvino": [], "litert": ["litert_torch"], "torch": []},
}


@pytest.mark.parametrize("backend, kind", [(backend, kind) for backend, kinds in CASES.items() for kind in kinds])
def test_exported_models_predict_the_same(backend, kind, tmp_path):
    missing = [each for each in NEEDS.get(kind, []) + CASES[backend][kind] if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    environment = launch.variables(backend, OMP_NUM_THREADS="1", XLA_FLAGS="", JAX_PLATFORMS="cpu")
    printed = launch.run([sys.executable, "-c", PROGRAM, kind, str(tmp_path)], 200, {**os.environ, **environment})
    assert "exported trained" in printed and "exported loaded" in printed

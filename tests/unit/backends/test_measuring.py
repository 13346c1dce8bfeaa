"""Each backend reads its profiler's traces. Traces of a GPU are made by hand here, in the format of the profiler."""

import json

import keras
import pytest

from keras_shardopt.backends import for_backend

measuring = for_backend({name: f"keras_shardopt.backends.{name}.measuring" for name in ("tensorflow", "jax", "torch")})

XSPACE = """
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 9000000 } }
         event_metadata { key: 1 value { id: 1 name: "dense/MatMul:MatMul" } } }
planes { name: "/device:GPU:0" id: 1
         lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 1000
                 events { metadata_id: 1 offset_ps: 2000000 duration_ps: 4000000 }
                 events { metadata_id: 2 offset_ps: 6000000 duration_ps: 1000000 } }
         lines { id: 2 name: "Stream #14(MemcpyH2D)" timestamp_ns: 1000
                 events { metadata_id: 3 offset_ps: 0 duration_ps: 3000000 } }
         lines { id: 3 name: "XLA Modules" timestamp_ns: 1000
                 events { metadata_id: 4 offset_ps: 0 duration_ps: 9000000 } }
         event_metadata { key: 1 value { id: 1 name: "gemm" } }
         event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce" } }
         event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
         event_metadata { key: 4 value { id: 4 name: "jit_train_step" } } }
"""


def write_jax(folder):
    import jax

    write_xspace(folder, jax.profiler.ProfileData.text_proto_to_serialized_xspace(XSPACE))


def write_tensorflow(folder):
    from google.protobuf import text_format
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    write_xspace(folder, text_format.Parse(XSPACE, XSpace()).SerializeToString())


def write_xspace(folder, serialized):
    (folder / "plugins" / "profile" / "2026").mkdir(parents=True)
    (folder / "plugins" / "profile" / "2026" / "host.xplane.pb").write_bytes(serialized)


def write_torch(folder):
    rows = [
        ("cpu_op", "aten::mm", 1, 0.0, 9.0),
        ("kernel", "gemm", 7, 3.0, 4.0),
        ("kernel", "ncclDevKernel_AllReduce", 7, 7.0, 1.0),
        ("gpu_user_annotation", "nccl:all_reduce", 7, 7.0, 1.0),
        ("gpu_memcpy", "MemcpyH2D", 8, 1.0, 3.0),
        ("cuda_runtime", "cudaLaunchKernel", 1, 1.0, 1.0),
    ]
    names = "cat", "name", "tid", "ts", "dur"
    traced = [{"ph": "X", "pid": 0, **dict(zip(names, row))} for row in rows] + [{"ph": "M", "name": "process_name"}]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": traced}))


def test_on_a_gpu_only_its_own_operations_count(tmp_path):
    globals()[f"write_{keras.config.backend()}"](tmp_path)
    found = list(measuring.operations(str(tmp_path)))
    assert sorted((name, round(1e6 * begin, 3), round(1e6 * end, 3)) for _, name, begin, end in found) == [
        ("MemcpyH2D", 1, 4),
        ("gemm", 3, 7),
        ("ncclDevKernel_AllReduce", 7, 8),
    ]
    threads = {name: thread for thread, name, _, _ in found}
    assert threads["gemm"] == threads["ncclDevKernel_AllReduce"] != threads["MemcpyH2D"]


def test_a_trace_that_is_missing_is_an_error(tmp_path):
    with pytest.raises((OSError, ValueError)):
        list(measuring.operations(str(tmp_path)))

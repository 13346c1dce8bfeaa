"""`StepReport`: times of phases, the slow rank, the file, and its picture."""

import json
import time

import keras
import numpy as np
import pytest
from support import events, problem

import keras_shardopt as ks
from keras_shardopt.backends import phases
from keras_shardopt.callbacks import slow_ranks, step_report, trace_summary
from keras_shardopt.callbacks.forward_passes import ForwardPasses
from keras_shardopt.callbacks.slow_ranks import PHASES, PROBES

COLUMNS = (*PHASES, *PROBES)


def window(num_ranks=4, **changes):
    """A table of ranks that each compute 10 ms; `changes` has columns with (rank, ms)."""
    rows = np.tile([1.0, 10.0, 2.0, 0.5, 0.0, 3.0, 10.0, 0.4], (num_ranks, 1)) * 1e-3
    table = slow_ranks.table_of(rows)
    for column, (rank, ms) in changes.items():
        table[rank, COLUMNS.index(column.replace("_", " "))] = ms * 1e-3
    return table


def slow(*tables, hidden=False, threshold=0.1, remote=()):
    found = slow_ranks.slowest(tables, threshold, hidden, remote)
    return None if found is None else (found.rank, found.phase)


@pytest.mark.neutral
@pytest.mark.parametrize("phase", slow_ranks.OWN)
def test_the_rank_and_phase_above_the_others_are_named(phase):
    usual = 1e3 * window()[0, COLUMNS.index(phase)]
    assert slow(*[window(**{phase: (2, usual + 3)})] * 3) == (2, phase)
    assert slow(*[window(**{phase: (2, usual + 0.5)})] * 3) is None
    assert slow(*[window(**{phase: (2, usual + 3)})] * 2, window(**{phase: (1, usual + 3)})) is None


@pytest.mark.neutral
def test_all_ranks_waiting_equally_is_sending():
    table = slow_ranks.table_of([[1, 10, 2, 0, 0, 7, 0, 0], [1, 14, 2, 0, 0, 3, 0, 0]])
    np.testing.assert_array_equal(table[:, PHASES.index("waiting")], [4, 0])
    np.testing.assert_array_equal(table[:, PHASES.index("sending")], [3, 3])
    np.testing.assert_array_equal(slow_ranks.own_seconds(table), [13, 17])
    assert slow_ranks.seconds_per_step(table) == 20


@pytest.mark.neutral
def test_of_compiled_steps_only_probes_are_compared():
    assert slow(*[window(step=(1, 30))] * 3, hidden=True) is None
    assert slow(*[window(forward_pass=(1, 13))] * 3, hidden=True) == (1, "forward pass")
    assert slow(*[window(forward_pass=(1, 10.8))] * 3, hidden=True) is None
    # A forward pass is short: one late measurement counts only if no other window has a good one.
    assert slow(*[window(forward_pass=(1, 50))] * 2, window(), hidden=True) is None


@pytest.mark.neutral
def test_a_slow_network_is_found_except_for_rank_0():
    assert slow(*[window(message=(2, 3))] * 3) == (2, "message")
    assert slow(*[window(message=(0, 3))] * 3) is None
    assert slow(*[window(message=(2, 0.7))] * 3) is None
    assert slow(*[window(num_ranks=2, message=(1, 3))] * 3) is None


@pytest.mark.neutral
def test_messages_to_the_machine_of_rank_0_are_not_compared_with_others():
    assert slow(*[window(message=(3, 3))] * 3, remote=[3]) is None
    assert slow(*[window(5, message=(3, 3))] * 3, remote=[2, 3, 4]) == (3, "message")


@pytest.mark.neutral
def test_a_forward_pass_that_failed_on_one_rank_is_not_compared():
    assert slow(*[window(num_ranks=2, forward_pass=(0, 0))] * 3, hidden=True) is None


@pytest.mark.neutral
def test_one_rank_is_never_slow():
    assert slow(*[window(num_ranks=1)] * 3) is None


@pytest.mark.neutral
def test_a_phase_inside_another_interrupts_it(monkeypatch):
    clock = iter([0, 0, 1, 3, 6, 10, 15, 100, 200])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    recorder = phases.Recorder("callbacks")
    recorder.start()
    with phases.timed("step"), phases.timed("waiting"):  # from 1 to 10, from 3 to 6
        pass
    assert recorder.stop() == {"callbacks": 6, "step": 6, "waiting": 3}  # it stops at 15
    with phases.timed("step"):
        assert next(clock) == 100  # without a recorder, nobody reads the clock


SLEEP = 0.004


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        time.sleep(SLEEP)
        x, y = problem.data()
        return x[:8], y[:8]


class Sleeps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(2 * SLEEP)

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(0.1)


def test_times_of_one_process(tmp_path, capsys):
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    ks.prepare(model)
    report = ks.callbacks.StepReport(every=10, to=tmp_path / "steps.jsonl", profile_step=9)
    x, y = problem.data()
    begin = time.perf_counter()
    model.fit(Batches(), validation_data=(x[:8], y[:8]), callbacks=[Sleeps(), report], verbose=0)
    wall = time.perf_counter() - begin
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["num_steps"]) for line in lines] == [(13, 10), (23, 10)]
    for line in lines:
        ((times),) = line["ranks"]
        loads_ahead = keras.config.backend() == "tensorflow"
        assert times["input"] >= (0 if loads_ahead else 1e3 * SLEEP) and times["input"] > 0
        assert times["callbacks"] >= 2e3 * SLEEP and times["step"] > 0
        assert times["waiting"] == times["sending"] == 0
    total = sum(line["num_steps"] * sum(line["ranks"][0][phase] for phase in PHASES) for line in lines)
    assert total < 1e3 * (wall - 0.1)  # without the validation
    printed = capsys.readouterr().out
    assert "StepReport, epoch 1: " in printed and "One process" in printed and "input" in printed
    assert report.slow is None and not hasattr(model.train_function, "real")
    assert any(file.stat().st_size for file in (tmp_path / "steps.jsonl.trace" / "rank-0").rglob("*") if file.is_file())


class IsStopped(keras.callbacks.Callback):
    """Checks that no profiler runs during a validation."""

    def __init__(self, report):
        super().__init__()
        self.report = report

    def on_test_begin(self, logs=None):
        assert self.report._trace is not None and self.report._trace not in trace_summary._running


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_traced_step_is_summarized(tmp_path, capsys, sleeps):
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024), keras.layers.Dense(64)])
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    x = np.ones((8 * 64, 1024), "float32")
    step = 8 if sleeps else 6  # a validation follows step 8; nothing waits for step 6 on JAX except the report
    report = ks.callbacks.StepReport(to=tmp_path / "steps.jsonl", profile_step=step)
    callbacks = [report, *[Sleeps()] * sleeps, IsStopped(report)]
    held_out = x[:64], x[:64, :64]
    model.fit(x, x[:, :64], batch_size=64, validation_data=held_out, callbacks=callbacks, verbose=0)
    found = json.loads((tmp_path / "steps.jsonl.trace" / "summary.json").read_text())
    (rank,) = found["ranks"]
    assert found["step"] == step
    assert rank["ms"] * rank["idle"] > (1.9e3 * SLEEP if sleeps else 0)
    shares = [rank[kind] for kind in (*trace_summary.KINDS, "idle")]
    assert rank["computing"] > 0 and sum(shares) == pytest.approx(1, abs=1e-3)
    names = " ".join(operation["name"] for operation in rank["operations"])
    products = {"torch": ["aten::mm"], "jax": ["dot", "ynn_fusion"], "tensorflow": ["MatMul"]}[keras.config.backend()]
    assert any(name in names for name in products)
    printed = capsys.readouterr().out
    assert f"StepReport, epoch 1: Traced step {step}: {rank['ms']:.3g} ms: " in printed
    assert f"StepReport, epoch 1: Traced step {step}, most own time: {names.split()[0]} " in printed


def summary(*operations, ms=20):
    """The summary of a step with operations of thread, name, and ms."""
    return trace_summary.summarize([(thread, name, 1e-3 * a, 1e-3 * b) for thread, name, a, b in operations], 1e-3 * ms)


def shares(*operations):
    found = summary(*operations)
    return [found[kind] for kind in (*trace_summary.KINDS, "idle")]


@pytest.mark.neutral
def test_of_operations_at_the_same_time_computing_counts_first():
    found = summary(
        (1, "aten::linear", 0, 10),
        (1, "aten::mm", 2, 6),
        (1, "aten::mm", 7, 9),
        (2, "gloo:all_reduce", 8, 14),
        (3, "Memcpy HtoD (Pageable -> Device)", 13, 16),
    )
    times = [
        {"name": "aten::mm", "count": 2, "ms": 6.0},
        {"name": "gloo:all_reduce", "count": 1, "ms": 6.0},
        {"name": "aten::linear", "count": 1, "ms": 4.0},
        {"name": "Memcpy HtoD (Pageable -> Device)", "count": 1, "ms": 3.0},
    ]
    assert found == {
        "ms": 20.0, "computing": 0.5, "exchange": 0.2, "copies": 0.1, "idle": 0.2, "operations": times
    }  # fmt: skip


@pytest.mark.neutral
def test_time_inside_another_operation_counts_for_the_inner_one():
    assert shares((1, "hook", 0, 10), (1, "c10d::broadcast_", 2, 6)) == [0.3, 0.2, 0.0, 0.5]
    assert shares((1, "hook", 0, 10), (1, "c10d::broadcast_", 0, 10)) == [0.0, 0.5, 0.0, 0.5]
    assert shares((1, "a", 0, 10), (1, "ncclDevKernel_AllReduce", 6, 12), (1, "b", 8, 9)) == [0.35, 0.25, 0.0, 0.4]
    assert shares((1, "a", 0, 40)) == [1.0, 0.0, 0.0, 0.0]  # longer than the step by another clock


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "exchange") for name in ("gloo:broadcast", "c10d::_allgather_base_", "ncclDevKernel_Broadcast")],
        *[(name, "exchange") for name in ("all-reduce", "reduce-scatter", "collective-permute", "all-to-all")],
        *[(name, "exchange") for name in ("psum", "psum_invariant", "pmax", "ppermute")],
        *[(name, "exchange") for name in ("CollectiveReduceV2", "NcclAllReduce", "CollectiveBcastSendV2")],
        *[(name, "copies") for name in ("Memcpy DtoH (Device -> Pinned)", "MemcpyH2D", "MemcpyD2H", "infeed")],
        *[(name, "computing") for name in ("broadcast", "reduce", "copy", "aten::copy_", "BroadcastTo", "MemcpyD2D")],
    ],
)
def test_kinds_of_operations(name, kind):
    assert summary((1, name, 0, 5))[kind] == 0.25


@pytest.mark.neutral
def test_an_error_of_a_summary_is_one_line(tmp_path, capsys, monkeypatch):
    def fails(folder):
        yield 1, "aten::mm", 0.0, 1e-6
        raise KeyError("planes")

    monkeypatch.setattr(step_report._measuring, "operations", fails)
    fit(compiled(), ks.callbacks.StepReport(to=tmp_path / "steps.jsonl", profile_step=3))
    assert "StepReport, epoch 1: Traced step 3: no summary: KeyError('planes')\n" in capsys.readouterr().out
    found = summary()
    assert list(trace_summary.lines(3, [found])) == ["Traced step 3: no summary: the trace has no operations"]


@pytest.mark.neutral
def test_scalars_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    ks.prepare(model)
    report = ks.callbacks.StepReport(every=10, log_dir=tmp_path)
    model.fit(Batches(), callbacks=[report], verbose=0)
    found = events.read(tmp_path)
    assert {step for step, _ in found["StepReport/input_ms"]} == {13, 23}
    assert all(value >= 1e3 * SLEEP for _, value in found["StepReport/input_ms"])
    assert "StepReport/own_ms/rank_0" in found


@pytest.mark.neutral
def test_the_picture_has_a_bar_per_rank(tmp_path):
    pytest.importorskip("matplotlib")
    ranks = [{**dict.fromkeys(PHASES, 1.0), "input": 1.0 + rank} for rank in range(3)]
    lines = [
        {"step": 10, "num_steps": 10, "ranks": ranks, "slow": None},
        {"step": 40, "num_steps": 30, "ranks": [dict.fromkeys(PHASES, 5.0)] * 3, "slow": {"words": "rank 2: input"}},
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    axes = ks.plot_step_report(path)
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert len(widths) == len(PHASES)
    assert widths[0] == [4.0, 4.25, 4.5] and widths[1] == [4.0] * 3  # means, by number of steps
    assert axes.get_title() == "rank 2: input"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="`path` must be a file of"):
        ks.plot_step_report(path)


@pytest.mark.neutral
def test_a_profile_needs_a_path():
    with pytest.raises(ValueError, match="`profile_step` needs the path `to`"):
        ks.callbacks.StepReport(profile_step=3)


def compiled():
    model = problem.model()
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.01)), "mse")
    return model


def fit(model, *callbacks, epochs=1):
    model.fit(*problem.data(12), batch_size=problem.BATCH_SIZE, epochs=epochs, callbacks=list(callbacks), verbose=0)


def test_epochs_shorter_than_a_window_are_compared(capsys):
    report = ks.callbacks.StepReport(every=100)
    fit(compiled(), report, epochs=6)
    assert len(report._tables) == 3 and {num for _, num in report._tables} == {12}


@pytest.mark.neutral
def test_nothing_is_said_of_ranks_before_they_are_compared():
    (_, early), (_, late) = (slow_ranks.summary(window(), None, False, is_compared) for is_compared in (False, True))
    assert early.startswith("Too few windows to compare.") and late.startswith("No rank is slow.")


def test_a_second_report_is_refused():
    with pytest.raises(ValueError, match="`fit` accepts only one `StepReport`"):
        fit(compiled(), ks.callbacks.StepReport(), ks.callbacks.StepReport())


def test_a_folder_that_is_missing_is_an_error_before_the_first_step(tmp_path):
    report = ks.callbacks.StepReport(to=tmp_path / "missing" / "steps.jsonl")
    with pytest.raises(FileNotFoundError):
        fit(compiled(), report)
    assert report._num_steps == 0


def test_after_an_error_nothing_is_measured_in_a_later_fit(capsys):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("stopped")

    model, report = compiled(), ks.callbacks.StepReport(every=5)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(model, Fails(), report)
    again = ks.callbacks.StepReport(every=5)
    fit(model, again)  # ends, so it restores the training function below the wrapper that the error left
    assert not hasattr(model.train_function, "real") and not report._recorder.is_active()
    report.model.evaluate(*problem.data(1), batch_size=problem.BATCH_SIZE, callbacks=[report], verbose=0)
    assert not report._recorder.is_active()


def test_after_an_error_in_the_traced_step_other_steps_can_be_traced(tmp_path, capsys):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("stopped")

    model = compiled()
    reports = [ks.callbacks.StepReport(to=tmp_path / name, profile_step=3) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(RuntimeError, match="stopped"):
        fit(model, Fails(), reports[0])
    capsys.readouterr()
    for report in (reports[1], reports[0]):
        fit(model, report)
        assert "StepReport, epoch 1: Traced step 3: " in (printed := capsys.readouterr().out)
        assert "no summary" not in printed


def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path, capsys):
    (tmp_path / "steps.jsonl.trace").write_text("a file, where a folder should be")
    fit(compiled(), ks.callbacks.StepReport(to=tmp_path / "steps.jsonl", profile_step=3))
    assert "StepReport, epoch 1: Traced step 3: no summary: " in capsys.readouterr().out


@pytest.mark.neutral
def test_a_traced_step_after_the_last_one_is_named(tmp_path):
    with pytest.warns(
        UserWarning, match="`profile_step` is after the last step of `fit`. Received: profile_step=1000, with "
    ):
        fit(compiled(), ks.callbacks.StepReport(to=tmp_path / "steps.jsonl", profile_step=1000))


class Draws(keras.layers.Layer):
    """Draws random numbers in inference too."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return keras.random.dropout(inputs, 0.5, seed=self.seed_generator)


def compared(layer):
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(ks.CrossShard("sgd"), "mse")
    return model, ForwardPasses(model)


def test_a_forward_pass_for_comparison_changes_no_seed():
    model, passes = compared(draws := Draws())
    before = draws.seed_generator.state.numpy().copy()
    assert passes.seconds(model) > 0
    np.testing.assert_array_equal(draws.seed_generator.state.numpy(), before)


@pytest.mark.neutral
def test_a_forward_pass_for_comparison_can_fail(monkeypatch):
    model, passes = compared(keras.layers.Dense(1))
    monkeypatch.setattr(model, "predict_on_batch", lambda rows: rows / "no number")
    with pytest.warns(UserWarning, match="measures no forward passes, because a forward pass failed"):
        assert passes.seconds(model) == 0.0
    assert passes.seconds(model) == 0.0  # without a second warning

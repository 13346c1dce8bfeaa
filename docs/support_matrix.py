"""Writes docs/support.md: the tested features by backend and version of Keras.

    REPORTS=FOLDER tox run
    REPORTS=FOLDER tox run -m exhaustive
    python docs/support_matrix.py write FOLDER

builds it from pytest's reports of a whole run. Names of files in FOLDER hold the backend, the version of Keras, and the
environment. Reports of the same backend and version are one column.
The tests that stand for the features, and no more, are run in a separate environment with

    KERAS_BACKEND=jax python docs/support_matrix.py run FOLDER
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

_EVERYWHERE = tuple(BACKENDS)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A line of the table.

    Args:
        name: its first cell.
        tests: per backend, the tests that stand for it; none if the backend lacks it.
        remarks: per backend, a limit, or the reason for its absence.
    """

    name: str
    tests: dict[str, list[str]]
    remarks: dict[str, str] = dataclasses.field(default_factory=dict)


def _on(
    jax: str = "",
    tensorflow: str = "",
    torch: str = "",
    everywhere: str = "",
    one_program: str = "",
) -> dict[str, list[str]]:
    """`one_program` stands for JAX and TensorFlow: one program has all replicas."""
    given = {
        "jax": jax or one_program or everywhere,
        "tensorflow": tensorflow or one_program or everywhere,
        "torch": torch or everywhere,
    }
    return {
        backend: [f"tests/{name}" for name in names.split()]
        for backend, names in given.items()
        if names
    }


_DEVICES = "promises/test_equals_one_process_devices.py::"
_RANKS = "promises/test_equals_one_process_ranks.py::"
_FOUR = "promises/test_several_processes_torch.py::test_on_four_ranks"
_TF = "promises/test_reduced_once_tensorflow.py::"
_JAX = "promises/test_reduced_once_jax.py::"
_STEPS = "promises/test_gradient_accumulation.py::"
_STYLES = (
    "promises/test_training_styles.py::test_replicas_are_identical_and_equal_one_process"
)

FEATURES = [
    Feature(
        "N replicas under `fit` make the update of one process",
        _on(
            one_program=_DEVICES + "test_replicas_equal_one_device",
            torch=_RANKS + "test_ranks_equal_one_process",
        ),
    ),
    Feature(
        "the same for a custom `train_step`, `train_on_batch` and a custom training loop",
        _on(everywhere=_STYLES),
    ),
    Feature(
        "clipping, LARC, loss scaling and master weights inside get global gradients",
        _on(
            everywhere="promises/test_global_gradients_inside.py::test_inside_cross_shard_it_sees_global_gradients"
        ),
    ),
    Feature(
        "`prepare`: uneven batches",
        _on(
            one_program="promises/test_uneven_batches_devices.py::test_update_and_metrics_are_those_of_one_process",
            torch="promises/test_uneven_batches_ranks.py::test_update_and_metrics_are_those_of_one_process",
        ),
    ),
    Feature(
        "`fit` divides the same data among several processes",
        _on(
            jax="promises/test_automatic_sharding_jax.py::test_the_updates_are_those_of_one_process",
            tensorflow="promises/test_several_processes_tensorflow.py::test_fit_equals_one_process",
            torch="promises/test_automatic_sharding_ranks.py::test_on_ranks",
        ),
    ),
    Feature(
        "`predict` returns all rows on every process",
        _on(
            jax="promises/test_automatic_sharding_jax.py::test_evaluate_and_predict_tell_of_all_rows",
            tensorflow="promises/test_several_processes_tensorflow.py::test_fit_equals_one_process",
            torch="promises/test_automatic_sharding_ranks.py::test_on_ranks[2-evaluate_and_predict] "
            "promises/test_automatic_sharding_ranks.py::test_on_ranks[2-outputs_of_other_kinds]",
        ),
    ),
    Feature(
        "callbacks, metrics and saved files match a single-process run",
        _on(everywhere="promises/test_same_script.py::test_it_does_what_one_process_does"),
    ),
    Feature(
        "`BatchNormalization(synchronized=True)`",
        _on(
            everywhere="promises/test_synchronized_batch_normalization.py::test_update_is_that_of_one_process"
        ),
    ),
    Feature(
        "`steps_per_execution`",
        _on(
            jax="promises/test_uneven_batches_devices.py::test_state_of_layers_in_a_shard_map",
            tensorflow="unit/fit/test_tensorflow_scopes.py::"
            "test_several_steps_per_execution_need_prepare_and_are_those_of_one",
            torch="promises/test_automatic_sharding_ranks.py::test_on_ranks[2-several_steps_per_execution]",
        ),
        {"tensorflow": "after `prepare`"},
    ),
    Feature(
        "`gradient_accumulation_steps`: the update of the larger batch",
        _on(
            one_program=_STEPS + "test_windows_equal_larger_batches",
            torch=_STEPS + "test_ranks_equal_larger_batches",
        ),
    ),
    Feature(
        "no communication of gradients in between",
        _on(
            jax=_STEPS
            + "test_the_compiled_step_of_jax_communicates_gradients_in_the_branch_only",
            tensorflow=_STEPS + "test_tensorflow_reduces_once_in_a_window",
            torch=_STEPS + "test_ranks_communicate_once_in_a_window",
        ),
        {"jax": "after `prepare`"},
    ),
    Feature(
        "`replica_clipnorm`",
        _on(
            jax="promises/test_uneven_batches_devices.py::test_replica_clipnorm_is_that_of_numpy",
            tensorflow=_TF + "test_each_replica_is_clipped_by_itself_under_fit",
            torch=_RANKS + "test_each_replica_is_clipped_by_itself",
        ),
        {"jax": "after `prepare`"},
    ),
    Feature(
        "`group_assignment`",
        _on(
            jax=_JAX + "test_groups_drift_apart",
            tensorflow=_TF + "test_groups_drift_apart_under_fit",
            torch=_FOUR + "[groups_drift_apart_and_are_made_once]",
        ),
        {"jax": "in `shard_map` and `pmap`; an error in `fit`"},
    ),
    Feature(
        "`VirtualReplicas`: bitwise identical on 1, 2, 4 or 8 replicas",
        _on(
            jax="promises/test_same_bits_jax.py::test_one_sha256_for_any_number_of_devices",
            tensorflow="promises/test_same_bits_tensorflow.py::test_one_sha256_for_any_number_of_devices",
            torch="promises/test_same_bits_ranks.py::test_one_sha256_for_any_number_of_ranks",
        ),
        {
            "jax": "after `prepare`",
            "tensorflow": "devices of one machine, under `fit`",
        },
    ),
    Feature(
        "`LocalSGD`: local SGD and DiLoCo, as NumPy does it",
        _on(
            everywhere="promises/test_local_sgd.py::test_weights_are_those_of_replicas_in_numpy"
        ),
        {"jax": "after `prepare`, one process", "tensorflow": "one process"},
    ),
    Feature(
        "`compute_gradients`, `minimize`",
        _on(
            jax=_JAX + "test_minimize_computes_local_gradients_in_shard_map",
            tensorflow=_TF + "test_minimize_on_each_replica",
            torch=_FOUR + "[minimize_equals_one_process]",
        ),
    ),
    Feature(
        "`shard_state=True`: the same updates",
        _on(
            jax="promises/test_sharded_state_jax.py::test_state_stays_divided_through_fit_and_weights_are_the_same",
            tensorflow="promises/test_sharded_state_tensorflow.py::test_updates_are_those_of_whole_state",
            torch="promises/test_sharded_state_ranks.py::test_on_ranks",
        ),
        {"jax": "under `fit`", "tensorflow": "one machine, element-wise optimizers"},
    ),
    Feature(
        "its files fit any number of replicas",
        _on(
            jax="promises/test_sharded_state_jax.py::test_files_hold_whole_arrays_and_fit_any_number_of_devices",
            tensorflow="promises/test_sharded_state_tensorflow.py::"
            "test_files_are_those_of_whole_state_for_any_number_of_replicas",
            torch="promises/test_sharded_state_ranks.py::test_files_of_any_number_of_ranks_fit_one_process",
        ),
    ),
    Feature(
        "an overflow on any replica is skipped on all (`LossScaling`)",
        _on(
            one_program="promises/test_overflow_on_one_replica.py::test_an_overflow_on_any_replica_is_skipped_on_all",
            torch=_FOUR + "[an_overflow_on_any_rank_is_skipped_on_all]",
        ),
    ),
    Feature(
        "`on_nonfinite`: skipped on all, replica and variable named",
        _on(
            one_program="promises/test_nan_on_one_replica.py::test_on_any_replica_the_update_is_left_out_on_all",
            torch="promises/test_nan_on_one_replica.py::test_on_ranks",
        ),
    ),
    Feature(
        "`MixedPrecision`: float32 master weights",
        _on(
            everywhere="unit/optimizers/test_mixed_precision.py::test_updates_too_small_for_the_weight_add_up"
        ),
    ),
    Feature(
        "`optimize_loss` on replicas",
        _on(
            everywhere="promises/test_optimize_loss_on_replicas.py::test_replicas_are_identical_and_equal_one_process"
        ),
    ),
    Feature(
        "`Tower` and `replicate`",
        _on(
            everywhere="unit/classic/test_tower.py::test_fit_with_towers_equals_the_whole_batch"
        ),
        dict.fromkeys(_EVERYWHERE, "one device"),
    ),
    Feature(
        "schedules count updates",
        _on(
            everywhere="unit/schedules/test_schedules_in_keras.py::test_update_s_uses_the_rate_of_step_s"
        ),
    ),
    Feature(
        "`CheckReplicas` finds one flipped bit",
        _on(
            one_program="promises/test_replicas_stay_equal.py::test_one_flipped_bit_is_found_in_every_trial",
            torch=_FOUR + "[one_flipped_bit_is_found_in_100_of_100_trials]",
        ),
    ),
    Feature(
        "several processes make the update of one",
        _on(
            jax="promises/test_several_processes_jax.py::test_weights_and_slots_equal_one_process",
            tensorflow="promises/test_several_processes_tensorflow.py::test_fit_equals_one_process "
            "promises/test_several_processes_tensorflow.py::test_two_workers_in_a_loop_by_hand",
            torch=_RANKS + "test_ranks_equal_one_process",
        ),
    ),
    Feature(
        "two machines (network namespaces) make the updates of one process, and continue after a death",
        _on(
            everywhere="promises/test_several_machines.py::test_two_machines_train_as_one_process_and_go_on_after_a_death"
        ),
    ),
    Feature(
        "a job that loses a process continues with fewer",
        _on(
            everywhere="promises/test_launched.py::test_a_job_that_loses_a_process_goes_on_with_fewer"
        ),
    ),
    Feature(
        "a `torchrun` job that loses a machine continues with the other",
        _on(
            torch="promises/test_several_machines.py::test_a_job_that_loses_a_machine_goes_on_with_the_other"
        ),
        {"jax": "start it again", "tensorflow": "start it again"},
    ),
    Feature(
        "if a network link is cut, all raise and name the machine",
        _on(
            everywhere="promises/test_several_machines.py::test_all_raise_where_a_link_is_cut"
        ),
    ),
    Feature(
        "killed and started again: the weights of an uninterrupted run",
        _on(
            jax="promises/test_several_processes_jax.py::"
            "test_processes_that_are_started_again_end_with_the_weights_of_some_that_nobody_killed",
            tensorflow="promises/test_restart.py::test_on_several_replicas",
            torch="promises/test_restart_ranks.py::"
            "test_a_restarted_job_ends_with_the_weights_of_one_that_nobody_killed",
        ),
        {"tensorflow": "one process"},
    ),
    Feature(
        "saving: all processes call it, rank 0 writes",
        _on(
            jax="promises/test_several_processes_jax.py::test_what_the_chief_saved_loads_elsewhere",
            tensorflow="promises/test_several_processes_tensorflow.py::test_two_workers_in_a_loop_by_hand "
            "promises/test_several_processes_tensorflow.py::test_what_the_first_worker_saved_loads_elsewhere",
            torch=_FOUR + "[all_enter_and_the_chief_saves]",
        ),
    ),
]

HEAD = """<!-- Written by docs/support_matrix.py from reports of pytest. -->

# Support matrix

**The tests do not run on GPUs, TPUs or physically separate machines.** All results are from CPUs of one machine; tests
of several machines use network namespaces. Steps on JAX are also [compiled for TPU v5e and H100](compiled.md). TensorFlow and JAX
run on several CPU devices of one process, unless the row names several processes. PyTorch runs in several processes
with "gloo".

✓ works; ◐ works in part, as the note says; ✗ does not work. Numbers count the passing tests of that row on that backend
and Keras. *Fails*: at least one test fails. *Not run*: the tests were not part of that run; most belong to the
exhaustive suite. A backend or a Keras without a column had no report. Features not listed are not promised.

The columns are from the versions in `constraints.txt` and `constraints-lowest.txt`. Tests also ran on Python 3.13.0 with
NumPy 2.5.5 and Keras 3.15.1: the default tests on JAX 0.12.0.1 and TensorFlow 2.21, the unit and contract tests on
PyTorch 2.13. On a preview of Keras 3.16, only some tests of JAX ran.

"""


def outcomes(*files: pathlib.Path) -> dict[str, collections.Counter[str]]:
    """Counts of passed, failed and skipped cases by test, with and without its parameters.

    A case in several reports counts once, and as failed if it failed in any of them.
    """
    order = ("skipped", "passed", "failed")
    worst: dict[tuple[str, str], str] = {}
    for case in (case for file in files for case in ET.parse(file).iter("testcase")):
        given = re.sub(r"@[^\]]*$", "", case.get("name", ""))  # the group of pytest-xdist
        function, bracket, values = given.partition("[")
        test = (
            f"{case.get('classname', '').replace('.', '/')}.py::{function}",
            bracket + values,
        )
        kinds = {child.tag for child in case}
        outcome = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        worst[test] = max(outcome, worst.get(test, outcome), key=order.index)
    found: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for (name, values), outcome in worst.items():
        for key in {name, name + values}:
            found[key][outcome] += 1
    return found


def cell(feature: Feature, backend: str, found: dict[str, collections.Counter[str]]) -> str:
    """The cell of a feature."""
    remark = feature.remarks.get(backend, "")
    total: collections.Counter[str] = collections.Counter()
    for test in feature.tests.get(backend, []):
        total += found.get(test, collections.Counter())
    if total["failed"]:
        return f"✗ **fails**: {total['failed']} of {total['failed'] + total['passed']}"
    if not feature.tests.get(backend):
        return f"✗ {remark}".rstrip()
    if not total["passed"]:
        return "not run"
    return f"◐ {total['passed']}; {remark}" if remark else f"✓ {total['passed']}"


def page(folder: pathlib.Path) -> str:
    """The page, of all reports in a folder."""
    files = collections.defaultdict(list)
    for file in sorted(folder.glob("*.xml")):
        backend, version, *_ = file.stem.split("-")
        files[backend, version].append(file)
    columns = sorted(
        files,
        key=lambda c: (
            [-int(part) for part in c[1].split(".")],
            list(BACKENDS).index(c[0]),
        ),
    )
    lines = [
        "| | "
        + " | ".join(
            f"{BACKENDS[backend]}, Keras {version}" for backend, version in columns
        )
        + " |"
    ]
    lines.append("|---|" + "---|" * len(columns))
    reports = [(column[0], outcomes(*files[column])) for column in columns]
    for feature in FEATURES:
        lines.append(
            f"| {feature.name} | "
            + " | ".join(cell(feature, b, found) for b, found in reports)
            + " |"
        )
    return HEAD + "\n".join(lines) + "\n"


def run(folder: pathlib.Path) -> int:
    """Runs the tests of this environment's backend."""
    backend = os.environ.get("KERAS_BACKEND", "jax")
    tests = sorted(
        {test for feature in FEATURES for test in feature.tests.get(backend, [])}
    )
    command = [sys.executable, "-m", "pytest", "-q", "--suite", "all", *tests]
    environment = {**os.environ, "KERAS_BACKEND": backend, "REPORTS": str(folder.resolve())}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "run":
        sys.exit(run(arguments.folder))
    PAGE.write_text(page(arguments.folder), encoding="utf-8")


if __name__ == "__main__":
    main()

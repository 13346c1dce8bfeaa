"""Ranks of PyTorch: torchrun's own launcher."""

from __future__ import annotations

import signal
import sys
import uuid

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from keras_shardopt.launch.job import Job, JobError


def start(job: Job) -> int:
    """Runs the job's processes of this machine to their end. Returns the exit status."""
    if job.devices_per_process not in (None, 1):
        raise JobError(
            "On PyTorch each process has one device. "
            f"Received: --devices-per-process {job.devices_per_process}. Leave it out, and start more processes."
        )
    config, command, arguments = run.config_from_args(run.parse_args(_arguments(job)))
    config.log_line_prefix_template = "[${rank}] "
    try:
        elastic_launch(config=config, entrypoint=command)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(
            f"keras_shardopt.launch: rank {rank} ended with status {failure.exitcode}; all others were ended.",
            file=sys.stderr,
            flush=True,
        )
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    return 0


def _arguments(job: Job) -> list[str]:
    """Those of torchrun."""
    found = ["--nproc-per-node", str(job.nproc), "--tee", "3"]
    if job.nnodes == 1:
        found += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(uuid.uuid4())]
    else:
        is_first = str(job.node_rank == 0).lower()
        found += ["--nnodes", str(job.nnodes), "--node-rank", str(job.node_rank), "--rdzv-backend", "c10d"]
        found += ["--rdzv-endpoint", str(job.coordinator), "--rdzv-conf", f"is_host={is_first}"]
        if job.hosts:
            found += ["--local-addr", job.hosts[job.node_rank]]
    module, program = (["-m"], job.program[1:]) if job.program[0] == "-m" else ([], job.program)
    return [*found, *module, "--", *program]  # or it would take the program's own arguments for its own

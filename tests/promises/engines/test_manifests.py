"""The manifests for Kubernetes have the fields of their kinds, and commands that the launcher accepts."""

import json
import shlex

import pytest
from support import pages

from keras_shardopt.launch import __main__ as launcher

models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed")
yaml = pytest.importorskip("yaml", reason="kubernetes is not installed")

FOLDER = pages.ROOT / "examples" / "kubernetes"
KINDS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def known(document):
    """The document as its kind's model has it, without fields that this does not have."""
    if document["kind"] in KINDS:
        return json.loads(KINDS[document["kind"]].from_dict(document).to_json())
    api = client.ApiClient()
    found = api.deserialize(json.dumps(document), f"V1{document['kind']}", "application/json")
    return api.sanitize_for_serialization(found)


@pytest.mark.parametrize("name", [file.name for file in sorted(FOLDER.glob("*.yaml"))])
def test_all_fields_are_those_of_the_kind(name):
    for document in documents(name):
        assert known(document) == document
        document["spec"]["unknown"] = 1
        assert known(document) != document


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_the_command_names_the_pods(name):
    job = documents(name)[-1]
    domain, prefix = job["metadata"]["name"], job["metadata"]["name"]
    if name == "jobset.yaml":
        domain, (replicated,) = job["spec"]["network"]["subdomain"], job["spec"]["replicatedJobs"]
        prefix, job = f"{prefix}-{replicated['name']}-0", replicated["template"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (line,) = container["args"]
    assert line.startswith("exec python -m keras_shardopt.launch ")
    given = launcher._parser().parse_args(shlex.split(line.replace("$JOB_COMPLETION_INDEX", "1"))[4:])
    pods = [f"{prefix}-{index}.{domain}" for index in range(job["spec"]["completions"])]
    assert given.hosts.split(",") == pods and given.coordinator.startswith(f"{pods[0]}:")
    assert given.nnodes == len(pods) == job["spec"]["parallelism"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == str(given.nproc)
    if name == "job.yaml":
        service = documents(name)[0]
        assert pod["subdomain"] == service["metadata"]["name"] == domain


def test_the_container_file_names_files_of_the_repository():
    lines = (FOLDER / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert copied and all((pages.ROOT / name).exists() for name in copied)

import re
from pathlib import Path

import pytest

MANIFEST = Path(__file__).parents[2] / "launch/kubernetes.yaml"
ELASTIC = MANIFEST.with_name("kubernetes-elastic.yaml")

# paddle-operator, api/v1/paddlejob_types.go: PaddleJobSpec and ResourceSpec.
JOB_FIELDS = {
    "cleanPodPolicy",
    "schedulingPolicy",
    "intranet",
    "withGloo",
    "sampleSetRef",
    "ps",
    "worker",
}
JOB_FIELDS |= {"heter", "elastic"}
RESOURCE_FIELDS = {"replicas", "requests", "limits", "template"}


@pytest.fixture(params=["cpu", "gpu"])
def job(request):
    yaml = pytest.importorskip("yaml")
    text = MANIFEST.read_text()
    # what the comment says: replace image, args and resources
    if request.param == "gpu":
        start, end = (
            text.index("            # image:"),
            text.index("            volumeMounts:"),
        )
        gpu = re.sub(r"(?m)^(\s+)# ", r"\1", text[start:end])
        head = re.sub(
            r"(?ms)^            (image|args): [^\n]*\n", "", text[:start]
        )
        head = re.sub(
            r"(?ms)^            resources:\n.*?(?=^            # GPUs)",
            "",
            head,
        )
        text = head + gpu + text[end:]
    return yaml.safe_load(text)


def test_kubernetes_manifest_is_a_paddle_job(job):
    assert (job["apiVersion"], job["kind"]) == (
        "batch.paddlepaddle.org/v1",
        "PaddleJob",
    )
    assert set(job["spec"]) <= JOB_FIELDS
    assert set(job["spec"]["worker"]) <= RESOURCE_FIELDS
    assert job["spec"]["intranet"] == "PodIP"
    pod = job["spec"]["worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [container["command"][0], *container["args"][1:3]] == [
        "python",
        "-m",
        "paddle.distributed.launch",
    ]
    assert {m["name"] for m in container["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }
    assert all(
        isinstance(variable["value"], str) for variable in container["env"]
    )


def test_kubernetes_processes_are_counted_by_cpu_or_gpu(job):
    (container,) = job["spec"]["worker"]["template"]["spec"]["containers"]

    assert ("--nproc_per_node" in container["args"]) != (
        "nvidia.com/gpu" in container["resources"]["limits"]
    )


def test_kubernetes_elastic_manifest_runs_elastic_sh():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(ELASTIC.read_text())
    assert (job["apiVersion"], job["kind"]) == (
        "batch.paddlepaddle.org/v1",
        "PaddleJob",
    )
    assert set(job["spec"]) <= JOB_FIELDS
    assert job["spec"]["elastic"] == 1  # an integer: the level
    worker = job["spec"]["worker"]
    assert set(worker) <= RESOURCE_FIELDS
    assert 1 <= worker["requests"] <= worker["replicas"] <= worker["limits"]
    pod = worker["template"]["spec"]
    assert "restartPolicy" not in pod  # the operator sets it
    assert pod["terminationGracePeriodSeconds"] > 30
    (container,) = pod["containers"]
    assert container["command"] == ["launch/elastic.sh"]
    given = {
        variable["name"]: variable["value"] for variable in container["env"]
    }
    assert given["NNODES"] == f"{worker['requests']}:{worker['limits']}"
    assert given["JOB"] == job["metadata"]["name"]
    assert all(isinstance(value, str) for value in given.values())
    known = re.findall(
        r"(?m)^# ([A-Z_]+)  ", MANIFEST.with_name("elastic.sh").read_text()
    )
    assert set(given) <= {*known, "NPROC", "LOG_DIR"}
    assert {m["name"] for m in container["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }

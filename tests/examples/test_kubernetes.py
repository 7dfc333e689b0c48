"""The files for Kubernetes: fields that the API has, the engine's flags, and room to save before SIGKILL.

`FIELDS` are those of the CustomResourceDefinition trainjobs.trainer.kubeflow.org (v1alpha1) that kubeflow/trainer 2.3
publishes in manifests/base/crds (Apache-2.0), as far as examples use them; the pod's are those of Kubernetes' core/v1.
"""

import re
from typing import Any

import yaml

from tests.distributed import ROOT
from tests.examples.test_examples import example

_POD = {
    "terminationGracePeriodSeconds": int,
    "containers": [{"name!": str, "volumeMounts": [{"name!": str, "mountPath!": str}]}],
    "volumes": [
        {"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str, "sizeLimit": str}}
    ],
}
FIELDS: Any = {
    "apiVersion!": str,
    "kind!": str,
    "metadata!": {"name!": str},
    "spec!": {
        "runtimeRef!": {"name!": str, "kind": str, "apiGroup": str},
        "suspend": bool,
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": [{"name!": str, "value": str}],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"limits": dict, "requests": dict},
        },
        "runtimePatches": [
            {
                "manager!": str,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {"replicatedJobs": [{"name!": str, "template": {"spec": {"template": {"spec": _POD}}}}]}
                    }
                },
            }
        ],
    },
}
"""Types by name; ! marks those that are required."""


def wrong_in(value: Any, expected: Any, path: str = "") -> list[str]:
    if isinstance(expected, type):
        return [] if type(value) is expected else [f"{path} is {value!r}, no {expected.__name__}"]
    if isinstance(expected, list):
        if type(value) is not list:
            return [f"{path} is no list"]
        return [wrong for i, each in enumerate(value) for wrong in wrong_in(each, expected[0], f"{path}[{i}]")]
    known = {name.rstrip("!"): kind for name, kind in expected.items()}
    wrong = [f"{path}.{name[:-1]} is missing" for name in expected if name.endswith("!") and name[:-1] not in value]
    for name, each in value.items():
        wrong += wrong_in(each, known[name], f"{path}.{name}") if name in known else [f"there is no {path}.{name}"]
    return wrong


def test_the_checks_find_what_is_wrong():
    spec = {"runtimeRef": {"name": "b"}, "trainer": {"args": "c"}}
    job = {"metadata": {"name": 1}, "more": 2, "kind": "a", "spec": spec}
    assert wrong_in(job, FIELDS) == [
        ".apiVersion is missing",
        ".metadata.name is 1, no str",
        "there is no .more",
        ".spec.trainer.args is no list",
    ]


def test_trainjob():
    job = yaml.safe_load((ROOT / "examples" / "trainjob.yaml").read_text())
    assert wrong_in(job, FIELDS) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    pod = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = pod["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 60
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"checkpoints", "shm"}


def test_what_they_start():
    job = yaml.safe_load((ROOT / "examples" / "trainjob.yaml").read_text())["spec"]["trainer"]
    dockerfile = (ROOT / "examples" / "Dockerfile").read_text()
    entry, arguments = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", dockerfile, re.MULTILINE)
    for command, args in ((job["command"], job["args"]), (yaml.safe_load(entry), yaml.safe_load(arguments))):
        assert command == ["polyphase", "launch", "--max-restarts", "10", "--"]
        flags = example(args[0].removesuffix(".py")).arguments().parse_args(args[1:])
        assert (flags.resume, flags.default_root_dir) == ("auto", "/checkpoints")

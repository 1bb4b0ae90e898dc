"""The files that deploy an answer follow the schemas of Kubernetes and KServe, and agree with those of deploy/."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ingot.planning.choice.manifests import Manifests
from ingot.planning.choice.search import choose
from tests.data_paths import ROOT
from tests.planning.choice.questions import found, question


@cache
def manifests() -> Manifests:
    answer = choose(found("a100")[:1], question(requests=16)).best
    assert answer
    return Manifests("llama-fp16", answer, ("max_batch_tokens=512", "num_draft_tokens=4"), "auto", 4)


def documents(file: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(file.read_text()) if each}


def test_the_files_follow_the_schemas(tmp_path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes, kserve = (documents(file) for file in manifests().write(tmp_path / "new"))
    assert set(kubernetes) == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    for document in kubernetes.values():
        validator.validate(document, validator.latest_version(), strict=True)
    schemas = json.loads((ROOT / "tests/custom_resources.json").read_text())
    schema = jsonschema.Draft7Validator({"$ref": "#/definitions/InferenceService", **schemas})
    assert not [error.message for error in schema.iter_errors(kserve["InferenceService"])]


def test_the_pods_are_those_of_deploy_with_the_answers_options_and_devices(tmp_path: Path) -> None:
    kubernetes, kserve = (documents(file) for file in manifests().write(tmp_path))
    shipped = documents(ROOT / "deploy/kubernetes/deployment.yaml")["Deployment"]
    pod, model = kubernetes["Deployment"]["spec"]["template"]["spec"], shipped["spec"]["template"]["spec"]
    (container,), (by,) = pod["containers"], model["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext", "env", "ports"):
        assert container[name] == by[name]
    assert container["volumeMounts"] == by["volumeMounts"]
    assert pod["terminationGracePeriodSeconds"] == model["terminationGracePeriodSeconds"]
    assert pod["securityContext"] == model["securityContext"]
    assert kubernetes["Deployment"]["spec"]["strategy"] == shipped["spec"]["strategy"]
    words = ["--speculate", "auto", "--set", "max_batch_tokens=512", "--set", "num_draft_tokens=4"]
    predictor = kserve["InferenceService"]["spec"]["predictor"]
    for arguments in (container["args"], predictor["model"]["args"]):
        assert " ".join(words) in " ".join(arguments)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    # 16 GB of weights and 4 GiB for the process.
    assert container["resources"]["limits"]["memory"] == "19Gi"


def test_the_autoscaler_starts_at_the_answer_and_ends_at_the_most(tmp_path: Path) -> None:
    kubernetes, kserve = (documents(file) for file in manifests().write(tmp_path))
    replicas = manifests().answer.replicas
    scaler = kubernetes["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (replicas, 4)
    assert scaler["scaleTargetRef"]["name"] == kubernetes["Deployment"]["metadata"]["name"]
    predictor = kserve["InferenceService"]["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (replicas, 4)
    assert kubernetes["Service"]["spec"]["selector"] == kubernetes["Deployment"]["spec"]["selector"]["matchLabels"]

"""Files that deploy an answer: Kubernetes (Deployment, Service, HorizontalPodAutoscaler) and KServe's InferenceService.

Probes, pauses and limits are those of deploy/kubernetes, whose README says what has to agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ingot.planning.choice.search import ServingAnswer

_DRAIN_SECONDS = 60
_GRACE_SECONDS = 90
"""preStop, the drain, and 20 s to write blocks, with a margin."""
_PORT = 8000
_IMAGE = "ingot:latest"
_GIB = 1 << 30
_PROGRAM_GIB = 4
"""Memory of the process itself: Python, tokenizer, metrics, requests."""
_WAITING = "8"
"""Waiting requests of a replica above which another starts."""


@dataclass(frozen=True)
class Manifests:
    """The files of one answer.

    name        of the artifact, and of all objects
    settings    KEY=VALUE of `ingot serve --set`
    drafter     `ingot serve --speculate`; "" for none
    most        replicas up to which the autoscaler goes
    """

    name: str
    answer: ServingAnswer
    settings: Sequence[str]
    drafter: str
    most: int

    @property
    def options(self) -> list[str]:
        """Arguments of `ingot serve` after the artifact, without where it listens."""
        drafts = ["--speculate", self.drafter] if self.drafter else []
        return [*drafts, *(word for setting in self.settings for word in ("--set", setting))]

    def write(self, folder: Path) -> list[Path]:
        """Write both files into a folder, which is made; return them."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {"kubernetes.yaml": self.kubernetes(), "kserve.yaml": self.kserve()}
        for name, documents in files.items():
            (folder / name).write_text(self._heading + yaml.safe_dump_all(documents, sort_keys=False, width=120))
        return [folder / name for name in files]

    @property
    def _heading(self) -> str:
        answer = self.answer
        return (
            f"# {answer.replicas} x {answer.configuration}\n"
            f"# ${answer.price:.2f} an hour; each replica is predicted to keep the service level at"
            f" {answer.rate:.3g} requests/s\n"
        )

    def kubernetes(self) -> list[dict[str, Any]]:
        """Deployment, Service and HorizontalPodAutoscaler.

        The autoscaler reads the pods' metric vllm:num_requests_waiting, which needs an adapter for Prometheus.
        """
        labels = {"app": self.name}
        # By the second label PodMonitors find the pods' metrics.
        pod_labels = {**labels, "app.kubernetes.io/name": "ingot"}
        volumes = [
            {"name": "artifact", "persistentVolumeClaim": {"claimName": f"{self.name}-artifact", "readOnly": True}},
            {"name": "cache", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ]
        pod = {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._pod_container()],
            "volumes": volumes,
        }
        return [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": self.name, "labels": labels},
                "spec": {
                    "replicas": self.answer.replicas,
                    "selector": {"matchLabels": labels},
                    "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                    "template": {"metadata": {"labels": pod_labels}, "spec": pod},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self.name, "labels": labels},
                "spec": {"selector": labels, "ports": [{"name": "http", "port": _PORT, "targetPort": "http"}]},
            },
            self._autoscaler(),
        ]

    def _autoscaler(self) -> dict[str, Any]:
        metric = {
            "type": "Pods",
            "pods": {
                "metric": {"name": "vllm:num_requests_waiting"},
                "target": {"type": "AverageValue", "averageValue": _WAITING},
            },
        }
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": self.name, "labels": {"app": self.name}},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": self.name},
                "minReplicas": self.answer.replicas,
                "maxReplicas": self.most,
                "metrics": [metric],
            },
        }

    def kserve(self) -> list[dict[str, Any]]:
        """InferenceService for the runtime of deploy/kubernetes/kserve.yaml, with this answer's options and devices."""
        return [
            {
                "apiVersion": "serving.kserve.io/v1beta1",
                "kind": "InferenceService",
                # Knative refuses preStop.
                "metadata": {
                    "name": self.name,
                    "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"},
                },
                "spec": {
                    "predictor": {
                        "minReplicas": self.answer.replicas,
                        "maxReplicas": self.most,
                        "terminationGracePeriodSeconds": _GRACE_SECONDS,
                        "model": {
                            "modelFormat": {"name": "ingot"},
                            "storageUri": f"pvc://{self.name}-artifact/{self.name}",
                            "args": self._arguments("/mnt/models"),
                            "resources": self._resources(),
                        },
                    }
                },
            }
        ]

    def _arguments(self, artifact: str) -> list[str]:
        listening = ["--host", "0.0.0.0", "--port", str(_PORT), "--drain-seconds", str(_DRAIN_SECONDS)]
        return [artifact, *listening, *self.options, "--log-format", "json"]

    def _pod_container(self) -> dict[str, Any]:
        ready, health = ({"path": path, "port": "http"} for path in ("/ready", "/health"))
        return {
            "name": "ingot",
            "image": _IMAGE,
            "args": self._arguments("/artifact"),
            "ports": [{"name": "http", "containerPort": _PORT}],
            "resources": self._resources(),
            "startupProbe": {"httpGet": ready, "periodSeconds": 2, "failureThreshold": 300},
            "readinessProbe": {"httpGet": dict(ready), "periodSeconds": 2, "failureThreshold": 1},
            "livenessProbe": {"httpGet": health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "env": [{"name": "INGOT_CACHE", "value": "/cache"}],
            "volumeMounts": [
                {"name": "artifact", "mountPath": "/artifact", "readOnly": True},
                {"name": "cache", "mountPath": "/cache"},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }

    def _resources(self) -> dict[str, Any]:
        """Host memory of the weights' file and the process, of a CPU all that is planned; and the GPUs."""
        configuration = self.answer.configuration
        memory, on_cpu = configuration.memory, configuration.variant.subject.program.on_cpu
        held = memory.used if on_cpu else memory.weights
        amounts: dict[str, Any] = {"memory": f"{-(-held // _GIB) + _PROGRAM_GIB}Gi"}
        if not on_cpu:
            amounts["nvidia.com/gpu"] = configuration.tensor
        return {"requests": amounts, "limits": dict(amounts)}

"""What does a cluster decide that a scenario does not say? Names, image, where the weights and Prometheus are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from real.manifests_numbers import Numbers
from real.manifests_predict import Prediction
from real.manifests_text import object_name
from twin.scenario import Scenario

FINGERPRINT = "vllm-twin/policy-fingerprint"
"""Annotation with the fingerprint of the policy."""

CONFIG_HASH = "vllm-twin/config-hash"
"""Annotation of pods with the hash of the ConfigMap they read: another configuration makes other pods."""

PORT = 8000
"""vLLM's API and its /metrics."""

PROXY_PORT = 8080
STATS_PORT = 8404
"""Of the proxy: requests; its health and metrics."""

METRICS_FOLDER = "/var/lib/twin-metrics"
"""In our image; empty whenever a container starts, because it is no volume."""

MODELS = "/models"
"""Where the weights are mounted."""

POD_SUFFIX = "-[a-z0-9]+-[a-z0-9]{5}"
"""What the names of a Deployment's pods have behind its own: the hash of the template, and five letters."""


@dataclass(frozen=True)
class Setup:
    """A scenario and what its cluster says."""

    scenario: Scenario
    numbers: Numbers
    prediction: Prediction
    namespace: str = "inference"
    image: str = "vllm-twin:0.1.0"
    """Our wheel on vLLM's image (k8s/Containerfile)."""
    models_claim: str = "model-weights"
    """PersistentVolumeClaim that holds the weights, a folder for each model."""
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    monitoring_namespace: str = "monitoring"
    monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """What the operator of Prometheus selects PodMonitors and PrometheusRules by."""
    tiny: bool = False
    """The built-in model with random weights on CPUs."""

    @property
    def name(self) -> str:
        """Of all objects."""
        return object_name(self.scenario.name)

    @property
    def gpus(self) -> int:
        """Of each pod."""
        return 0 if self.tiny else self.scenario.hardware.tensor_parallel_size

    @property
    def most_replicas(self) -> int:
        """What the autoscaler may ask for; else the replicas."""
        fleet = self.scenario.cluster.fleet
        return self.scenario.cluster.replicas if fleet is None else fleet.most_replicas

    @property
    def is_scaled(self) -> bool:
        """Whether an autoscaler sets the replicas."""
        fleet = self.scenario.cluster.fleet
        return fleet is not None and bool(fleet.scaler.names)

    @property
    def has_standby(self) -> bool:
        """Whether sleeping servers stand beside the replicas."""
        fleet = self.scenario.cluster.fleet
        pool = None if fleet is None else fleet.warm_pool
        return pool is not None and pool.standby > 0 and not self.tiny

    @property
    def served(self) -> Mapping[str, str]:
        """What selects the pods that requests go to: the replicas, and sleepers that are awake.

        Sleepers have no label of the replicas' own Deployment: an autoscaler would count them.
        """
        if not self.has_standby:
            return self.labels("engine")
        return {"app.kubernetes.io/name": self.name, "vllm-twin/serves": "requests"}

    @property
    def pods(self) -> str:
        """Regular expression of PromQL for the names of the Deployment's own pods: of no other that begins alike."""
        return f"{self.name}{POD_SUFFIX}"

    @property
    def serving_pods(self) -> str:
        """The same for all pods that requests go to: sleepers too, which have a Deployment of their own."""
        return f"{self.name}(-standby)?{POD_SUFFIX}" if self.has_standby else self.pods

    def monitored(self, component: str) -> dict[str, str]:
        """Labels of a PodMonitor or PrometheusRule about a component."""
        return {**self.labels(component), **self.monitor_labels}

    def labels(self, component: str) -> Mapping[str, str]:
        """What selects the pods of a component."""
        return {"app.kubernetes.io/name": self.name, "app.kubernetes.io/component": component}

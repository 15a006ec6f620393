"""Do manifests that were rendered from a scenario still say what it says?"""

import json
from collections.abc import Iterator, Mapping

from real.hints import CONFIG_KEY
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import SCENARIO_KEY, Cluster
from real.manifests_setup import FINGERPRINT
from twin.errors import InputError
from twin.scenario_yaml import KeyPath


def check(cluster: Cluster) -> Iterator[Finding]:
    """Where the scenario of the folder and its objects disagree."""
    scenario = cluster.scenario
    if scenario is None:
        return
    if isinstance(scenario, InputError):
        (first, *_) = str(scenario).splitlines()
        for manifest in cluster.of_kind("ConfigMap"):
            if manifest.get("data", SCENARIO_KEY) is not None:
                path = ("data", SCENARIO_KEY)
                yield manifest.finding("needs", "scenario", path, f"cannot be loaded here: {first}")
        return
    wanted = scenario.policy_fingerprint
    for other in cluster.manifests:
        paths: tuple[KeyPath, ...] = (
            ("metadata", "annotations", FINGERPRINT),
            ("spec", "template", "metadata", "annotations", FINGERPRINT),
        )
        for spot in paths:
            found = other.get(*spot)
            if found is not None and found != wanted:
                yield other.fault(
                    "fingerprint",
                    spot,
                    f"names policy {found}, the scenario has {wanted}",
                    "render again",
                )
    for server in cluster.servers:
        written = server.arguments.get("additional-config")
        if written is None:
            continue
        where = server.argument_path("additional-config")
        try:
            config = json.loads(written)
        except ValueError:
            yield server.manifest.fault("fingerprint", where, "--additional-config is no JSON")
            continue
        ours = config.get(CONFIG_KEY) if isinstance(config, Mapping) else None
        policy = None if scenario.policy is None else scenario.policy.to_dict()
        if isinstance(ours, Mapping) and ours.get("policy") != policy:
            yield server.manifest.fault(
                "fingerprint",
                where,
                "the policy of the server is not that of the scenario",
                "render again",
            )

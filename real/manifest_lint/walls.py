"""Who may speak to the servers? NetworkPolicies that are not there, that admit nobody, and that let nothing out."""

from collections.abc import Iterator, Mapping
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest, Server, entries, texts

KINDS = ("Deployment", "StatefulSet")


def check(cluster: Cluster) -> Iterator[Finding]:
    """All findings about the walls around servers."""
    for server in cluster.servers:
        manifest = server.manifest
        if manifest.kind not in KINDS or not server.gpus:
            continue
        policies = cluster.selecting("NetworkPolicy", manifest.pod_labels, "spec", "podSelector")
        if not policies:
            yield manifest.finding(
                "advice",
                "network-policy",
                ("spec", "template"),
                "no NetworkPolicy: every pod of the cluster reaches its API and /metrics",
                "let in the proxy and Prometheus only",
            )
            continue
        yield from inwards(server, policies)
        yield from outwards(server, policies)


def _of_type(policies: list[Manifest], kind: str) -> list[Manifest]:
    """Those that limit a direction: without policyTypes all limit what comes in, and what goes out if they name any."""
    found = []
    for policy in policies:
        types = policy.get("spec", "policyTypes")
        default = ["Ingress", "Egress"] if policy.get("spec", "egress") is not None else ["Ingress"]
        if kind in (texts(types) if isinstance(types, list) else default):
            found.append(policy)
    return found


def inwards(server: Server, policies: list[Manifest]) -> Iterator[Finding]:
    """Policies that together admit nobody to the port of the API, or to that of a proxy in the pod."""
    limiting = _of_type(policies, "Ingress")
    rules = [rule for p in limiting for rule in entries(p.get("spec", "ingress"))]
    doors = _doors(server)
    if limiting and not any(_opens(rule, doors) for rule in rules):
        what = f"port {server.port}, which is the API's" if rules else "any port"
        policy = limiting[0]
        yield policy.fault(
            "network-policy",
            ("spec", "ingress"),
            f"admits nobody to {what}: neither clients nor Prometheus reach {server.manifest.name}",
            f"an ingress rule for port {server.port} from the proxy and from Prometheus",
        )


def _doors(server: Server) -> Mapping[int, set[str]]:
    """Ports at which requests may come in -> their names: of the API, and of other containers of the pod."""
    found: dict[int, set[str]] = {}
    if server.arguments.get("host") not in ("127.0.0.1", "localhost", "::1"):
        found[server.port] = set()
    for container in entries(server.pod.get("containers")):
        for port in entries(container.get("ports")):
            number = port.get("containerPort")
            is_own = container.get("name") == server.container.get("name")
            if isinstance(number, int) and (number in found or not is_own):
                found.setdefault(number, set()).add(str(port.get("name")))
    return found


def _opens(rule: Mapping[str, Any], doors: Mapping[int, set[str]]) -> bool:
    """Whether a rule admits somebody to one of the doors."""
    ports = entries(rule.get("ports"))
    for port in ports:
        first, last = port.get("port"), port.get("endPort")
        if str(port.get("protocol", "TCP")) != "TCP":
            continue
        if first is None or any(first in names for names in doors.values()):
            return True
        if isinstance(first, int):
            upto = last if isinstance(last, int) else first
            if any(first <= door <= upto for door in doors):
                return True
    return not ports


def outwards(server: Server, policies: list[Manifest]) -> Iterator[Finding]:
    """Policies that together let nothing out, before servers that fetch their model."""
    limiting = _of_type(policies, "Egress")
    rules = [rule for p in limiting for rule in entries(p.get("spec", "egress"))]
    model = server.arguments.get("model", "")
    env = {str(e.get("name")): str(e.get("value")) for e in entries(server.container.get("env"))}
    is_local = model.startswith(("/", ".")) or env.get("HF_HUB_OFFLINE", "0").lower() in (
        "1",
        "true",
        "yes",
        "on",
    )
    if limiting and not rules and model and not is_local and "$" not in model:
        yield limiting[0].fault(
            "network-policy",
            ("spec", "egress"),
            f"lets nothing out, not even to DNS: {server.manifest.name} looks for {model} at its hub",
            "an egress rule for DNS and the hub, or the model from a volume with HF_HUB_OFFLINE=1",
        )

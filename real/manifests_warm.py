"""Warm capacity as Kubernetes objects: placeholders that hold GPUs, and sleeping servers beside the serving ones."""

from typing import Any

from real.manifests_setup import Setup


def warm_pool(setup: Setup) -> list[dict[str, Any]]:
    """The objects of the scenario's warm pool; none without one."""
    return []

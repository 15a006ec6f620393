"""The scheduler that both hosts share: the simulated engine and vLLM run this code, unchanged.

Standard library only. A policy is handed the time and what it may know of the engine; it never reads a clock, a file
or the future.
"""

from twin.scheduling.config import PolicyConfig, TierConfig, fingerprint
from twin.scheduling.job import Host, Job, Plan
from twin.scheduling.policy import Policy
from twin.scheduling.presets import PRESETS, policy_config

__all__ = [
    "PRESETS",
    "Host",
    "Job",
    "Plan",
    "Policy",
    "PolicyConfig",
    "TierConfig",
    "fingerprint",
    "policy_config",
]

"""What a browser may ask for: sizes and times. A scenario on the command line knows no such limit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server."""

    yaml_bytes: int = 200_000
    """Of a scenario, pasted, uploaded or in a link."""
    upload_bytes: int = 50 * 2**20
    """Of an uploaded trace."""
    uploads: int = 10
    """Traces of one session."""
    kept_bytes: int = 2 * 2**30
    """Of all uploads of all sessions."""
    requests: int = 200_000
    """Of all streams of a scenario, where it says how many."""
    replicas: int = 64
    kv_blocks: int = 5_000_000
    """Of all replicas together."""
    run_s: float = 120.0
    """Wall time of one run, comparison or search."""
    search_s: float = 45.0
    """Wall time after which a search begins nothing new, so that what it found is still confirmed within run_s."""
    values: int = 200
    """Of one key that a search varies."""
    changes_chars: int = 5_000
    """Of the changes of a comparison, or what a search may vary."""
    memory_bytes: int = 4 * 2**30
    """Address space of the process that runs it."""
    waiting: int = 20
    """Runs that wait for a worker."""
    kept: int = 40
    """Results that are kept for a second look."""

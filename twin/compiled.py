"""Whether what runs is compiled."""

from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether the modules that a run spends its time in are compiled (setup.py), and not the sources themselves."""
    found = find_spec("twin.clock")
    return found is None or not str(found.origin).endswith(".py")

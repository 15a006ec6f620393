"""What compiling (setup.py) changes: speed, and what Python no longer does by itself."""

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**attributes):
        """For whoever compiles: `acyclic` = an object never reaches itself, so that no collector need look at it."""
        return lambda cls: cls


def is_compiled() -> bool:
    """Whether the modules that a run spends its time in are compiled, and not the sources themselves."""
    found = find_spec("twin.clock")
    return found is None or not str(found.origin).endswith(".py")


def remade(value: Any) -> tuple[Any, ...]:
    """What `__reduce__` of a frozen dataclass gives: compiled, it can be copied and sent to other processes only so."""
    return type(value), tuple(getattr(value, field.name) for field in fields(value))

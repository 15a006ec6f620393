"""One thing that is wrong, missing or worth knowing, and where it stands."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["fault", "needs", "advice"]


@dataclass(frozen=True)
class Finding:
    """What a rule has found."""

    kind: Kind
    """fault: it does not work, or not as meant; needs: something beside the files must be there; advice."""
    rule: str
    """Name of the rule, as docs/deploy.md lists them."""
    place: str
    """file:line"""
    subject: str
    """Kind and name of the object."""
    message: str
    fix: str = ""
    """What to do; empty where the message says it."""

    def __str__(self) -> str:
        """As one line."""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.place}: {self.kind}: {self.subject}: {self.message}{fix} [{self.rule}]"

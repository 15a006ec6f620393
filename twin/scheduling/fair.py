"""Who has had how much: start tags of start-time fair queueing (Goyal, Vin and Cheng, 1996), in integers.

A job's tag is where its tenant's account stands when the job becomes ready, but never before the tag of the job
started last, so an idle tenant earns no credit. The account moves on by the job's size at once; keys stay static.
"""

from collections.abc import Mapping

SCALE = 1000
"""Accounts count thousandths of a weighted token, so that weights divide without floats."""


class FairShare:
    """Accounts of all tenants."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._account: dict[str, int] = {}
        self._jobs: dict[str, int] = {}
        self._enough = 1024  # accounts, before idle ones are looked for
        self._virtual = 0  # largest tag started before this step
        self._starts: list[int] = []  # tags started in this step, not undone so far

    def enter(self, tenant: str, size: int) -> int:
        """Charge a job of `size` tokens that becomes ready; returns its tag."""
        tag = max(self._virtual, self._account.get(tenant, 0), *self._starts)
        self._account[tenant] = tag + self._cost(tenant, size)
        self._jobs[tenant] = self._jobs.get(tenant, 0) + 1
        return tag

    def start(self, tag: int) -> None:
        """A job with this tag has started."""
        self._starts.append(tag)

    def undo_start(self, tag: int) -> None:
        """A job with this tag, started in this step, has not started after all."""
        self._starts.remove(tag)

    def begin_step(self) -> None:
        """What has started until now can no longer be undone."""
        self._virtual = max(self._virtual, *self._starts, 0)
        self._starts.clear()

    def settle(self, tenant: str, charged: int, used: int) -> None:
        """A charged job has ended: correct its tenant's account from `charged` to `used` tokens."""
        self._account[tenant] += self._cost(tenant, used) - self._cost(tenant, charged)
        self._jobs[tenant] -= 1
        if self._jobs[tenant] == 0:
            del self._jobs[tenant]
            if len(self._account) > self._enough:
                self._forget_idle()
                self._enough = max(1024, 2 * len(self._account))

    def service(self, tenant: str) -> int:
        """Where the account of `tenant` stands."""
        return self._account.get(tenant, 0)

    def _cost(self, tenant: str, tokens: int) -> int:
        return tokens * SCALE // self._weights.get(tenant, 1)

    def _forget_idle(self) -> None:
        """Accounts behind the virtual time say nothing: their next tag is the virtual time anyway."""
        self._account = {
            tenant: account
            for tenant, account in self._account.items()
            if tenant in self._jobs or account > self._virtual
        }

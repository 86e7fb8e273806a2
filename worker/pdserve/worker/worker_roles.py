"""`WorkerRoles`: the role of a worker, the roles that it can take, and its changes of role.

A role says what routers may place at the worker. It is no property of the process: a worker serves calls of both roles at any time,
those of an earlier role until they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from pdserve.common import clock
from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.worker_identity import WorkerRole


class WorkerRoles:
    """One worker's."""

    def __init__(
        self,
        role: WorkerRole,
        settings: Mapping[WorkerRole, WorkerSettings],
        objection: str,
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """role: with which the worker was started. settings: in each role that it can take. objection: why there is only one.
        on_change: called after each change."""
        self.role = role
        self._settings = settings
        self._objection = objection
        self._on_change = on_change
        self._clock = clock
        self._changed_at: float | None = None
        self.num_changes: Counter[WorkerRole] = Counter(dict.fromkeys(WorkerRole, 0))
        """Role -> times that the worker has taken it since its start."""

    @property
    def settings(self) -> WorkerSettings:
        """Those of the role."""
        return self._settings[self.role]

    def can_take(self, role: WorkerRole) -> bool:
        return role in self._settings

    def settings_in(self, role: WorkerRole) -> WorkerSettings:
        """Of a role that it can take."""
        return self._settings[role]

    def change(self, role: WorkerRole, dwell_s: float = 0.0) -> bool:
        """Take a role; False if the worker has it.

        Raises: InvalidRequest with the reason if it cannot take the role; Overloaded if its role was changed less than `dwell_s`
        seconds ago.
        """
        if role is self.role:
            return False
        if role not in self._settings:
            raise InvalidRequest(f"role is {role.value}, which this worker cannot take: {self._objection}", "role")
        since_s = None if self._changed_at is None else self._clock() - self._changed_at
        if since_s is not None and since_s < dwell_s:
            raise Overloaded(
                f"the worker's role was changed {since_s:.1f} s ago, and may be changed after {dwell_s:g} s"
            )
        self.role, self._changed_at = role, self._clock()
        self.num_changes[role] += 1
        self._on_change()
        return True

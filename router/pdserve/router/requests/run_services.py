"""`RunServices`: the parts of a router that every run of a request works with."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.admission.admission import Admission
from pdserve.router.attempts.poison import Company, PoisonList
from pdserve.router.placement.placer import Placer
from pdserve.router.requests.preparation import Preparation
from pdserve.router.workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class RunServices:
    """Made once a router."""

    fleet: Fleet
    placer: Placer
    admission: Admission
    preparation: Preparation
    poison: PoisonList
    company: Company
    settings: RouterSettings

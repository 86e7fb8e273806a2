"""`RunServices`: the parts of a router that every run of a request works with."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.router_settings import RouterSettings
from pdserve.router.admission import Admission
from pdserve.router.fleet import Fleet
from pdserve.router.placer import Placer
from pdserve.router.poison import Company, PoisonList
from pdserve.router.preparation import Preparation


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

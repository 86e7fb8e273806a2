"""`RequestServices`: the parts of a router that every task of a request uses."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.admission.shared_admission import RequestAdmission
from pdserve.router.attempts.crash_guard import Company, DenyList
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.requests.preparation import Preparation
from pdserve.router.requests.served_models import ServedModels
from pdserve.router.workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class RequestServices:
    """Made once a router."""

    fleet: Fleet
    models: ServedModels
    selector: WorkerSelector
    admission: RequestAdmission
    preparation: Preparation
    deny_list: DenyList
    company: Company
    settings: RouterSettings

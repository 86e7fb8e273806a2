"""`RequestServices`: the parts of a router that every task of a request uses."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.admission import Admission
from pdserve.router.attempts.crash_guard import Company, DenyList
from pdserve.router.placement.rebalancing import Rebalancing
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.requests.cache_moves import CacheMoves
from pdserve.router.requests.preparation import Preparation
from pdserve.router.requests.served_models import ServedModels
from pdserve.router.workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class RequestServices:
    """Made once a router."""

    fleet: Fleet
    models: ServedModels
    selector: WorkerSelector
    admission: Admission
    preparation: Preparation
    deny_list: DenyList
    company: Company
    rebalancing: Rebalancing
    cache_moves: CacheMoves
    settings: RouterSettings

    @property
    def num_encoder_tokens(self) -> int:
        """Positions of every prompt's sound, whose KV blocks precede those of the prompt's tokens; 0 for another model."""
        audio = self.preparation.audio
        return 0 if audio is None else audio.config.num_positions

    def num_prompt_blocks(self, num_tokens: int) -> int:
        """KV blocks of a prompt and its sound, of all KV cache groups together, at the worker where it has most."""
        workers = (worker for role in WorkerRole for worker in self.fleet.workers(role))
        lengths = ((worker, worker.num_sequence_tokens(num_tokens, self.num_encoder_tokens)) for worker in workers)
        return max((worker.num_prompt_blocks(length) for worker, length in lengths), default=0)

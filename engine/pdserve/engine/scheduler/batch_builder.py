"""`BatchBuilder`: collects the sequences and tokens of one step."""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.engine.scheduler_output import SchedulerOutput


class BatchBuilder:
    """The tokens left in the budget, and the choices so far."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = max_num_batched_tokens
        """Tokens that may still be scheduled."""
        self.output = SchedulerOutput()
        self.new_requests: list[Request] = []
        """Sequences that enter the batch in this step."""
        self.preempted = False
        """True if blocks have run out in this step."""

    def put(self, request: Request, num_tokens: int) -> None:
        """Compute its next `num_tokens` tokens."""
        self.output.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def schedule_new(self, request: Request, num_tokens: int) -> None:
        """Schedule a sequence that enters the batch in this step."""
        self.new_requests.append(request)
        self.put(request, num_tokens)

    def unschedule(self, request: Request) -> None:
        """Remove a preempted sequence. Harmless when it had no part in the step."""
        self.preempted = True
        self.budget += self.output.num_scheduled_tokens.pop(request.request_id, 0)
        self.output.scheduled_cached_reqs.new_block_ids.pop(request.request_id, None)
        if request in self.new_requests:
            self.new_requests.remove(request)

"""`PooledInputs`: fields of a body whose inputs are pooled one by one, into embeddings or classes."""

from __future__ import annotations

import msgspec

from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.prompts import OpenAIPrompts, as_prompts, num_prompts
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.prompt import Truncation


class PooledInputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Bodies of `/v1/embeddings` and `/classify` add their own fields."""

    input: OpenAIPrompts
    model: str | None = None
    user: str | None = None
    # extensions
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def pooled_by(
        self, pooling: PoolingParams, call: CallFields, *, add_special_tokens: bool = True
    ) -> list[ClientRequest]:
        """One request per input. Raises: InvalidRequest."""
        verify_caller(self)
        num_prompts(self.input, "input", MAX_EMBEDDING_INPUTS)
        prompts = as_prompts(self.input, "input", add_special_tokens=add_special_tokens)
        pooling.verify()
        truncation = Truncation.of(self.truncate_prompt_tokens, self.truncation_side)
        return [
            ClientRequest(
                prompt=prompt,
                field="input" if len(prompts) == 1 else f"input[{place}]",
                pooling_params=pooling,
                cache_salt=self.cache_salt or None,
                truncation=truncation,
                **call._asdict(),
            )
            for place, prompt in enumerate(prompts)
        ]

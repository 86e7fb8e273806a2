"""`PoolingCalls`: the calls of `LLM` that generate no text: `embed`, `classify`, `score` and `encode`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.pooling_params import PoolingParams, PoolingTask
from pdserve.llm.llm_engine import LLMEngine
from pdserve.llm.pooling_output import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pdserve.llm.progress import MakeBar, Progress
from pdserve.llm.requests.local_request import LocalPooling, ValidRequest
from pdserve.llm.requests.prompt_lists import many_prompts, one_for_each, validated
from pdserve.llm.requests.prompts import PromptType, PromptWithSalt, TokenizationKwargs, as_prompt
from pdserve.llm.requests.request_factory import RequestFactory
from pdserve.text.prompt import PairInput
from pdserve.text.scored_pairs import cosine_similarity, paired

Params = PoolingParams | Sequence[PoolingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class PoolingCalls(ABC):
    """A base of `LLM`, which has the engine."""

    _requests: RequestFactory

    @abstractmethod
    def _exclusive(self) -> AbstractContextManager[LLMEngine]:
        """The engine, for the exclusive use of one call."""

    @abstractmethod
    def _computing(
        self, engine: LLMEngine, num_requests: int, use_tqdm: bool | MakeBar
    ) -> AbstractContextManager[Progress]:
        """Context for the steps of a batch."""

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Params = None,
        *,
        use_tqdm: bool | MakeBar = True,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in the order of the prompts.

        prompts, tokenization_kwargs, lora_request: as in `generate`.
        pooling_params: for all prompts, or one for each; None: last token, normalised.
        Raises: as `generate` does; InvalidRequest for a model with a classification head.
        """
        pooled = self.encode(
            prompts,
            pooling_params,
            pooling_task="embed",
            use_tqdm=use_tqdm,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in pooled]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        use_tqdm: bool | MakeBar = True,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """One number per label of the model's classification head for each prompt, in the order of the prompts.

        Arguments: as in `embed`. Raises: as `generate` does; InvalidRequest for a model without such a head.
        """
        pooled = self.encode(
            prompts,
            pooling_params,
            pooling_task="classify",
            use_tqdm=use_tqdm,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
        )
        return [ClassificationRequestOutput.from_base(output) for output in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | MakeBar = True,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` fits that of `data_1` at its place, or the only one.

        A model with a classification head of one label computes each pair as one prompt; one without a head embeds the texts, and
        the score is the cosine of the two embeddings. pooling_params, lora_request: of all. tokenization_kwargs: as in `generate`,
        but the longer text of a pair is truncated first, by default at its right side.
        Raises: as `generate` does; InvalidRequest for a head with several labels.
        """
        pairs = paired(_texts(data_1, "data_1"), _texts(data_2, "data_2"), ("data_1", "data_2"))
        if self._requests.num_labels:

            def parse(value: object) -> PromptWithSalt:
                pair = PromptWithSalt(PairInput(*cast("tuple[str, str]", value)), "data_2")
                return pair.tokenized_with(tokenization_kwargs)

            scored = self._pooled(pairs, "pairs", parse, pooling_params, "score", use_tqdm, lora_request)
            return [ScoringRequestOutput.from_base(output) for output in scored]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = self.embed(
            texts, pooling_params, use_tqdm=use_tqdm, tokenization_kwargs=tokenization_kwargs, lora_request=lora_request
        )
        by_text = dict(zip(texts, embedded, strict=True))
        return [_of_embeddings(by_text[text], by_text[text_pair]) for text, text_pair in pairs]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool | MakeBar = True,
        tokenization_kwargs: TokenizationKwargs | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The result of pooling of each prompt, by the general type.

        pooling_task: of all prompts; None: that of `pooling_params`, else `classify` with a classification head and `embed`
        without. Others: as in `embed`.
        """
        values, label = many_prompts(prompts)
        parse = partial(as_prompt, tokenization_kwargs=tokenization_kwargs)
        return self._pooled(values, label, parse, pooling_params, pooling_task, use_tqdm, lora_request)

    def _pooled(
        self,
        values: Sequence[object],
        label: str | None,
        parse: Callable[[object], PromptWithSalt],
        pooling_params: Params,
        task: PoolingTask | None,
        use_tqdm: bool | MakeBar,
        lora_request: Adapters,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """label: the name of a list of values in error messages; None for a single value."""
        params = one_for_each(pooling_params, len(values), PoolingParams, "pooling_params")
        adapters = one_for_each(lora_request, len(values), LoRARequest, "lora_request")
        with self._exclusive() as engine:
            validate = self._requests.validate_pooling

            def validate_one(place: int, value: object) -> ValidRequest:
                return validate(parse(value), params[place], task, lora_request=adapters[place])

            valid = validated(values, label, validate_one)
            requests: list[LocalPooling] = [self._requests.make_pooling(request) for request in valid]
            with self._computing(engine, len(requests), use_tqdm) as progress:
                engine.run(requests, lambda request: progress.finished(len(request.core.prompt_token_ids), 0))
        return [request.output for request in requests if request.output is not None]


def _texts(given: object, name: str) -> list[str]:
    """One text or many. Raises: InvalidRequest."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a text or a list of them, not {given!r:.60}", name)
    return list(texts)


def _of_embeddings(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        prompt=None,
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        outputs=ScoringOutput(score=cosine_similarity(first.outputs.embedding, second.outputs.embedding)),
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )

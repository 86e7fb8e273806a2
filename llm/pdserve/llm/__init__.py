"""Offline Python API: `LLM` for batches, `AsyncLLM` for streams, `LLMEngine` step by step; one engine, without network."""

from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import NamedLogitsProcessor, RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.llm.async_llm import AsyncLLM
from pdserve.llm.beam_search import BeamSearchOutput, BeamSearchSequence
from pdserve.llm.embedding_output import EmbeddingOutput, EmbeddingRequestOutput
from pdserve.llm.llm import LLM
from pdserve.llm.llm_engine import LLMEngine
from pdserve.llm.prompts import Conversation, PromptType, TextPrompt, TokenizationKwargs, TokensPrompt
from pdserve.text.beam_search import BeamSearchParams
from pdserve.text.outputs.request_output import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Conversation",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "NamedLogitsProcessor",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenizationKwargs",
    "TokensPrompt",
]

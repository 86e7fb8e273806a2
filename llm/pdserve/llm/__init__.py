"""Offline Python API: `LLM` for batches, `AsyncLLM` for streams, `LLMEngine` step by step; one engine, without network."""

from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import NamedLogitsProcessor, RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.stats.stat_logger import LoggingStatLogger, StatLoggerBase
from pdserve.llm.async_llm import AsyncLLM
from pdserve.llm.beam_search import BeamSearchOutput, BeamSearchSequence
from pdserve.llm.engine_options import EngineArgs
from pdserve.llm.llm import LLM
from pdserve.llm.llm_engine import LLMEngine
from pdserve.llm.pooling_output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pdserve.llm.requests.prompts import (
    ChatKwargs,
    Conversation,
    EmbedsPrompt,
    PromptType,
    TextPrompt,
    TokenizationKwargs,
    TokensPrompt,
)
from pdserve.llm.requests.request_output_collector import RequestOutputCollector
from pdserve.llm.requests.streaming_session import StreamingInput
from pdserve.text.beam_search import BeamSearchParams
from pdserve.text.outputs.request_output import CompletionOutput, RequestMetadata, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatKwargs",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Conversation",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "LoggingStatLogger",
    "NamedLogitsProcessor",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestMetadata",
    "RequestOutput",
    "RequestOutputCollector",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLoggerBase",
    "StreamingInput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenizationKwargs",
    "TokensPrompt",
]

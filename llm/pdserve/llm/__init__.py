"""Offline Python API: `LLM` for batches, `AsyncLLM` for streams, one engine in this process. Knows no network."""

from pdserve.common.sampling_params import SamplingParams
from pdserve.common.structured_outputs import StructuredOutputsParams
from pdserve.llm.async_llm import AsyncLLM
from pdserve.llm.llm import LLM
from pdserve.llm.prompts import Conversation, PromptType, TextPrompt, TokensPrompt
from pdserve.text.output_processor import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Conversation",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

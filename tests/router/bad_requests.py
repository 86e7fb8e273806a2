"""Requests that are no requests, over both front ends. Each is refused with a status of its own kind and a message that
names the field, its value and its limit; none of them reaches a worker.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import HIDDEN_SIZE, VOCAB_SIZE

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
USER = {"role": "user", "content": "x"}
LONG = "x" * 300
HUGE = "x" * 13 * 300
"""It has at least 300 tokens, since none stands for more than 13 bytes."""


def completion(field: str, value: Any, message: str, param: str | None = None) -> tuple[str, dict[str, Any], str, str]:
    return COMPLETIONS, {"prompt": "x", field: value}, param or field, message


def chat(field: str, value: Any, message: str, param: str | None = None) -> tuple[str, dict[str, Any], str, str]:
    return CHAT, {"messages": [USER], field: value}, param or field, message


def message(value: Any, told: str) -> tuple[str, dict[str, Any], str, str]:
    return CHAT, {"messages": [value]}, "messages", told


def streamed(options: Any, told: str, param: str = "stream_options") -> tuple[str, dict[str, Any], str, str]:
    return COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": options}, param, told


HTTP: list[tuple[Any, ...]] = [
    ("/v1/completions", {"prompt": ""}, "prompt", "prompt is empty"),
    ("/v1/completions", {"prompt": []}, "prompt", "prompt is empty"),
    ("/v1/completions", {"prompt": [[]]}, "prompt", "prompt is empty"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt", "mixes kinds"),
    ("/v1/completions", {"prompt": [1, 2.5]}, "prompt", "prompt[1]: expected"),
    ("/v1/completions", {}, "prompt", "prompt is missing"),
    ("/v1/completions", {"prompt": "x" * 256}, "prompt", "prompt has 256 tokens; the model's length is 256"),
    (
        "/v1/completions",
        {"prompt": "x" * 250, "max_tokens": 7},
        "max_tokens",
        "max_tokens is 7 and prompt has 250 tokens",
    ),
    ("/v1/completions", {"prompt": [5, VOCAB_SIZE]}, "prompt", f"prompt[1] is {VOCAB_SIZE}, outside the vocabulary"),
    ("/v1/completions", {"prompt": [-1]}, "prompt", "prompt[0] is -1"),
    (
        "/v1/completions",
        {"prompt": "x", "allowed_token_ids": [1] * (VOCAB_SIZE + 1)},
        "allowed_token_ids",
        f"allowed_token_ids must be at most {VOCAB_SIZE} tokens, not {VOCAB_SIZE + 1}",
    ),
    ("/v1/completions", {"prompt": [2**40]}, "prompt", "outside the vocabulary"),
    ("/v1/completions", {"prompt": "x", "temprature": 1}, "temprature", "temprature is not a known field"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "temperature", "temperature: expected"),
    ("/v1/completions", {"prompt": "x", "temperature": True}, "temperature", "temperature: expected"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature", "temperature must be from 0 to 100, not -1"),
    ("/v1/completions", {"prompt": "x", "temperature": float("nan")}, "temperature", "must be a finite number"),
    ("/v1/completions", {"prompt": "x", "top_p": float("inf")}, "top_p", "must be a finite number"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p", "top_p must be above 0"),
    ("/v1/completions", {"prompt": "x", "top_k": -2}, "top_k", "top_k must be"),
    ("/v1/completions", {"prompt": "x", "top_k": 1.5}, "top_k", "top_k: expected `int"),
    ("/v1/completions", {"prompt": "x", "min_p": 2}, "min_p", "min_p must be"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -5}, "max_tokens", "max_tokens must be at least 1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens (2)"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs", "logprobs must be from 0 to 20, not 21"),
    ("/v1/completions", {"prompt": "x", "logprobs": -1}, "logprobs", "logprobs must be from 0 to 20, not -1"),
    ("/v1/completions", {"prompt": "x", "logprobs": True}, "logprobs", "expected `int"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "must be from 0 to 20, not 21"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "must be from 0 to 20, not -1"),
    (
        "/v1/completions",
        {"prompt": "x", "prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "comes with a whole answer",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "frequency_penalty": 2.5},
        "frequency_penalty",
        "must be from -2 to 2, not 2.5",
    ),
    ("/v1/completions", {"prompt": "x", "frequency_penalty": "x"}, "frequency_penalty", "expected `float"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": -3}, "presence_penalty", "must be from -2 to 2, not -3"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": float("nan")}, "presence_penalty", "a finite number"),
    ("/v1/completions", {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "must be above 0, not 0"),
    ("/v1/completions", {"prompt": "x", "repetition_penalty": [1]}, "repetition_penalty", "expected `float"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", 'the key "a"'),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", f"token id {VOCAB_SIZE}"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", "token id -1, outside"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias", "expected `float"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"1": float("nan")}}, "logit_bias", "must be a finite number"),
    ("/v1/completions", {"prompt": "x", "logit_bias": [1]}, "logit_bias", "expected `object"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids", "[1] is"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": ["1"]}, "allowed_token_ids", "expected `int"),
    ("/v1/completions", {"prompt": "x", "bad_words": [""]}, "bad_words", "1 to 256 characters"),
    ("/v1/completions", {"prompt": "x", "bad_words": "x"}, "bad_words", "expected `array"),
    ("/v1/completions", {"prompt": "x", "bad_words": ["x"] * 129}, "bad_words", "at most 128 texts, not 129"),
    ("/v1/completions", {"prompt": "x", "spaces_between_special_tokens": 1}, "spaces_between_special_tokens", "`bool"),
    ("/v1/completions", {"prompt": "x", "skip_special_tokens": "no"}, "skip_special_tokens", "expected `bool"),
    ("/v1/completions", {"prompt": "x", "include_stop_str_in_output": 0}, "include_stop_str_in_output", "`bool"),
    ("/v1/completions", {"prompt": "x", "seed": 2**70}, "seed", "seed"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 strings"),
    ("/v1/completions", {"prompt": "x", "stop": "x" * 257}, "stop", "1 to 256 characters"),
    ("/v1/completions", {"prompt": "x", "stop": [1]}, "stop", "stop[0]: expected `str`"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "outside the vocabulary"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a known"),
    ("/v1/completions", {"prompt": "x", "cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    ("/v1/completions", {"prompt": ["a"] * 129}, "prompt", "1 to 128 are allowed"),
    ("/v1/chat/completions", {"messages": []}, "messages", "messages is empty"),
    ("/v1/chat/completions", {}, "messages", "messages is missing"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages", "role"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages", "messages: expected `array`"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "messages has"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": 3}, "logprobs", "`bool"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3},
        "top_logprobs",
        "top_logprobs needs logprobs to be true",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs must be from 0 to 20, not 21",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        "tools[0].function",
        "tools[0].function is missing",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1000},
        "max_completion_tokens",
        "max_completion_tokens is 1000",
    ),
    completion("model", 5, "model: expected `str"),
    completion("priority", 2**31, "from -2147483648 to 2147483647, not 2147483648"),
    completion("priority", 0.5, "expected `int"),
    completion("speculative_tokens", 33, "speculative_tokens must be from 0 to 32, not 33"),
    completion("speculative_tokens", -1, "speculative_tokens must be from 0 to 32, not -1"),
    completion("n", 0, "n must be from 1 to 16, not 0"),
    completion("n", 17, "n must be from 1 to 16, not 17"),
    completion("n", "2", "expected `int"),
    (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, "best_of", "at least n (3) and at most 16, not 2"),
    completion("best_of", 17, "at least n (1) and at most 16, not 17"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3, "stream": True}, "best_of", "stream must be false"),
    chat("n", -1, "n must be from 1 to 16"),
    completion("stream", "yes", "stream: expected `bool"),
    streamed("usage", "stream_options: expected `object"),
    streamed({"include_usage": 1}, "expected `bool", "stream_options.include_usage"),
    streamed({"include_obfuscation": 1}, "expected `bool", "stream_options.include_obfuscation"),
    completion("max_tokens", "5", "expected `int"),
    completion("max_tokens", 1.5, "expected `int"),
    completion("max_tokens", True, "expected `int"),
    completion("max_tokens", 2**40, "max_tokens is 1099511627776 and prompt has 1 tokens"),
    completion("min_tokens", -1, "min_tokens must be at least 0"),
    completion("min_tokens", "x", "expected `int"),
    completion("temperature", 101, "temperature must be from 0 to 100, not 101"),
    completion("temperature", [1], "expected `float"),
    completion("temperature", float("-inf"), "must be a finite number"),
    completion("top_p", 1.5, "top_p must be above 0 and at most 1, not 1.5"),
    completion("top_p", -0.1, "top_p must be above 0 and at most 1, not -0.1"),
    completion("top_p", "x", "expected `float"),
    completion("min_p", -0.5, "min_p must be from 0 to 1, not -0.5"),
    completion("min_p", "x", "expected `float"),
    completion("top_k", 2**31, "positive and at most 2147483647, not 2147483648"),
    completion("top_k", True, "expected `int"),
    completion("seed", "x", "expected `int"),
    completion("seed", 1.5, "expected `int"),
    completion("seed", -(2**63) - 1, "seed"),
    completion("stop", {"a": 1}, "expected `str | array"),
    completion("stop", 5, "expected `str | array"),
    completion("stop", ["a", ""], "1 to 256 characters, not ''"),
    completion("stop", ["x" * 257], "1 to 256 characters"),
    completion("stop", [None], "stop[0]: expected `str`"),
    completion("stop_token_ids", "5", "expected `array"),
    completion("stop_token_ids", [-1], "stop_token_ids[0] is -1, outside the vocabulary"),
    completion("stop_token_ids", [1.5], "expected `int"),
    completion("stop_token_ids", [1] * 257, "at most 256 ids, not 257"),
    completion("suffix", "end", 'suffix is "end", but only "" is supported'),
    completion("suffix", 5, "expected `str"),
    completion("echo", "yes", "expected `bool"),
    (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "must be from 0 to 20, not 21"),
    completion("user", 5, "expected `str"),
    completion("logit_bias", {str(token): 1 for token in range(1025)}, "at most 1024 tokens, not 1025"),
    completion("logit_bias", {"1.5": 1}, 'the key "1.5"'),
    completion("logit_bias", {"": 1}, 'the key ""'),
    completion("logit_bias", {"9" * 30: 1}, "its keys are token ids"),
    completion("allowed_token_ids", [-1], "allowed_token_ids[0] is -1"),
    completion("allowed_token_ids", "all", "expected `array"),
    completion("bad_words", [5], "bad_words[0]: expected `str"),
    completion("bad_words", ["x" * 257], "1 to 256 characters"),
    completion("repetition_penalty", -1, "must be above 0, not -1"),
    completion("repetition_penalty", float("nan"), "must be a finite number"),
    completion("presence_penalty", 2.01, "from -2 to 2, not 2.01"),
    completion("frequency_penalty", float("inf"), "must be a finite number"),
    completion("ignore_eos", 1, "expected `bool"),
    completion("cache_salt", 5, "expected `str"),
    completion("logprobs", 2.5, "expected `int"),
    completion("use_beam_search", "yes", "expected `bool"),
    completion("beam_width", 4, "beam_width is 4, but only 1 is supported; with use_beam_search, the number of beams"),
    completion("length_penalty", 2.0, "length_penalty needs use_beam_search to be true"),
    completion("early_stopping", "never", "early_stopping needs use_beam_search to be true"),
    completion("messages", [USER], "messages is not a known field"),
    completion("max_completion_tokens", 5, "max_completion_tokens is not a known field"),
    completion("detokenize", False, "detokenize is not a known field"),
    completion("output_kind", "delta", "output_kind is not a known field"),
    completion("logits_processors", "ban", "expected `array"),
    completion("logits_processors", [5], "logits_processors[0]: expected `object"),
    completion("logits_processors", [{}], "logits_processors[0].name is missing", "logits_processors[0].name"),
    completion("logits_processors", [{"name": 5}], "logits_processors[0].name: expected `str", "logits_processors"),
    completion("logits_processors", [{"name": "x", "args": [1]}], "expected `object", "logits_processors"),
    completion("logits_processors", [{"name": "x", "code": "y"}], "is not a known field", "logits_processors[0].code"),
    completion("logits_processors", [{"name": ""}], "logits_processors[0].name must be 1 to 128 characters"),
    completion("logits_processors", [{"name": "x"}] * 9, "at most 8, not 9"),
    completion("logits_processors", [{"name": "x", "args": {"a": "b" * 5000}}], "at most 4096 bytes of JSON"),
    completion("prompt_token_ids", [1], "prompt_token_ids is not a known field"),
    completion("extra_" * 100, 1, "is not a known field", ("extra_" * 100)[:77] + "..."),
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "expected `str | array"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt", "expected `str | array"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", "mixes kinds"),
    (COMPLETIONS, {"prompt": [None]}, "prompt", "prompt[0]: expected"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "prompt[0]: expected"),
    (COMPLETIONS, {"prompt": [[1, 2.5]]}, "prompt", "prompt[0][1]: expected `int"),
    (COMPLETIONS, {"prompt": [["a"]]}, "prompt", "prompt[0][0]: expected `int"),
    (COMPLETIONS, {"prompt": [[1], [VOCAB_SIZE]]}, "prompt[1]", f"prompt[1][0] is {VOCAB_SIZE}"),
    (COMPLETIONS, {"prompt": "x", "model": "other"}, "model", "model 'other' is not served here", 404),
    (CHAT, {"messages": None}, "messages", "expected `array"),
    (CHAT, {"messages": [5]}, "messages", "messages[0]: expected `object"),
    (CHAT, {"messages": [USER], "model": "other"}, "model", "model 'other' is not served here", 404),
    (CHAT, {"messages": [USER], "model": "m" * 5000}, "model", "is not served here", 404),
    message({"role": ["m" * 5000], "content": "x"}, "role must be a non-empty string"),
    message({"role": "user", "content": [{"type": "m" * 5000}]}, "this model takes only text"),
    chat("chat_template_kwargs", {"a": json.loads("[" * 99 + "]" * 99)}, "chat_template_kwargs is nested deeper than"),
    message({}, "messages[0].role must be a non-empty string"),
    message({"role": "", "content": "x"}, "messages[0].role must be a non-empty string, not ''"),
    message({"role": 5, "content": "x"}, "messages[0].role must be a non-empty string, not 5"),
    message({"role": "user", "content": 5}, "messages[0].content must be a string or a list of parts, not int"),
    message({"role": "user", "content": {"text": "x"}}, "messages[0].content must be a string or a list"),
    message({"role": "user", "content": [5]}, "messages[0].content[0] has type 'int'"),
    message({"role": "user", "content": [{"type": "image_url"}]}, "has type 'image_url'; this model takes only text"),
    message({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text must be a string"),
    chat("max_completion_tokens", 0, "max_completion_tokens must be at least 1, not 0"),
    chat("max_completion_tokens", "x", "expected `int"),
    chat("max_tokens", 300, "max_tokens is 300 and messages has 3 tokens"),
    chat("top_logprobs", -1, "top_logprobs needs logprobs to be true"),
    (
        CHAT,
        {"messages": [USER], "logprobs": True, "top_logprobs": -1},
        "top_logprobs",
        "top_logprobs must be from 0 to 20, not -1",
    ),
    chat("top_logprobs", "x", "expected `int"),
    chat("store", "no", "expected `bool"),
    chat("service_tier", 5, "expected `str"),
    chat("modalities", ["text", "audio"], 'modalities is ["text", "audio"], but only ["text"]'),
    chat("modalities", "text", "expected `array"),
    chat("audio", {"voice": "alloy", "format": "wav"}, "it is not supported; this model reads and writes only text"),
    chat("web_search_options", {}, "web_search_options is {}: it is not supported"),
    chat("moderation", {"model": "x"}, "it is not supported"),
    chat("functions", [{"name": "f"}], "to call functions, use tools"),
    chat("function_call", {"name": "f"}, 'but only "none" or "auto" is supported'),
    chat("reasoning_effort", "hi", 'reasoning_effort is "hi", one of none, minimal, low, medium, high, xhigh, max is'),
    chat("verbosity", "low", 'verbosity is "low", but only "medium"'),
    chat("prompt_cache_retention", 24, "expected `str"),
    chat("metadata", {"a": 1}, "metadata[...]: expected `str`"),
    chat("metadata", "x", "expected `object"),
    chat("safety_identifier", 5, "expected `str"),
    chat("prompt_cache_key", 5, "expected `str"),
    chat("early_stopping", True, "early_stopping needs use_beam_search to be true"),
    chat("beam_width", 2, "beam_width is 2, but only 1"),
    chat("chat_template_kwargs", [1], "expected `object"),
    chat("add_generation_prompt", "x", "expected `bool"),
    chat("prompt", "x", "prompt is not a known field"),
    chat("suffix", "x", "suffix is not a known field"),
    chat("best_of", 2, "best_of is not a known field"),
    chat("echo", "yes", "expected `bool"),
    chat("temperature", -1, "temperature must be from 0 to 100, not -1"),
    chat("stop", ["x"] * 17, "at most 16 strings, not 17"),
    (EMBEDDINGS, {}, "input", "input is missing"),
    (EMBEDDINGS, {"input": ""}, "input", "input is empty"),
    (EMBEDDINGS, {"input": []}, "input", "input is empty"),
    (EMBEDDINGS, {"input": [[]]}, "input", "input is empty"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input[1]", "input[1] is empty"),
    (EMBEDDINGS, {"input": ["a", 1]}, "input", "input mixes kinds"),
    (EMBEDDINGS, {"input": [2.5]}, "input", "input[0]: expected"),
    (EMBEDDINGS, {"input": 5}, "input", "expected `str | array"),
    (EMBEDDINGS, {"input": None}, "input", "expected `str | array"),
    (EMBEDDINGS, {"input": [1, VOCAB_SIZE]}, "input", f"input[1] is {VOCAB_SIZE}, outside the vocabulary"),
    (EMBEDDINGS, {"input": [[-1]]}, "input", "input[0] is -1"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "input has 2049 entries, 1 to 2048 are allowed"),
    (EMBEDDINGS, {"input": HUGE}, "input", "input has at least 300 tokens; the model's length is 256 tokens"),
    ("/v1/completions", {"prompt": HUGE}, "prompt", "prompt has at least 300 tokens; the model's length is 256"),
    ("/v1/completions", {"prompt": ["x", HUGE]}, "prompt[1]", "prompt[1] has at least 300 tokens"),
    (EMBEDDINGS, {"input": LONG}, "input", "input has 300 tokens; the model's length is 256 tokens"),
    (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions", "dimensions must be at least 1, not 0"),
    (EMBEDDINGS, {"input": "x", "dimensions": "8"}, "dimensions", "expected `int"),
    (
        EMBEDDINGS,
        {"input": "x", "dimensions": HIDDEN_SIZE + 1},
        "dimensions",
        "from 1 to 8, the model's hidden size, not 9",
    ),
    (EMBEDDINGS, {"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid enum value 'int8'"),
    (EMBEDDINGS, {"input": "x", "pooling_type": "max"}, "pooling_type", "invalid enum value 'max'"),
    (EMBEDDINGS, {"input": "x", "pooling_type": "m" * 5000}, "pooling_type", "invalid enum value 'mmm"),
    (EMBEDDINGS, {"input": "x", "normalize": "x"}, "normalize", "expected `bool"),
    (EMBEDDINGS, {"input": "x", "cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    (EMBEDDINGS, {"input": "x", "user": 5}, "user", "expected `str"),
    (EMBEDDINGS, {"input": "x", "max_tokens": 5}, "max_tokens", "max_tokens is not a known field"),
    (EMBEDDINGS, {"input": "x", "model": "other"}, "model", "model 'other' is not served here", 404),
    (TOKENIZE, {}, "prompt", "one of prompt and messages is needed, neither is given"),
    (TOKENIZE, {"prompt": "x", "messages": [USER]}, "prompt", "both are given"),
    (TOKENIZE, {"prompt": 5}, "prompt", "expected `str"),
    (TOKENIZE, {"prompt": ["x"]}, "prompt", "expected `str"),
    (TOKENIZE, {"messages": []}, "messages", "messages is empty"),
    (TOKENIZE, {"messages": [{"content": "x"}]}, "messages", "messages[0].role must be"),
    (TOKENIZE, {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens", "expected `bool"),
    (TOKENIZE, {"prompt": "x", "return_token_strs": 1}, "return_token_strs", "expected `bool"),
    (TOKENIZE, {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
    (TOKENIZE, {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs", "needs messages"),
    (TOKENIZE, {"prompt": "x", "tools": []}, "tools", "tools needs messages"),
    (TOKENIZE, {"messages": [USER], "tools": [{"function": {}}]}, "tools[0].function.name", "is missing"),
    (TOKENIZE, {"messages": [USER], "tools": [{"type": "x", "function": {"name": "f"}}]}, "tools", "only 'function'"),
    (TOKENIZE, {"prompt": "x", "tokens": [1]}, "tokens", "tokens is not a known field"),
    (TOKENIZE, {"prompt": "x", "model": "other"}, "model", "model 'other' is not served here", 404),
    (DETOKENIZE, {}, "tokens", "tokens is missing"),
    (DETOKENIZE, {"tokens": "x"}, "tokens", "expected `array"),
    (DETOKENIZE, {"tokens": [VOCAB_SIZE]}, "tokens", f"tokens[0] is {VOCAB_SIZE}, outside the vocabulary"),
    (DETOKENIZE, {"tokens": [1, -1]}, "tokens", "tokens[1] is -1"),
    (DETOKENIZE, {"tokens": [1.5]}, "tokens", "expected `int"),
    (DETOKENIZE, {"tokens": ["a"]}, "tokens", "expected `int"),
    (DETOKENIZE, {"tokens": [2**40]}, "tokens", "outside the vocabulary"),
    (DETOKENIZE, {"tokens": [1], "prompt": "x"}, "prompt", "prompt is not a known field"),
]
"""Path, body, what `error.param` says, a part of the message, and the status where it is not 400."""

BODIES = [b"", b"{", b"[1]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{,}"]
"""Sent to every endpoint that takes a body; none is an object in JSON."""

RAW = [
    (COMPLETIONS, b'{"prompt": "x"} x', None, "the body is not valid JSON"),
    (COMPLETIONS, b'{"prompt": "x",}', None, "the body is not valid JSON"),
    (DETOKENIZE, b'{"tokens": [1]} {}', None, "the body is not valid JSON"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', None, "the body is not valid JSON"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', "temperature", "temperature"),
    (COMPLETIONS, b'{"prompt": "x", "seed": 99999999999999999999999999}', "seed", "seed"),
    (TOKENIZE, b'{"prompt": "\\ud800"}', None, "the body is not valid JSON"),
]
"""Bodies that `json.dumps` would not write."""

TRANSPORT = [
    ("GET", COMPLETIONS, 405, "method_not_allowed", "it takes POST"),
    ("PUT", CHAT, 405, "method_not_allowed", "it takes POST"),
    ("DELETE", EMBEDDINGS, 405, "method_not_allowed", "it takes POST"),
    ("GET", TOKENIZE, 405, "method_not_allowed", "it takes POST"),
    ("POST", "/v1/models", 405, "method_not_allowed", "it takes GET"),
    ("POST", "/health", 405, "method_not_allowed", "it takes GET"),
    ("GET", "/v2", 404, "not_found", "there is no such path: GET /v2"),
    ("POST", "/v1/nothing", 404, "not_found", "there is no such path: POST /v1/nothing"),
    ("POST", "/v1/engines/fake-model/completions", 404, "not_found", "there is no such path"),
    ("GET", "/v1/models/other", 404, "model_not_found", "model 'other' is not served here"),
    ("GET", f"/{'x' * 2000}", 404, "not_found", "there is no such path"),
]
"""Method, path, status, code, a part of the message."""

MEDIA_TYPES = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/jsonx",
]


def generate(text="hello", **fields):
    sampling = {
        name: fields.pop(name) for name in list(fields) if name in request_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    }
    request = inference_pb2.GenerateRequest(sampling=request_pb2.SamplingParams(**sampling), **fields)
    if request.WhichOneof("prompt") is None and text is not None:
        request.text.text = text
    return request


def chat_prompt(*messages: tuple[str, str]) -> inference_pb2.ChatPrompt:
    made = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return inference_pb2.ChatPrompt(messages=made)


def embed(
    *inputs: str | list[int] | None,
    model: str = "",
    cache_salt: str = "",
    client_request_id: str = "",
    **pooling: Any,
) -> Message:
    request = inference_pb2.EmbedRequest(
        model=model,
        cache_salt=cache_salt,
        client_request_id=client_request_id,
        pooling=request_pb2.PoolingParams(**pooling),
    )
    for given in inputs:
        added = request.inputs.add()
        if isinstance(given, str):
            added.text.text = given
        elif given is not None:
            added.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=given))
    return request


def unknown(message: Message, field: str = "") -> Message:
    """With a field that a newer client might send, in the message itself or in the first of one of its fields."""
    inner = getattr(message, field) if field else message
    inner = inner if isinstance(inner, Message) else inner[0]
    inner.MergeFromString(b"\xf8\x06\x01")
    return message


GRPC = [
    (generate(None), "prompt is missing"),
    (generate(""), "text is empty"),
    (generate(tokens=inference_pb2.TokenPrompt()), "tokens is empty"),
    (generate(tokens=inference_pb2.TokenPrompt(token_ids=[1, VOCAB_SIZE])), f"tokens[1] is {VOCAB_SIZE}"),
    (generate(chat=inference_pb2.ChatPrompt()), "chat.messages is empty"),
    (generate("x" * 256), "text has 256 tokens"),
    (generate("x" * 250, max_tokens=7), "sampling.max_tokens is 7 and text has 250 tokens"),
    (generate(temperature=float("nan")), "temperature must be a finite number"),
    (generate(top_p=2), "top_p must be"),
    (generate(max_tokens=0), "max_tokens must be at least 1"),
    (generate(max_tokens=2, min_tokens=3), "min_tokens must be at most max_tokens (2)"),
    (generate(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids[0]"),
    (generate(cache_salt="s" * 257), "cache_salt"),
    (generate(client_request_id="i" * 257), "client_request_id has 257 characters, at most 256"),
    (generate(client_request_id="é\n"), "client_request_id has U+000A at character 1, only printable"),
    (generate(presence_penalty=2.5), "presence_penalty must be from -2 to 2"),
    (generate(frequency_penalty=float("inf")), "frequency_penalty must be a finite number"),
    (generate(repetition_penalty=0), "repetition_penalty must be above 0"),
    (generate(logit_bias={VOCAB_SIZE: 1}), f"logit_bias has token id {VOCAB_SIZE}"),
    (generate(logit_bias={1: float("nan")}), "logit_bias[1] must be from -100 to 100"),
    (generate(allowed_token_ids=[VOCAB_SIZE]), "allowed_token_ids[0]"),
    (generate(logprobs=21), "logprobs must be from 0 to 20, not 21"),
    (generate(bad_words=[""]), "bad_words must be 1 to 256 characters"),
    (generate(bad_words_token_ids=[request_pb2.TokenSequence(token_ids=[1])]), "send sampling.bad_words"),
    (generate(top_k=-2), "top_k must be"),
    (generate(temperature=-1), "temperature must be from 0 to 100, not -1"),
    (generate(temperature=101), "temperature must be from 0 to 100, not 101"),
    (generate(temperature=float("inf")), "temperature must be a finite number"),
    (generate(min_p=2), "min_p must be from 0 to 1, not 2"),
    (generate(min_p=float("nan")), "min_p must be a finite number"),
    (generate(top_p=0), "top_p must be above 0"),
    (generate(max_tokens=4_000_000_000), "sampling.max_tokens is 4000000000 and text has 5 tokens"),
    (generate(stop=["x"] * 17), "at most 16 strings, not 17"),
    (generate(stop=[""]), "stop must be 1 to 256 characters"),
    (generate(stop=["x" * 257]), "stop must be 1 to 256 characters"),
    (generate(stop_token_ids=[1] * 257), "at most 256 ids, not 257"),
    (generate(logit_bias=dict.fromkeys(range(1025), 1)), "at most 1024 tokens, not 1025"),
    (generate(repetition_penalty=float("nan")), "repetition_penalty must be a finite number"),
    (generate(presence_penalty=-2.5), "presence_penalty must be from -2 to 2, not -2.5"),
    (generate(bad_words=["x"] * 129), "at most 128 texts, not 129"),
    (generate(chat=chat_prompt(("", "x"))), "messages[0].role must be a non-empty string"),
    (generate(chat=chat_prompt(("user", LONG))), "chat has 302 tokens"),
    (generate(chat=chat_prompt(("user", HUGE))), "chat has at least 302 tokens"),
    (generate(HUGE), "text has at least 300 tokens; the model's length is 256"),
    (generate(tokens=inference_pb2.TokenPrompt(token_ids=[1] * 256)), "tokens has 256 tokens"),
    (unknown(generate()), "GenerateRequest has a field number 111, which is not known here"),
    (unknown(generate(), "sampling"), "sampling has a field number 111"),
    (unknown(generate(chat=chat_prompt(("user", "x"))), "chat"), "chat has a field number 111"),
    (generate(output_kind=2), "sampling.output_kind is DELTA, which needs stream to be true"),
    (generate(output_kind=9), "output_kind is 9"),
    (generate(detokenize=False, stop=["x"]), "stop needs detokenize to be true"),
    (generate(logits_processors=[{"name": ""}]), "logits_processors[0].name must be 1 to 128 characters"),
    (generate(logits_processors=[{"name": "x", "args": "{"}]), "logits_processors[0].args must be a JSON object"),
    (generate(logits_processors=[{"name": "x"}] * 9), "at most 8, not 9"),
    (embed(), "inputs has 0 entries, 1 to 2048 are allowed"),
    (embed(*["x"] * 2049), "inputs has 2049 entries, 1 to 2048 are allowed"),
    (embed(""), "inputs[0].text is empty"),
    (embed("x", HUGE), "inputs[1].text has at least 300 tokens; the model's length is 256"),
    (embed("x", LONG), "inputs[1].text has 300 tokens; the model's length is 256"),
    (embed(None), "inputs[0] is missing: one of text and tokens is needed"),
    (embed([]), "inputs[0].tokens is empty"),
    (embed([5], [1, VOCAB_SIZE]), f"inputs[1].tokens[1] is {VOCAB_SIZE}, outside the vocabulary"),
    (embed("x", dimensions=0), "dimensions must be at least 1, not 0"),
    (embed("x", dimensions=HIDDEN_SIZE + 1), "dimensions must be from 1 to 8"),
    (embed("x", pooling_type=9), "pooling_type is 9"),
    (embed("x", cache_salt="s" * 257), "cache_salt has 257 characters"),
    (embed("x", client_request_id="i" * 257), "client_request_id has 257 characters"),
    (unknown(embed("x")), "EmbedRequest has a field number 111"),
    (unknown(embed("x"), "inputs"), "inputs[0] has a field number 111"),
]
"""A message for `Generate` or `Embed`, and a part of the refusal; each is INVALID_ARGUMENT."""
GRPC_NOT_FOUND = [generate(model="other"), generate(model="m" * 20_000), embed("x", model="other")]

DEEP = [
    (CHAT, '{"messages": [{"role": "user", "content": "x"}], "audio": ?}', "audio"),
    (CHAT, '{"messages": [{"role": "user", "content": ?}]}', "messages"),
    (
        CHAT,
        '{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required",'
        ' "tools": [{"function": {"name": "f", "parameters": {"a": ?}}}]}',
        "tools",
    ),
    (
        COMPLETIONS,
        '{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": ?}}}}',
        "response_format",
    ),
    (COMPLETIONS, '{"prompt": "x", "structured_outputs": {"json": {"a": ?}}}', "structured_outputs"),
]
"""Bodies in which anything may stand for the `?`, and the field in which it does."""


def size() -> int:
    """How many malformed requests there are here."""
    bodies = len(BODIES) * 5 + len(RAW)
    return len(HTTP) + bodies + len(TRANSPORT) + len(MEDIA_TYPES) + len(GRPC) + len(GRPC_NOT_FOUND)


def encoded(body: object) -> bytes:
    """With NaN and infinity, as Python's own encoder writes them."""
    return json.dumps(body).encode()

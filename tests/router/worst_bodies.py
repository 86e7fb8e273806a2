"""Requests of as many bytes as a router takes, each built to cost as much as its bytes can."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from google.protobuf.message import Message

from pdserve.v1 import inference_pb2, request_pb2

LIMIT = 2 << 20
"""`max_request_bytes` of a router whose model takes `MODEL_LEN` tokens."""
MODEL_LEN = 131_072
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
CLASSIFY, SCORE, RERANK = "/classify", "/v1/score", "/v1/rerank"
ALIASES = {"/score", "/rerank", "/v2/rerank"}
"""Other names of the last two."""
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
ROLE = "/workers/{worker_id}/role"


class Worst(NamedTuple):
    """One of them. name: for the test's report. status: of the answer."""

    name: str
    path: str
    body: bytes
    status: int = 400
    content_type: str = "application/json"


def repeated(before: str, part: str, after: str, num_bytes: int = LIMIT) -> bytes:
    """A text of about so many bytes: `part` with commas between, as often as it fits."""
    count = (num_bytes - len(before) - len(after)) // (len(part) + 1)
    return f"{before}{','.join([part] * count)}{after}".encode()


def numbered(before: str, part: str, after: str, num_bytes: int = LIMIT) -> bytes:
    """Likewise, with a different number in each part."""
    count = (num_bytes - len(before) - len(after)) // (len(part) + 7)
    return f"{before}{','.join(part % number for number in range(count))}{after}".encode()


def schema(num_bytes: int) -> dict[str, Any]:
    """A JSON schema of about so many bytes."""
    names = [f"p{number}" for number in range(num_bytes // 26)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def _form(num_bytes: int) -> str:
    json_schema = {"name": "x", "schema": schema(num_bytes)}
    return json.dumps({"type": "json_schema", "json_schema": json_schema})


def _tools(count: int, num_bytes: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": schema(num_bytes)}} for n in range(count)]


_USER = '"messages":[{"role":"user","content":"x"}]'
COMPLETION_BODIES = [
    Worst("many prompts", COMPLETIONS, repeated('{"prompt":[', '"a"', "]}")),
    Worst(
        "many prompts and a schema",
        COMPLETIONS,
        repeated(f'{{"response_format":{_form(LIMIT // 2)},"prompt":[', '"a"', "]}"),
    ),
    Worst("all prompts and the largest schema", COMPLETIONS,
          f'{{"response_format":{_form(60_000)},"max_tokens":1,"prompt":{json.dumps(["a"] * 128)}}}'.encode(), 200),
    Worst("a schema", COMPLETIONS, f'{{"prompt":"a","response_format":{_form(LIMIT * 8 // 10)}}}'.encode()),
    Worst("biases", COMPLETIONS, numbered('{"prompt":"a","logit_bias":{', '"%d":1', "}}")),
    Worst("allowed tokens", COMPLETIONS, repeated('{"prompt":"a","allowed_token_ids":[', "1", "]}")),
    Worst("allowed tokens of many prompts", COMPLETIONS,
          repeated(f'{{"prompt":{json.dumps(["a"] * 128)},"allowed_token_ids":[', "1", "]}")),
    Worst("allowed tokens of all prompts, as many as may be", COMPLETIONS,
          repeated(f'{{"max_tokens":1,"prompt":{json.dumps(["a"] * 128)},"allowed_token_ids":[', "1", "]}", 1100), 200),
    Worst("stop strings", COMPLETIONS, repeated('{"prompt":"a","stop":[', '"a"', "]}")),
    Worst("bad words", COMPLETIONS, repeated('{"prompt":"a","bad_words":[', '"a"', "]}")),
    Worst("bad words of all prompts", COMPLETIONS, json.dumps(
          {"prompt": ["a"] * 128, "max_tokens": 1, "bad_words": [f"{n:0>250}" for n in range(128)]}).encode(), 200),
    Worst("processors", COMPLETIONS, repeated('{"prompt":"a","logits_processors":[', '{"name":"a"}', "]}")),
    Worst("choices", COMPLETIONS, repeated('{"prompt":"a","structured_outputs":{"choice":[', '"a"', "]}}")),
    Worst("token ids", COMPLETIONS, repeated('{"prompt":[', "1", "]}")),
    Worst("lists of token ids", COMPLETIONS, repeated('{"prompt":[', f"[{','.join(['1'] * 8192)}]", "]}")),
    Worst("empty lists", COMPLETIONS, repeated('{"prompt":[', "[]", "]}")),
    Worst("a text", COMPLETIONS, b'{"prompt":"' + b"a" * (LIMIT - 20) + b'"}'),
    Worst("escapes", COMPLETIONS, b'{"prompt":"' + b"\\n" * (LIMIT // 2 - 20) + b'"}'),
    Worst("braces in a text", COMPLETIONS, b'{"prompt":"' + b'{[,\\"' * (LIMIT // 5 - 20) + b'"}'),
    Worst("a field's name", COMPLETIONS, b'{"' + b"a` - at `$." * (LIMIT // 11 - 2) + b'":1}'),
    Worst("unknown fields", COMPLETIONS, numbered('{"prompt":"a",', '"%d":1', "}")),
    Worst("nesting", COMPLETIONS, b'{"prompt":' + b"[" * (LIMIT - 20) + b"}"),
    Worst("a wrong end", COMPLETIONS, repeated('{"prompt":[', '"ab"', ",NaN]}")),
    Worst("a wrong value", COMPLETIONS, repeated('{"top_p":"x","prompt":[', '"ab"', "]}")),
    Worst("blanks", COMPLETIONS, b" " * LIMIT),
]  # fmt: skip
CHAT_BODIES = [
    Worst("empty messages", CHAT, repeated('{"messages":[', "{}", "]}")),
    Worst("short messages", CHAT, repeated('{"messages":[', '{"role":"user","content":""}', "]}")),
    Worst("as many messages as may be", CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}] * 4096}).encode()),
    Worst("messages of lists", CHAT, repeated('{"messages":[{"role":"user","content":[', "[]", "]}]}")),
    Worst("messages of numbers", CHAT, repeated('{"messages":[{"role":"user","content":[', "0.5", "]}]}")),
    Worst("echoed numbers", CHAT, repeated('{"echo":true,"messages":[{"role":"assistant","content":[', "0.5", "]}]}")),
    Worst("deep messages", CHAT, b'{"messages":[' + b'{"a":' * (LIMIT // 5 - 20) + b"1}"),
    Worst("tools", CHAT, repeated(f'{{{_USER},"tools":[', '{"function":{"name":"f"}}', "]}")),
    Worst("forced tools", CHAT,
          f'{{{_USER},"tool_choice":"required","tools":{json.dumps(_tools(128, 8_000))}}}'.encode()),
    Worst("offered tools", CHAT, f'{{{_USER},"tools":{json.dumps(_tools(128, 8_000))}}}'.encode()),
    Worst("variables", CHAT, numbered(f'{{{_USER},"max_tokens":1,"chat_template_kwargs":{{', '"a%d":1', "}}"), 200),
    Worst("metadata", CHAT, numbered(f'{{{_USER},"metadata":{{', '"%d":""', "}}")),
    Worst("functions", CHAT, repeated(f'{{{_USER},"functions":[', '"ab"', "]}")),
]  # fmt: skip
_CALL = '{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"'
RESPONSE_BODIES = [
    Worst("empty items", RESPONSES, repeated('{"input":[', "{}", "]}")),
    Worst("as many items as may be", RESPONSES, json.dumps({"input": [{"role": "user", "content": "a"}] * 4096}).encode()),
    Worst("parts", RESPONSES,
          repeated('{"input":[{"role":"user","content":[', '{"type":"input_text","text":""}', "]}]}")),
    Worst("fields of an item", RESPONSES, numbered('{"input":[{"role":"user","content":"a",', '"%d":1', "}]}")),
    Worst("deep items", RESPONSES, b'{"input":[' + b'{"a":' * (LIMIT // 5 - 20) + b"1}"),
    Worst("arguments of lists", RESPONSES, repeated(f"{_CALL}[", "[]", ']"}]}')),
    Worst("arguments of numbers", RESPONSES, repeated(f"{_CALL}[", "1", ']"}]}')),
    Worst("deep arguments", RESPONSES, _CALL.encode() + b"[" * (LIMIT - 100) + b'"}]}'),
    Worst("tools", RESPONSES, repeated('{"input":"a","tools":[', '{"type":"function","name":"f"}', "]}")),
    Worst("metadata", RESPONSES, numbered('{"input":"a","metadata":{', '"%d":""', "}}")),
    Worst("things to include", RESPONSES, repeated('{"input":"a","include":[', '"message.output_text.logprobs"', "]}")),
    Worst("long metadata", RESPONSES,
          json.dumps({"input": "a", "max_output_tokens": 1, "metadata": {"a": "b" * (LIMIT - 100)}}).encode(), 400),
]  # fmt: skip
OTHER_BODIES = [
    Worst("many inputs", EMBEDDINGS, repeated('{"input":[', '"a"', "]}")),
    Worst("all inputs", EMBEDDINGS, json.dumps({"input": ["a"] * 2048}).encode(), 200),
    Worst("long inputs", EMBEDDINGS, json.dumps({"input": ["a" * 900] * 2048}).encode()),
    Worst("many inputs", CLASSIFY, repeated('{"input":[', '"a"', "]}")),
    Worst("all pairs", SCORE, json.dumps({"text_1": "a", "text_2": [f"b{n}" for n in range(2048)]}).encode(), 200),
    Worst("many texts", SCORE, repeated('{"text_1":"a","text_2":[', '"b"', "]}")),
    Worst("many documents", RERANK, repeated('{"query":"a","documents":[', '{"text":"b"}', "]}")),
    Worst("inputs of token ids", EMBEDDINGS, repeated('{"input":[', "[1]", "]}")),
    Worst("a text", TOKENIZE, json.dumps({"prompt": "! " * 327_680}).encode(), 200),
    Worst("one word", TOKENIZE, json.dumps({"prompt": "a" * 655_360}).encode()),
    Worst("a text with its strings", TOKENIZE,
          json.dumps({"prompt": "a " * (1 << 17), "return_token_strs": True}).encode(), 200),
    Worst("too long a text with its strings", TOKENIZE,
          json.dumps({"prompt": "a " * 327_680, "return_token_strs": True}).encode()),
    Worst("too long a text", TOKENIZE, b'{"prompt":"' + b"a" * (LIMIT - 20) + b'"}'),
    Worst("messages", TOKENIZE, repeated('{"messages":[', "{}", "]}")),
    Worst("token ids", DETOKENIZE, repeated('{"tokens":[', "1", "]}")),
    Worst("as many token ids as may be", DETOKENIZE, repeated('{"tokens":[', "9", "]}", (5 << 18) + 13), 200),
    Worst("a long role", ROLE, b'{"role":"' + b"a" * (LIMIT - 20) + b'"}'),
    Worst("many fields", ROLE, numbered("{", '"f%d":1', "}")),
    Worst("too large", COMPLETIONS, b" " * (LIMIT + 1), 413),
]  # fmt: skip
_FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
_FIELD = b'--b\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n'


def _form_data(name: str, body: bytes, status: int = 400) -> Worst:
    return Worst(name, TRANSCRIPTIONS, body[:LIMIT], status, "multipart/form-data; boundary=b")


FORM_BODIES = [
    _form_data("beginnings of boundaries", _FILE + b"\r\n--" * (LIMIT // 4)),
    _form_data("parts", b"".join(_FIELD % number for number in range(LIMIT // 55))),
    _form_data("a header", b"--b\r\nx:" + b"x" * LIMIT),
]
HTTP = [*FORM_BODIES, *COMPLETION_BODIES, *CHAT_BODIES, *RESPONSE_BODIES, *OTHER_BODIES]


def varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def field(message: type[Message], name: str, content: bytes) -> bytes:
    """A field that holds bytes, or a message."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2) + varint(len(content)) + content


_GENERATE, _SAMPLING, _EMBED = inference_pb2.GenerateRequest, request_pb2.SamplingParams, inference_pb2.EmbedRequest
_CHAT = inference_pb2.ChatPrompt
_UNKNOWN = varint(1000 << 3) + b"\x01"
_TEXT = field(_GENERATE, "text", field(inference_pb2.TextPrompt, "text", b"a"))
_ROOM = LIMIT - 100


def _sampling(name: str, content: bytes, rest: bytes = _TEXT) -> bytes:
    part = field(_SAMPLING, name, content)
    return rest + field(_GENERATE, "sampling", part * ((_ROOM - len(rest)) // len(part)))


GENERATE = [
    Worst("empty messages", "Generate",
          field(_GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", b"") * (_ROOM // 2))),
    Worst("as many messages as may be", "Generate",
          field(_GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", b"") * 4097)),
    Worst("parts of a message", "Generate",
          field(_GENERATE, "chat", field(_CHAT, "messages", field(inference_pb2.ChatMessage, "parts", b"") * (_ROOM // 2)))),
    Worst("calls of a message", "Generate",
          field(_GENERATE, "chat", field(_CHAT, "messages", field(inference_pb2.ChatMessage, "tool_calls", b"") * 65_000))),
    Worst("tools", "Generate", field(_GENERATE, "chat", field(_CHAT, "tools", b"") * 65_000)),
    Worst("variables in JSON", "Generate", field(_GENERATE, "chat", field(
        _CHAT, "chat_template_kwargs", b'{"a":[' + b"{}," * ((_ROOM - 20) // 3) + b"{}]}"))),
    Worst("unknown fields", "Generate", _TEXT + _UNKNOWN * (_ROOM // len(_UNKNOWN) - 9)),
    Worst("unknown fields in a text", "Generate", field(_GENERATE, "text", _UNKNOWN * (_ROOM // len(_UNKNOWN)))),
    Worst("token ids", "Generate", field(_GENERATE, "tokens", field(inference_pb2.TokenPrompt, "token_ids", b"\x01" * _ROOM))),
    Worst("token ids one by one", "Generate", field(_GENERATE, "tokens", b"\x08\x01" * (_ROOM // 2))),
    Worst("an empty prompt again and again", "Generate", field(_GENERATE, "tokens", b"") * (_ROOM // 2)),
    Worst("a text", "Generate", field(_GENERATE, "text", field(inference_pb2.TextPrompt, "text", b"a" * _ROOM))),
    Worst("biases", "Generate", _sampling("logit_bias", b"")),
    Worst("stop strings", "Generate", _sampling("stop", b"")),
    Worst("stop tokens", "Generate",
          _TEXT + field(_GENERATE, "sampling", field(_SAMPLING, "stop_token_ids", b"\x01" * (_ROOM - 20)))),
    Worst("allowed tokens", "Generate",
          _TEXT + field(_GENERATE, "sampling", field(_SAMPLING, "allowed_token_ids", b"\x01" * (_ROOM - 20)))),
    Worst("bad words", "Generate", _sampling("bad_words", b"")),
    Worst("bad words' tokens", "Generate", _sampling("bad_words_token_ids", b"")),
    Worst("processors", "Generate", _sampling("logits_processors", b"")),
    Worst("groups", "Generate", (b"\x0b" * 99 + b"\x0c" * 99) * (_ROOM // 198)),
    Worst("no message", "Generate", b"\xff" * _ROOM),
]  # fmt: skip
EMBED = [
    Worst("empty inputs", "Embed", field(_EMBED, "inputs", b"") * (_ROOM // 2)),
    Worst("all inputs", "Embed", b"".join(
        field(_EMBED, "inputs", field(inference_pb2.EmbedInput, "text", field(inference_pb2.TextPrompt, "text", b"a")))
        for _ in range(2048)), 200),
    Worst("inputs of token ids", "Embed", field(_EMBED, "inputs", field(inference_pb2.EmbedInput, "tokens",
          field(inference_pb2.TokenPrompt, "token_ids", b"\x01" * 1000))) * 2048),
    Worst("unknown fields in inputs", "Embed", field(_EMBED, "inputs", _UNKNOWN) * 2048),
]  # fmt: skip
POOLING = [
    Worst("empty inputs", "Classify", field(inference_pb2.ClassifyRequest, "inputs", b"") * (_ROOM // 2)),
    Worst("empty texts", "Score", field(inference_pb2.ScoreRequest, "text_2", b"") * (_ROOM // 2)),
]
GET_MODEL = [
    Worst("unknown fields", "GetModel", _UNKNOWN * (_ROOM // len(_UNKNOWN))),
    Worst("no message", "GetModel", b"\xff" * _ROOM),
]
FIRST_TURNS = [
    _TEXT
    + field(_GENERATE, "sampling", varint(_SAMPLING.DESCRIPTOR.fields_by_name["max_tokens"].number << 3) + b"\x01")
]
"""Turns of a session, before a message that is built to cost much."""
LATER_TURNS = ("unknown fields", "token ids", "a text", "biases", "stop tokens", "groups")
GRPC = [
    *GENERATE,
    *EMBED,
    *POOLING,
    *GET_MODEL,
    *(worst._replace(path="Session") for worst in GENERATE),
    *(
        worst._replace(path="Session", name=f"second turn: {worst.name}")
        for worst in GENERATE
        if worst.name in LATER_TURNS
    ),
]

LARGE_LIMIT = 16 << 20
"""`max_request_bytes` of a router whose prompts may be embeddings, images or sound."""
_LARGE_ROOM = LARGE_LIMIT - 200


def _ids(content: bytes) -> bytes:
    return field(_GENERATE, "tokens", field(inference_pb2.TokenPrompt, "token_ids", content))


def _inputs_of_ids(content: bytes, count: int) -> bytes:
    prompt = field(inference_pb2.TokenPrompt, "token_ids", content)
    return field(_EMBED, "inputs", field(inference_pb2.EmbedInput, "tokens", prompt)) * count


def _one_list(name: str, content: bytes) -> bytes:
    return _TEXT + field(_GENERATE, "sampling", field(_SAMPLING, name, content))


_SEQUENCE = field(request_pb2.TokenSequence, "token_ids", b"\x01" * _LARGE_ROOM)
_FILE_AND_IDS = field(_GENERATE, "embeds", field(inference_pb2.EmbedsPrompt, "safetensors", b"x" * (8 << 20)))
LARGE = [
    Worst("token ids", "Generate", _ids(b"\x01" * _LARGE_ROOM)),
    Worst("larger token ids", "Generate", _ids(b"\xff\xff\x03" * (_LARGE_ROOM // 3))),
    Worst("token ids one by one", "Generate", field(_GENERATE, "tokens", b"\x08\x01" * (_LARGE_ROOM // 2))),
    Worst("token ids in many lists", "Generate", _ids(b"\x01" * 100) * (_LARGE_ROOM // 104)),
    Worst("token ids behind a group", "Generate", b"\x0b\x0c" + _ids(b"\x01" * _LARGE_ROOM)),
    Worst("token ids beside a file", "Generate", _FILE_AND_IDS + _ids(b"\x01" * (7 << 20))),
    Worst("a text", "Generate", field(_GENERATE, "text", field(inference_pb2.TextPrompt, "text", b"a" * _LARGE_ROOM))),
    Worst("unknown fields in a text", "Generate",
          field(_GENERATE, "text", _UNKNOWN * (_LARGE_ROOM // len(_UNKNOWN)))),
    Worst("unknown numbers", "Generate", _TEXT + varint(1000 << 3 | 2) + varint(_LARGE_ROOM - 20) + b"\x01" * (_LARGE_ROOM - 20)),
    Worst("stop tokens", "Generate", _one_list("stop_token_ids", b"\x01" * _LARGE_ROOM)),
    Worst("allowed tokens", "Generate", _one_list("allowed_token_ids", b"\x01" * _LARGE_ROOM)),
    Worst("bad words' tokens", "Generate", _one_list("bad_words_token_ids", _SEQUENCE)),
    Worst("token ids", "Session", _ids(b"\x01" * _LARGE_ROOM)),
    Worst("second turn: token ids", "Session", _ids(b"\x01" * _LARGE_ROOM)),
    Worst("token ids", "Embed", _inputs_of_ids(b"\x01" * _LARGE_ROOM, 1)),
    Worst("inputs of token ids", "Embed", _inputs_of_ids(b"\x01" * 8000, 2048)),
    Worst("inputs of token ids", "Classify", _inputs_of_ids(b"\x01" * 8000, 2048)),
    Worst("a text", "Score", field(inference_pb2.ScoreRequest, "text_1", b"a" * _LARGE_ROOM)),
    Worst("unknown fields", "GetModel", _UNKNOWN * (_LARGE_ROOM // len(_UNKNOWN))),
]  # fmt: skip
"""Messages as large as files make them, of something else."""


def _ids_of(before: str, count: int, after: str) -> bytes:
    """A body of `count` token ids, larger ones than Python has ready, and of blanks up to the limit."""
    return f"{before}{','.join(['300'] * count)}{after}".encode().ljust(LARGE_LIMIT)


_NUMBERS = {
    COMPLETIONS: ('{"prompt":[', "]}"),
    CHAT: ('{"messages":[{"role":"user","content":"a"}],"allowed_token_ids":[', "]}"),
    RESPONSES: ('{"input":[{"role":"user","content":"a"}],"metadata":{"a":[', "]}}"),
    EMBEDDINGS: ('{"input":[', "]}"),
    CLASSIFY: ('{"input":[', "]}"),
    SCORE: ('{"text_1":"a","text_2":[', "]}"),
    RERANK: ('{"query":"a","documents":[', "]}"),
    TOKENIZE: ('{"messages":[{"role":"user","content":[', "]}]}"),
    DETOKENIZE: ('{"tokens":[', "]}"),
}
_MOST_NUMBERS = (1 << 20) + MODEL_LEN - 100
"""Nearly as many as a body may have for any model of this length."""
LARGE_HTTP = [
    *(Worst("numbers", path, _ids_of(before, LARGE_LIMIT // 4 - 50, after)) for path, (before, after) in _NUMBERS.items()),
    *(Worst("as many numbers as may be", path, _ids_of(before, _MOST_NUMBERS, after))
      for path, (before, after) in _NUMBERS.items()),
    Worst("prompt's log-probabilities", COMPLETIONS, _ids_of('{"prompt_logprobs":20,"prompt":[', _MOST_NUMBERS, "]}")),
    Worst("prompts of token ids", COMPLETIONS,
          f'{{"prompt":[{",".join(["[" + ",".join(["300"] * 9000) + "]"] * 128)}]}}'.encode().ljust(LARGE_LIMIT)),
    Worst("inputs of token ids", EMBEDDINGS,
          f'{{"input":[{",".join(["[" + ",".join(["300"] * 540) + "]"] * 2048)}]}}'.encode().ljust(LARGE_LIMIT)),
]  # fmt: skip
"""Bodies as large as files make them, of numbers."""

_TEXTS = {
    "signs": "! " * (_ROOM // 2),
    "one word": "a" * _ROOM,
}
"""Each of a token per byte, for a tokenizer of bytes."""


def _generate(name: str, text: str) -> bytes:
    if name == "chat":
        message = field(inference_pb2.ChatMessage, "role", b"user")
        message += field(inference_pb2.ChatMessage, "content", text.encode())
        return field(_GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", message))
    return field(_GENERATE, "text", field(inference_pb2.TextPrompt, "text", text.encode()))


def _of_a_text(name: str, text: str) -> list[Worst]:
    def body(path: str, content: dict[str, Any]) -> Worst:
        return Worst(name, path, json.dumps(content, ensure_ascii=False).encode())

    given = field(inference_pb2.EmbedInput, "text", field(inference_pb2.TextPrompt, "text", text.encode()))
    scored = field(inference_pb2.ScoreRequest, "text_1", b"a")
    scored += field(inference_pb2.ScoreRequest, "text_2", text.encode())
    return [
        body(COMPLETIONS, {"prompt": text}),
        body(CHAT, {"messages": [{"role": "user", "content": text}]}),
        body(RESPONSES, {"input": text}),
        body(EMBEDDINGS, {"input": text}),
        body(CLASSIFY, {"input": text}),
        body(SCORE, {"text_1": "a", "text_2": text}),
        body(RERANK, {"query": "a", "documents": [text]}),
        body(TOKENIZE, {"messages": [{"role": "user", "content": text[:655_000]}]})._replace(
            status=400 if name == "one word" else 200
        ),
        Worst(name, "Generate", _generate("text", text)),
        Worst(f"{name} in a chat", "Generate", _generate("chat", text)),
        Worst(name, "Session", _generate("text", text)),
        Worst(name, "Embed", field(_EMBED, "inputs", given)),
        Worst(name, "Classify", field(inference_pb2.ClassifyRequest, "inputs", given)),
        Worst(name, "Score", scored),
    ]


TEXTS = [worst for name, text in _TEXTS.items() for worst in _of_a_text(name, text)]
"""For a model of `MODEL_LEN` tokens whose longest token has so many bytes that no text is refused unseen."""

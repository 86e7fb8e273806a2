"""`ClientBodies`: limits of clients' messages and of whole answers, for both front ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pdserve.common.errors import BodyTooLarge, ConfigError, InvalidRequest
from pdserve.common.json_file import read_model_config
from pdserve.common.net.body_budget import BodyBudget
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.security.wire_size import MAX_FIELDS, LargeMessage, verify_num_fields
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.bodies.body_thread import ON_LOOP_BYTES, BodyThread
from pdserve.router.bodies.ignored_fields import IgnoredFields
from pdserve.router.bodies.unknown_fields import refuse_unknown_fields

T = TypeVar("T")
_BASE_BYTES = 1 << 20
_TOKEN_BYTES = 8
"""Bytes of a token id with comma and blank, or of the text of about 1.5 tokens."""
_UNKNOWN_MODEL_LEN = 131_072
_LENGTHS = ("max_position_embeddings", "model_max_length", "max_target_positions")
"""Fields of config.json with a model's length; the second is Kimi Linear's, the third Whisper's."""
_MIN_BUDGET_BYTES = 64 << 20
_ASIDE_BYTES = 32 << 20
_FILES = frozenset(
    ("pdserve.v1.EmbedsPrompt.safetensors", "pdserve.v1.AudioPrompt.file", "pdserve.v1.ContentPart.image_url")
)
"""Fields for which messages may be larger than prompts of tokens are."""
MIN_VALUES = 1 << 20
"""Values of a body or message besides as many as the model has tokens, at most."""
_MIN_BODIES = 16
"""Number of bodies of the largest size that may be read at the same time."""


class ClientBodies:
    """Limits, the budget of bytes being read, and the thread for large bodies. `close` it."""

    def __init__(self, settings: RouterSettings, model_len: int, *, has_media: bool = False) -> None:
        """model_len: the model's length in tokens, which determines limits that are not in `settings`. has_media: its prompts
        have images or sound."""
        self.model_len = model_len
        of_tokens = min(MAX_MESSAGE_BYTES, _BASE_BYTES + _TOKEN_BYTES * model_len)
        default = MAX_MESSAGE_BYTES if settings.enable_prompt_embeds or has_media else of_tokens
        self.max_request_bytes = settings.limits.max_request_bytes or default
        self._large = LargeMessage(
            MIN_VALUES + model_len, settings.limits.max_request_bytes or of_tokens, _FILES, "max_request_bytes"
        )
        self.embeds_len = model_len if settings.enable_prompt_embeds else 0
        """Tokens of a prompt that is embeddings, at most; 0: these are refused."""
        self.timeout_s = settings.limits.request_timeout_s
        self.budget = BodyBudget(
            settings.limits.max_body_bytes_in_flight or max(_MIN_BUDGET_BYTES, _MIN_BODIES * self.max_request_bytes)
        )
        self.unread = BodyBudget(max(_MIN_BUDGET_BYTES, 2 * settings.limits.max_answer_bytes))
        """Bytes of whole answers that their clients have not read."""
        self.aside = BodyBudget(_ASIDE_BYTES)
        """Bytes of all that `/tokenize` and `/detokenize` hold, from before a body is read until its answer is."""
        self.ignored = IgnoredFields() if settings.unknown_fields == "ignore" else None
        """Set if unknown fields are ignored; None: they are refused."""
        self._thread = BodyThread()

    def close(self) -> None:
        self._thread.close()

    async def in_background_pool(self, num_bytes: int, call: Callable[[], T]) -> T:
        """Result of `call`, whose time is linear in `num_bytes`; in a thread if that is large. Raises: exceptions of `call`."""
        return await self._thread.run(num_bytes, call)

    async def message(self, data: bytes, parse: Callable[[bytes], Any]) -> Any:
        """The protobuf message in `data`. parse: `FromString` of its class. Raises: InvalidRequest, BodyTooLarge."""
        if len(data) > self.max_request_bytes:
            raise BodyTooLarge(
                f"the message has {len(data)} bytes, at most {self.max_request_bytes} are allowed (max_request_bytes)"
            )
        return await self.in_background_pool(len(data), lambda: _message(data, parse, self.ignored, self._large))


def _message(
    data: bytes, parse: Callable[[bytes], Any], ignored: IgnoredFields | None = None, large: LargeMessage | None = None
) -> Any:
    kind = getattr(parse, "__self__", None)
    may_have_unknown = True
    if len(data) > ON_LOOP_BYTES and kind is not None:
        # a message has fewer numbers than bytes
        is_large = large is not None and len(data) > min(large.max_values, large.max_bytes)
        may_have_unknown = verify_num_fields(data, kind.DESCRIPTOR, MAX_FIELDS, large if is_large else None)
    try:
        message = parse(data)
    except Exception as error:
        raise InvalidRequest(f"the message cannot be parsed: {error}") from None
    # the check takes copies
    return _without_unknown(message, ignored) if may_have_unknown else message


def _without_unknown(message: Any, ignored: IgnoredFields | None) -> Any:
    """ignored: None refuses unknown fields. Raises: InvalidRequest."""
    try:
        refuse_unknown_fields(message)
    except InvalidRequest as error:
        if ignored is None:
            raise
        ignored.note(error.message)
        message.DiscardUnknownFields()
    return message


def model_len_of(model_folder: Path) -> int:
    """The model's length in tokens from its `config.json`; 131072 if there is none."""
    try:
        config = read_model_config(model_folder)
    except ConfigError:
        return _UNKNOWN_MODEL_LEN
    config = config.get("text_config") or config
    positions = None
    if isinstance(config, dict):
        positions = next((config[name] for name in _LENGTHS if config.get(name)), None)
    if not isinstance(positions, int) or not 0 < positions < 1 << 31:
        return _UNKNOWN_MODEL_LEN
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    return round(positions * factor) if isinstance(factor, int | float) and 1 <= factor <= 1024 else positions

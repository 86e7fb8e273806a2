"""`Tokenizer`: text to token ids and back, for one model folder, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from pdserve.common.decoder_rules import DecoderRules
from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.json_file import MAX_TOKENIZER_BYTES, read_regular_file
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.text.outputs.detokenizer import ByteDetokenizer, IncrementalDetokenizer, WindowDetokenizer
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.tokenization.literal_specials import LiteralSpecials
from pdserve.text.tokenization.long_text import PART_BYTES, LongText
from pdserve.text.tokenization.pair_limit import PairLimit
from pdserve.text.tokenization.token_bytes import TokenBytes, longest_token_bytes
from pdserve.text.tokenization.tokenizer_folder import TokenizerFolder

_SAMPLE_SIZE = 256


class TokenizerJson(msgspec.Struct):
    """Parts of tokenizer.json that the library does not expose."""

    decoder: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None


class Tokenizer:
    """Immutable once loaded; every method may be called from any thread."""

    def __init__(
        self, backend: Backend, parts: TokenizerJson, folder: TokenizerFolder, *, parse_special: bool = True
    ) -> None:
        """Use `from_folder`."""
        _complete(backend, folder)
        self._literal_specials = None if parse_special else LiteralSpecials(backend)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """Every token id is below it."""
        self.bos_token_id: int | None = self._named_id(folder, "bos_token")
        declared = folder.declared_ids("eos_token_id")
        self.eos_token_ids: tuple[int, ...] = self._own_eos(folder) if declared is None else declared
        self.generation_defaults: dict[str, float | int] = folder.generation_defaults()
        """Values of temperature, top_p, top_k, min_p and repetition_penalty in the model's generation_config.json."""
        self.labels: tuple[str, ...] = folder.labels()
        """Names of the classes of a classification head; empty where config.json names none."""
        self.fingerprint: str = tokenizer_fingerprint(folder.path)
        """32 hex digits; router and workers must have the same."""
        templates, named_tokens = folder.chat_templates(), folder.special_tokens()
        self._named_tokens = named_tokens
        self.chat_template_source: str = templates["default"][0] if "default" in templates else ""
        self.tool_template_source: str = (
            templates["tool_use"][0] if "tool_use" in templates else self.chat_template_source
        )
        """Source of the template for chats with tools."""
        self._chat_template, self._tool_template = (
            ChatTemplate(templates[name][0], named_tokens, templates[name][1]) if name in templates else None
            for name in ("default", "tool_use")
        )
        self._longest_token_bytes = longest_token_bytes(backend, parts.pre_tokenizer)
        self._token_bytes = _checked_token_bytes(backend, parts.decoder, self.special_token_ids)
        self._long_text = LongText.of(backend, parts.pre_tokenizer, parts.normalizer)
        self._around = _tokens_around(backend)
        self._around_pair = _tokens_around_pair(backend)

    @classmethod
    def from_folder(cls, folder: Path, *, parse_special: bool = True) -> Tokenizer:
        """Read tokenizer.json and the JSON files next to it.

        parse_special: False encodes special tokens in clients' chat messages as plain text.
        Raises: ConfigError naming the missing or invalid folder or file.
        """
        files = TokenizerFolder.read(folder)
        path = folder / "tokenizer.json"
        data = read_regular_file(path, MAX_TOKENIZER_BYTES)
        try:
            backend = Backend.from_buffer(data)
            parts = msgspec.json.decode(data, type=TokenizerJson)
        except Exception as error:
            # the library raises plain exceptions
            raise ConfigError(f"{path} is not a tokenizer: {error!s:.300}") from error
        return cls(backend, parts, files, parse_special=parse_special)

    def is_special(self, text: str) -> bool:
        """True if this text is a special token, which `skip_special_tokens` leaves out of answers."""
        return self._backend.token_to_id(text) in self.special_token_ids

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`; None for a model without any."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        field: str = "prompt",
        count: Callable[[int], None] | None = None,
    ) -> list[int]:
        """The text's token ids. Special tokens in the text are parsed. Releases the GIL while it works.

        field: the client's name of the text, for errors. count: called with the number of tokens so far; may raise. With it, a
        tokenizer that `LongText` supports works in parts, so that memory does not grow with the text.
        Raises: InvalidRequest for text that is not valid Unicode (JSON may contain a lone surrogate), and with `count` for a run of
        text that is too long to be tokenized at once.
        """
        _verify_unicode(text, field)
        if count is None or self._long_text is None or self._around is None or len(text) <= PART_BYTES // 4:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *self._long_text.encode(text, field, count), *after]

    def encode_pair(
        self,
        text: str,
        text_pair: str,
        *,
        field: str = "prompt",
        count: Callable[[int], None] | None = None,
        limit: PairLimit | None = None,
    ) -> list[int]:
        """The token ids of two texts, with the special tokens of a pair.

        limit: drops tokens. Other arguments and errors: as of `encode`; InvalidRequest for a limit that leaves no token of a text.
        """
        for each in (text, text_pair):
            _verify_unicode(each, field)
        if self._around_pair is None:
            if limit is not None:
                raise InvalidRequest(
                    "truncate_prompt_tokens is given, and the special tokens of a pair depend on its texts in this tokenizer",
                    "truncate_prompt_tokens",
                )
            return self._backend.encode(text, text_pair).ids
        before, between, after = self._around_pair
        num_special = len(before) + len(between) + len(after)

        def count_first(num_tokens: int) -> None:
            if count is not None:
                count(num_special + num_tokens)

        first = self.encode(text, add_special_tokens=False, field=field, count=count_first)

        def count_second(num_tokens: int) -> None:
            count_first(len(first) + num_tokens)

        second = self.encode(text_pair, add_special_tokens=False, field=field, count=count_second)
        if limit is not None:
            first, second = limit.kept(first, second, num_special)
        return [*before, *first, *between, *second, *after]

    def added_around(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Numbers of special tokens that `encode` added before and after a text. token_ids: its result."""
        before, after = self._around or ([], [])
        whole = list(token_ids)
        if (
            len(before) + len(after) > len(whole)
            or [*before, *whole[len(before) : len(whole) - len(after)], *after] != whole
        ):
            return 0, 0
        return len(before), len(after)

    def token_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Characters of a text before each of its tokens; spaces between two tokens belong to the second. Tokens of one character
        have the same number. Releases the GIL while it works."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        begins: list[int] = []
        begin = end = 0
        for first, stop in encoding.offsets:
            # added special tokens have the place 0
            place = max(first, end) if first == stop == 0 else first
            # the library may leave out a token's spaces; other characters between two tokens were composed with the first one
            while place > end and text[place - 1].isspace():
                place -= 1
            begin, end = max(begin, place), max(end, stop)
            begins.append(begin if begins else 0)
        return begins

    def least_tokens(self, text: str) -> int:
        """Lower bound of the number of tokens of a text, without tokenizing it; 0 if unknown."""
        if self._longest_token_bytes is None:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._longest_token_bytes)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of all ids together; ids without a token are skipped.

        Raises: InvalidRequest for a number that cannot be an id.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequest("token_ids holds a number outside 0 to 2**32 - 1", "token_ids") from error

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """A new detokenizer for one sequence that continues this prompt."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        bare = {} if skip_special_tokens or spaces_between_special_tokens else self._added_tokens
        return WindowDetokenizer(self._backend, hidden, prompt_token_ids, bare)

    def token_piece(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; may end within a character. Empty for an unknown id."""
        if self._token_bytes is not None:
            return self._token_bytes.table(skip_special_tokens=False)[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode(errors="replace")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for an unknown id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        hide: Callable[[str], str] | None = None,
    ) -> str:
        """The prompt's text; `encode_chat` also returns its token ids. Arguments: as in `ChatTemplate.render`.

        chat_template: in place of the model's.
        With tools, a template named `tool_use` is preferred to the default one. Raises: InvalidRequest if there is no template, and
        as `ChatTemplate.render`.
        """
        template = self._tool_template if tools is not None and self._tool_template else self._chat_template
        if chat_template is not None:
            template = self._given_template(chat_template)
        if template is None:
            raise InvalidRequest("this model has no chat template; send a prompt to the completions API", "messages")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
            hide=hide,
        )

    def _given_template(self, source: str) -> ChatTemplate:
        """Raises: InvalidRequest when it does not compile."""
        try:
            return ChatTemplate(source, self._named_tokens, "chat_template", name="chat_template")
        except ConfigError as error:
            raise InvalidRequest(error.message, "chat_template") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        field: str = "messages",
        verify: Callable[[str], None] | None = None,
        count: Callable[[int], None] | None = None,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """The prompt's text and token ids. options: of `apply_chat_template`.

        add_special_tokens: add special tokens to those of the template. verify: called with the text before it is tokenized.
        count: as in `encode`. Without `parse_special`, special tokens in the client's texts are encoded as plain text. Raises:
        InvalidRequest.
        """
        literals = self._literal_specials.in_one_prompt() if self._literal_specials is not None else None
        text = self.apply_chat_template(messages, hide=literals.hide if literals else None, **options)
        shown = literals.shown(text) if literals else text
        if verify is not None:
            verify(shown)
        if literals is None or shown == text:
            return shown, self.encode(shown, add_special_tokens=add_special_tokens, field=field, count=count)
        begins = self._backend.encode("", add_special_tokens=True).ids if add_special_tokens else []
        return shown, begins + literals.encode(
            text, lambda piece: self.encode(piece, add_special_tokens=False, field=field, count=count)
        )

    def _named_id(self, folder: TokenizerFolder, name: str) -> int | None:
        text = folder.token(name)
        if text is None:
            return next(iter(folder.declared_ids(f"{name}_id") or ()), None)
        return self._backend.token_to_id(text)

    def _own_eos(self, folder: TokenizerFolder) -> tuple[int, ...]:
        token_id = self._named_id(folder, "eos_token")
        return () if token_id is None else folder.known_ids((token_id,), "eos_token")


def _complete(backend: Backend, folder: TokenizerFolder) -> None:
    """Apply the changes that transformers' loader makes after reading tokenizer.json, so that a text gives the same ids.

    As in transformers, the post-processor of tokenizer.json applies and not `add_bos_token` of tokenizer_config.json.
    """
    # training scripts store truncation and padding, which would silently cut a long prompt
    backend.no_truncation()
    backend.no_padding()
    special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for token in folder.added_tokens():
        # this may declare a known token special; the library does not support the reverse
        if token.special > special.get(token.content, -1):
            special[token.content] = token.special
            backend.add_tokens([token])


def _tokens_around(backend: Backend) -> tuple[list[int], list[int]] | None:
    """Token ids that the post-processor adds before and after a text; None if they depend on the text."""
    around: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for text in ("a", "b 1"):
        plain, whole = (backend.encode(text, add_special_tokens=special).ids for special in (False, True))
        places = _places(whole, plain)
        if len(places) != 1:
            return None
        around.add((tuple(whole[: places[0]]), tuple(whole[places[0] + len(plain) :])))
    (before, after), *others = around
    return None if others else (list(before), list(after))


def _tokens_around_pair(backend: Backend) -> tuple[list[int], list[int], list[int]] | None:
    """Token ids that the post-processor adds before, between and after two texts; None if they depend on the texts."""
    around: set[tuple[tuple[int, ...], ...]] = set()
    for pair in (("a", "b 1"), ("c 2", "d")):
        first, second = (backend.encode(text, add_special_tokens=False).ids for text in pair)
        whole = backend.encode(*pair).ids
        begins, ends = _places(whole, first), _places(whole, second)
        if len(begins) != 1 or len(ends) != 1 or begins[0] + len(first) > ends[0]:
            return None
        parts = whole[: begins[0]], whole[begins[0] + len(first) : ends[0]], whole[ends[0] + len(second) :]
        around.add(tuple(map(tuple, parts)))
    (before, between, after), *others = around
    return None if others else (list(before), list(between), list(after))


def _places(whole: list[int], part: list[int]) -> list[int]:
    """Places at which `part` begins in `whole`."""
    return [place for place in range(len(whole)) if whole[place : place + len(part)] == part]


def _verify_unicode(text: str, field: str) -> None:
    """Raises: InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: lone surrogate at character {error.start}", field
        ) from error


def _checked_token_bytes(backend: Backend, decoder: Any, special_token_ids: frozenset[int]) -> TokenBytes | None:
    """Tokens as bytes; None unless `DecoderRules` reproduce the library on a sample of the vocabulary."""
    rules = DecoderRules.of(decoder)
    if rules is None:
        return None
    token_bytes = TokenBytes(backend, rules, special_token_ids)
    size = backend.get_vocab_size(with_added_tokens=True)
    sample = [*range(0, size, max(1, size // _SAMPLE_SIZE)), *sorted(backend.get_added_tokens_decoder())]
    if rules.byte_fallback:
        # adjacent single bytes are invalid UTF-8, for which the results differ on purpose
        table = token_bytes.table(skip_special_tokens=False)
        sample = [token_id for token_id in sample if table[token_id].isascii()]

    def agrees(token_ids: list[int]) -> bool:
        detokenizer = ByteDetokenizer(token_bytes, skip_special_tokens=False)
        text = detokenizer.add(token_ids) + detokenizer.flush()
        return text == backend.decode(token_ids, skip_special_tokens=False)

    # each token by itself, as the first of a text, then all together
    return token_bytes if all(agrees([token_id]) for token_id in sample) and agrees(sample) else None

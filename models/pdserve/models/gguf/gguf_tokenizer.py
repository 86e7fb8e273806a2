"""`gguf_tokenizer`: tokenizer.json, tokenizer_config.json and generation_config.json from a GGUF file's metadata.

The file names its pre-tokenizer; which rules stand for the name is knowledge of llama.cpp, and the rules are those of the models'
own tokenizers. What transformers makes of the same metadata ignores the name, so that texts with digits are split otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.json_object import JsonObject

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens; another is 5, unused."""
_SPACE = "\u2581"
"""A space in the tokens of SentencePiece."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is divided before pairs are merged."""

    patterns: tuple[str, ...]
    """Applied one after the other: each divides the pieces that are left of those before."""
    ignores_merges: bool = False
    """True: a piece that is a token needs no merges."""
    adds_bos: bool = False
    """Where the file does not say."""


_LLAMA3 = _PreTokenizer((_WORDS.format(digits="{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer((_WORDS.format(digits=""),))
_SMOLLM = _PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _PreTokenizer(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion", "granite-docling"), _PreTokenizer((_GPT2,))
    ),
    "falcon": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": _PreTokenizer((_CASED.format(ending="", digits=""),), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2"),
        _PreTokenizer((_CASED.format(ending="(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits="{1,3}"),)),
    ),
    "deepseek-coder": _PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        _PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK)),
    ),
}
"""`tokenizer.ggml.pre` -> its rules."""
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
        "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    }
)  # fmt: skip
"""Tokens that end an answer in the models that have them: many files name only one of theirs."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of `general.sampling` -> field of generation_config.json."""


class GgufTokenizer:
    """The files of a tokenizer."""

    def __init__(self, metadata: JsonObject) -> None:
        """Raises: ConfigError for metadata that do not make a tokenizer; UnsupportedModel naming its kind."""
        self._metadata = metadata
        self._tokens = _strings(metadata, "tokenizer.ggml.tokens")
        types = metadata.items("tokenizer.ggml.token_type")
        self._types = [1] * len(self._tokens) if types is None else types
        if len(self._types) != len(self._tokens):
            raise metadata.error("tokenizer.ggml.token_type", f"a list of {len(self._tokens)} types")
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            twice = next(token for index, token in enumerate(self._tokens) if self._ids[token] != index)
            raise ConfigError(f"{metadata.where}: tokenizer.ggml.tokens has {twice[:80]!r} more than once")

    def tokenizer_json(self) -> str:
        """tokenizer.json."""
        model = self._metadata.text("tokenizer.ggml.model")
        if model == "gpt2":
            tokenizer, adds_bos = self._byte_pairs()
        elif model == "llama":
            tokenizer, adds_bos = self._sentence_pieces()
        else:
            raise UnsupportedModel(
                f"{self._metadata.where}: tokenizer.ggml.model is {model[:80]!r}; read are gpt2 (byte pairs) and llama "
                "(SentencePiece)"
            )
        self._add_tokens(tokenizer)
        self._add_ends(tokenizer, adds_bos)
        written: str = tokenizer.to_str()
        return written

    def tokenizer_config(self) -> dict[str, object]:
        """Fields of tokenizer_config.json: named tokens and chat templates."""
        fields: dict[str, object] = {
            f"{name}_token": self._tokens[token_id]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (token_id := self._named_id(key)) is not None
        }
        template = self._metadata.get("tokenizer.chat_template")
        if template is None:
            return fields
        templates = [{"name": "default", "template": self._metadata.text("tokenizer.chat_template")}]
        for name in self._metadata.items("tokenizer.chat_templates") or []:
            key = f"tokenizer.chat_template.{name}"
            if self._metadata.has(key):
                templates.append({"name": str(name), "template": self._metadata.text(key)})
        fields["chat_template"] = templates[0]["template"] if len(templates) == 1 else templates
        return fields

    def generation_config(self) -> dict[str, object]:
        """Fields of generation_config.json: tokens that begin and end a text, and the author's sampling."""
        fields: dict[str, object] = {}
        if (bos := self._named_id("bos")) is not None:
            fields["bos_token_id"] = bos
        named = [self._named_id(key) for key in ("eos", "eot", "eom")]
        known = [self._ids[token] for token in sorted(_ENDS & self._ids.keys())]
        if {"<|return|>", "<|call|>"} <= self._ids.keys() and "<|end|>" in self._ids:
            known.remove(self._ids["<|end|>"])  # it ends a part of an answer there
        ends = list(dict.fromkeys([*(end for end in named if end is not None), *known]))
        if ends:
            fields["eos_token_id"] = ends
        for key, name in _SAMPLING.items():
            if self._metadata.has(f"general.sampling.{key}"):
                fields[name] = self._metadata.get(f"general.sampling.{key}")
        return fields

    def _named_id(self, key: str) -> int | None:
        name = f"tokenizer.ggml.{key}_token_id"
        if not self._metadata.has(name):
            return None
        token_id = self._metadata.integer(name, minimum=0, maximum=2**32 - 1)
        # -1 in 32 bits says that there is none
        return token_id if token_id < len(self._tokens) else None

    def _byte_pairs(self) -> tuple[Tokenizer, bool]:
        name = self._metadata.text("tokenizer.ggml.pre", "default")
        rules = PRE_TOKENIZERS.get(name)
        if rules is None:
            raise UnsupportedModel(
                f"{self._metadata.where}: tokenizer.ggml.pre is {name[:80]!r}; read are {', '.join(PRE_TOKENIZERS)}"
            )
        merges = []
        for merge in _strings(self._metadata, "tokenizer.ggml.merges"):
            first, separator, second = merge.partition(" ")
            if not (first and separator and second) or not {first, second, first + second} <= self._ids.keys():
                raise ConfigError(
                    f"{self._metadata.where}: tokenizer.ggml.merges has {merge[:80]!r}, which is not two tokens that make a third"
                )
            merges.append((first, second))
        tokenizer = Tokenizer(models.BPE(self._ids, merges, ignore_merges=rules.ignores_merges))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, rules.adds_bos

    def _sentence_pieces(self) -> tuple[Tokenizer, bool]:
        scores = self._metadata.items("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(self._tokens):
            raise self._metadata.error("tokenizer.ggml.scores", f"a list of {len(self._tokens)} numbers")
        unknown = [token for token, kind in zip(self._tokens, self._types, strict=True) if kind == _UNKNOWN]
        tokenizer = Tokenizer(
            models.BPE(
                self._ids,
                self._merges(scores),
                unk_token=unknown[0] if unknown else None,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        adds_space = self._metadata.boolean("tokenizer.ggml.add_space_prefix", True)
        begin = [normalizers.Prepend(_SPACE)] if adds_space else []
        tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
        end = [decoders.Strip(" ", 1, 0)] if adds_space else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
        )
        return tokenizer, True

    def _merges(self, scores: Sequence[object]) -> list[tuple[str, str]]:
        """Pairs of tokens that make a third, the third with the best score first.

        Raises: UnsupportedModel for what llama.cpp joins by other rules: two normal tokens with one score, of which it takes
        the one that comes first in a text, and characters that are no tokens.
        """
        mergeable = {
            token: token_id
            for token, token_id in self._ids.items()
            if self._types[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
        }
        found: list[tuple[float, int, int, tuple[str, str]]] = []
        with_score: dict[float, str] = {}
        for token, token_id in mergeable.items():
            score = scores[token_id]
            if not isinstance(score, int | float):
                raise self._metadata.error("tokenizer.ggml.scores", "a list of numbers")
            is_normal = self._types[token_id] == _NORMAL
            if is_normal and (missing := next((char for char in token if char not in mergeable), None)) is not None:
                raise UnsupportedModel(
                    f"{self._metadata.where}: tokenizer.ggml.tokens has {token[:80]!r} and not {missing!r}; a SentencePiece "
                    "vocabulary is read where every character of its tokens is one itself"
                )
            pairs = [(token[:place], token[place:]) for place in range(1, len(token))]
            pairs = [(first, second) for first, second in pairs if first in mergeable and second in mergeable]
            found += [(-score, mergeable[first], mergeable[second], (first, second)) for first, second in pairs]
            if pairs and is_normal and with_score.setdefault(score, token) != token:
                raise UnsupportedModel(
                    f"{self._metadata.where}: tokenizer.ggml.scores has {score:g} for {with_score[score][:80]!r} and "
                    f"{token[:80]!r}; read are scores that say which of two tokens comes first"
                )
        return [pair for *_, pair in sorted(found)]

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Tokens that are found in a text before all others. Phi-3's take the spaces that follow, which no key says."""
        name = self._metadata.text("general.name", "").lower()
        strips = "phi-3" in name or "phi3" in name
        keeping = {"<unk>", "<s>", "<|endoftext|>"}
        special, plain = [], []
        for token, kind in zip(self._tokens, self._types, strict=True):
            if kind in (_CONTROL, _UNKNOWN) or token in _ENDS:
                special.append(
                    AddedToken(token, special=True, normalized=False, rstrip=strips and token not in keeping)
                )
            elif kind == _USER_DEFINED:
                plain.append(AddedToken(token, special=False, normalized=False, rstrip=strips))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)

    def _add_ends(self, tokenizer: Tokenizer, adds_bos: bool) -> None:
        """Tokens that the tokenizer adds to a text."""
        bos, eos = self._named_id("bos"), self._named_id("eos")
        around = ["$A"]
        if bos is not None and self._metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos):
            around.insert(0, self._tokens[bos])
        if eos is not None and self._metadata.boolean("tokenizer.ggml.add_eos_token", False):
            around.append(self._tokens[eos])
        if len(around) > 1:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=around,
                pair=[*around, *(token if token != "$A" else "$B" for token in around)],
                special_tokens=[(token, self._ids[token]) for token in around if token != "$A"],
            )


def _strings(metadata: JsonObject, name: str) -> list[str]:
    found = metadata.items(name)
    if found is None:
        raise ConfigError(f"{metadata.where}: {name} is missing")
    strings = [item for item in found if isinstance(item, str)]
    if len(strings) < len(found):
        raise ConfigError(f"{metadata.where}: {name} has values that are no strings")
    return strings

"""The demo model's tokenizer, its ChatML template, and the same template applied token by token for training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.corpus import Conversation, conversation, conversations, passage, plain_text

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
VOCABULARY = 2560
CONTEXT = 4096

CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)

# Words take the space before them; a digit stands alone, so that a number is read place by place.
_SPLIT = r"(?i:'s)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def learn_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of ``VOCABULARY`` entries, learned from a sample of the corpus."""
    rng = random.Random(seed)
    texts = [m.content for c in islice(conversations(seed, 400), 20_000) for m in c]
    texts += ["system\nuser\nassistant\n"] * 100
    texts += [passage(rng, 2000) for _ in range(200)] + [plain_text(rng) for _ in range(1000)]
    return learn_byte_pairs(texts, VOCABULARY, (END_OF_TEXT, MESSAGE_START, MESSAGE_END))


def learn_byte_pairs(texts: Iterable[str], vocabulary: int, special_tokens: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocabulary`` entries; those of ``special_tokens`` are the first.

    All 256 bytes are in the alphabet, and there is no normalizer, so any text survives encoding and decoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens where {vocabulary} are wanted")
    return tokenizer


class ChatEncoder:
    """Turns conversations into token ids, with a weight for how much each token counts in the loss."""

    def __init__(self, tokenizer: Tokenizer, prompt_weight: float) -> None:
        self._tokenizer = tokenizer
        self._prompt_weight = prompt_weight
        self._cache: dict[str, list[int]] = {}
        (self.end_of_text,) = self.ids(END_OF_TEXT)

    def ids(self, text: str) -> list[int]:
        """The token ids of a text; short texts recur often and are kept."""
        found = self._cache.get(text)
        if found is None:
            found = list(self._tokenizer.encode(text).ids)
            if len(text) < 60:
                self._cache[text] = found
        return found

    def prompt(self, messages: Conversation) -> list[int]:
        """The token ids of the messages and of the header that opens the assistant's answer."""
        ids, _ = self.encode(messages)
        return ids + self.ids(f"{MESSAGE_START}assistant\n")

    def answer(self, text: str) -> list[int]:
        """The token ids the model should produce, with the token that ends the message."""
        return self.ids(text) + self.ids(MESSAGE_END)

    def encode(self, messages: Conversation) -> tuple[list[int], list[float]]:
        """Token ids and loss weights of a whole conversation, equal in length."""
        ids: list[int] = []
        weights: list[float] = []
        for message in messages:
            head = self.ids(f"{MESSAGE_START}{message.role}\n")
            body = self.answer(message.content)
            tail = self.ids("\n")
            ids += head + body + tail
            weight = 1.0 if message.role == "assistant" else self._prompt_weight
            weights += [self._prompt_weight] * len(head) + [weight] * len(body) + [self._prompt_weight] * len(tail)
        return ids, weights

    def encode_plain(self, text: str) -> tuple[list[int], list[float]]:
        """Token ids and loss weights of text without markup."""
        ids = self.ids(text)
        return ids, [1.0] * len(ids)


def rows(
    encoder: ChatEncoder, rng: random.Random, count: int, length: int
) -> tuple[list[list[int]], list[list[float]]]:
    """``count`` rows of exactly ``length`` token ids, and the loss weight of every token.

    A row holds conversations one after another, separated by the end-of-text token, and is cut where it is full.
    """
    all_ids: list[list[int]] = []
    all_weights: list[list[float]] = []
    for _ in range(count):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            if rng.random() < 0.04:
                more, more_weights = encoder.encode_plain(plain_text(rng))
            else:
                # About four characters a token: either one conversation fills the row, or many short ones share it.
                more, more_weights = encoder.encode(conversation(rng, rng.choice((400, length * 4))))
            ids += [*more, encoder.end_of_text]
            weights += [*more_weights, 1.0]
        all_ids.append(ids[:length])
        all_weights.append(weights[:length])
    return all_ids, all_weights


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a saved checkpoint."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))

"""Model folders with tiny tokenizers of every decoder family, trained or spelled out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pdserve.text.tokenization.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat, naïve café", "你好世界 你好", "🙂🚀 e\u0301 🇫🇷 नमस्ते", "def f(x): return x + 1"] * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(folder: Path, backend: Backend, **files: Any) -> Path:
    """Write tokenizer.json and the given JSON files, named without their ending."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool é>", "▁plain"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback() -> Backend:
    """Llama 2's kind: sentencepiece BPE, unknown characters as bytes, one leading space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdehlortx,.é你", "▁a", "▁▁", "▁th", "he", "llo", "▁x▁"]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def metaspace(prepend_scheme: str) -> Backend:
    words = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁hello", "▁world", "lo", "é", "你", "🙂", "▁a▁b", "x", "."]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return backend


def word_piece() -> Backend:
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ly", "##s", ",", "do", "not", "n", "'", "t", "你"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def no_decoder() -> Backend:
    return Backend(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": word_piece,
    "no_decoder": no_decoder,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT_TEMPLATE}
    return {
        name: save(root / name, build(), **({"tokenizer_config": config} if "byte" in name else {}))
        for name, build in BUILDERS.items()
    }


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture
def byte_level_backend() -> Backend:
    return byte_level()


@pytest.fixture(scope="session")
def byte_level_tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]

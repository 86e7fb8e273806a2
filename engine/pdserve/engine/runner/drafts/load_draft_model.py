"""`DraftModelFolder`: the folder of a draft model, checked against the model for which it drafts, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.common.settings.speculative_config import FIELD, SpeculativeConfig
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.drafts.model_drafter import DraftModel
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.kv_cache import KVCacheGroupSpec, make_kv_caches, shapes_of
from pdserve.models.model_folder import model_folder
from pdserve.models.model_impl import AnyDecoder, load_model_decoder, read_model_config

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftModelFolder:
    """A draft model that is not loaded yet. Its weights have the settings' `dtype`, and no `quantization`."""

    folder: Path
    config: ModelConfig
    groups: tuple[KVCacheGroupSpec, ...]
    setting: SpeculativeConfig

    @classmethod
    def of(
        cls, settings: WorkerSettings, folder: Path, model: ModelConfig, *, download: bool = True
    ) -> DraftModelFolder | None:
        """The draft model of `speculative_config`; None if it names none, or on a prefill worker, which drafts nothing.

        folder, model: of the model for which it drafts. Raises: ConfigError naming the setting, if there is no such folder or its
        vocabulary is another one; UnsupportedModel.
        """
        setting = settings.speculative_config
        if setting is None or setting.draft_model is None or settings.section == "prefill":
            return None
        with named(setting.draft_model):
            draft_folder = model_folder(setting.draft_model, download=download)
            config = read_model_config(draft_folder, settings.dtype, settings.model_impl)
            if config.classifier is not None:
                raise ConfigError(f"{draft_folder} has a classification head and generates no text")
            if config.vision is not None:
                raise ConfigError(
                    f"{draft_folder} takes images, and a model that drafts sees tokens alone: name a text model"
                )
            if config.states is not None:
                raise ConfigError(
                    f"layers of {config.architecture} in {draft_folder} keep a state, which does not go back to before a wrong "
                    "draft: name a model without such layers"
                )
        _verify_vocabulary(setting.draft_model, draft_folder, config, folder, model)
        return cls(draft_folder, config, config.kv_cache_groups(settings.block_size, ""), setting)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of each shape."""
        return sum(shape.block_bytes for shape in shapes_of(self.groups))

    def max_model_len(self, max_model_len: int) -> int:
        """Tokens of the longest sequence that it drafts for. max_model_len: of the engine."""
        return min(max_model_len, self.config.max_position_embeddings)

    def num_blocks(self, settings: WorkerSettings, num_blocks: int, max_model_len: int) -> int:
        """Blocks of its cache: for all sequences that are drafted at once, at most as many as the pool of the engine has.

        num_blocks: of the engine's pool, of all its KV cache groups together. max_model_len: of the engine.
        """
        per_sequence = -(-self.max_model_len(max_model_len) // settings.block_size)
        return min(num_blocks, self.setting.num_drafted(settings.max_num_seqs) * per_sequence)

    def load(self, settings: WorkerSettings) -> AnyDecoder:
        """Read the weights. Raises: ConfigError, UnsupportedModel."""
        with named(str(self.folder)):
            return load_model_decoder(
                self.folder,
                dtype=settings.dtype,
                model_impl=settings.model_impl,
                device=settings.device,
                load_format=settings.load_format,
            )

    def with_cache(
        self, decoder: AnyDecoder, settings: WorkerSettings, num_blocks: int, max_model_len: int
    ) -> DraftModel:
        """num_blocks, max_model_len: as of `num_blocks`."""
        own = self.num_blocks(settings, num_blocks, max_model_len)
        caches = make_kv_caches(self.groups, [own] * len(shapes_of(self.groups)), settings.device)
        return DraftModel(decoder, caches, self.max_model_len(max_model_len))


@contextmanager
def named(model: str) -> Iterator[None]:
    """Errors about a model name the setting."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{FIELD}.model {model}: {error.message}") from error
    except ConfigError as error:
        raise ConfigError(f"{FIELD}.model {model}: {error.message}") from error


def _verify_vocabulary(name: str, draft: Path, draft_config: ModelConfig, folder: Path, model: ModelConfig) -> None:
    """Raises: ConfigError unless token ids mean the same in both."""
    given = f"{FIELD}.model is {name!r:.200}"
    if draft_config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{given} with a vocabulary of {draft_config.vocab_size} tokens, that of {folder} has {model.vocab_size}: "
            "drafts need the same"
        )
    if tokenizer_fingerprint(draft) == tokenizer_fingerprint(folder):
        return
    for each in (draft, folder):
        if not (each / _TOKENIZER).is_file():
            raise ConfigError(f"{given}: {each} has no {_TOKENIZER}, so its tokens cannot be compared with the others")
    ours, theirs = _tokens(draft), _tokens(folder)
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ConfigError(
            f"{given}: its tokenizer is not that of {folder}, {len(differing)} tokens differ: {token!r:.60} has the id "
            f"{ours.get(token)} here and {theirs.get(token)} there"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """Token -> id. Raises: ConfigError."""
    from tokenizers import Tokenizer  # only a worker with a draft model needs it

    try:
        tokens: dict[str, int] = Tokenizer.from_file(str(folder / _TOKENIZER)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{folder / _TOKENIZER} cannot be read: {error}"[:300]) from error
    return tokens

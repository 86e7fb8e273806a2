"""Check of the model folder: its files, their content, and whether they agree. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.model_folder import model_folder
from pdserve.text.tokenization.tokenizer import Tokenizer

_DOWNLOAD = "give the folder of a whole Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
_QUESTION = [{"role": "user", "content": "What is 7 plus 5?"}]


def check_model(settings: WorkerSettings | RouterSettings) -> Iterator[Finding]:
    """Check the folder as a service would load it; a router loads only the tokenizer and the chat template."""
    try:
        folder = model_folder(settings.model, download=False)
    except PdServeError as error:
        yield failed(error.message, _DOWNLOAD)
        return
    tokenizer = problem = None
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except PdServeError as error:
        problem = failed(error.message, _DOWNLOAD)
    if isinstance(settings, WorkerSettings):
        yield from _weights(folder, settings, tokenizer)
    if problem is not None:
        yield problem
    if tokenizer is not None:
        yield from _text_side(tokenizer)


def _text_side(tokenizer: Tokenizer) -> Iterator[Finding]:
    yield ok(f"tokenizer of {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint[:12]}")
    if not tokenizer.eos_token_ids:
        advice = "set eos_token_id in generation_config.json"
        yield warning("no token ends a text: answers end at max_tokens or a stop string", advice)
    if not tokenizer.has_chat_template:
        advice = "put chat_template.jinja next to tokenizer.json, or ask for completions"
        yield warning("no chat template: chat requests are refused", advice)
        return
    try:
        prompt = tokenizer.apply_chat_template(_QUESTION)
        num_tokens = len(tokenizer.encode(prompt, add_special_tokens=False))
        yield ok(f"chat template: a short question is {num_tokens} tokens")
    except InvalidRequest as error:
        yield failed(error.message, "correct chat_template.jinja (or chat_template in tokenizer_config.json)")


def _weights(folder: Path, settings: WorkerSettings, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    # torch takes seconds to import, and the check for a router does not need it
    from pdserve.engine.runner.loading.loaded_model import verify_model
    from pdserve.engine.runner.pool.memory_needs import weight_bytes

    try:
        config = verify_model(folder, settings)
        num_bytes = weight_bytes(
            folder,
            settings.dtype,
            settings.load_format,
            settings.weight_form,
            model_impl=settings.model_impl,
            device=settings.device,
        )
    except PdServeError as error:
        yield failed(error.message, _DOWNLOAD)
        return
    yield ok(
        f"{config.architecture} at {folder}: {config.num_layers} layers, {config.dtype}, "
        f"{num_bytes / (1 << 20):.1f} MiB of weights, up to {config.max_position_embeddings} tokens"
    )
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        yield warning(f"{what}: requests with the others are refused", "use the model's own tokenizer.json")

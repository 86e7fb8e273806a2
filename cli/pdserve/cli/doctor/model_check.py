"""Model folder: its files, their content, and whether they agree. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.model_folder import model_folder
from pdserve.text.tokenizer import Tokenizer

_DOWNLOAD = "give the folder of a whole Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
_QUESTION = [{"role": "user", "content": "What is 7 plus 5?"}]


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Checks the model folder; for a router only tokenizer and chat template. Implements `Check`."""

    settings: WorkerSettings | RouterSettings
    name: str = "model"
    deadline_s: float = 60.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        try:
            folder = model_folder(self.settings.model)
        except PdServeError as error:
            return [failed(error.message, _DOWNLOAD)]
        tokenizer, findings = _text_side(folder)
        if isinstance(self.settings, WorkerSettings):
            findings = [*_weights(folder, self.settings, tokenizer), *findings]
        return findings


def _text_side(folder: Path) -> tuple[Tokenizer | None, list[Finding]]:
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except PdServeError as error:
        return None, [failed(error.message, _DOWNLOAD)]
    findings = [ok(f"tokenizer of {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint[:12]}")]
    if not tokenizer.eos_token_ids:
        advice = "set eos_token_id in generation_config.json"
        findings.append(warning("no token ends a text: answers end at max_tokens or a stop string", advice))
    if not tokenizer.has_chat_template:
        advice = "put chat_template.jinja beside tokenizer.json, or ask for completions"
        return tokenizer, [*findings, warning("no chat template: chat requests are refused", advice)]
    try:
        prompt = tokenizer.apply_chat_template(_QUESTION)
        num_tokens = len(tokenizer.encode(prompt, add_special_tokens=False))
        findings.append(ok(f"chat template: a short question is {num_tokens} tokens"))
    except InvalidRequest as error:
        findings.append(
            failed(error.message, "correct chat_template.jinja (or chat_template in tokenizer_config.json)")
        )
    return tokenizer, findings


def _weights(folder: Path, settings: WorkerSettings, tokenizer: Tokenizer | None) -> list[Finding]:
    # torch takes seconds to import, and the check for a router does not need it
    from pdserve.engine.runner.memory_needs import weight_bytes
    from pdserve.models.read_config import read_config

    try:
        config = read_config(folder, settings.dtype)
        num_bytes = weight_bytes(folder, settings.dtype)
    except PdServeError as error:
        return [failed(error.message, _DOWNLOAD)]
    findings = [
        ok(
            f"{config.architecture} at {folder}: {config.num_layers} layers, {config.dtype}, "
            f"{num_bytes / (1 << 20):.1f} MiB of weights, up to {config.max_position_embeddings} tokens"
        )
    ]
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        findings.append(warning(f"{what}: requests with the others are refused", "use the model's own tokenizer.json"))
    return findings

"""LoRA adapters: each folder of `lora_modules` and `lora_dir`, read as a worker reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import PdServeError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.models.model_folder import model_folder
from pdserve.worker.lora_modules import absolute_folder, adapter_folders

_CORRECT = "give the PEFT folder of an adapter of this model (adapter_config.json, adapter_model.safetensors)"
_OFFERED_BY = {True: "lora_modules", False: "lora_dir"}


def check_adapters(settings: WorkerSettings) -> Iterator[Finding]:
    """One finding per adapter. A worker starts without a broken adapter of `lora_dir`, and with none of `lora_modules`."""
    if not settings.enable_lora:
        yield ok("enable_lora is false: no adapters")
        return
    given = {name: absolute_folder(path) for name, path in (settings.lora_modules or {}).items()}
    watched = None if settings.lora_dir is None else absolute_folder(settings.lora_dir)
    try:
        folders, passed_over = adapter_folders(given, watched)
    except OSError as error:
        yield failed(
            f"lora_dir {watched} cannot be read: {error.strerror}", "give a folder whose subfolders are adapters"
        )
        folders, passed_over = given, {}
    for name, why in passed_over.items():
        yield warning(f"the folder {name!r:.200} in lora_dir is not offered: {why}", "rename it, or move it elsewhere")
    if not folders:
        yield ok("enable_lora is true, and there is no adapter yet")
        return
    yield from _read(settings, folders, set(given))


def _read(settings: WorkerSettings, folders: dict[str, Path], given: set[str]) -> Iterator[Finding]:
    # torch takes seconds to import, and a worker without adapters does not need it here
    from pdserve.engine.runner.pool.memory_needs import adapter_targets
    from pdserve.models.lora.lora_adapter import read_adapter

    try:
        targets = adapter_targets(model_folder(settings.model, download=False), settings)
    except PdServeError as error:
        yield failed(f"adapters are not checked: {error.message}", "correct the model or the settings")
        return
    for name, folder in folders.items():
        offered_by = _OFFERED_BY[name in given]
        try:
            adapter = read_adapter(folder, targets)
        except PdServeError as error:
            say = failed if name in given else warning
            yield say(f"adapter {name} of {offered_by} cannot be used: {error.message}", _CORRECT)
            continue
        yield ok(
            f"adapter {name} of {offered_by}: rank {adapter.rank}, {len(adapter.weights)} modules, "
            f"{adapter.nbytes / (1 << 20):.1f} MiB, fingerprint {adapter.fingerprint[:12]}"
        )

"""`LocalEngine`: a loaded model folder, with all parts that serve a prompt without services."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.client.loaded_engine import LoadedEngine, local_hasher
from pdserve.engine.client.process_client import ProcessClient
from pdserve.engine.runner.loading.loaded_model import model_folder
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.stats.stat_logger import StatLoggerFactory, load_stat_loggers
from pdserve.engine.stats.stat_recorder import StatRecorder
from pdserve.llm.engine_options import EngineOptions, max_logprobs, worker_settings
from pdserve.llm.requests.logits_callables import CallerLogitsProcessors
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.tokenization.tokenizer import Tokenizer


class LocalEngine:
    """The client of an engine, and what prepares its requests."""

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        engine_process: bool = False,
        disable_log_stats: bool = False,
        stat_loggers: Sequence[str | StatLoggerFactory] = (),
    ) -> None:
        """model: a checkpoint's folder, or `demo`. engine_process: run the engine in a process of its own.

        disable_log_stats: answers have no `metrics`, and there are no stat loggers. stat_loggers: names of installed ones and
        factories. Raises: ConfigError naming the option, its value and its limit; UnsupportedModel.
        """
        self.settings = settings = worker_settings(options)
        folder = model_folder(str(model))
        self.log_stats = not disable_log_stats
        self.tokenizer = Tokenizer.from_folder(folder)
        self.images = ImageProcessor.from_folder(folder)
        self.audio = AudioProcessor.from_folder(folder)
        self.hasher = local_hasher(settings.block_size)
        # loaded here too for the engine's process, since `check` is called before anything is computed
        installed = LogitsProcessors.from_entry_points(settings.logits_processors)
        self.logits_processors = CallerLogitsProcessors(installed, takes_functions=not engine_process)
        self.client: EngineCoreClient = (
            ProcessClient.load(folder, settings)
            if engine_process
            else InprocClient(LoadedEngine.load(folder, settings, self.logits_processors))
        )
        self.info = self.client.info
        try:
            self.max_logprobs = max_logprobs(options, self.info.vocab_size)
        except ConfigError:
            self.client.close()
            raise
        self.recorder: StatRecorder | None = None
        if stat_loggers and self.log_stats:
            try:
                self.recorder = StatRecorder(load_stat_loggers(stat_loggers, self.info))
            except ConfigError:
                self.client.close()
                raise
            self.client.recorder = self.recorder

"""`draft_head_config`: the draft head that `speculative_config` names, before any weight is read."""

from __future__ import annotations

from pdserve.common.errors import ConfigError
from pdserve.common.settings.speculative_config import FIELD, SpeculativeConfig
from pdserve.engine.runner.drafts.load_draft_model import named
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.eagle_head import read_eagle_config
from pdserve.models.model_folder import model_folder


def draft_head_config(setting: SpeculativeConfig | None, model: ModelConfig) -> DraftHeadConfig | None:
    """None if no head drafts. model: the one for which it drafts.

    Raises: ConfigError naming the setting, if there is no such head; UnsupportedModel.
    """
    if setting is None or not setting.has_draft_head:
        return None
    if model.implementation:
        raise ConfigError(f"{FIELD}.method is {setting.method!r}, and {model.architecture} is computed by transformers")
    if setting.model is None:
        if model.family.draft_names is None:
            raise ConfigError(
                f"{FIELD}.method is {setting.method!r}, and no draft head is read of {model.architecture}"
            )
        return DraftHeadConfig()
    with named(setting.model):
        return read_eagle_config(model_folder(setting.model), model)

"""`DraftHeadConfig`: the draft head with which a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.models.config.model_config import ModelConfig

MTP = "mtp"


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """The model's own head, or the EAGLE-3 head of another folder."""

    name: str = MTP
    """See `KvLayout.draft_head`."""
    folder: Path | None = None
    """Of an EAGLE-3 head; None: the head is in the model's checkpoint."""
    own: ModelConfig | None = None
    """Dimensions of that head's layer; None: they are the model's."""
    taps: tuple[int, ...] = ()
    """Layers of the model whose inputs an EAGLE-3 head takes."""
    vocab_size: int = 0
    """Tokens that an EAGLE-3 head can draft."""
    norms_residual: bool = False
    """True: the stream to which that head's layer adds is normalised, too."""

    @property
    def is_in_checkpoint(self) -> bool:
        """True: the head's weights are among the model's."""
        return self.folder is None

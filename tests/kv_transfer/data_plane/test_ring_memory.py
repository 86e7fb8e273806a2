"""A ring for which there is no memory: one sentence that names the setting."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pdserve.common.errors import ConfigError
from pdserve.kv_transfer.make_connectors import with_ring


class FullDevice:
    """A pool whose device has no room for a ring."""

    block_bytes = 1024

    def __init__(self, error: Exception) -> None:
        self.error = error

    def new_ring(self, num_slots: int, *, pinned: bool) -> None:
        assert num_slots == 3 << 10
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_the_setting_is_named(error: Exception) -> None:
    with pytest.raises(ConfigError, match="kv_ring_mib 3 needs more pinned main memory than is free"):
        with_ring(cast(Any, object()), cast(Any, FullDevice(error)), 3 << 20)

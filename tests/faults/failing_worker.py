"""A worker of whose transfers some fail: `python failing_worker.py SHARE prefill --port ...`."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from pdserve.cli.main import main
from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from tests.support.processes.prepared_children import prepare_children


def install(share: float) -> None:
    """Let this share of the transfers end when their first blocks are final."""
    draw = random.Random(1)
    real = SourceTransfer.settled

    def settled(
        transfer: SourceTransfer, first_index: int, block_ids: Sequence[int], digests: Sequence[tuple[int, ...]]
    ) -> None:
        if draw.random() < share:
            transfer.fail(TransferFailed("this transfer was chosen to fail"))
        else:
            real(transfer, first_index, block_ids, digests)

    SourceTransfer.settled = settled  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    share = float(sys.argv.pop(1))
    prepare_children(lambda: install(share))
    main()

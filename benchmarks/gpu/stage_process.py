"""`python -m gpu.stage_process STAGE ROWS SECONDS [--dry]`: one stage, in a process of its own.

An error of a kernel leaves a process without a usable GPU, and a library may end one: neither reaches the next stage.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
import zlib
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.bench import Bench, Skipped
from gpu.plan import BY_NAME, Stage
from gpu.rows import Rows

MARGIN_S = 5.0
"""A stage begins no case that late before its limit."""


def interpreter(stage: Stage) -> Any:
    """For a dry run: kernels run in the interpreter of the tests while it is open. Without triton, torch operations run.

    Not for stages that start processes, which would inherit `TRITON_INTERPRET` from it.
    """
    if not stage.launches or find_spec("triton") is None:
        return nullcontext()
    from tests.support.kernels.triton_interpreter import interpreted

    return interpreted(zlib.crc32(stage.name.encode()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=list(BY_NAME))
    parser.add_argument("rows", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    # so that `finally` ends what a stage has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = Rows(options.rows, options.stage, dry=options.dry)
    stage = importlib.import_module(f"gpu.stages.{options.stage}")
    ends_at = time.monotonic() + options.seconds - MARGIN_S
    with interpreter(BY_NAME[options.stage]) if options.dry else nullcontext():
        try:
            stage.run(Bench(rows, dry=options.dry, ends_at=ends_at))
        except Skipped as skipped:
            rows.skip("stage", str(skipped))
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            rows.fail("stage", f"{type(error).__name__}: {lines[0][:300]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

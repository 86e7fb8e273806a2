"""`dump_stacks`: where the threads of this process are."""

from __future__ import annotations

import faulthandler
import sys


def dump_stacks() -> None:
    """Write the stacks of all threads of this process to standard error."""
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

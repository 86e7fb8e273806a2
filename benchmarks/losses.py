"""Where moving, tiers and separate prefill and decode lose: recorded traces on four workers, each way next to its alternative.

    moves      `block_moves` auto and always                   against never
    P/D        two prefill and two decode workers              against four that do both
    tier       `kv_host_mib`, pools that are too small         against the same pools without

The folder has `weka/*.json` and `mooncake_conversation.jsonl`, which others publish; `trace_replay.py` says what is measured.
Ratios above 1 in a cluster's line are losses against the first cluster of its run.

Usage: python benchmarks/losses.py FOLDER [--model demo] [--rounds 3] [--only weka-moves ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SMALL_POOL = "num-blocks=700"
LARGE_POOL = "num-blocks=20000"
WEKA = ["weka/trace_0590.json", "weka/trace_0578.json", "weka/trace_0175.json"]
WEKA_SHAPE = ["--scale", "32", "--num", "25", "--copies", "3", "--speed", "40"]
MOONCAKE = ["mooncake_conversation.jsonl"]
MOONCAKE_SHAPE = ["--scale", "64", "--num", "500", "--speed", "6"]
MOVES = ["--clusters", "never", "auto", "always", "together"]
TIER = ["--clusters", "auto", "auto,kv-host-mib=512"]
RUNS = {
    "weka-moves": [*WEKA, *WEKA_SHAPE, "--set", LARGE_POOL, *MOVES],
    "weka-tier": [*WEKA, *WEKA_SHAPE, "--set", SMALL_POOL, *TIER],
    "mooncake-moves": [*MOONCAKE, *MOONCAKE_SHAPE, "--set", LARGE_POOL, *MOVES],
    "mooncake-tier": [*MOONCAKE, *MOONCAKE_SHAPE, "--set", SMALL_POOL, *TIER],
}
"""Name -> arguments of `trace_replay.py`; files are in the given folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    for name in options.only:
        arguments = [str(options.folder / word) if word in (*WEKA, *MOONCAKE) else word for word in RUNS[name]]
        print(f"\n{name}: trace_replay.py {' '.join(RUNS[name])}", flush=True)
        script = Path(__file__).with_name("trace_replay.py")
        command = [sys.executable, str(script), *arguments, "--model", options.model, "--rounds", str(options.rounds)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

"""Write the secrets of docker-compose.yml into a file that its owner alone can read: `python3 deploy/make_secrets.py [FILE]`.

The file is `.env` by default, which docker-compose reads by itself. An existing file is never overwritten: services that run
have its secrets. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

NAMES = ("PDSERVE_DEPLOYMENT_KEY", "REDIS_PASSWORD", "PDSERVE_API_KEYS", "GRAFANA_PASSWORD")
"""Each gets 256 random bits as 64 hex digits."""


def write_secrets(path: Path) -> None:
    """Raises: FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(f"{name}={secrets.token_hex(32)}\n" for name in NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].partition(":")[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, default=Path(".env"), help="default: .env")
    path = parser.parse_args().file
    try:
        write_secrets(path)
    except FileExistsError:
        sys.exit(f"{path} is there already and is not overwritten: services that run have its secrets")
    print(f"{path} holds {', '.join(NAMES)}.")
    print(f"For `pdserve chat`: export PDSERVE_API_KEY=$(sed -n 's/^PDSERVE_API_KEYS=//p' {path})")


if __name__ == "__main__":
    main()

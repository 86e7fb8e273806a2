"""`python -m pdserve` is the `pdserve` command."""

from __future__ import annotations

from pdserve.cli.main import main

if __name__ == "__main__":
    main()

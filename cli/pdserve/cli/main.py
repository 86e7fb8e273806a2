"""`main`: the `pdserve` command. It imports the commands when it is called, so that Ctrl-C during the imports ends it cleanly."""

from __future__ import annotations

import sys

from pdserve.cli.exit_status import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED


def main() -> None:
    """Entry point. pdserve's own errors are printed on one line, without a traceback."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _run() -> None:
    from pdserve.cli.app import app
    from pdserve.cli.not_reached import NotReached
    from pdserve.common.errors import ConfigError, PdServeError

    try:
        app()
    except PdServeError as error:
        print(f"pdserve: {error.message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError | NotReached) else EXIT_FAILED)
    except ValueError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()

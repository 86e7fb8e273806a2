"""One log format for every service: time, level, service, message, on standard error."""

from __future__ import annotations

import logging
import sys


def configure_logging(service: str, level: str) -> None:
    """Called once, by the command that starts a service. level: `debug`, `info`, `warning` or `error`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # these repeat our own lines at INFO
    for chatty in ("uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """A status that could not be sent, because its client left in that moment, is no error of this service."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"

"""One log format for every service: time, level, service, message, on standard error, as text or as JSON."""

from __future__ import annotations

import datetime
import logging
import sys

import msgspec


def configure_logging(service: str, level: str, log_format: str = "text") -> None:
    """Called once, by the command that starts a service. level: `debug`, `info`, `warning` or `error`. log_format: `text` or
    `json`."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s")
    handler.setFormatter(_JsonLines(service) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # these repeat our own lines at INFO
    for chatty in ("uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_news)


class _JsonLines(logging.Formatter):
    """A JSON object per record, in one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # a lone surrogate, as in the name of a file, cannot be encoded
        plain = {name: value.encode(errors="backslashreplace").decode() for name, value in line.items()}
        return msgspec.json.encode(plain).decode()


def is_news(record: logging.LogRecord) -> bool:
    """A status that could not be sent, because its client left in that moment, is no error of this service."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"

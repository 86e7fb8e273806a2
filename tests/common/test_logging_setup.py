"""One format for every service, and no traceback for what is no error."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from pdserve.common.telemetry.logging_setup import configure_logging


class ExecuteBatchError(Exception):
    """As gRPC names it."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The output of a configured service."""
    root, grpc_logger = logging.getLogger(), logging.getLogger("grpc._cython.cygrpc")
    handlers, level, filters = root.handlers[:], root.level, grpc_logger.filters[:]
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("decode", "info")
    yield stream
    root.handlers[:], grpc_logger.filters[:] = handlers, filters
    root.setLevel(level)


def raised(error: Exception) -> None:
    try:
        raise error
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core")


def test_lines_name_level_and_service(written: io.StringIO) -> None:
    logging.getLogger("somewhere").warning("careful")
    logging.getLogger("httpx").info("chatter")
    assert written.getvalue().splitlines()[0].endswith("WARNING decode somewhere: careful")
    assert len(written.getvalue().splitlines()) == 1


def test_json_lines(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging("router", "info", "json")
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logging.getLogger("somewhere").exception("careful: %s", "a\nb\udcff")
    [line] = written.getvalue().splitlines()
    fields = json.loads(line)
    told = (fields["level"], fields["service"], fields["logger"], fields["message"])
    assert told == ("error", "router", "somewhere", "careful: a\nb\\udcff")
    assert "ValueError: broken\nin two lines" in fields["exception"]
    assert fields["time"].endswith("Z")


def test_a_client_that_left_is_no_error_but_other_failures_of_grpc_are(written: io.StringIO) -> None:
    raised(ExecuteBatchError("Failed"))
    assert written.getvalue() == ""
    raised(RuntimeError("broken"))
    assert "RuntimeError: broken" in written.getvalue()

"""The fixture of the fuzz tests itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.inputs.fuzz_cases import Fuzzer


@pytest.mark.fuzz(share=0.01)
def test_log_records_of_the_cases_are_not_kept(
    request: pytest.FixtureRequest, fuzzer: Fuzzer, caplog: pytest.LogCaptureFixture
) -> None:
    plugin: Any = request.config.pluginmanager.get_plugin("logging-plugin")
    kept = plugin.report_handler
    num_kept = len(kept.records)
    logging.getLogger("fuzz").warning("a case ended")
    assert len(kept.records) == num_kept
    # a test that looks at the log of its cases still has it
    assert caplog.messages == ["a case ended"]

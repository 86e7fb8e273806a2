"""A file stays within 400 lines, so that it has one idea and can be read at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
LONGER = {
    "tests/cli/test_doctor_checks.py",
    "tests/common/test_tls_renewal.py",
    "tests/engine/test_grammar_processes.py",
    "tests/engine/test_sampling.py",
    "tests/engine/test_structured_outputs.py",
    "tests/router/bad_requests.py",
    "tests/router/fake_worker.py",
    "tests/router/test_attempt.py",
    "tests/router/test_router_telemetry.py",
    "tests/router/test_tools.py",
    "tests/worker/test_fuzz_calls.py",
}
"""Files of tests that are longer, each to be divided when it is changed; none of the product is."""


def files() -> Iterator[Path]:
    for pattern in (
        "*/pdserve/**/*.py",
        "benchmarks/**/*.py",
        "deploy/**/*.py",
        "examples/**/*.py",
        "tools/**/*.py",
        "tests/**/*.py",
    ):
        yield from (path for path in ROOT.glob(pattern) if "_pb2" not in path.name)


def test_no_other_file_is_longer() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    assert len(lengths) > 800
    assert {name for name, length in lengths.items() if length > MAX_LINES} == LONGER

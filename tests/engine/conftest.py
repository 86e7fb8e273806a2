"""Engines; the pool of each is checked after every test."""

from tests.support.engine.bart_engines import bart, make_bart  # noqa: F401
from tests.support.engine.engine_harness import harnesses, make_engine, make_real_engine  # noqa: F401
from tests.support.engine.whisper_engines import make_whisper_engine, whisper  # noqa: F401

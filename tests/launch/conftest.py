"""Processes that are forked, as for tests of the engine."""

from tests.engine.conftest import in_fork  # noqa: F401

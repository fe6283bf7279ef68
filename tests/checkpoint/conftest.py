"""Process groups and forced writes, as for tests of the engine."""

from tests.engine.conftest import alone, in_fork, on_ranks, synced  # noqa: F401

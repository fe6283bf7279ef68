"""Process groups and forced writes, as for tests of the engine."""

"""Processes that are forked, as for tests of the engine."""

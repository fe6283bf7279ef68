"""Writes a run's folder, and reads it again."""

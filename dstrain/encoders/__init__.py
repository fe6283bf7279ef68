"""Frozen networks of others."""

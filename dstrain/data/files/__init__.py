"""Bytes: local, at an address, in a zip; tables; what is tried again."""

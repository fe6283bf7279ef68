"""Reads bytes: local files, files at an address, members of zip files, tables; what fails is tried again."""

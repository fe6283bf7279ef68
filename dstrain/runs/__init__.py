"""A run as a folder on a disk: what is written there, and what is read of it again."""

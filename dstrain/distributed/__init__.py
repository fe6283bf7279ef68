"""The processes of a run: which one this is, what they exchange, and when they stop."""

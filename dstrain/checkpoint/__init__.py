"""The format of checkpoints. It knows no engine."""

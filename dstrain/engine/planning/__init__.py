"""Counts the memory and the operations of a rank by running DeepSpeed itself without a GPU."""

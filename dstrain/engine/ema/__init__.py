"""Averages of the weights: the sharded shadow, its profiles and snapshots, and their combination."""

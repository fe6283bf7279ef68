"""Drawing from trained networks by all ranks, and the files that come of it."""

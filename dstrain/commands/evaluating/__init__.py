"""What `dstrain evaluate` measures beside held-out losses: pictures by metrics, and averages of every length."""

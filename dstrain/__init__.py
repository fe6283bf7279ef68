"""dstrain: a DeepSpeed-first trainer for visual generative models."""

__version__ = "0.1.0"

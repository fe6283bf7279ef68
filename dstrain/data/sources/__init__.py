"""Samples by number: images, videos, captions, buckets."""

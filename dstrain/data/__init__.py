"""Where samples come from, and which sample goes where: map-style sources, an arithmetic order, and
batches.
"""

"""Where samples come from, and which sample goes where: sources (source.py), an arithmetic order, and batches."""

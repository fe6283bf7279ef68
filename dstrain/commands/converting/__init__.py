"""The converters of `dstrain convert`, a file for each kind: they write data of others once in our own formats."""

"""Serves `dstrain evaluate`: metrics of pictures, and a comparison of averages of several widths."""

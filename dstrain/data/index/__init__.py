"""The index of data: all samples, listed once and mapped by every process."""

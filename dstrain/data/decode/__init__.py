"""From bytes to tensors: pixels, crops, clips."""

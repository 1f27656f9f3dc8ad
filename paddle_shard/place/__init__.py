"""Turning what a rank has read into distributed tensors, each on its mesh with its placements."""

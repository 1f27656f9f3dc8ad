"""Distributed tensors from the batch that a rank has read, each on its mesh with its placements."""

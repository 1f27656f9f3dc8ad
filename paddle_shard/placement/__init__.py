"""How the batch that a rank has read becomes distributed tensors, each on its mesh with its placements."""

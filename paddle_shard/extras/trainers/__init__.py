"""Trainers that cannot be edited: a patch of Paddle's loaders, and a callback that saves the data position."""

"""The loader itself: what users call."""

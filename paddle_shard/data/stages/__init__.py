"""The stages of a stream between its source and the batch."""

"""Data of the user: a DataLoader or a Stream, and the order that it defines."""

"""The user's input: a DataLoader or a Stream, and its order."""

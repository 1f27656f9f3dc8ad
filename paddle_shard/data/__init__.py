"""What the user gives: a DataLoader or a Stream, and the order that it defines."""

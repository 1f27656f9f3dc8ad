"""The record of a run: what was delivered where, in a file of lines. Needs the standard library and numpy."""

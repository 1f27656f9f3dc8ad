"""Loaders of other libraries as a `Foreign`, one library per file. Each library is imported where it is used."""

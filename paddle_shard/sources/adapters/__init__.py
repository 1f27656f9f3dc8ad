"""Loaders of other libraries as a `Foreign`, one library a file; each is imported where it is used."""

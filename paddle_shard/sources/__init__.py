"""The sources of samples, one kind per file. Third-party libraries are imported inside functions."""

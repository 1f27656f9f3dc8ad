"""Sources of samples in files, one kind per module. Third-party packages are imported where they are used."""

"""Where a stream's samples come from, one kind per file. Third-party packages are imported where they are used."""

"""Where a stream's samples come from, one kind a file; third parties are imported where they are used."""

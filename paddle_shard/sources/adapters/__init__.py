"""Other libraries as an `ExternalLoader`, one library per file. Each library is imported where it is used."""

"""The commands of `paddle-shard`, a file for each kind of question."""

"""Commands, one a file: `python -m paddle_shard.cli.<command> --help`."""

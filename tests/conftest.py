import os

# Scripts that ranks run are no test modules: collecting one for doctests would run it.
collect_ignore_glob = ["*/*_worker.py"]
# Other libraries need environments of their own: `make test-adapters`.
if "PADDLE_SHARD_ADAPTER" not in os.environ:
    collect_ignore = ["adapters"]

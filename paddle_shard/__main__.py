"""`python -m paddle_shard`: the same as the command `paddle-shard`."""

import sys

from paddle_shard.extras.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

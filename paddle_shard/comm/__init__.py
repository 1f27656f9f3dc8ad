"""Communication between ranks: where they meet, how they agree, and what they compare."""

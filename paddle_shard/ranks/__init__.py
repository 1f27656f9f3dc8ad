"""Messages between ranks: agreement on steps, the connections that carry it, and batches that several ranks share."""

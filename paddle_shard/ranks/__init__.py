"""What ranks say to each other: agreement on steps, the connections that carry it, and batches that several share."""

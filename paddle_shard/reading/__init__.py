"""Reading the samples that a rank needs, in this process or in workers. Failures are returned as values."""

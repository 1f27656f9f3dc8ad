"""Fetching the samples that a rank needs: in this process or in workers, failures as values."""

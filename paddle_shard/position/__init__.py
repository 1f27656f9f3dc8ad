"""Where a run stands: its epoch, its saved state, and the account of what was delivered."""

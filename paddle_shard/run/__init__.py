"""The position of a run: its epoch, its saved state, and the account of what was delivered."""

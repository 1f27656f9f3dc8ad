"""How the steps of a pass are read ahead, placed, agreed on and delivered."""

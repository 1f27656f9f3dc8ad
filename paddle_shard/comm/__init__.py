"""What ranks say to each other: where they meet, what they agree through, what they compare."""

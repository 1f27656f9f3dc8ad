"""Foundations without Paddle: checks, trees, collating, random generators, warnings."""

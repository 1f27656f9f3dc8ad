"""How long does a test wait before it says that something hangs?"""

HANG = 120.0
"""Seconds that only a hang reaches, whatever else the machine does. What is told "at once" comes before: the loaders'
own `timeout` is 1800 s where a test does not say otherwise."""

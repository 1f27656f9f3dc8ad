"""Libraries that some tests need."""

import importlib
from importlib.util import find_spec

import pytest


class Lazy:
    """A module that is imported when it is first used, not by each of the processes that collect all tests."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        # pytest asks them of every global of a test file
        if name.startswith(("__", "_mock")):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def needs(*names):
    """The first of the modules, lazily; a file of tests that asks for one that is not installed is skipped."""
    for name in names:
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip(
                f"could not import {name!r}: it is not installed",
                allow_module_level=True,
            )
    return Lazy(names[0])

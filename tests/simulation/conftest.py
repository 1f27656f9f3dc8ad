import logging

import pytest


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("paddle_shard")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)

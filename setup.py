"""Package metadata; `pyproject.toml` only configures the tools."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "paddle_shard/__init__.py").read_text())[1]

DEMO = ["scikit-learn", "tqdm"]
WEBDATASET = ["webdataset>=0.2.90", "fsspec"]

setup(
    name="paddle_shard",
    version=VERSION,
    description="Exact data sharding for Paddle auto-parallel training.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["paddle_shard", "paddle_shard.*"]),
    package_data={"paddle_shard": ["py.typed"]},
    install_requires=["numpy>=1.21"],
    extras_require={
        "cpu": ["paddlepaddle>=3.0"],
        "gpu": ["paddlepaddle-gpu>=3.0"],
        "demo": DEMO,
        "webdataset": WEBDATASET,
        "test": [
            *DEMO,
            *WEBDATASET,
            "hypothesis>=6",
            "mypy>=1.10",
            "pytest>=8",
            "pyyaml",
            "ruff>=0.5",
            "setuptools",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

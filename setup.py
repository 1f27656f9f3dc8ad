"""Package metadata; `pyproject.toml` only configures the tools."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'VERSION = "(.+?)"', (ROOT / "paddle_shard/version.py").read_text())[1]

DEMO = ["scikit-learn", "tqdm"]
WEBDATASET = ["webdataset>=0.2.90", "fsspec"]
PARQUET = ["pyarrow>=14", "fsspec[http]"]
HUGGINGFACE = ["datasets>=5.2"]
GRAIN = ["grain>=0.2.18; python_version >= '3.11'"]  # which has none for 3.10
S3 = ["s3fs"]
ELASTIC = ["etcd3"]  # of Paddle's launcher; launch/elastic.sh sets what it needs beside a newer protobuf
# All of them; the tests of what is not installed are skipped.
SOURCES = [*WEBDATASET, *PARQUET, *HUGGINGFACE, *GRAIN, *S3]
# Not among the tests' own: `make test-adapters` gives each an environment. They are for recipes.
ADAPTERS = {
    "torchdata": ["torchdata>=0.11", "torch"],
    "mds": ["mosaicml-streaming==0.13.*", "filelock==3.16.1", "numpy<2.2"],
    "dali": ["nvidia-dali-cuda130>=2.4"],
    "ray": ["ray[data]>=2.40"],
}

setup(
    name="paddle_shard",
    version=VERSION,
    description="Exact data sharding for Paddle auto-parallel training.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["paddle_shard", "paddle_shard.*"]),
    package_data={"paddle_shard": ["py.typed", "cli/page/*"]},
    entry_points={"console_scripts": ["paddle-shard = paddle_shard.cli.main:main"]},
    install_requires=["numpy>=1.21"],
    extras_require={
        "cpu": ["paddlepaddle>=3.0"],
        "gpu": ["paddlepaddle-gpu>=3.0"],
        "demo": DEMO,
        "webdataset": WEBDATASET,
        "parquet": PARQUET,
        "huggingface": HUGGINGFACE,
        "grain": GRAIN,
        "s3": S3,
        "elastic": ELASTIC,
        "sources": SOURCES,
        **ADAPTERS,
        "test": [
            *DEMO,
            *ELASTIC,
            "flask",
            "flask-cors",
            "hypothesis>=6",
            "moto[s3]",
            "mypy>=1.10",
            "pytest>=8",
            "pytest-xdist>=3.5",
            "pyyaml",
            "ruff>=0.5",
            "setuptools",
        ],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

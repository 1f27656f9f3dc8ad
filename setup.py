"""The package's metadata: all of it. `pyproject.toml` names the build system and configures the tools.

PADDLE_SHARD_URL: where the repository can be read, such as https://host/owner/paddle_shard/blob/main. An index shows
the README without the files that it links to. With this variable its links point there; without it they are plain text.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'VERSION = "(.+?)"', (ROOT / "paddle_shard/version.py").read_text()
)[1]

DEMO = ["scikit-learn", "tqdm"]
WEBDATASET = ["webdataset>=0.2.90", "fsspec[http]"]
PARQUET = ["pyarrow>=14", "fsspec[http]"]
HUGGINGFACE = ["datasets>=5.2"]
GRAIN = ["grain>=0.2.18; python_version >= '3.11'"]  # which has none for 3.10
S3 = ["s3fs"]
# of Paddle's launcher; launch/elastic.sh sets what it needs beside a newer protobuf
ELASTIC = ["etcd3"]
# All of them; the tests of what is not installed are skipped.
SOURCES = [*WEBDATASET, *PARQUET, *HUGGINGFACE, *GRAIN, *S3]
METRICS = ["prometheus-client>=0.20"]
RAY = ["ray[data]>=2.40"]
URL = os.environ.get("PADDLE_SHARD_URL", "").rstrip("/")


def shown_by_an_index(text: str) -> str:
    """Return the README with links that do not depend on the files beside it."""
    found = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    if URL:
        return re.sub(found, rf"\1[\2]({URL}/\3)", text)
    return re.sub(found, lambda link: "" if link[1] else link[2], text)


setup(
    name="paddle_shard",
    version=VERSION,
    description="Exact data sharding for Paddle auto-parallel training.",
    long_description=shown_by_an_index(
        (ROOT / "README.md").read_text(encoding="utf-8")
    ),
    long_description_content_type="text/markdown",
    author="The paddle_shard authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    project_urls={"Source": URL, "Changes": f"{URL}/CHANGELOG.md"}
    if URL
    else {},
    keywords=[
        "paddlepaddle",
        "data loading",
        "sharding",
        "distributed training",
        "auto-parallel",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["paddle_shard", "paddle_shard.*"]),
    package_data={"paddle_shard": ["py.typed"]},
    entry_points={
        "console_scripts": ["paddle-shard = paddle_shard.extras.cli.main:main"]
    },
    install_requires=["numpy>=1.21"],
    extras_require={
        "cpu": ["paddlepaddle>=3.0"],
        "demo": DEMO,
        "webdataset": WEBDATASET,
        "parquet": PARQUET,
        "huggingface": HUGGINGFACE,
        "grain": GRAIN,
        "s3": S3,
        "elastic": ELASTIC,
        "sources": SOURCES,
        "ray": RAY,
        "metrics": METRICS,
        "test": [
            *DEMO,
            *ELASTIC,
            *METRICS,
            "flask",
            "flask-cors",
            "hypothesis>=6",
            "moto[s3]",
            "mypy>=1.10",
            "pytest>=8",
            "pytest-rerunfailures>=14",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "pyyaml",
            "ruff>=0.5",
            "setuptools",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

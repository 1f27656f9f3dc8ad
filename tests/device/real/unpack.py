"""Unpack the pieces that `pack.py` made: python unpack.py FOLDER SITE KEEP

Chunks of FOLDER go to KEEP. Once all are there, Paddle is unpacked into SITE.
"""

import hashlib
import io
import json
import lzma
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def decompress(piece, chunk):
    chunk.write_bytes(lzma.decompress(piece.read_bytes()))


def main(folder, site, keep):
    began = time.perf_counter()
    Path(keep).mkdir(parents=True, exist_ok=True)
    pieces = sorted(Path(folder).glob("*.xz"))
    with ProcessPoolExecutor(8) as pool:
        list(
            pool.map(
                decompress, pieces, [Path(keep, piece.stem) for piece in pieces]
            )
        )
    about = json.loads(Path(folder, "pieces.json").read_text())
    chunks = [Path(keep, Path(name).stem) for name in about["names"]]
    missing = [chunk.name for chunk in chunks if not chunk.exists()]
    if not missing:
        tar = b"".join(chunk.read_bytes() for chunk in chunks)
        if hashlib.sha256(tar).hexdigest() != about["sha256"]:
            sys.exit(f"{keep}: pieces of another wheel. Remove it.")
        with tarfile.open(fileobj=io.BytesIO(tar)) as members:
            members.extractall(site, filter="data")
    seconds = time.perf_counter() - began
    print(f"unpacked in {seconds:.1f} s; missing: {missing}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

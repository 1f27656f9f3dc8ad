"""Pack Paddle's CPU wheel into pieces that can be carried to a machine with a GPU: python pack.py WHEEL FOLDER

MKL, OpenVINO, LAPACK, headers, stubs and tests are left out, so the CPU cannot multiply matrices there. The rest is
one tar, cut into chunks that are compressed one by one, in FOLDER/1, FOLDER/2 .. of less than `MOST` bytes each.
"""

import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CHUNK, MOST = 24 << 20, 54 << 20
LEFT_OUT = ("include/", "cost_model/static_op", "tests/", "libs/libmklml")
LEFT_OUT += (
    "libs/libopenvino_intel_cpu_plugin",
    "libs/liblapack",
    "libs/libblas",
)
LEFT_OUT += ("libs/libgfortran", "libs/libquadmath", "libs/libwarp")
GOMP = Path("/usr/lib/x86_64-linux-gnu/libgomp.so.1")
"""Packed, too, in case the other machine has none."""


def is_wanted(name):
    is_code = not name.endswith((".pyi", ".h", ".cuh", "/"))
    inside = name.removeprefix("paddle/")
    return inside != name and is_code and not inside.startswith(LEFT_OUT)


def strip(library):
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(library)
        subprocess.run(["strip", "--strip-unneeded", file.name], check=False)
        return Path(file.name).read_bytes()


def compress(chunk):
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 1}]
    return lzma.compress(
        chunk, lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters
    )


def tar_of(wheel):
    """Return the bytes of a tar of a wheel, the largest files first."""
    whole = io.BytesIO()
    with (
        zipfile.ZipFile(wheel) as archive,
        tarfile.open(fileobj=whole, mode="w") as tar,
    ):

        def add(name, content):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))

        for info in sorted(
            archive.infolist(), key=lambda info: -info.file_size
        ):
            if is_wanted(info.filename):
                content = archive.read(info)
                is_library = ".so" in Path(info.filename).suffixes
                add(info.filename, strip(content) if is_library else content)
        if GOMP.exists():
            add(f"paddle/libs/{GOMP.name}", GOMP.read_bytes())
    return whole.getvalue()


def main(wheel, folder):
    tar = tar_of(wheel)
    chunks = [tar[at : at + CHUNK] for at in range(0, len(tar), CHUNK)]
    print(f"{len(tar) / 1e6:.0f} MB in {len(chunks)} chunks", flush=True)
    call, size, names = 1, 0, []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, piece in enumerate(pool.map(compress, chunks)):
            if size + len(piece) > MOST:
                call, size = call + 1, 0
            size += len(piece)
            names.append(f"{number:02d}.xz")
            path = Path(folder, str(call), names[-1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(piece)
    about = {"names": names, "sha256": hashlib.sha256(tar).hexdigest()}
    for number in range(1, call + 1):
        Path(folder, str(number), "pieces.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main(*sys.argv[1:])

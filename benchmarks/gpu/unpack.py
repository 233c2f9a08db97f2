"""Unpack parts of the kit with all cores: `python -m benchmarks.gpu.unpack TARGET PART...`.

Each part has a copy of this file, which needs no package: `python3 unpack.py TARGET PART...`.

A blob that was unpacked is removed, so that the next call unpacks only what has come since.
"""

import argparse
import lzma
import os
import tarfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    blobs = [blob for part in arguments.parts for blob in sorted(part.glob("*.xz"))]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(unpack, arguments.target), blobs))
    enter_plugin(arguments.target)


def unpack(target: Path, blob: Path) -> None:
    """Write the files of a blob, or a piece of one at its offset, with their times."""
    with lzma.open(blob) as packed, tarfile.open(fileobj=packed) as tar:
        for member in tar:
            path = target / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            piece = tar.extractfile(member)
            assert piece is not None
            file = os.open(path, os.O_WRONLY | os.O_CREAT, member.mode)
            os.pwrite(file, piece.read(), int(member.pax_headers.get("offset", 0)))
            os.close(file)
            os.utime(path, (member.mtime, member.mtime))
    blob.unlink()


def enter_plugin(target: Path) -> None:
    """Let SGLang load `benchmarks/gpu/attention.py`, by an entry point as pip writes one."""
    package = target / "qurl_kit-0.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: qurl-kit\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nqurl_kit = benchmarks.gpu.attention:use_triton\n"
    )


if __name__ == "__main__":
    main()

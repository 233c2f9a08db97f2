"""Unpack parts of the kit with all cores: `python3 unpack.py TARGET PART...`; needs no package.

A blob that was unpacked is removed, so that the next call unpacks only what has come since.
"""

import lzma
import os
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path


def main() -> None:
    target, *parts = map(Path, sys.argv[1:])
    blobs = [blob for part in parts for blob in sorted(part.glob("*.xz"))]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(unpack, target), blobs))


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


if __name__ == "__main__":
    main()

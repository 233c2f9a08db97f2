"""Pack this environment for a CUDA machine without network: `python -m benchmarks.gpu.kit DIR`.

It packs the packages of the Python that runs it, for GPUs of one compute capability, into the
folders DIR/part1, DIR/part2, ... of at most `--part-mib` each, which can be copied one at a time.
On the bare machine, which needs the same Python version and a CUDA toolkit with cuDNN:

    python3 DIR/part1/unpack.py TARGET DIR/part*     # again for parts that come later
    export PYTHONPATH=REPOSITORY:TARGET:TARGET/nvidia_cutlass_dsl/dsl_packages
    export CUDA_HOME=/usr/local/cuda LIBRARY_PATH=/usr/local/cuda/lib64

Code for other GPUs is zeroed in the libraries of torch and NCCL, so that it packs to nothing.
CUDA's own libraries are the bare machine's. SGLang's compiled attention is left out (1.1 GB),
and servers use Triton's (`attention.py`).
"""

import argparse
import fnmatch
import io
import lzma
import shutil
import struct
import sysconfig
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

MIB = 2**20
BLOB_BYTES = 48 * MIB  # before packing: what one core packs or unpacks at a time
LEFT_OUT = (
    "*/__pycache__/*",
    "nvidia/cu13/*",
    "nvidia/cudnn/*",
    "nvidia/cusparselt/*",
    "nvidia/mathdx/*",
    "nvidia/nvshmem/*",
    "ray/*",
    "sgl_kernel/flash*_ops*",
    "sgl_kernel/sm100/*",
    "torch/include/*",
    "torch/bin/protoc*",
    "triton/backends/nvidia/lib/cupti*",
    "wandb/*",
    "*mypy*",
)
TRIMMED = ("torch/lib/libtorch_cuda*.so", "nvidia/nccl/lib/libnccl.so.2")
FAT_BINARY = struct.pack("<I", 0xBA55ED50)  # begins a container of code for several GPUs
ELF = 2  # the kind of an entry that is machine code; 1 is PTX


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part-mib", type=int, default=57, help="largest part, in MiB")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU")
    arguments = parser.parse_args()
    source = Path(sysconfig.get_paths()["purelib"])
    parts = pack(source, arguments.directory, arguments.part_mib * MIB, arguments.capability)
    for part in parts:
        size = sum(file.stat().st_size for file in part.iterdir())
        print(f"{part}: {size / MIB:.0f} MiB")


def pack(source: Path, directory: Path, part_bytes: int, capability: int) -> list[Path]:
    """Pack the files under `source` into parts under `directory`; return these."""
    directory.mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        write = partial(write_blob, source, directory, capability)
        blobs = list(pool.map(write, *zip(*enumerate(groups(source)), strict=True)))
    bins: list[list[Path]] = []
    for blob in sorted(blobs, key=lambda path: -path.stat().st_size):
        for blobs_of_part in bins:
            together = [*blobs_of_part, blob]
            if sum(path.stat().st_size for path in together) <= part_bytes:
                blobs_of_part.append(blob)
                break
        else:
            bins.append([blob])
    parts = [directory / f"part{number}" for number in range(1, len(bins) + 1)]
    for part, blobs_of_part in zip(parts, bins, strict=True):
        part.mkdir()
        shutil.copy(Path(__file__).with_name("unpack.py"), part)
        for blob in blobs_of_part:
            blob.rename(part / blob.name)
    return parts


def groups(source: Path) -> Iterator[list[tuple[str, int]]]:
    """Yield names of small files together, and pieces of large ones, as (name, offset)."""
    small: list[tuple[str, int]] = []
    size = 0
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if not path.is_file() or any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
            continue
        num_bytes = path.stat().st_size
        if num_bytes > BLOB_BYTES:
            for offset in range(0, num_bytes, BLOB_BYTES):
                yield [(name, offset)]
            continue
        small.append((name, 0))
        size += num_bytes
        if size > BLOB_BYTES:
            yield small
            small, size = [], 0
    if small:
        yield small


def write_blob(
    source: Path, directory: Path, capability: int, number: int, group: list[tuple[str, int]]
) -> Path:
    """Write one group of files, or one piece of a file, as a packed tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, offset in group:
            data = (source / name).read_bytes()
            if any(fnmatch.fnmatch(name, pattern) for pattern in TRIMMED):
                data = trimmed(data, capability)
            member = tar.gettarinfo(source / name, name)
            if len(data) > BLOB_BYTES:
                data = data[offset : offset + BLOB_BYTES]
                member.pax_headers = {"offset": str(offset)}
            member.type, member.size = tarfile.REGTYPE, len(data)
            tar.addfile(member, io.BytesIO(data))
    blob = directory / f"{number:03d}.tar.xz"
    blob.write_bytes(lzma.compress(archive.getvalue(), preset=5))
    return blob


def trimmed(library: bytes, capability: int) -> bytes:
    """Return a library whose machine code for other compute capabilities is zero.

    In a container without machine code for `capability`, PTX stays, which the driver compiles.
    """
    data = bytearray(library)
    place = -1
    while (place := data.find(FAT_BINARY, place + 1)) >= 0:
        entries = entries_of(library, place)
        fits = any(kind == ELF and target == capability for kind, target, *_ in entries)
        for kind, target, start, end in entries:
            is_kept = (kind, target) == (ELF, capability) if fits else kind != ELF
            if not is_kept:
                data[start:end] = bytes(end - start)
    return bytes(data)


def entries_of(library: bytes, place: int) -> list[tuple[int, int, int, int]]:
    """Return the entries of the container at `place`: kind, capability, start and end of the code.

    There are none if other data looks like the beginning of a container.

    NVIDIA does not document the layout. It was read from torch 2.14 and NCCL 2.30, which computed
    on an H100 afterwards: a header of 16 bytes with the size of all that follows; then entries,
    each with its kind, the sizes of its header and of its code, and the capability.
    """
    start = place + 16
    if start > len(library):
        return []
    version, header, size = struct.unpack_from("<HHQ", library, place + 4)
    end = start + size
    if (version, header) != (1, 16) or end > len(library):
        return []
    entries = []
    while start + 32 <= end:
        kind, _, header, code = struct.unpack_from("<HHIQ", library, start)
        (capability,) = struct.unpack_from("<I", library, start + 28)
        if header < 32 or start + header + code > end:
            return []
        entries.append((kind, capability, start + header, start + header + code))
        start += header + code
    return entries


if __name__ == "__main__":
    main()

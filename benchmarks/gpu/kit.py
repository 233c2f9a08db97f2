"""What a bare CUDA machine without network needs: packed where there is one, installed there.

    python -m benchmarks.gpu.kit pack DIR [--installed FREEZE] [--part-mib 60]
    python3 -m benchmarks.gpu.kit install DIR TARGET      # in this repository, on the bare machine

The machine has Python 3.12, torch 2.11.0 for CUDA 13 with Triton and torchvision, and nvcc.
`pack` takes the versions of the environment it runs in, which is `requirements.txt`'s, follows what
each package requires, packs what is Python alone from here, downloads the rest for that Python, and
leaves out what the machine brings and what SGLang starts without
(`NOT_NEEDED`). With `pip freeze` of the machine it also leaves out what is there in a version that
every requirement allows. Wheels lie in folders `part1`, `part2`, ... of at most `--part-mib` each,
so that they can travel one at a time.

sglang-kernel is cut down to its Python files and the library of compute capability 9.0: 19 MB of
1.2 GB. The attention kernels that go with it are not there; `device.lacks_flash_attention` sees
that, and servers take Triton's. `install` needs nothing but pip; it ends with the environment
variable to set.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
PYTHON = "3.12"
PLATFORMS = ["manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40))]
# Not asked for by a run of a server and a learner there; the rest follows from what they require.
NOT_ROOTS = {"nemo-run", "leptonai", "mypy", "ruff", "types-psutil", "types-pyyaml"}
BROUGHT = {"torch", "triton", "torchvision", "torchaudio", "setuptools", "wheel", "pip"}
NOT_NEEDED = {
    "anthropic",
    "cuda-python",
    "cuda-tile",
    "datasets",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "helion",
    "humming-kernels",
    "kernels",
    "llguidance",
    "modelscope",
    "nccl4py",
    "numba",
    "openai-harmony",
    "outlines",
    "py-spy",
    "quack-kernels",
    "sgl-deep-gemm",
    "smg-grpc-proto",
    "smg-grpc-servicer",
    "tensorboard",
    "tilelang",
    "timm",
    "tokenspeed-mla",
    "torch-memory-saver",
}
WRITTEN = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # by pip, as it installs
UNDECLARED = ["dill"]  # SGLang imports it, and what requires it is left out
STRIPPED = {"sglang-kernel": "sgl_kernel/sm90/common_ops.abi3.so"}  # the one library that is kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("directory", type=Path)
    packing.add_argument("--installed", type=Path, help="pip freeze of the bare machine")
    packing.add_argument("--part-mib", type=int, default=60)
    installing = commands.add_parser("install")
    installing.add_argument("directory", type=Path)
    installing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.directory, arguments.installed, arguments.part_mib * MIB)
    else:
        install(arguments.directory, arguments.target)


def pack(directory: Path, installed: Path | None, part_bytes: int) -> None:
    directory.mkdir(parents=True)
    there = (
        dict(line.split("==", 1) for line in installed.read_text().split() if "==" in line)
        if installed
        else {}
    )
    packages = needed({canonical(name): version for name, version in there.items()})
    compiled = []
    for name, version in packages.items():
        if name in STRIPPED:
            repack(distribution(name), directory, "cp310-abi3-manylinux2014_x86_64")
        elif is_compiled(distribution(name)):
            compiled.append(f"{name}=={version}")
        else:
            repack(distribution(name), directory, "py3-none-any")
    tags = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    tags += ["--python-version", PYTHON, "--implementation", "cp"]
    tags += ["--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    for wanted in compiled:
        if not download(["--only-binary=:all:", *tags, wanted], directory):
            # No wheel for that Python: its source, to be built where it is installed.
            if not download(["--no-binary=:all:", wanted], directory):
                sys.exit(f"{wanted}: neither a wheel for Python {PYTHON} nor a source is to be had")
    for number, wheels in enumerate(parts(directory, part_bytes), start=1):
        part = directory / f"part{number}"
        part.mkdir()
        for wheel in wheels:
            wheel.rename(part / wheel.name)
        total = sum(wheel.stat().st_size for wheel in part.iterdir())
        print(f"{part}: {len(wheels)} wheels, {total / MIB:.0f} MiB")


def needed(there: dict[str, str]) -> dict[str, str]:
    """Names and versions of this environment's packages that the machine lacks."""
    from packaging.requirements import Requirement

    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    roots = [
        Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()
    ]
    roots += [Requirement(name) for name in UNDECLARED]
    todo = [(root, root.extras) for root in roots if canonical(root.name) not in NOT_ROOTS]
    found: dict[str, str] = {}
    allowed: dict[str, bool] = {}  # what is there, is in a version that everything allows
    while todo:
        requirement, extras = todo.pop()
        name = canonical(requirement.name)
        if name in BROUGHT | NOT_NEEDED or name.startswith(("nvidia-", "cuda-")):
            continue
        fits = name in there and requirement.specifier.contains(there[name], prereleases=True)
        allowed[name] = allowed.get(name, True) and fits
        if name in found:
            continue
        package = distribution(name)
        found[name] = package.version
        for line in package.requires or []:
            needs = Requirement(line)
            markers = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
            if needs.marker is None or any(
                needs.marker.evaluate({**markers, "extra": extra}) for extra in (*extras, "")
            ):
                todo.append((needs, needs.extras))
    return {name: version for name, version in sorted(found.items()) if not allowed[name]}


def is_compiled(package: Distribution) -> bool:
    says = package.read_text("WHEEL") or ""
    libraries = [file for file in package.files or [] if ".so" in file.suffixes]
    return bool(libraries) or "Root-Is-Purelib: false" in says


def download(words: list[str], directory: Path) -> bool:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    return subprocess.run([*pip, str(directory), *words], stderr=subprocess.DEVNULL).returncode == 0


def repack(package: Distribution, directory: Path, tag: str) -> None:
    """A wheel of what is installed here: its Python and data, and of its libraries the one kept.

    Without a library in it, it is the same for every Python.
    """
    name = package.metadata["Name"].replace("-", "_").replace(".", "_")
    library = STRIPPED.get(canonical(package.metadata["Name"]))
    info, record = "", []
    wheel = directory / f"{name}-{package.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in package.files or []:
            inside = str(file)
            if file.parts[0].endswith(".dist-info"):
                info = file.parts[0]
            is_cut_off = library is not None and inside != library and ".so" in file.suffixes
            if is_cut_off or ".." in file.parts or file.suffix == ".pyc" or file.name in WRITTEN:
                continue
            data = Path(str(file.locate())).read_bytes()
            archive.writestr(inside, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{inside},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")


def parts(directory: Path, part_bytes: int) -> list[list[Path]]:
    """The wheels in as few folders as the largest-first rule needs, each under `part_bytes`."""
    bins: list[list[Path]] = []
    for wheel in sorted(directory.glob("*.*"), key=lambda path: -path.stat().st_size):
        size = wheel.stat().st_size
        for some in bins:
            if sum(other.stat().st_size for other in some) + size <= part_bytes:
                some.append(wheel)
                break
        else:
            bins.append([wheel])
    return bins


def install(directory: Path, target: Path) -> None:
    """Put the wheels and this repository into `target`, a folder for PYTHONPATH."""
    wheels = sorted(str(path) for path in directory.glob("part*/*"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(target)]
    pip += ["--no-build-isolation"]
    # This repository for its entry points, through which SGLang finds the layers.
    subprocess.run([*pip, *wheels, str(REPOSITORY)], check=True)
    print(f"export PYTHONPATH={REPOSITORY}:{target.resolve()}")


def canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    main()

"""Pack the packages that a bare CUDA machine without network needs, and install them there.

    python -m benchmarks.gpu.kit pack DIR [--installed FREEZE] [--part-mib 60]
    python3 -m benchmarks.gpu.kit install DIR TARGET      # in this repository, on the bare machine

The bare machine has Python 3.12, torch 2.14.1 for CUDA 13 with Triton and torchvision, and nvcc.
`pack` follows the requirements in `pyproject.toml` and takes the versions of the environment it
runs in. It repacks pure Python packages from this environment and downloads the others for that
Python. It leaves out what the bare machine has and what SGLang starts without (`OPTIONAL`). With
`--installed`, the `pip freeze` of the bare machine, it also leaves out packages whose version there
meets every requirement. The wheels are in folders `part1`, `part2`, ... of at most `--part-mib`
each, so that they can be copied one at a time.

sglang-kernel is reduced to its Python files and the library for compute capability 9.0: 19 MB of
1.2 GB. Its attention kernels are left out; `device.lacks_flash_attention` detects that, and servers
use Triton's. `install` needs only pip, and prints the environment variables to set.
"""

import argparse
import base64
import hashlib
import itertools
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
PYTHON = "3.12"
PLATFORMS = ["manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40))]
# Direct requirements that a server and a learner do not need on a bare machine.
SKIPPED_ROOTS = {
    "cuda-toolkit",
    "leptonai",
    "mypy",
    "nemo-run",
    "ruff",
    "types-psutil",
    "types-pyyaml",
}
BASE_PACKAGES = {"torch", "triton", "torchvision", "torchaudio", "setuptools", "wheel", "pip"}
OPTIONAL = {
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
WRITTEN_BY_PIP = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
UNDECLARED = ["dill"]  # SGLang imports it, but only packages that are left out require it
NEEDED_OF_NVIDIA = {"nvidia-ml-py"}  # flashinfer imports its module, pynvml
KEPT_LIBRARIES = {"sglang-kernel": "sgl_kernel/sm90/common_ops.abi3.so"}  # only this one is packed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("directory", type=Path)
    packing.add_argument("--installed", type=Path, help="output of pip freeze on the bare machine")
    packing.add_argument("--part-mib", type=int, default=60, help="largest part, in MiB")
    installing = commands.add_parser("install")
    installing.add_argument("directory", type=Path)
    installing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.directory, arguments.installed, arguments.part_mib * MIB)
    else:
        install(arguments.directory, arguments.target)


def pack(directory: Path, installed: Path | None, part_bytes: int) -> None:
    """Write the wheels that the bare machine lacks into `directory`, split into parts."""
    directory.mkdir(parents=True)
    preinstalled = (
        dict(line.split("==", 1) for line in installed.read_text().split() if "==" in line)
        if installed
        else {}
    )
    packages = missing_packages(
        {canonical(name): version for name, version in preinstalled.items()}
    )
    compiled = []
    for name, version in packages.items():
        if name in KEPT_LIBRARIES:
            repack(distribution(name), directory, "cp310-abi3-manylinux2014_x86_64")
        elif is_compiled(distribution(name)):
            compiled.append(f"{name}=={version}")
        else:
            repack(distribution(name), directory, "py3-none-any")
    tags = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    tags += ["--python-version", PYTHON, "--implementation", "cp"]
    tags += ["--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    for requirement in compiled:
        if not download(["--only-binary=:all:", *tags, requirement], directory):
            # There is no wheel for that Python. `install` builds the source.
            if not download(["--no-binary=:all:", requirement], directory):
                sys.exit(f"{requirement}: found neither a wheel for Python {PYTHON} nor a source")
    for number, wheels in enumerate(split_into_parts(directory, part_bytes), start=1):
        part = directory / f"part{number}"
        part.mkdir()
        for wheel in wheels:
            wheel.rename(part / wheel.name)
        total = sum(wheel.stat().st_size for wheel in part.iterdir())
        print(f"{part}: {len(wheels)} wheels, {total / MIB:.0f} MiB")


def missing_packages(preinstalled: dict[str, str]) -> dict[str, str]:
    """Return this environment's packages that the bare machine lacks, as name -> version.

    Args:
        preinstalled: packages of the bare machine, as canonical name -> version.
    """
    from packaging.requirements import Requirement

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), UNDECLARED]
    roots = [Requirement(line) for line in itertools.chain(*lists)]
    todo = [(root, root.extras) for root in roots if canonical(root.name) not in SKIPPED_ROOTS]
    versions: dict[str, str] = {}
    satisfied: dict[str, bool] = {}  # the preinstalled version meets every requirement
    while todo:
        requirement, extras = todo.pop()
        name = canonical(requirement.name)
        is_cuda = name.startswith(("nvidia-", "cuda-")) and name not in NEEDED_OF_NVIDIA
        if is_cuda or name in BASE_PACKAGES | OPTIONAL:
            continue
        fits = name in preinstalled and requirement.specifier.contains(
            preinstalled[name], prereleases=True
        )
        satisfied[name] = satisfied.get(name, True) and fits
        if name in versions:
            continue
        package = distribution(name)
        versions[name] = package.version
        for line in package.requires or []:
            needs = Requirement(line)
            markers = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
            if needs.marker is None or any(
                needs.marker.evaluate({**markers, "extra": extra}) for extra in (*extras, "")
            ):
                todo.append((needs, needs.extras))
    return {name: version for name, version in sorted(versions.items()) if not satisfied[name]}


def is_compiled(package: Distribution) -> bool:
    """Check whether a package contains compiled code."""
    metadata = package.read_text("WHEEL") or ""
    libraries = [file for file in package.files or [] if ".so" in file.suffixes]
    return bool(libraries) or "Root-Is-Purelib: false" in metadata


def download(arguments: list[str], directory: Path) -> bool:
    """Run `pip download`; return whether it succeeded."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command = [*pip, str(directory), *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def repack(package: Distribution, directory: Path, tag: str) -> None:
    """Build a wheel from an installed package, with Python files and data.

    A package in `KEPT_LIBRARIES` keeps only the library named there.
    """
    name = package.metadata["Name"].replace("-", "_").replace(".", "_")
    library = KEPT_LIBRARIES.get(canonical(package.metadata["Name"]))
    info, record = "", []
    wheel = directory / f"{name}-{package.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in package.files or []:
            inside = str(file)
            if file.parts[0].endswith(".dist-info"):
                info = file.parts[0]
            is_dropped = library is not None and inside != library and ".so" in file.suffixes
            is_generated = file.suffix == ".pyc" or file.name in WRITTEN_BY_PIP
            if is_dropped or is_generated or ".." in file.parts:
                continue
            data = Path(str(file.locate())).read_bytes()
            archive.writestr(inside, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{inside},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")


def split_into_parts(directory: Path, part_bytes: int) -> list[list[Path]]:
    """Group the wheels into parts of at most `part_bytes` each, largest first.

    A wheel that is larger gets a part of its own.
    """
    bins: list[list[Path]] = []
    for wheel in sorted(directory.glob("*.*"), key=lambda path: -path.stat().st_size):
        size = wheel.stat().st_size
        for part in bins:
            if sum(other.stat().st_size for other in part) + size <= part_bytes:
                part.append(wheel)
                break
        else:
            bins.append([wheel])
    return bins


def install(directory: Path, target: Path) -> None:
    """Install the wheels and this repository into `target`, a folder for PYTHONPATH."""
    wheels = sorted(str(path) for path in directory.glob("part*/*"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(target)]
    pip += ["--no-build-isolation"]
    # This repository is installed for its entry points: SGLang finds the layers through them.
    subprocess.run([*pip, *wheels, str(REPOSITORY)], check=True)
    print(f"export PYTHONPATH={REPOSITORY}:{target.resolve()}")
    print("\n".join(toolkit_exports(shutil.which("nvcc"))))


def toolkit_exports(nvcc: str | None) -> list[str]:
    """Return the lines with which SGLang's just-in-time compiler finds the CUDA toolkit."""
    if nvcc is None:
        return ["# nvcc is not on PATH: SGLang's first server will fail to compile its kernels"]
    toolkit = Path(nvcc).resolve().parents[1]
    return [f"export CUDA_HOME={toolkit}", f"export LIBRARY_PATH={toolkit}/lib64:$LIBRARY_PATH"]


def canonical(name: str) -> str:
    """Return a package name in lower case with dashes."""
    return name.strip().lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    main()

"""The wheel works away from the checkout, and the lock meets the list of dependencies."""

import ast
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution, version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tiny import build_tiny_model

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "qurl_megatron"  # with links to recipes/ and launch/
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# Import names that differ from the name of the package.
IMPORT_NAMES = {"megatron-core": "megatron", "pyyaml": "yaml"}
# torch and sglang bring these; the last two are extras, and the one before is for GPUs.
BROUGHT_BY_OTHERS = {
    "fla",  # of requirements-gpu.txt
    "jinja2",
    "triton",
    "sgl_kernel",
    "starlette",
    "transformer_engine",
    "nemo_run",
    "wandb",
    "yarl",
}


def requirements_of(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


CORE = requirements_of(PROJECT["dependencies"])
EXTRAS = requirements_of(
    [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
)
LOCKED = {
    name: version
    for file in ("requirements.txt", "requirements-model.txt")
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+) \\$", (REPOSITORY / file).read_text(), re.MULTILINE
    )
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it into a directory of its own, without a network."""
    directory = tmp_path_factory.mktemp("wheel")
    # A build leaves files beside the sources that a later build would put into its wheel.
    source = directory / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=ignored)  # which follows links
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--no-cache-dir", "-q"]
    build = ["wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *build, "-w", directory, source], check=True)
    (wheel,) = directory.glob("*.whl")
    site = directory / "site"
    subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--target", site, wheel], check=True
    )
    return site


def run(site: Path, directory: Path, *command: str | Path) -> str:
    """Return what a command prints in a directory where only the wheel can be imported."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def qurl(site: Path, directory: Path, *words: str) -> str:
    return run(site, directory, sys.executable, site / "bin" / "qurl", *words)


def files_of(package: Path) -> set[str]:
    """Return the paths of a package's files, also of those behind links."""
    paths = glob.glob("**", root_dir=package, recursive=True)
    return {path for path in paths if (package / path).is_file() and "__pycache__" not in path}


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(site: Path) -> None:
    assert files_of(site / PACKAGE.name) == files_of(PACKAGE)
    names = {path.name for path in site.iterdir()} - {"bin"}
    assert {name.partition("-")[0] for name in names} == {PACKAGE.name}


def test_modules_are_imported_from_the_wheel(site: Path, tmp_path: Path) -> None:
    program = (
        "import json, qurl_megatron.config.schema\n"
        "from qurl_megatron import launch\n"
        "from qurl_megatron.recipes import quickstart\n"
        "modules = [launch, qurl_megatron, qurl_megatron.config.schema, quickstart]\n"
        "print(json.dumps([module.__file__ for module in modules]))\n"
    )
    modules = json.loads(run(site, tmp_path, sys.executable, "-c", program))
    assert all(Path(path).is_relative_to(site) for path in modules), modules


def test_the_installed_command_prints_its_version_and_plans_a_recipe(
    site: Path, tmp_path: Path
) -> None:
    assert PROJECT["version"] in qurl(site, tmp_path, "--version")
    plan = qurl(site, tmp_path, "plan", "Qwen3-0.6B", "--gpus", "2")
    assert plan.startswith("2 H100:\n")
    assert "learner.tensor_parallel_size=" in plan


def test_the_image_installs_what_make_installs_and_docs_say_on_the_cuda_of_torch() -> None:
    """Docker itself does not run here."""
    lines = (REPOSITORY / "docker" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    copied = [words[1:-1] for words in map(str.split, lines) if words[:1] == ["COPY"]]
    assert copied == [["requirements.txt", "requirements-model.txt", "requirements-gpu.txt"]]
    installed = [
        line.partition("pip install --no-cache-dir ")[2].replace("/tmp/", "")
        for line in lines
        if "pip install" in line
    ]
    for options, page in zip(installed, ("Makefile", "docs/cluster.md"), strict=True):
        assert f"pip install {options}\n" in (REPOSITORY / page).read_text()
    (base,) = re.findall(r"^FROM nvidia/cuda:(\d+)\S+-ubuntu24.04$", "\n".join(lines), re.MULTILINE)
    assert base == (torch.version.cuda or "").partition(".")[0]


def test_the_installed_command_writes_a_job_script(site: Path, tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    problems = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(40)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    words = ["model=model", "data=problems.jsonl", "name=first"]
    words += ["rollout.max_prompt_length=100", "rollout.max_completion_length=100"]
    words += ["rollout.prompts_per_step=16"]
    script = qurl(
        site,
        tmp_path,
        "launch",
        "grpo",
        *words,
        "--executor",
        "slurm",
        "--account",
        "a",
        "--dry-run",
    )
    assert "#SBATCH --account=a" in script
    assert f'{sys.executable} -m qurl_megatron.launch.slurm run "$0" <<< ' in script


def test_the_wheel_has_its_metadata(site: Path) -> None:
    (directory,) = site.glob("*.dist-info")
    metadata = PathDistribution(directory).metadata
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (directory / "licenses" / "LICENSE").read_text()
    assert str(metadata.json["description"]).startswith("# QuRL")
    assert metadata["Requires-Python"] == "<3.13,>=3.11"


def test_the_changelog_has_an_entry_for_the_version() -> None:
    assert f"\n## [{PROJECT['version']}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def imported_packages() -> set[str]:
    """Return the names of other packages that this one imports anywhere."""
    names: set[str] = set()
    for path in files_of(PACKAGE):
        if path.endswith(".py"):
            for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.partition(".")[0])
    return names - {PACKAGE.name} - sys.stdlib_module_names


def test_every_imported_package_is_a_dependency_and_every_dependency_is_used() -> None:
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in CORE}
    run_only = {"cuda_toolkit"}
    assert declared - run_only == imported_packages() - BROUGHT_BY_OTHERS


def test_the_lock_meets_every_requirement_and_is_what_is_installed() -> None:
    for name, requirement in (CORE | EXTRAS).items():
        assert requirement.specifier.contains(LOCKED[name]), name
    assert {name: version(name) for name in LOCKED} == LOCKED

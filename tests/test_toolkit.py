"""What a server on a GPU compiles kernels with: found, made from the packages, or refused."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import stub_driver
from qurl_megatron import device
from qurl_megatron.commands import doctor
from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.rollout import toolkit
from qurl_megatron.rollout.start import environment


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_driver.leave_only_packages(monkeypatch, tmp_path)


def spec(directory: Path) -> ServerSpec:
    return ServerSpec(directory, ServerConfig(), "int8", 64)


def make_toolkit(root: Path) -> Path:
    for name in toolkit.NEEDED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(mode=0o755)
    return root


def test_the_compiler_of_the_packages_is_that_of_their_headers(tmp_path: Path) -> None:
    """CUDA's C++ headers (CCCL), which SGLang's kernels of experts include, refuse any other."""
    root = toolkit.find_toolkit(tmp_path)
    ran = subprocess.run([root / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    (version,) = re.findall(
        r"^#define CUDART_VERSION +(\d+)$",
        (root / "include" / "cuda_runtime_api.h").read_text(),
        re.MULTILINE,
    )
    assert f"release {int(version) // 1000}.{int(version) % 1000 // 10}," in ran.stdout


def test_a_toolkit_of_the_machine_comes_before_the_packages_and_cuda_home_before_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system, on_path, given = (make_toolkit(tmp_path / name) for name in ("usr", "path", "given"))
    monkeypatch.setattr(toolkit, "SYSTEM", system)
    assert toolkit.find_toolkit(tmp_path) == system
    monkeypatch.setenv("PATH", f"{on_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert toolkit.find_toolkit(tmp_path) == on_path
    monkeypatch.setenv("CUDA_HOME", str(given))
    assert toolkit.find_toolkit(tmp_path) == given


def test_an_incomplete_toolkit_is_passed_over_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = make_toolkit(tmp_path / "part")
    (part / "lib64" / "libcudart.so").unlink()
    monkeypatch.setattr(toolkit, "SYSTEM", part)
    assert toolkit.find_toolkit(tmp_path) != part
    monkeypatch.setenv("CUDA_HOME", str(part))
    with pytest.raises(ConfigError, match=r"^CUDA_HOME=.*it has no lib64/libcudart.so; unset"):
        environment(spec(tmp_path))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("nvidia", "^no CUDA toolkit, .*install a CUDA 13 toolkit"),
        ("c++", r"^a server on a GPU compiles kernels: no C\+\+ compiler .*apt install g\+\+$"),
        ("Python.h", "^a server on a GPU compiles kernels: no Python.h: apt install python3-dev$"),
    ],
)
def test_what_is_missing_is_one_line_before_a_server_starts_and_in_the_doctors_page(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    which, find_spec = shutil.which, toolkit.importlib.util.find_spec
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else which(name))
    monkeypatch.setattr(
        toolkit.importlib.util,
        "find_spec",
        lambda name: None if name == missing else find_spec(name),
    )
    if missing == "Python.h":
        monkeypatch.setattr(toolkit, "_python_header", lambda: tmp_path / missing)
    monkeypatch.setattr(device, "capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=message) as refused:
        environment(spec(tmp_path))
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(doctor, "CHECKS", {"kernels": doctor.check_kernels})
    ((status, _, text),) = doctor.check_machine()
    assert status == "!!"
    assert str(refused.value) in text


def test_compiled_kernels_are_kept_where_nobody_else_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = toolkit.cache_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"^{folder}: others may write to this folder"):
        toolkit.cache_dir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="others may write"):
        toolkit.cache_dir()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "mine"))
    assert toolkit.cache_dir() == tmp_path / "mine"

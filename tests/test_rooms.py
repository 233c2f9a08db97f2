"""The house rules of the package, read from its source: who may import what."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qurl_megatron

PACKAGE = Path(qurl_megatron.__file__).parent
REPOSITORY = PACKAGE.parent
ROOMS = sorted(PACKAGE.glob("*.py"))
PLUGIN = sorted((PACKAGE / "sglang_plugin").glob("*.py"))
OUTSIDE = sorted([*REPOSITORY.glob("launch/**/*.py"), *REPOSITORY.glob("recipes/**/*.py")])

# Imports between rooms go down these levels only, never up or sideways.
LEVELS = [
    {"architecture", "files"},
    {"config", "batch", "channel_kernel", "checksum_kernel", "shared_memory"},
    {"objective", "advantages", "quantize", "rewards", "weight_map", "checksum"},
    {"uaq", "memory"},
    {"step_time"},
    {"plan"},
    {"device", "huggingface", "logprobs", "metrics", "data"},
    {"learner", "rollout"},
    {"reshard", "sampling", "warmup", "offline", "avg_at_k", "critic"},
    {"publish", "checkpoint", "report"},
    {"export", "evaluation", "noise"},
    {"train"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
PURE = set().union(*LEVELS[:6])

IMPURE_LIBRARIES = {"megatron", "sglang", "httpx", "requests", "aiohttp", "urllib3", "socket"}
ENVIRONMENT_READERS = {"device", "cli"}
HTTP_SPEAKERS = {"rollout", "publish"}


def label(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of what a file imports anywhere in it, `from a import b` as `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    names = (name.split(".") for name in imported_modules(path))
    return {parts[1] for parts in names if parts[0] == "qurl_megatron" and len(parts) > 1}


def reads_environment(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {name.rpartition(".")[2] for name in imported_modules(path)}
    return bool(names & {"environ", "getenv", "putenv"})


def test_every_room_is_on_a_level() -> None:
    rooms = {path.stem for path in ROOMS} - {"__init__"}
    assert rooms <= set(LEVEL), f"place {sorted(rooms - set(LEVEL))} in LEVELS"


@pytest.mark.parametrize("path", ROOMS, ids=label)
def test_imports_between_rooms_go_one_way(path: Path) -> None:
    for imported in imported_rooms(path) & set(LEVEL):
        assert LEVEL[imported] < LEVEL.get(path.stem, -1), f"{path.stem} must not import {imported}"


@pytest.mark.parametrize("path", PLUGIN, ids=label)
def test_sglang_plugin_imports_pure_rooms_only(path: Path) -> None:
    """It lives in the server's process, where there is no learner."""
    assert imported_rooms(path) <= PURE | {"sglang_plugin"}


@pytest.mark.parametrize("path", [path for path in ROOMS if path.stem in PURE], ids=label)
def test_pure_rooms_import_no_engine_and_no_network(path: Path) -> None:
    for name in imported_modules(path):
        assert name.split(".")[0] not in IMPURE_LIBRARIES, name
        assert not name.startswith("torch.distributed"), name


@pytest.mark.parametrize("path", [*ROOMS, *PLUGIN, *OUTSIDE], ids=label)
def test_environment_is_read_in_device_cli_and_launch_only(path: Path) -> None:
    if path.stem in ENVIRONMENT_READERS or label(path).startswith("launch/"):
        return
    assert not reads_environment(path)


@pytest.mark.parametrize("path", [*ROOMS, *PLUGIN, *OUTSIDE], ids=label)
def test_http_is_spoken_in_rollout_and_publish_only(path: Path) -> None:
    clients = {"httpx", "requests", "aiohttp", "urllib", "urllib3", "http"}
    spoken = {name.split(".")[0] for name in imported_modules(path)} & clients
    assert not spoken or path.stem in HTTP_SPEAKERS, f"{label(path)} imports {sorted(spoken)}"


@pytest.mark.parametrize(
    "path", [path for path in [*ROOMS, *PLUGIN, *OUTSIDE] if path.name == "__init__.py"], ids=label
)
def test_init_files_do_nothing_when_imported(path: Path) -> None:
    """A docstring; for sglang_plugin, also the functions that SGLang's entry points name."""
    allowed: tuple[type[ast.stmt], ...] = ()
    if path.parent.name == "sglang_plugin":
        allowed = (ast.FunctionDef,)
    for number, statement in enumerate(ast.parse(path.read_text()).body):
        is_docstring = number == 0 and isinstance(statement, ast.Expr)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        assert is_docstring or is_future or isinstance(statement, allowed), (
            f"{label(path)}:{statement.lineno}"
        )

"""Check the import rules of the repository from its source."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import qurl_megatron

PACKAGE = Path(qurl_megatron.__file__).parent
REPOSITORY = PACKAGE.parent
FILES = sorted(
    path
    for folder in ("qurl_megatron", "recipes", "launch")
    for path in (REPOSITORY / folder).glob("**/*.py")
)

# A folder, or a module beside the folders, imports only from those above it in this list.
LEVELS = [
    {"files", "process"},
    {"device"},
    {"model"},
    {"config"},
    {"algorithm", "quantization", "report"},
    {"data", "planning", "rollout"},
    {"agents"},
    {"learner"},
    {"weight_sync"},
    {"sglang_plugin"},
    {"evaluation"},
    {"loop"},
    {"rehearsal"},
    {"recipes"},
    {"launch"},
    {"commands"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# What stands behind a fence, and the only files that import it. Agents of users import the client
# of OpenEnv; no file of this repository does.
FENCES = {
    "rehearsal": {"commands/rehearse", "commands/rehearse_page"},
    "evaluation/mismatch": {"commands/models"},
    "agents/openenv": set[str](),
    "weight_sync/elsewhere": {
        "launch/serve",  # starts such servers, and claims them for a run
        "sglang_plugin/routes",  # gives a server its routes
        "weight_sync/link",  # chooses the transport to a server
    },
}

# Folders and files that import no engine, no collectives and no network.
PURE = {
    "agents/calls",
    "agents/chat",
    "agents/policy",
    "agents/tools",
    "agents/worker",
    "algorithm",
    "config",
    "data/deepscaler",
    "data/rewards",
    "data/scoring",
    "data/verifiers",
    "learner/packing",
    "model/architecture",
    "model/chat_template",
    "model/delta_rule",
    "model/tokenizer",
    "model/weight_map",
    "planning",
    "quantization/activations",
    "quantization/checksum",
    "quantization/kernels",
    "quantization/products",
    "quantization/quantize",
    "quantization/rounding",
    "quantization/uaq",
    "rollout/wire",
    "weight_sync/bucket",
    "weight_sync/delta",
    "weight_sync/direct",
    "weight_sync/elsewhere/routes",
    "weight_sync/elsewhere/wire",
}
IMPURE_LIBRARIES = {"megatron", "sglang", "httpx", "requests", "aiohttp", "urllib3", "socket"}
HTTP_CLIENTS = {"huggingface_hub", "httpx", "requests", "aiohttp", "urllib", "urllib3", "http"}
HTTP_SPEAKERS = {
    "agents/endpoint",
    "agents/openenv",
    "model/hub",
    "rollout",
    "weight_sync/elsewhere/servers",  # reads URLs and statuses; it asks through `rollout`
}
ENVIRONMENT_READERS = {"device", "cli", "launch", "rollout/toolkit"}


def name_of(path: Path) -> str:
    """Return `learner/critic` for `qurl_megatron/learner/critic.py`."""
    base = PACKAGE if path.is_relative_to(PACKAGE) else REPOSITORY
    return str(path.relative_to(base).with_suffix("")).removesuffix("/__init__")


def room_of(name: str) -> str:
    return name.partition("/")[0]


def is_in(name: str, rooms: set[str]) -> bool:
    """Return whether a set names this file, or the folder it is in."""
    return name in rooms or room_of(name) in rooms


NAMES = {name_of(path): path for path in FILES}


def imported_modules(path: Path) -> Iterator[str]:
    """Yield what a file imports anywhere in it, `from a import b` as `a` and as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_names(path: Path) -> set[str]:
    """Return the files of this repository that a file imports, as `name_of` names them."""
    names = (
        name.replace(".", "/").removeprefix("qurl_megatron/") for name in imported_modules(path)
    )
    return {name for name in names if name in NAMES} - {name_of(path)}


def names_read(path: Path) -> set[str]:
    """Return every attribute a file uses and the last part of every name it imports."""
    names = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    return names | {name.rpartition(".")[2] for name in imported_modules(path)}


def test_every_folder_has_a_level() -> None:
    rooms = {room_of(name) for name in NAMES} - {"__init__"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("name", NAMES)
def test_imports_between_folders_go_one_way(name: str) -> None:
    room = room_of(name)
    for imported in {room_of(other) for other in imported_names(NAMES[name])} & set(LEVEL):
        if imported != room:
            assert LEVEL[imported] < LEVEL[room], f"{name} must not import from {imported}"


@pytest.mark.parametrize("fenced", FENCES)
def test_what_is_behind_a_fence_is_imported_where_it_is_used_only(fenced: str) -> None:
    within = {name for name in NAMES if f"{name}/".startswith(f"{fenced}/")}
    importers = {name for name, path in NAMES.items() if imported_names(path) & within} - within
    assert within and importers == FENCES[fenced]


def test_no_test_file_is_imported_by_another() -> None:
    """What tests share is in modules beside them, which hold no tests."""
    tests = REPOSITORY / "tests"
    for path in tests.glob("**/*.py"):
        for name in imported_modules(path):
            assert not name.rpartition(".")[2].startswith("test_"), f"{path} imports {name}"


def test_no_file_imports_itself_in_a_circle() -> None:
    TopologicalSorter({name: imported_names(path) for name, path in NAMES.items()}).prepare()


@pytest.mark.parametrize("name", [name for name in NAMES if room_of(name) == "sglang_plugin"])
def test_sglang_plugin_imports_pure_files_and_helpers_of_processes_only(name: str) -> None:
    """It runs in the server's process, which has no learner."""
    for imported in imported_names(NAMES[name]):
        is_folder = NAMES[imported].name == "__init__.py"
        assert is_folder or is_in(imported, PURE | {"process", "sglang_plugin"}), imported


@pytest.mark.parametrize("name", [name for name in NAMES if is_in(name, PURE)])
def test_pure_files_import_no_engine_and_no_network(name: str) -> None:
    for imported in imported_modules(NAMES[name]):
        assert imported.split(".")[0] not in IMPURE_LIBRARIES, imported
        assert not imported.startswith("torch.distributed"), imported


@pytest.mark.parametrize("name", NAMES)
def test_environment_is_read_in_few_files_only(name: str) -> None:
    if not is_in(name, ENVIRONMENT_READERS):
        assert not names_read(NAMES[name]) & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("name", NAMES)
def test_http_is_used_in_rollout_only(name: str) -> None:
    spoken = {imported.split(".")[0] for imported in imported_modules(NAMES[name])} & HTTP_CLIENTS
    assert not spoken or is_in(name, HTTP_SPEAKERS), f"{name} imports {sorted(spoken)}"


@pytest.mark.parametrize("name", [n for n, path in NAMES.items() if path.name == "__init__.py"])
def test_init_files_do_nothing_when_imported(name: str) -> None:
    """They hold a docstring; sglang_plugin also holds the targets of SGLang's entry points."""
    allowed: tuple[type[ast.stmt], ...] = (ast.FunctionDef,) if name == "sglang_plugin" else ()
    for number, statement in enumerate(ast.parse(NAMES[name].read_text()).body):
        is_docstring = number == 0 and isinstance(statement, ast.Expr)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        assert is_docstring or is_future or isinstance(statement, allowed), statement.lineno


def test_only_these_files_branch_on_cpu_or_gpu() -> None:
    by_question = {
        ("is_available", "device_count"): {"device", "sglang_plugin"},
        ("accelerator",): {
            "evaluation/avg_at_k",
            "learner/cpu_runtime",
            "learner/layers",
            "rollout/preload",
            "rollout/server",
        },
        ("is_cuda",): {
            "learner/delta_net",
            "learner/layers",
            "learner/logprobs",
            "quantization/checksum",
            "quantization/products",
            "quantization/quantize",
            "quantization/rounding",
            "sglang_plugin/formats",
            "sglang_plugin/linear",
            "weight_sync/conversion",
            "weight_sync/direct",
        },
    }
    for question, expected in by_question.items():
        assert {n for n, path in NAMES.items() if names_read(path) & set(question)} == expected

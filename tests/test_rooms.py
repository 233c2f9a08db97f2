"""Check the import rules of the repository from its source."""

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import qurl_megatron
from qurl_megatron.config.extensions import BUILT_ON, COMMANDS, FOLDER, needed
from qurl_megatron.config.schema import ConfigError

PACKAGE = Path(qurl_megatron.__file__).parent
REPOSITORY = PACKAGE.parent
FILES = sorted(
    path
    for folder in ("qurl_megatron", "recipes", "launch")
    for path in (REPOSITORY / folder).glob("**/*.py")
)

# A folder, or a module beside the folders, imports only from those above it in this list.
LEVELS = [
    {"machine"},
    {"files"},
    {"device"},
    {"model"},
    {"config"},
    {"algorithm", "quantization", "report"},
    {"data", "memory", "rollout"},
    {"learner"},
    {"weight_sync"},
    {"sglang_plugin"},
    {"evaluation"},
    {"loop"},
    {"launch"},
    {"commands"},
    {"extensions"},
    {"recipes"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# What stands behind a fence, and the only files that import it. Agents of users import the client
# of OpenEnv; no file of this repository does.
FENCES = {
    "extensions/agents/openenv": set[str](),
}

EXTENSIONS = sorted(path.parent.name for path in PACKAGE.glob("extensions/*/__init__.py"))
# Who imports an extension of another. The recipe's agent, which only their processes call, has the
# tools of agents.
USERS_OF_EXTENSIONS = {*BUILT_ON.items(), ("recipes/math_tools", "agents")}

# Folders and files that import no engine, no collectives and no network.
PURE = {
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
    "extensions/agents/calls",
    "extensions/agents/chat",
    "extensions/agents/policy",
    "extensions/agents/tools",
    "extensions/agents/worker",
    "extensions/colocated/fit",
    "extensions/adapters/checks",
    "extensions/planning",
    "extensions/ppo/values",
    "memory",
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
    "extensions/elsewhere/receiver",
    "extensions/elsewhere/wire",
}
IMPURE_LIBRARIES = {"megatron", "sglang", "httpx", "requests", "aiohttp", "urllib3", "socket"}
HTTP_CLIENTS = {"huggingface_hub", "httpx", "requests", "aiohttp", "urllib", "urllib3", "http"}
HTTP_SPEAKERS = {
    "extensions/agents/endpoint",
    "extensions/agents/openenv",
    "model/downloads",
    "rollout",
    "extensions/elsewhere/servers",  # reads URLs and statuses; it asks through `rollout`
}
ENVIRONMENT_READERS = {"device", "cli", "extensions/elsewhere/key", "launch", "rollout/toolkit"}


def name_of(path: Path) -> str:
    """Return `learner/model` for `qurl_megatron/learner/model.py`."""
    base = PACKAGE if path.is_relative_to(PACKAGE) else REPOSITORY
    return str(path.relative_to(base).with_suffix("")).removesuffix("/__init__")


def room_of(name: str) -> str:
    return name.partition("/")[0]


def is_in(name: str, rooms: set[str]) -> bool:
    """Return whether a set names this file, or a folder it is in."""
    return any(f"{name}/".startswith(f"{room}/") for room in rooms)


def extension_of(name: str) -> str:
    """Return the extension that a file is in; empty for the core."""
    return name.split("/")[1] if name.startswith("extensions/") else ""


def is_extension(module: str) -> bool:
    """Return whether a module is of an extension."""
    return module.startswith(f"{FOLDER}.")


NAMES = {name_of(path): path for path in FILES}


@functools.cache
def imports_and_attributes(path: Path) -> tuple[list[str], set[str]]:
    """Return what a file imports anywhere in it, `from a import b` as `a` and as `a.b`.

    And every attribute that it uses.
    """
    imports, attributes = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
    return imports, attributes


def imported_modules(path: Path) -> list[str]:
    return imports_and_attributes(path)[0]


def imported_names(path: Path) -> set[str]:
    """Return the files of this repository that a file imports, as `name_of` names them."""
    names = (
        name.replace(".", "/").removeprefix("qurl_megatron/") for name in imported_modules(path)
    )
    return {name for name in names if name in NAMES} - {name_of(path)}


def names_read(path: Path) -> set[str]:
    """Return every attribute a file uses and the last part of every name it imports."""
    imports, attributes = imports_and_attributes(path)
    return attributes | {name.rpartition(".")[2] for name in imports}


def test_every_folder_has_a_level() -> None:
    rooms = {room_of(name) for name in NAMES} - {"__init__"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("name", NAMES)
def test_imports_between_folders_go_one_way(name: str) -> None:
    room = room_of(name)
    for imported in {room_of(other) for other in imported_names(NAMES[name])} & set(LEVEL):
        if imported != room:
            assert LEVEL[imported] < LEVEL[room], f"{name} must not import from {imported}"


def test_no_file_of_the_core_imports_an_extension() -> None:
    arrows = {
        (name if room_of(name) == "recipes" else extension_of(name), extension_of(imported))
        for name, path in NAMES.items()
        for imported in imported_names(path)
    }
    between = {(own, other) for own, other in arrows if other not in ("", own)}
    assert between == USERS_OF_EXTENSIONS


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_has_its_tests_in_a_folder_of_its_own(extension: str) -> None:
    """So nothing else needs a change when it is deleted, but for benchmarks that measure it."""
    tests = REPOSITORY / "tests"
    for path in tests.glob("**/*.py"):
        found = {name.split(".")[2] for name in imported_modules(path) if is_extension(name)}
        *_, extensions, own = path.parent.parts  # in `e2e` too
        may = own == extension or (own, extension) in USERS_OF_EXTENSIONS
        assert extension not in found or (extensions == "extensions" and may), path


def test_extensions_can_be_deleted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in ("qurl_megatron", "recipes", "launch"):
        shutil.copytree(REPOSITORY / folder, tree / folder, symlinks=True)
    for extension in EXTENSIONS:
        deleted = tree / "qurl_megatron" / "extensions" / extension
        shutil.rmtree(deleted)
        (deleted / "__pycache__").mkdir(parents=True)  # git leaves it

    start = ["train", "quickstart", "data_options.size=1000", "--dry-run"]
    missing = (
        "adapters.rank=8",
        "rollout.agent=json:dumps",
        "rollout.placement=colocated",
        "rollout.servers_at=[https://a]",
    )
    commands = [["--help"], ["config"], start, *([*start, word] for word in missing)]
    program = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from qurl_megatron.cli import app\n"
        "ended = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[each.exit_code, each.stdout, each.stderr] for each in ended]))"
    )
    words = [sys.executable, "-c", program, json.dumps(commands)]
    ran = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True)
    shown, recipes, planned, *refused = json.loads(ran.stdout.splitlines()[-1])
    assert set(COMMANDS) & set(shown[1].split()) == set()
    assert "math_tools" in recipes[1]
    assert planned[0] == 0, planned
    for code, _, said in refused:
        assert code == 2
        assert re.fullmatch("qurl: .*: needs .*, which was deleted\n", said)
    with pytest.raises(ConfigError, match="^--x: needs qurl_megatron/extensions/y, which was del"):
        needed("y", "page", by="--x")


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
        assert is_folder or is_in(imported, PURE | {"machine", "sglang_plugin"}), imported


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
    """They hold a docstring, SGLang's entry points, or say where the package's names are."""
    of_package = (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    allowed: dict[str, tuple[type[ast.stmt], ...]] = {
        "sglang_plugin": (ast.FunctionDef,),
        "__init__": of_package,
    }
    for number, statement in enumerate(ast.parse(NAMES[name].read_text()).body):
        is_docstring = number == 0 and isinstance(statement, ast.Expr)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        assert is_docstring or is_future or isinstance(statement, allowed.get(name, ())), (
            statement.lineno
        )


def test_only_these_files_branch_on_cpu_or_gpu() -> None:
    by_question = {
        ("is_available", "device_count"): {"device", "sglang_plugin"},
        ("accelerator",): {
            "evaluation/evaluate",
            "learner/cpu_runtime",
            "learner/layers",
            "rollout/preload",
            "rollout/start",
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

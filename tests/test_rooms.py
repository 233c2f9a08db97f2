"""Check the import rules of the repository from its source."""

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import qurl_megatron
from qurl_megatron.config.extensions import BUILT_ON, COMMANDS, FOLDER

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
    "data/dapo",
    "data/deepscaler",
    "data/mathematics",
    "data/rewards",
    "data/scoring",
    "data/verifiers",
    "learner/packing",
    "model/architecture",
    "model/config_json",
    "model/delta_net",
    "model/chat_template",
    "model/delta_rule",
    "model/rope_scaling",
    "model/rules",
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
    "extensions/ppo/checks",
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


def modules_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the modules that these nodes import: `from a import b` as `a` and as `a.b`."""
    modules = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return modules


class Source(NamedTuple):
    """What a file imports, anywhere and at its top level; its attributes; its nodes by kind."""

    imports: list[str]
    at_once: list[str]
    attributes: set[str]
    kinds: Counter[type[ast.AST]]


@functools.cache
def source_of(path: Path) -> Source:
    top = ast.parse(path.read_text())
    nodes = [*ast.walk(top)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return Source(modules_in(nodes), modules_in(top.body), attributes, Counter(map(type, nodes)))


def imported_modules(path: Path) -> list[str]:
    return source_of(path).imports


def files_among(modules: Iterable[str]) -> set[str]:
    """Return the modules that are files of this repository, as `name_of` names them."""
    names = (name.replace(".", "/").removeprefix("qurl_megatron/") for name in modules)
    return {name for name in names if name in NAMES}


def imported_names(path: Path) -> set[str]:
    """Return the files of this repository that a file imports."""
    return files_among(imported_modules(path)) - {name_of(path)}


def names_read(path: Path) -> set[str]:
    """Return every attribute a file uses and the last part of every name it imports."""
    return source_of(path).attributes | {name.rpartition(".")[2] for name in imported_modules(path)}


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


def reached(starts: Iterable[str]) -> set[str]:
    """Return the files that every run imports which starts with these.

    These are imported at top level, or named by `find`. What `needed` names, or only a function
    imports, is for some runs; where it is for all, it is one of the starts.
    """
    seen, left = set[str](), set(starts)
    while left:
        seen |= left
        modules = []
        for path in map(NAMES.__getitem__, left):
            modules += source_of(path).at_once
            found = re.findall(r'\bfind\("(\w+)", "(\w+)"\)', path.read_text())
            modules += [f"{FOLDER}.{extension}.{module}" for extension, module in found]
        left = files_among(modules) - seen
    return seen


def lines_of(names: Iterable[str]) -> int:
    return sum(len(NAMES[name].read_text().splitlines()) for name in names)


OF_HYBRIDS = "sglang_plugin/delta_net"  # the only file of the plugin that a function imports late
# What a plain local run starts with: the command, what prepares it, and its processes.
STARTS = {
    *("cli", "commands/runs", "launch/prepare", "launch/local", "recipes/quickstart"),
    *("loop/train", "rollout/preload"),
    *(name for name in NAMES if room_of(name) == "sglang_plugin" and name != OF_HYBRIDS),
}
# Lower them when the code does. To raise one needs a reason.
MOST_REACHED_LINES = 27_250
MOST_PER_1000_LINES = {ast.Raise: 12.2, ast.ExceptHandler: 4.1}


def test_a_plain_run_reaches_no_more_than_before() -> None:
    assert lines_of(reached(STARTS)) <= MOST_REACHED_LINES


@pytest.mark.parametrize("kind", MOST_PER_1000_LINES)
def test_the_core_raises_and_catches_no_more_than_before(kind: type[ast.AST]) -> None:
    core = [name for name in NAMES if room_of(name) not in ("extensions", "recipes")]
    found = sum(source_of(NAMES[name]).kinds[kind] for name in core)
    assert 1000 * found / lines_of(core) <= MOST_PER_1000_LINES[kind]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_has_its_tests_in_a_folder_of_its_own(extension: str) -> None:
    """So nothing else needs a change when it is deleted, but for benchmarks that measure it."""
    tests = REPOSITORY / "tests"
    for path in tests.glob("**/*.py"):
        found = {name.split(".")[2] for name in imported_modules(path) if is_extension(name)}
        *_, extensions, own = path.parent.parts  # in `e2e` too
        may = own == extension or (own, extension) in USERS_OF_EXTENSIONS
        assert extension not in found or (extensions == "extensions" and may), path


START = ["train", "quickstart", "prompts.options.size=1000", "reward=exact", "--dry-run"]
# What asks for an extension.
ASKING = {
    "adapters": [*START, "adapters.rank=8"],
    "agents": [*START, "rollout.agent=json:dumps"],
    "colocated": [*START, "rollout.placement=colocated"],
    "elsewhere": [*START, "rollout.servers_at=[https://a]"],
    "mismatch": ["mismatch"],
    "planning": ["plan"],
    "ppo": [*START, "objective.advantage_estimator=gae"],
    "rehearsal": ["plan", "quickstart", "--rehearse"],
    "report": ["report"],
    "user_objective": [*START, "objective.objective=json:dumps"],
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository from which folders can be moved away."""
    tree = tmp_path_factory.mktemp("rooms") / "tree"
    for folder in ("qurl_megatron", "recipes", "launch", "tests", "benchmarks", "docs"):
        unused = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(REPOSITORY / folder, tree / folder, symlinks=True, ignore=unused)
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    return tree


@pytest.fixture(scope="module")
def program(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a program that runs `qurl` in the tree as it is when it is asked."""
    start = "import runpy; runpy.run_path('tests/deleted_program.py', run_name='__main__')"
    words = [sys.executable, "-c", start]  # so it imports from this tree
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=tree, stdin=pipe, stdout=pipe, text=True) as program:
        yield program
        assert program.stdin is not None
        program.stdin.close()


@contextmanager
def without(deleted: list[str], tree: Path, kept: Path) -> Iterator[None]:
    """Delete extensions and their tests from the tree while the context lasts."""
    places = [tree / place for name in deleted for place in folders_of(name)]
    for number, place in enumerate(places):
        place.rename(kept / str(number))
    yield
    for number, place in enumerate(places):
        shutil.rmtree(place, ignore_errors=True)
        (kept / str(number)).rename(place)


@pytest.mark.parametrize("deleted", [*([name] for name in EXTENSIONS), EXTENSIONS], ids=",".join)
def test_extensions_can_be_deleted(
    deleted: list[str], tree: Path, program: subprocess.Popen[str], tmp_path: Path
) -> None:
    missing = {name for name in EXTENSIONS if {name, *bases_of(name)} & set(deleted)}
    commands = [START, ["--help"], ["config"], *(ASKING[name] for name in sorted(missing))]
    assert program.stdin is not None and program.stdout is not None
    with without(deleted, tree, tmp_path):
        for name in deleted:
            (tree / folders_of(name)[0] / "__pycache__").mkdir(parents=True)  # git leaves it
        print(json.dumps(commands), file=program.stdin, flush=True)
        planned, shown, recipes, *refused = json.loads(program.stdout.readline())
        lint = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "."]
        linted = subprocess.run(lint, cwd=tree, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    listed = re.findall(r"^\W+([a-z]+) ", shown[1], re.MULTILINE)
    assert set(COMMANDS) - set(listed) == {name for name, of in COMMANDS.items() if of in missing}
    assert "math_tools" in recipes[1]
    assert planned[0] == 0, planned
    imported = {name for name in files_among(planned[3]) if NAMES[name].name != "__init__.py"}
    assert imported <= reached(STARTS)
    lacks = f".*: needs qurl_megatron/extensions/({'|'.join(deleted)}), which was deleted"
    for code, output, said, _ in refused:
        assert (code, output) == (2, "")
        assert re.fullmatch(f"qurl: ({lacks}|No such command .*; see qurl --help)\n", said)


@pytest.mark.skipif(
    not (REPOSITORY / ".mypy_cache").is_dir(), reason="takes minutes before `make lint`"
)
def test_types_hold_when_all_extensions_are_deleted(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / ".mypy_cache", tmp_path / "cache")
    with without(EXTENSIONS, tree, tmp_path):
        check = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
        checked = subprocess.run(check, cwd=tree, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def folders_of(extension: str) -> list[str]:
    """Return the folders of an extension and its tests."""
    of_tests = [REPOSITORY / "tests", REPOSITORY / "tests/e2e"]
    tests = [path / "extensions" / extension for path in of_tests]
    found = [PACKAGE / "extensions" / extension, *(path for path in tests if path.is_dir())]
    return [str(path.relative_to(REPOSITORY)) for path in found]


def bases_of(extension: str) -> list[str]:
    """Return the extensions that an extension is built on, the nearest first."""
    base = BUILT_ON.get(extension)
    return [base, *bases_of(base)] if base else []


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
    """They hold a docstring, or SGLang's entry points, or say where the package's names are.

    The learner's imports Megatron, before any of its files could do so with more packages.
    """
    of_package = (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    allowed: dict[str, tuple[type[ast.stmt], ...]] = {
        "sglang_plugin": (ast.FunctionDef,),
        "learner": (ast.ImportFrom, ast.With),
        "__init__": of_package,
    }
    for number, statement in enumerate(ast.parse(NAMES[name].read_text()).body):
        is_docstring = number == 0 and isinstance(statement, ast.Expr)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        assert is_docstring or is_future or isinstance(statement, allowed.get(name, ())), (
            statement.lineno
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_program_begins_when_all_of_its_file_is_defined(name: str) -> None:
    statements = ast.parse(NAMES[name].read_text()).body
    assert not any(
        isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        for statement in statements[:-1]
    )


def test_only_these_files_branch_on_cpu_or_gpu() -> None:
    by_question = {
        ("is_available", "device_count"): {"device", "sglang_plugin"},
        ("accelerator",): {
            "evaluation/evaluate",
            "learner/cpu_runtime",
            "learner/delta_net",
            "learner/layers",
            "rollout/preload",
            "rollout/start",
        },
        ("is_cuda",): {
            "extensions/adapters/layers",
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

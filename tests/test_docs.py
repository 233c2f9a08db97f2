"""The documentation builds, is complete, agrees with the source, and loads nothing external."""

import ast
import dataclasses
import html
import pkgutil
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_configs import COMMAND_CONFIGS
from qurl_megatron import recipes
from qurl_megatron.cli import app
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import field_of, leaf_values
from qurl_megatron.report.metrics import RunSummary, StepMetrics

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
PROSE = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *PAGES]
LOADS = {  # element -> attribute that a browser fetches without a click
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation strictly: a broken link or anchor is an error."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return site


def anchors(page: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', page.read_text()))


def test_everything_has_a_section_or_an_entry(site: Path) -> None:
    """Every recipe, configuration field, metric and command."""
    names = {module.name for module in pkgutil.iter_modules(recipes.__path__)}
    assert names <= anchors(site / "recipes.html")
    fields = {*leaf_values(Config())}
    for command, kind in COMMAND_CONFIGS.items():
        fields |= {f"{command}.{field}" for field in leaf_values(kind())}
    assert fields <= anchors(site / "configuration.html")
    metrics = {
        f"{kind.__name__}.{field.name}"
        for kind in (StepMetrics, RunSummary)
        for field in dataclasses.fields(kind)
    }
    assert metrics <= anchors(site / "metrics.html")
    help_text = CliRunner().invoke(app, ["--help"]).stdout
    commands = set(re.findall(r"^│ ([a-z]+) ", help_text, re.MULTILINE))
    assert commands and commands <= anchors(site / "commands.html")


def test_an_entry_says_what_a_field_accepts_and_its_default(site: Path) -> None:
    page = html.unescape((site / "configuration.html").read_text())
    stage = "{max_completion_length: int >= 1, completions_per_prompt: int >= 1 and <= 65536}"
    for path, kind, default in (
        ("steps", "int >= 1", "100"),
        ("data", "str or [str, ...]", '""'),
        ("evaluation.top_p", "float > 0 and <= 1", "1.0"),
        ("optimizer.weight_decay", "float >= 0", "0.0"),  # nobody meets its upper bound
        ("time_limit_s", "float > 0 or null", "null"),
        ("learner.dtype", '"float32" | "bfloat16"', '"bfloat16"'),
        ("rollout.stages", f"{{int >= 2: {stage}, ...}}", "{}"),
        ("optimizer.learning_rate", "float >= 0 and <= 1", "1e-06"),
        ("critic.optimizer.learning_rate", "float >= 0 and <= 1", "1e-05"),  # the critic's own
    ):
        entry = page.partition(f'id="{path}"')[2].partition("<h4")[0]
        assert f"Type <code>{kind}</code>, default <code>{default}</code>." in entry, path
    assert "<p>One SGLang server.</p>" in page.partition('id="rollout.server"')[2][:200]


@pytest.mark.parametrize("name", ["configuration", "recipes"])
def test_a_tag_that_a_docstring_names_is_shown(site: Path, name: str) -> None:
    assert "&lt;/think&gt;" in (site / f"{name}.html").read_text()


class Loads(HTMLParser):
    """A parser that collects the URLs that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "link" and attributes.get("rel") in ("canonical", "next", "prev"):
            return
        if tag in LOADS and (url := attributes.get(LOADS[tag])):
            self.urls.append(url)


def test_no_page_loads_anything_from_another_site(site: Path) -> None:
    pages = sorted(site.glob("**/*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.urls, page
        for url in loads.urls:
            assert not re.match(r"(\w+:)?//", url), f"{page.name} loads {url}"
            local = (page.parent / url.partition("?")[0].partition("#")[0]).resolve()
            assert page.name == "404.html" or local.is_file(), f"{page.name} loads {url}"
    for style in site.glob("**/*.css"):
        urls = re.findall(r"(?:url\(|@import)\s*[\"']?(\w+:)?//", style.read_text())
        assert not urls, style


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    roots = "qurl_megatron|launch|recipes|tests|benchmarks|docs"
    named = re.findall(rf"`((?:{roots})/[\w./-]*\w/?)`", text)
    named += re.findall(r"\]\((?!https?://|#)([^)#]+)", text) if page not in PAGES else []
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_every_field_that_is_named_exists(page: Path) -> None:
    """Check `part.field` in backticks or commands where `part` is a part of a configuration."""
    fields = leaf_values(Config())
    parts = {field.rpartition(".")[0] for field in fields} - {""}
    parts |= {part.partition(".")[0] for part in parts}
    pattern = rf"(?<![\w./-])((?:{'|'.join(parts)})\.[a-z_][\w.]*\w)(?![\w/(])"
    for name in re.findall(pattern, page.read_text()):
        is_part = any(field.startswith(f"{name}.") for field in fields)
        known = is_part or field_of(name, fields)
        assert known or name.endswith((".py", ".md")), f"{page.name} names {name}"


def test_each_command_on_the_pages_that_starts_a_run_has_a_name_of_its_own() -> None:
    names = []
    for page in PROSE:
        joined = re.sub(r"\\\n *", "", page.read_text())
        for command in re.findall(r"qurl (?:launch|train) .*", joined):
            names += re.findall(r" name=(\w+)", command)
    assert len(names) > 8 and len(names) == len({*names})


def python_blocks(text: str) -> list[str]:
    """Return the blocks of code of a page, fenced or indented, that import something."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += map(textwrap.dedent, re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE))
    imports = re.compile(r"^(import [\w.]+|from [\w.]+ import )", re.MULTILINE)
    return [block for block in blocks if imports.search(block)]


def test_everything_that_python_on_a_page_imports_exists() -> None:
    blocks = [block for page in PROSE for block in python_blocks(page.read_text())]
    assert len(blocks) > 1
    missing = []
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Import):
            missing += [each.name for each in node.names if not find_spec(each.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for name in (each.name for each in node.names):
                if not hasattr(module, name) and not find_spec(f"{node.module}.{name}"):
                    missing.append(name)
    assert missing == []


def texts_of_the_source() -> str:
    """Return every string of the packages, one per line; an f-string is split at its values."""
    lines = []
    for package in ("qurl_megatron", "launch", "recipes"):
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    lines.append(node.value)
    return "\n".join(lines)


def test_every_message_that_troubleshooting_quotes_is_in_the_source() -> None:
    page = " ".join((REPOSITORY / "docs" / "troubleshooting.md").read_text().split())
    quoted = re.findall(r"Message: `([^`]+)`", page)
    assert len(quoted) > 5
    texts = texts_of_the_source()
    assert [message for message in quoted if message not in texts] == []


def test_every_row_of_the_fault_table_names_a_test_that_exists() -> None:
    page = (REPOSITORY / "docs" / "faults.md").read_text()
    of_faults = page[: page.index("\n## Restarts of a server")]
    table = [line for line in of_faults.splitlines() if line.startswith("| ")][1:]
    assert len(table) > 15
    for row in table:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, function in named:
            tree = ast.parse((REPOSITORY / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in functions, f"{file} has no {function}"

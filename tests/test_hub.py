"""Names of the Hub are found with the real client, on a small Hub on loopback."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from problem_files import numbered
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.data.entries import DataError
from qurl_megatron.data.problems import local_data, read_problems
from qurl_megatron.launch import experiment
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.resume import prepare_resume
from qurl_megatron.launch.sources import snapshots
from qurl_megatron.model.architecture import ArchitectureError
from qurl_megatron.model.hub import TOKENIZER, local_model
from qurl_megatron.model.repository import HubError, snapshot_of
from small_hub import SmallHub, serving
from tiny import build_tiny_model

MODEL, DATA = "Qwen/Qwen3-0.6B", "openai/gsm8k"
GSM8K = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
WORDS = [f"model={MODEL}", f"data={DATA}:main", "reward=gsm8k", "name=run"]
SMALL = ["rollout.max_prompt_length=64", "rollout.max_completion_length=64"]
SMALL += ["rollout.soft_overlong_tokens=0", "rollout.prompts_per_step=8", "evaluation.problems=0"]


def parquet(*rows: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


def gsm8k(count: int) -> bytes:
    return parquet(*({**row, "answer": f"#### {row['answer']}"} for row in numbered(*range(count))))


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return a tiny model, and what else its repository may hold."""
    directory = build_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return files | {"pytorch_model.bin": b"pickle", "original/a.safetensors": b"", "README.md": b""}


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_files: dict[str, bytes]
) -> Iterator[SmallHub]:
    """Serve a Hub with a model and a dataset, for an empty cache and working directory."""
    with serving(tmp_path / "hub") as served:
        served.add("models", MODEL, tiny_files)
        parts = {"README.md": GSM8K.encode(), "socratic/train-0.parquet": gsm8k(5)}
        served.add(
            "datasets", DATA, parts | {f"main/train-{n}.parquet": gsm8k(64 - n) for n in (0, 1)}
        )
        served.add("datasets", DATA, {"main/test-0.parquet": gsm8k(3)})
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield served


def refused(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


def test_only_what_is_read_of_a_model_is_downloaded_and_only_once(hub: SmallHub) -> None:
    config = local_model(MODEL, files=("config.json",))
    assert hub.sent == ["config.json"]
    assert local_model(MODEL) == config
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in Path(config).iterdir()} == names | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert len(hub.sent) == len(set(hub.sent))
    asked = len(hub.asked)
    assert local_model(config) == config  # a commit is complete, or not
    assert len(hub.asked) == asked


def test_a_directory_of_that_name_wins(hub: SmallHub) -> None:
    Path(MODEL).mkdir(parents=True)
    (place := Path(DATA)).mkdir(parents=True)
    (place / "train.jsonl").write_text(json.dumps(numbered(1)[0]))
    assert local_model(MODEL) == MODEL
    assert local_data(DATA) == DATA
    assert not hub.asked


def test_plan_needs_the_config_only(hub: SmallHub) -> None:
    plan_input = needed("planning", "command", by="this test").plan_input
    architecture, config, _ = plan_input(MODEL, [])
    assert (architecture.family, config.model) == ("qwen3", MODEL)
    assert hub.sent == ["config.json"]
    plan_input("Qwen2.5-32B", [])
    assert hub.sent == ["config.json"]


def test_a_config_of_a_dataset_is_downloaded_with_all_its_shards(hub: SmallHub) -> None:
    main = local_data(f"{DATA}:main")
    assert len(read_problems(f"{DATA}:main", {}).problems) == 64
    assert read_problems(main, {}).entries == 64 + 63
    assert len(read_problems(f"{DATA}:main:test", {}).problems) == 3
    assert {name for name in hub.sent if "parquet" in name} == {
        "train-0.parquet",
        "train-1.parquet",
        "test-0.parquet",
    }
    assert not list(Path(main.partition(":")[0]).glob("socratic/*"))
    both = f"{DATA}:main,{DATA}:main:test"
    assert local_data(both) == f"{main},{main}:test"
    assert local_data(both, kept=f"x.jsonl,{main}") == f"{main},{main}:test"
    assert len(read_problems(both, {}).problems) == 64


@pytest.mark.parametrize("form", ["{}@v1:main:test", "{}:main:test@v1"])
def test_a_revision_of_a_dataset_stands_on_either_side(hub: SmallHub, form: str) -> None:
    old = {"README.md": GSM8K.encode(), "main/test-0.parquet": gsm8k(7)}
    commit = hub.add("datasets", DATA, old | {"main/train-0.parquet": gsm8k(1)}, "v1")
    found = local_data(form.format(DATA))
    assert found.endswith(f"{commit}:main:test")
    assert len(read_problems(found, {}).problems) == 7


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATA, f"{DATA}: has several configs; name one of main, socratic as {DATA}:main"),
        (f"{DATA}:math", f"{DATA}: has no config 'math'; name one of main, socratic"),
        (f"{DATA}:main:dev", f"{DATA}:main: has no split 'dev'; name one of train, test as"),
        ("me/two", "me/two: has no split 'train'; name one of test, validation|validation, test"),
    ],
)
def test_configs_and_splits_are_named(hub: SmallHub, data: str, message: str) -> None:
    lines = json.dumps(numbered(1)[0]).encode()
    hub.add("datasets", "me/two", {"validation.jsonl": lines, "test.jsonl": lines})
    with pytest.raises(DataError) as raised:
        local_data(data)
    start, _, rest = message.partition("name one of ")
    assert str(raised.value).startswith(start)
    assert any(f"name one of {names}" in str(raised.value) for names in rest.split("|"))
    assert not [name for name in hub.sent if name.endswith((".parquet", ".jsonl"))]


def test_what_the_hub_does_not_give_is_a_line(
    hub: SmallHub, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(HubError, "Qwen/None: there is no such directory here, and no such model"):
        local_model("Qwen/None")
    with refused(HubError, "openai/none: there is no such directory here, and no such dataset"):
        read_problems("openai/none:main", {})
    with refused(HubError, f"{MODEL}@v9: the Hub has no such branch, tag or commit"):
        local_model(f"{MODEL}@v9")
    with refused(DataError, "data/none.jsonl: no such file or directory"):
        read_problems("data/none.jsonl", {})
    old = {name: data for name, data in tiny_files.items() if name != "model.safetensors"}
    hub.add("models", "old/pickles", old)
    with refused(HubError, "old/pickles: has no .safetensors", "pickles (.bin), are not read"):
        local_model("old/pickles", files=TOKENIZER)
    config = {**json.loads(tiny_files["config.json"]), "quantization_config": {"bits": 4}}
    hub.add("models", "other/awq", tiny_files | {"config.json": json.dumps(config).encode()})
    sent = hub.sent.count("model.safetensors")
    with refused(ArchitectureError, "is quantized already (quantization_config"):
        local_model("other/awq")
    assert hub.sent.count("model.safetensors") == sent  # before gigabytes are on their way
    hub.gated.add(MODEL)
    with refused(HubError, f"{MODEL}: is gated; ask for access at {hub.url}/{MODEL}, then log in"):
        local_model(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused(HubError, f"{DATA}: there is no such directory here", "HF_HUB_OFFLINE is set"):
        read_problems(f"{DATA}:main", {})


def test_a_model_that_is_downloaded_in_part_is_said_and_continued(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_model(MODEL, files=TOKENIZER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused(HubError, f"{MODEL}@", ": is not downloaded whole", f"hf download {MODEL}"):
        local_model(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.breaks_off = "model.safetensors"
    with refused(HubError, f"{MODEL}@", "closed connection", "run this again"):
        local_model(MODEL)
    hub.breaks_off = ""
    assert Path(local_model(MODEL), "model.safetensors").is_file()


def test_a_cache_without_lists_of_files_is_read_where_there_is_no_hub(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of the library keep no lists, and a copied cache may lack them."""
    model, data = local_model(MODEL), local_data(f"{DATA}:main")
    commit = Path(model).name
    for lists in tmp_path.glob("cache/*/trees"):
        shutil.rmtree(lists)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (MODEL, f"{MODEL}@main", f"{MODEL}@{commit}", model, f"{model}/"):
        assert Path(local_model(name)) == Path(model)
    for name in (f"{DATA}:main", data):
        assert len(read_problems(name, {}).problems) == 64
    shutil.move(tmp_path / "cache", tmp_path / "copied")
    copied = model.replace("/cache/", "/copied/")
    assert local_model(copied) == copied
    Path(copied, "model.safetensors").unlink()
    with refused(HubError, f"{MODEL}@{commit}: has no .safetensors"):
        local_model(copied)
    with refused(HubError, f"{MODEL}: there is no such directory here", "HF_HUB_OFFLINE is set"):
        local_model(MODEL)


def test_a_run_keeps_its_commit_when_the_branch_moves_on(
    hub: SmallHub, tiny_files: dict[str, bytes], tmp_path: Path
) -> None:
    config, _ = prepare_new("grpo", [*SMALL, *WORDS, f"evaluation.data.test={DATA}:main:test"])
    model, data = snapshot_of(config.model), config.data.partition(":")[0]
    assert model and snapshot_of(data)
    saved = load(config.run_dir / "config.yaml")
    assert (saved.model, saved.data) == (config.model, config.data)
    assert [each.path for each in snapshots(config)] == [
        "model",
        "data",
        "evaluation.data.test",
    ]
    hub.add("models", MODEL, {"README.md": b"moved"})
    hub.add("datasets", DATA, {"main/train-0.parquet": gsm8k(70)})
    assert local_model(MODEL) != config.model
    for words in ([], WORDS[:2]):
        assert prepare_resume(config.run_dir, words)[0].model == config.model
        assert prepare_resume(config.run_dir, words)[0].data == config.data
    with refused(ConfigError, "model=", "the run has"):
        prepare_resume(config.run_dir, [f"model={MODEL}@main"])
    shutil.rmtree(tmp_path / "cache")  # such as on another machine
    again, _ = prepare_resume(config.run_dir, [])
    assert (again.model, again.data) == (config.model, config.data)
    assert Path(again.model, "model.safetensors").is_file()
    shard = Path(data, "main/train-1.parquet")
    shard.unlink()
    prepare_resume(config.run_dir, [])
    assert shard.is_file()
    old = tmp_path / f"old/datasets--a--b/snapshots/{'a' * 40}"  # by a version that kept no list
    old.mkdir(parents=True)
    assert local_data(f"{old}:train") == f"{old}:train"


def test_a_job_is_given_snapshots(hub: SmallHub, capfd: pytest.CaptureFixture[str]) -> None:
    options = experiment.JobOptions(gpus_per_node=2)
    experiment.launch("grpo", [*SMALL, *WORDS], options=options, dry_run=True)
    _, here, last = capfd.readouterr().out.partition("<<<")
    commit = hub.commit("models", MODEL, "main")
    assert here and f"model: {constants.HF_HUB_CACHE}" in last and commit in last
    assert "model.safetensors" in hub.sent

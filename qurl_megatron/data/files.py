"""Entries of files, dataset directories and datasets of the Hugging Face Hub.

`problems.py` lists what can be read. Nothing is written outside a temporary directory, but what
`local` downloads into the Hub's cache.
"""

import contextlib
import csv
import glob
import gzip
import io
import itertools
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from qurl_megatron.data.entries import REASONING_GYM, DataError, Entries, from_json, place
from qurl_megatron.model.repository import refuse_address, repository_of, snapshot_of

ROWS_AT_ONCE = 1000  # of an Arrow table that become Python objects
# Files that say which config of a dataset has which files.
_CARD = ("README.md", ".huggingface.yaml", "dataset_infos.json")
# ORG/NAME or the path of a snapshot, @REVISION, :CONFIG:SPLIT, @REVISION
_HUB_DATA = re.compile(r"([^:@]+)(?:@([^:@]+))?((?::[^:@]+){0,2})(?:@([^:@]+))?")


def local(data: str, commits: Mapping[str, str]) -> str:
    """Return a source on this machine: `data` itself, or a download of what it names on the Hub.

    `commits` has the commit of each repository whose name without a revision means this one.

    Raises:
        DataError, HubError: as `problems.local_data`.
    """
    refuse_address(data)
    match = _HUB_DATA.fullmatch(data)
    if not match:
        return data
    name, before, names, after = match.groups(default="")
    if _reader(Path(name)) or (before and after):
        return data
    from qurl_megatron.model import downloads

    revision = f"@{before or after}" if before or after else ""
    known = snapshot_of(f"{name}{revision}")
    # The files of a snapshot may be only a part of it.
    if place(data) and not (known and downloads.is_listed(known, "dataset")):
        return data
    repository = repository_of(f"{name}{revision}", commits.get(name, ""))
    if repository is None:
        return data
    snapshot = downloads.download(repository, "dataset", _CARD)
    commit = snapshot_of(str(snapshot)) or repository
    with tempfile.TemporaryDirectory(prefix="qurl-data-") as scratch:
        # The library finds the files of a config by names alone, so empty files will do.
        for file in downloads.listed(commit, "dataset"):
            (Path(scratch) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / file).touch()
        for file in _CARD:
            if (snapshot / file).is_file():
                shutil.copyfile(snapshot / file, Path(scratch) / file)
        title, splits, rest = _config_files(Path(scratch), names.split(":")[1:], name + revision)
        _choose_split(splits, rest, title)
        files = [os.path.relpath(file, scratch) for split in splits.values() for file in split]
    downloads.download(commit, "dataset", [*_CARD, *map(glob.escape, files)])
    if not snapshot_of(name):
        print(f"qurl: {data} is {snapshot}{names}", file=sys.stderr)
    return f"{snapshot}{names}"


def read(data: str) -> Entries:
    """Return the entries of a file, of all whose names match a pattern, or of a directory.

    Raises:
        DataError: nothing is there, or it cannot be read.
    """
    found = place(data)
    if found is None:
        files = sorted(map(Path, glob.glob(data, recursive=True)))
        if not files:
            nothing = (
                "no file's name matches" if glob.has_magic(data) else "no such file or directory"
            )
            raise DataError(f"{data}: {nothing}")
        return itertools.chain.from_iterable(map(_read_file, filter(Path.is_file, files)))
    path, names = found
    return _read_directory(path, names) if path.is_dir() else _read_file(path)


def _reader(path: Path) -> Callable[[Path], Entries] | None:
    """Return what reads a file of this name; None if nothing does."""
    if path.suffix == ".gz" and path.stem.endswith(_TEXTS):
        path = path.with_suffix("")
    return _READERS.get(path.suffix)


def _read_file(path: Path) -> Entries:
    reader = _reader(path)
    if reader is None:
        raise DataError(
            f"{path}: unsupported; expected a {', '.join(_READERS)} or .jsonl.gz file, a dataset "
            f"directory or {REASONING_GYM}TASK"
        )
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({error}); copy it again, or without .gz if it is text"
        ) from error


def _read_jsonl(path: Path) -> Entries:
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                location = f"{path} line {number}"
                if line.strip():
                    encoded = line.encode(errors="surrogateescape")  # with any wrong bytes
                    yield location, from_json(encoded, location, "one object per line")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} line {number + 1}: not text ({error})") from error


def _open(path: Path, newline: str = "\n") -> TextIO:
    """Open a file of text, which is in UTF-8, UTF-16 or UTF-32, with a byte order mark or not.

    By default its lines end with a line feed only: the other separators can be inside a JSON
    string. Bytes that are not UTF-8 become surrogates.
    """
    with _open_bytes(path) as file:
        encoding = json.detect_encoding(file.read(4))
    return io.TextIOWrapper(_open_bytes(path), encoding, "surrogateescape", newline)


def _open_bytes(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_json(path: Path) -> Entries:
    with _open(path) as file:
        is_list = file.read(64).lstrip()[:1] == "["
    if not is_list:
        yield from _read_jsonl(path)
        return
    with _open_bytes(path) as whole:
        entries = from_json(whole.read(), str(path), "a list of objects")
    for number, entry in enumerate(entries, start=1):
        yield f"{path} entry {number}", entry


def _read_csv(path: Path) -> Entries:
    csv.field_size_limit(sys.maxsize)
    number = 0
    mark, separator = ("\t", "tab") if ".tsv" in path.suffixes else (",", "comma")
    try:
        with _open(path, newline="") as file:
            rows = csv.reader(file, delimiter=mark, strict=True)
            names = next(rows, [])
            number = rows.line_num
            "".join(names).encode()  # finds bytes that were not UTF-8
            if len(names) == 1 and (other := re.search("[;,\t|]", names[0])):
                raise DataError(
                    f"{path}: its first line has {other[0]!r} between names; expected a {separator}"
                )
            if len({*names}) < len(names):
                raise DataError(f"{path}: its first line must name each column, and no two alike")
            for cells in filter(None, rows):
                number = rows.line_num
                "".join(cells).encode()
                if len(cells) != len(names):
                    raise DataError(
                        f"{path} line {number}: has {len(cells)} cells, and the first line "
                        f"{len(names)}; a cell with a comma or a line break needs quotes"
                    )
                yield f"{path} line {number}", dict(zip(names, cells, strict=True))
    except UnicodeEncodeError as error:
        raise DataError(f"{path} line {number}: not UTF-8; save the file in it") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} line {number + 1}: not readable as CSV ({error})") from error


def _read_parquet(path: Path) -> Entries:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for rows in file.iter_batches():
                for entry in _entries(rows):
                    number += 1
                    yield f"{path} row {number}", entry
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet after row {number} ({error})") from error


def _entries(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table or batch."""
    narrow = [field for field in rows.schema if "float" in str(field.type)]  # 64 bits are "double"
    for entry in rows.to_pylist():
        yield entry | {field.name: _shortest(entry[field.name], field.type) for field in narrow}


def _shortest(value: Any, arrow_type: Any) -> Any:
    """Return a value with floats of 16 or 32 bits as the shortest decimals of their own type.

    Arrow gives 0.10000000149011612 for 0.1 in 32 bits.
    """
    import pyarrow.types

    if value is None:
        return None
    if pyarrow.types.is_float32(arrow_type) or pyarrow.types.is_float16(arrow_type):
        return float(str(arrow_type.to_pandas_dtype()(value)))
    if pyarrow.types.is_struct(arrow_type):
        return {field.name: _shortest(value[field.name], field.type) for field in arrow_type}
    if isinstance(value, list):
        return [_shortest(each, arrow_type.value_type) for each in value]
    return value


_READERS: dict[str, Callable[[Path], Entries]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")  # which may be compressed


def _read_directory(directory: Path, names: list[str]) -> Entries:
    """Read one split of a Hugging Face dataset; `names` are as for `_config_files`."""
    if not any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
        title, splits, rest = _config_files(directory, names, str(directory))
        for shard in splits[_choose_split(splits, rest, title)]:
            yield from _read_file(Path(shard))
        return
    import datasets  # takes seconds: imported only where it is used

    with _as_data_error(str(directory)):
        saved = datasets.load_from_disk(directory)
        by_name = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        name = _choose_split(by_name, names, str(directory))
        batches = by_name[name].with_format("arrow").iter(ROWS_AT_ONCE)
        rows = (entry for batch in batches for entry in _entries(batch))
        for number, entry in enumerate(rows, start=1):
            yield f"{directory} split {name} row {number}", entry


def _config_files(
    directory: Path, names: list[str], title: str
) -> tuple[str, Mapping[Any, list[str]], list[str]]:
    """Return a config's title, its files by split, and the `names` that are left for a split.

    The library finds the files, by their names and the README.md. `names` are those after the
    directory: a config, a split, both or none. `title` is the user's name for the dataset.
    """
    import datasets  # takes seconds: imported only where it is used

    with _as_data_error(title):
        config = _choose_config(directory, names, title)
        if names[:1] == [config]:
            title, names = f"{title}:{config}", names[1:]
        with tempfile.TemporaryDirectory(prefix="qurl-data-") as cache:
            shards = datasets.load_dataset_builder(str(directory), config, cache_dir=cache)
        return title, shards.config.data_files or {}, names


@contextlib.contextmanager
def _as_data_error(title: str) -> Iterator[None]:
    """Turn any exception of the library `datasets` into a DataError of one line."""
    # The library's log messages repeat its exceptions.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())
        raise DataError(
            f"{title}: not the directory of one dataset ({reason}); give the directory of one"
        ) from error


def _choose_config(directory: Path, names: list[str], title: str) -> str:
    """Return the config that `names` begins with, or the default one; may raise DataError."""
    import datasets

    configs = datasets.get_dataset_config_names(str(directory))
    if names and names[0] in configs:
        return names[0]
    default = datasets.get_dataset_default_config_name(str(directory))
    if default is None or len(names) == 2:
        given = f"no config {names[0]!r}" if names else "several configs"
        raise DataError(
            f"{title}: has {given}; name one of {', '.join(configs)} as {title}:{configs[0]}"
        )
    return default


def _choose_split(splits: Mapping[Any, Any], names: list[str], dataset: str) -> Any:
    """Return the key of the split in `names`, or of the default split; may raise DataError."""
    known = [str(split) for split in splits]
    name = ":".join(names) or (known[0] if len(known) == 1 else "train")
    if name not in known:
        raise DataError(
            f"{dataset}: has no split {name!r}; name one of {', '.join(known)} as "
            f"{dataset}:{known[0]}"
        )
    return list(splits)[known.index(name)]

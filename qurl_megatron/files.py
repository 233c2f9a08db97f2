"""Files that are complete or absent, even if the process dies or the disk fills.

Every file that a run or a command rewrites goes through `write_whole`, and every line that it adds
through `append_lines`. The files of a run's directory are read with `read_json_lines` and
`read_json_object`, which name a file or line that they cannot read, and go on.
"""

import contextlib
import errno
import functools
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from qurl_megatron.machine.disk import is_of_system

PARTIAL = ".partial"
LARGEST = 2.0**128  # the bound of float32


def partial_of(directory: Path) -> Path:
    """Return the path of a directory while it is filled, before `rename_whole` renames it."""
    return directory.with_name(directory.name + PARTIAL)


def check_output(path: Path) -> None:
    """Check that a file or directory may be renamed to `path`: nothing or a regular file is there.

    A link is refused too: renaming would replace the link, not its target.

    Raises:
        OSError: something else is there, or the path is in a directory of the operating system.
    """
    if is_of_system(path):
        raise PermissionError(errno.EPERM, "belongs to the system; choose another place", path)
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, "exists, and is not a regular file", path)


def _print_error(text: str) -> None:
    print(f"qurl: {text}", file=sys.stderr, flush=True)


def read_json_lines(
    path: Path, kind: Any = dict[str, Any], tell: Callable[[str], object] = _print_error
) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; an empty list if the file does not exist.

    A last line without a line break is dropped: its writer was interrupted. Any other line that
    does not hold an object of the form `kind` is left out.

    Args:
        kind: a dictionary's type, or a dataclass with the fields that a line must have.
        tell: called with a text that names the first line that was left out.
    """
    objects, wrong = [], []
    for number, line in enumerate(_text(path, tell).split("\n")[:-1], start=1):
        try:
            objects.append(_parse(line, kind))
        except (ValueError, RecursionError) as error:
            wrong.append(f"{path}, line {number}: {_reason(error)}; left out")
    if wrong:
        others = f", and {len(wrong) - 1} more of its lines" if len(wrong) > 1 else ""
        tell(f"{wrong[0]}{others}")
    return objects


def read_json_object(path: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if the file holds no object of form `kind`.

    `write_whole` leaves no such file, but a full disk or an interrupted copy may. A line on
    standard error then says so, unless the file is empty or absent.
    """
    text = _text(path, _print_error)
    try:
        return _parse(text, kind) if text else {}
    except (ValueError, RecursionError) as error:
        _print_error(f"{path}: {_reason(error)}; left out")
    return {}


def _text(path: Path, tell: Callable[[str], object]) -> str:
    """Return the text of a file; empty if it is absent or not regular: a pipe may never end."""
    if path.exists() and not path.is_file():
        tell(f"{path}: not a regular file; left out")
    return path.read_text(errors="replace") if path.is_file() else ""


def _parse(text: str, kind: Any) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError, RecursionError: the text is not JSON of the form `kind`.
    """
    content: dict[str, Any] = json.loads(
        text,
        parse_int=functools.partial(_number, int),
        parse_float=functools.partial(_number, float),
    )
    _adapter(kind).validate_json(text, strict=True)
    return content


def _number(convert: Callable[[str], float], text: str) -> float:
    """Convert a number, which sums and plots must be able to hold.

    Raises:
        ValueError: the number is larger than every float32.
    """
    number = convert(text)
    if abs(number) > LARGEST:
        raise ValueError(f"{text[:20]}: larger than any number that a run has")
    return number


_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def _reason(error: Exception) -> str:
    """Return what is wrong with a JSON text, as a part of a line that is safe to print."""
    reason = str(error)
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
    elif isinstance(error, json.JSONDecodeError):
        reason = f"not JSON ({error.msg} at character {error.pos + 1})"
    return reason[:200] if reason.isprintable() else ascii(reason[:200])


def append_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a JSON Lines file: all of them, or none if the disk is full.

    Half a line, left by a writer that was killed, is cut off first.

    Raises:
        OSError: writing failed; the file is as it was.
    """
    lines = "".join(json.dumps(each) + "\n" for each in objects)
    with open(path, "ab+", buffering=0) as file:
        _write_behind(_end_of_last_line(file), lines.encode(), file, path)


def append_whole(path: Path, data: bytes) -> None:
    """Append data to a file: all of it, or none if the disk is full.

    Raises:
        OSError: writing failed; the file is as it was.
    """
    with open(path, "ab", buffering=0) as file:
        _write_behind(file.seek(0, os.SEEK_END), data, file, path)


def _write_behind(end: int, data: bytes, file: Any, path: Path) -> None:
    """Write data behind the first `end` bytes of an unbuffered file, in place of the rest."""
    try:
        file.truncate(end)
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        file.truncate(end)
        raise _of(path, error) from None


def _end_of_last_line(file: Any) -> int:
    """Return the offset behind the last line break of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        line_break = file.read(end - start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        end = start
    return 0


def write_whole(
    path: Path, content: str | Callable[[Path], object], *, private: bool = False
) -> None:
    """Write a file atomically; its mode is that of any new file.

    Args:
        content: the text, or a function that writes the file at a given path.
        private: only this user may read the file.

    Raises:
        OSError: writing failed, or `check_output` refuses the path; an old file is as it was.
    """
    check_output(path)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.unlink(missing_ok=True)  # so no link of someone else is followed
        unfinished.touch(mode=0o600 if private else 0o666, exist_ok=False)
        mode = unfinished.stat().st_mode
        if isinstance(content, str):
            unfinished.write_text(content)
        else:
            content(unfinished)
        unfinished.chmod(stat.S_IMODE(mode))  # some libraries replace it by a file of their own
        rename_whole(unfinished, path)
    except OSError as error:
        raise _of(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _of(path: Path, error: OSError) -> OSError:
    """Return an error that names its file, which the error of a failed write does not."""
    return OSError(error.errno, error.strerror or str(error), path)


def rename_whole(unfinished: Path, path: Path) -> None:
    """Sync a finished file or directory to disk, then rename it to `path`.

    The caller syncs the files within a directory.

    Raises:
        OSError: `check_output` refuses the path.
    """
    check_output(path)
    sync(unfinished)
    os.replace(unfinished, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

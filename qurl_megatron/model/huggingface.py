"""Read, check and write Hugging Face directories.

A directory is checked before anything starts. Of the weights only headers are read, so 32 billion
parameters in 17 files take a fraction of a second. The values of a small model are read too. In a
larger one, the learner rank that loads NaN or infinity finds them, while the servers start.
"""

import functools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qurl_megatron.files import write_whole
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import (
    ADAPTER_CONFIG,
    Architecture,
    ArchitectureError,
    fp8_block,
    read_json,
    refuse_adapters,
    text_config,
    trainable,
)

INDEX_FILE = "model.safetensors.index.json"
MAX_BYTES_READ = 1024**3  # largest model whose values are read: about a second from a page cache
ROWS_READ = 4096  # of an embedding at once
_DTYPES = ("BF16", "F16", "F32")  # of stored weights, as safetensors spells them
_FP8, _SCALES = "F8_E4M3", "_scale_inv"  # of codes, and what follows their name in that of scales
# Of files that hold weights, in any library's format. Tokenizers are in others (.json, .model).
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt"),
    *(".gguf", ".h5", ".msgpack", ".onnx"),
)

# Of a model of text and images: where the weights of its text are, and what is left out: images,
# and heads that predict several tokens at once.
_TEXT = "model.language_model."
_LEFT_OUT = ("model.visual.", "mtp.")

Progress = Callable[[int, int], None]
"""A callback that receives (bytes done, bytes in total) while a directory is written."""


class Weights:
    """The weights in `model.safetensors`, or in the files of `model.safetensors.index.json`.

    Those that are stored in FP8 with a scale for each block are read as BF16.
    """

    def __init__(self, directory: str | Path, architecture: Architecture) -> None:
        """Read and check the names and shapes of all tensors, without their values.

        Raises:
            ArchitectureError: a file is missing, or a tensor is missing, unknown or misshapen.
        """
        self._directory = Path(directory)
        self._is_tied = architecture.tie_word_embeddings
        self._is_half = stored_dtype(self._directory) == torch.float16
        self.block = stored_block(self._directory)  # rows and columns; None: nothing is in FP8
        self._file_of = self._files_by_tensor()
        self.files = sorted(set(self._file_of.values()))
        self._open = {file: self._opened(file) for file in self.files}
        for file in self.files:
            named = {name for name, where in self._file_of.items() if where == file}
            absent = named - set(self._open[file].keys())
            if absent:
                raise ArchitectureError(
                    f"'{directory}' lacks tensor '{min(absent)}': {INDEX_FILE} places it in "
                    f"{file}, which does not have it"
                )
        self._check_others()
        # The names in the files, by the names of a text-only model.
        self._names = {name: name for name in self._file_of}
        self.left_out: list[str] = []  # prefixes of names that are not read
        if architecture.delta_net:
            self.left_out = [
                prefix
                for prefix in _LEFT_OUT
                if any(name.startswith(prefix) for name in self._file_of)
            ]
            self._names = {
                text_name(name): name for name in self._file_of if not name.startswith(_LEFT_OUT)
            }
        joins_experts = any(name.endswith(".experts.gate_up_proj") for name in self._names)
        self._places = {
            name: weight_map.in_file(name, architecture, joins_experts=joins_experts)
            for name in sorted(weight_map.hugging_face_names(architecture))
        }
        shapes = {place.name: place.shape for place in self._places.values()}
        expected = shapes.keys()
        # Some checkpoints store tensors that others determine.
        given = {name for name in self._names if not name.endswith("rotary_emb.inv_freq")}
        given -= {"lm_head.weight"} if architecture.tie_word_embeddings else set()
        self._codes: set[str] = set()  # tensors in FP8; another one has the scales of their blocks
        if self.block:
            for name in expected & given:
                if len(shapes[name]) > 1 and self._stored(name).get_dtype() == _FP8:
                    *others, rows, columns = shapes[name]
                    blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
                    shapes[name + _SCALES] = (*others, *blocks)
                    self._codes.add(name)
        for problem, names in (("lacks", expected - given), ("has unknown", given - expected)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ArchitectureError(
                    f"'{directory}' {problem} tensor '{min(names)}'{more}, according to its "
                    "config.json"
                )
        for name, expected_shape in shapes.items():
            stored = self._stored(name)
            if stored.get_dtype() not in _DTYPES and name not in self._codes:
                raise ArchitectureError(
                    f"'{directory}' has tensor '{name}' in {stored.get_dtype()}; weights must be "
                    f"in {', '.join(_DTYPES)}, not quantized"
                )
            if (stored_shape := stored.get_shape()) != list(expected_shape):
                raise ArchitectureError(
                    f"'{directory}' has tensor '{name}' of shape {stored_shape}; "
                    f"its config.json implies {list(expected_shape)}"
                )

    def _files_by_tensor(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise ArchitectureError(f"{index} has no 'weight_map' of tensors to files")
            for file in files.values():
                # Files are written under the same names, so a name must not lead elsewhere.
                if not isinstance(file, str) or not re.fullmatch(r"[^/\x00]+\.safetensors", file):
                    raise ArchitectureError(
                        f"{index} names {file!r:.80}; files must be *.safetensors beside the index"
                    )
            return files
        single = self._directory / "model.safetensors"
        if not single.is_file():
            raise ArchitectureError(
                f"'{self._directory}' has neither model.safetensors "
                "nor model.safetensors.index.json"
            )
        return dict.fromkeys(self._opened(single.name).keys(), single.name)

    def _check_others(self) -> None:
        """Check that no file of the directory, read or not, has a tensor that another has too.

        transformers and SGLang would choose differently between them.
        """
        refuse_adapters(self._directory)
        single = "model.safetensors"
        if single not in self.files and (self._directory / single).exists():
            raise ArchitectureError(
                f"'{self._directory}' has {single} and {INDEX_FILE}, which does not name it; one "
                f"is of another save: remove {single}, or the index and its files"
            )
        file_of: dict[str, str] = {}
        for file in sorted(path.name for path in self._directory.glob("*.safetensors")):
            for name in (self._open.get(file) or self._opened(file)).keys():
                other = file_of.setdefault(name, file)
                if other != file:
                    raise ArchitectureError(
                        f"'{self._directory}' has tensor '{name}' in {other} and in {file}; one "
                        "is of another save: remove its files"
                    )

    def _opened(self, file: str) -> Any:
        """Open a file, which reads and checks its header, and that it has all bytes of its data."""
        path = self._directory / file
        if not path.is_file():
            raise ArchitectureError(f"'{self._directory}' lacks {file}, which its index names")
        try:
            return safe_open(path, "pt")
        except SafetensorError as error:
            raise ArchitectureError(
                f"{path} is not a whole safetensors file ({' '.join(str(error).split())}); "
                "download or copy it again"
            ) from None

    def _stored(self, name: str) -> Any:
        name = self._names[name]
        return self._open[self._file_of[name]].get_slice(name)

    def _values(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """Return a tensor of the files at `index`, or what its codes stand for, if it is finite."""
        tensor = self._stored(name)[index]
        if self.block and name in self._codes:
            tensor = _dequantized(tensor, self._stored(name + _SCALES), index, self.block)
        check_finite(self._directory / self._file_of[self._names[name]], name, tensor)
        return tensor

    def whole(self, stored: str) -> Tensor:
        """Return the tensor that has the name `stored` in the files, as `read` does.

        Raises:
            ArchitectureError: it holds NaN or infinity.
        """
        name = text_name(stored) if stored not in self._names else stored
        return self._values(name, tuple(slice(0, size) for size in self._stored(name).get_shape()))

    def names(self, file: str) -> list[str]:
        """Return the tensors of a file that are not left out, and are no scales of codes."""
        scales = {name + _SCALES for name in self._codes}
        return [
            stored
            for name, stored in self._names.items()
            if self._file_of[stored] == file and name not in scales
        ]

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the full tensor `name` at `index`, in its stored dtype; only this part is read.

        Raises:
            ArchitectureError: it holds NaN or infinity, or would in the dtype of config.json.
        """
        place = self._places[name]
        tensor = self._values(place.name, place.of_part(index))
        file = self._directory / self._file_of[self._names[place.name]]
        if self._is_half and tensor.numel() and not math.isfinite(tensor.half().abs().max()):
            raise ArchitectureError(
                f"{file}: tensor '{place.name}' holds numbers beyond float16, the dtype of its "
                "config.json; set that to bfloat16 or float32"
            )
        return tensor

    def full_tensors(self) -> dict[str, dict[str, weight_map.Place]]:
        """Return, by tensor of the files, the places of its full tensors, from the first row."""

        def start(part: tuple[str, weight_map.Place]) -> list[int]:
            return [at if isinstance(at, int) else at.start for at in part[1].where]

        stored: dict[str, dict[str, weight_map.Place]] = {}
        for name, place in sorted(self._places.items(), key=start):
            stored.setdefault(self._names[place.name], {})[name] = place
        return stored

    def check_head(self) -> None:
        """Check that an output layer stored beside a tied embedding is equal to it.

        Raises:
            ArchitectureError: it is not, so config.json and weights contradict each other.
        """
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self._is_tied or head not in self._file_of:
            return
        stored = self._stored(head), self._stored(embedding)
        shapes = [each.get_shape() for each in stored]
        rows = shapes[0][0]
        if shapes[0] != shapes[1] or not all(
            torch.equal(*(each[row : row + ROWS_READ].float() for each in stored))
            for row in range(0, rows, ROWS_READ)
        ):
            raise ArchitectureError(
                f"'{self._directory}': tie_word_embeddings is true in its config.json, and its "
                f"'{head}' is not its '{embedding}'; set it to false if the head was trained, or "
                "remove the head"
            )

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum((self._directory / file).stat().st_size for file in self.files)


def text_name(name: str) -> str:
    """Return the name that a text-only model has for a tensor of a model of text and images."""
    return f"model.{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name


def _dequantized(
    codes: Tensor, scales: Any, index: tuple[int | slice, ...], block: tuple[int, int]
) -> Tensor:
    """Return codes times the scales of their blocks, in BF16.

    Args:
        codes: [..., rows, columns] float8, the part at `index` of a stored tensor.
        scales: the stored [..., blocks of rows, blocks of columns], of which a part is read.
        block: rows and columns of a block; a part may cut blocks, and the last ones may be smaller.
    """
    # For each row and column of the part, the number of its block.
    numbers = [
        torch.arange(part.start, part.stop) // size
        for part, size in zip(index[-2:], block, strict=True)
        if isinstance(part, slice)
    ]
    factors = scales[index[:-2]].float() if index[:-2] else scales[:].float()
    for dim, blocks in zip((-2, -1), numbers, strict=True):
        factors = factors.index_select(dim, blocks)
    return factors.mul_(codes.float()).bfloat16()


def check_model(directory: Path) -> Weights:
    """Check config.json and the weights of a model that will be trained or rewritten.

    Raises:
        ArchitectureError: one line: the architecture is not supported, the model is quantized, a
            file is missing or broken, a tensor is missing, unknown or misshapen, or holds NaN.
    """
    architecture = trainable(directory)
    stored_dtype(directory)
    weights = Weights(directory, architecture)
    weights.check_head()
    if weights.left_out:
        left_out = " and ".join(f"{prefix}*" for prefix in weights.left_out)
        _say(f"qurl: {directory}: only its text is used; {left_out} are left out")
    if weights.block:
        _say(f"qurl: {directory}: its FP8 weights are read as BF16")
    if weights.num_bytes <= MAX_BYTES_READ:
        for name in weight_map.hugging_face_names(architecture):
            weights.read(name, ())
    return weights


@functools.cache  # said once
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def check_finite(file: Path, name: str, tensor: Tensor) -> None:
    """Check that a tensor of a file holds neither NaN nor infinity.

    Raises:
        ArchitectureError: it does.
    """
    if not tensor.numel():  # ranks that share a key-value head may have no row of a tensor
        return
    smallest, largest = torch.aminmax(tensor)  # NaN if any value is
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        where = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise ArchitectureError(
            f"{file}: tensor '{name}' holds {float(tensor[tuple(where)])} at {where}; the model is "
            "spoilt, take an earlier one"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of `config.json`, of a model of text and images that of its text part.

    It describes the weights as they are read, so FP8 in blocks is left out of it.

    Raises:
        ArchitectureError: the file is missing, broken, or of an unsupported architecture.
    """
    Architecture.from_directory(directory)
    file = directory / "config.json"
    config = text_config(read_json(file), file)
    if fp8_block(config):
        del config["quantization_config"]
    return config


def stored_block(directory: Path) -> tuple[int, int] | None:
    """Return rows and columns of a block of FP8 that has a scale; None: no weights are in FP8."""
    file = directory / "config.json"
    return fp8_block(text_config(read_json(file), file))


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of the weights according to `config.json`; bfloat16 if it names none.

    Raises:
        ArchitectureError: it names no dtype of weights that can be trained.
    """
    config = read_config(directory)
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in ("bfloat16", "float16", "float32"):
        raise ArchitectureError(
            f"{directory / 'config.json'}: dtype {name!r:.80} must be bfloat16, float16 or float32"
        )
    return getattr(torch, name)


def copy_beside_weights(source: Path, destination: Path) -> None:
    """Copy the files of a model directory other than its weights: config, tokenizer, licence.

    Copies of the weights in other formats stay behind too: beside trained weights they would be
    from before the training. config.json is that of a text-only model.
    """
    for path in source.iterdir():
        name = path.name.removesuffix(".index.json")  # an index of weights stays behind as well
        if path.is_file() and not name.endswith(_WEIGHT_SUFFIXES) and name != ADAPTER_CONFIG:
            shutil.copyfile(path, destination / path.name)
    if not (source / "config.json").exists():
        return  # the model was taken away under a run, whose steps are saved all the same
    config = read_config(source)
    if config != read_json(source / "config.json"):
        write_whole(destination / "config.json", json.dumps(config, indent=2) + "\n")


def write_template(directory: Path, text: str) -> None:
    """Write a chat template that transformers prefers to the model's own; empty: write none."""
    if text:
        write_whole(directory / "chat_template.jinja", text)


def served_directory(source: Path, destination: Path) -> Path:
    """Return a directory of the model that SGLang can serve, if possible `source` itself.

    Otherwise `destination` is created, with links to the weights. SGLang accepts the names that
    they have in a model of text and images. FP8 weights are not described: it gets them from a
    learner, in another format.
    """
    if read_config(source) == read_json(source / "config.json"):
        return source
    destination.mkdir()
    copy_beside_weights(source, destination)
    for path in source.glob("*.safetensors*"):
        (destination / path.name).symlink_to(path.absolute())
    return destination


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        ArchitectureError: a weight is NaN or infinite.
        OSError: the disk is full.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.numel():
            largest = tensor.abs().max()  # NaN if any value is
            if not math.isfinite(largest):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ArchitectureError(
                    f"{path.parent}: tensor '{name}' would hold {float(largest)} in {dtype}; "
                    "nothing is written (float16 ends at 65504: set dtype in the model's "
                    "config.json to bfloat16)"
                )

    def save(unfinished: Path) -> None:
        try:
            save_file(tensors, unfinished, {"format": "pt"})
        except SafetensorError as error:  # such as "I/O error: No space left on device"
            raise OSError(None, str(error)) from None

    write_whole(path, save)


def write_index(directory: Path, file_of: dict[str, str]) -> None:
    """Write `model.safetensors.index.json`; `file_of` maps tensor names to files in `directory`."""
    sizes = {file: (directory / file).stat().st_size for file in file_of.values()}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
    write_whole(directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")

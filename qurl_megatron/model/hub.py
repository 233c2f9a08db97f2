"""Models by names of the Hugging Face Hub: the directories that they stand for on this machine."""

import sys
from collections.abc import Sequence

from qurl_megatron.model.architecture import trainable
from qurl_megatron.model.repository import HubError, refuse_address, repository_of, snapshot_of

CONFIG = ("config.json",)
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # and config
WEIGHTS = (*TOKENIZER, "*.safetensors")
# Copies of a model in other forms: `original/`, `onnx/`, and Mistral's of all weights in one file.
_COPIES = ("*/*", "consolidated*.safetensors")


def local_model(name: str, kept: str = "", files: Sequence[str] = WEIGHTS) -> str:
    """Return the directory of a model; download what is missing if it is one of the Hub.

    A text that names nothing of the Hub is returned as it is. `kept` is as for `repository_of`.

    Raises:
        ArchitectureError: the model cannot be trained.
        HubError: it cannot be downloaded, or is an address.
    """
    refuse_address(name)
    repository = repository_of(name, kept)
    if repository is None:
        return name
    from qurl_megatron.model.downloads import download, listed

    directory = download(repository, "model", CONFIG)
    if not (directory / "config.json").is_file():
        raise HubError(f"{repository}: has no config.json on the Hub; give a model that has one")
    if not snapshot_of(name):
        print(f"qurl: {repository} is {directory}", file=sys.stderr)
    if files != CONFIG:
        trainable(directory)  # before gigabytes are on their way
        # One commit for all files, even if the branch moves meanwhile.
        commit = snapshot_of(str(directory)) or repository
        if not any("/" not in file and file.endswith(".safetensors") for file in listed(commit)):
            raise HubError(
                f"{repository}: has no .safetensors; weights in other files, such as pickles "
                "(.bin), are not read: give a revision or another copy of it that has them"
            )
        download(commit, "model", files, _COPIES)
    return str(directory)

"""The types of a configuration's fields, with the bounds and forms of their values."""

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from annotated_types import Ge, Gt, Le, Lt

from qurl_megatron.machine.disk import is_of_system

# Every number has an upper bound, so that a slip ("1e300", a digit too many) is refused and nothing
# overflows later. Each bound is far beyond what a run can use.
MOST = 10**9  # of anything that is counted: steps, tokens, sequences
LARGEST = 1e6  # a coefficient; squared it still fits in float32
Finite = Annotated[float, pydantic.AllowInfNan(False)]
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Ranks = Annotated[int, Ge(1), Le(4096)]  # of one parallel dimension; beyond the largest clusters
Threads = Annotated[int, Ge(1), Le(1024)]  # beyond the cores of a machine
Sequences = Annotated[int, Ge(1), Le(65536)]  # that a GPU or one prompt has at the same time
SequencesOrZero = Annotated[int, Ge(0), Le(65536)]
Seed = Annotated[int, Ge(0), Lt(2**31)]  # numpy, inside SGLang, takes no negative seed
Positive = Annotated[Finite, Ge(1e-6), Le(LARGEST)]
NonNegative = Annotated[Finite, Ge(0), Le(LARGEST)]
Signed = Annotated[Finite, Ge(-LARGEST), Le(LARGEST)]
LearningRate = Annotated[Finite, Ge(0), Le(1)]  # Adam moves a weight by about this much
Seconds = Annotated[Finite, Gt(0), Le(1e8)]  # three years
Fraction = Annotated[Finite, Gt(0), Lt(1)]
FractionOrZero = Annotated[Finite, Ge(0), Lt(1)]
# SGLang takes a temperature below 1e-6 as greedy decoding, and logits divided by one below 0.01
# overflow in bfloat16. Above 10 every distribution is close to uniform.
Temperature = Annotated[Finite, Ge(0.01), Le(10)]
# Weights and norms times or divided by s must keep their range in float32 and bfloat16.
Scale = Annotated[Finite, Ge(0.001), Le(1000)]
TopP = Annotated[Finite, Gt(0), Le(1)]
Smoothing = Annotated[Finite, Ge(0), Le(1)]  # SmoothQuant's exponent


def matching(pattern: str, rule: str) -> pydantic.AfterValidator:
    """Return a validator that refuses text unless `pattern` matches all of it.

    Where it would match a function in a file, and text is the file, the refusal says so.
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            is_file = text.endswith(".py") and re.fullmatch(pattern, f"{text}:name")
            raise ValueError(f"which function? give {text}:NAME" if is_file else rule)
        return text

    return pydantic.AfterValidator(check)


# Names become file names, Slurm job names and arguments of shell commands.
RunName = Annotated[
    str,
    matching(
        r"(\w[\w.+-]{0,199})?",
        "a run's name has letters, digits and _ . + - only, at most 200, and begins with a letter, "
        "digit or _",
    ),
]
# A path or another text that goes into files, logs and messages of one line.
Text = Annotated[
    str, matching(r"[^\x00-\x1f\x7f]*", "must not have line breaks or other control characters")
]
# The text of a prompt, which may have several lines.
Lines = Annotated[
    str,
    matching(r"[^\x00-\x08\x0b-\x1f\x7f]*", "must not have control characters but line breaks"),
]

# `~/` is the home directory, also in a file, where no shell replaces it.
at_home = pydantic.AfterValidator(os.path.expanduser)
Place = Annotated[Text, at_home]


def _joined(given: object) -> object:
    if isinstance(given, str) and given.startswith("[") and given.endswith("]"):
        given = given[1:-1].split(",")
    if isinstance(given, list):
        if any("," in str(each) for each in given):
            raise ValueError("an item of this list must have no comma")
        return ",".join(str(each).strip().strip("\"'") for each in given)
    return given


def _at_home(sources: str) -> str:
    return re.sub(r"(?:^|(?<=,))\s*(~[^/,]*)", lambda part: os.path.expanduser(part[1]), sources)


JOINED = pydantic.BeforeValidator(_joined)  # a list becomes a text
# Sources or functions: one or several, with a comma between them, or as a list.
Several = Annotated[Text, JOINED, pydantic.AfterValidator(_at_home)]
Template = Annotated[Lines, at_home]  # a file, a name, or the text itself


def _not_of_system(directory: str) -> str:
    if is_of_system(Path(directory)):
        raise ValueError("belongs to the system; choose another directory")
    return directory


Directory = Annotated[
    str,
    matching(
        r"""(?!-)[^\x00-\x1f\x7f`$"'\\;&|<>]*""",
        "a directory's name must not begin with - or have control characters, quotes or any of "
        "` $ \\ ; & | < >",
    ),
    at_home,
    pydantic.AfterValidator(_not_of_system),
]
Url = Annotated[
    str,
    matching(
        r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[\w.~/-]*[\w.~-])?",
        "give http(s)://HOST:PORT, without a user, a query or a slash at the end",
    ),
]


def _day(given: object) -> str:
    text = str(given)  # a recipe in Python may give a date
    try:
        return text and date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("a day is YYYY-MM-DD") from None


Day = Annotated[str, pydantic.BeforeValidator(_day)]


Placement = Literal["separate", "colocated"]
DataName = Annotated[
    str,
    matching(
        r"\w[\w-]*",
        "a name has letters, digits and _ - only, and begins with a letter, digit or _",
    ),
]
OptionName = Annotated[
    str,
    matching(
        r"[^\W\d]\w*",
        "an option's name has letters, digits and _ only, and begins with a letter or _",
    ),
]

VariableName = Annotated[
    str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name has letters, digits and _ only")
]
# A value on the command line is parsed to a number or truth value; this gives its text back.
VariableText = Annotated[
    Text,
    pydantic.BeforeValidator(
        lambda given: json.dumps(given) if isinstance(given, int | float) else given
    ),
]

GROUP_SIZES = (32, 128)
# A literal number accepts no text, but the command line gives text.
GroupSize = Annotated[
    Literal[32, 128],
    pydantic.BeforeValidator(lambda given: {"32": 32, "128": 128}.get(str(given), given)),
]

OptionValue = str | int | float | bool

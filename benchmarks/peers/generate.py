"""Sample random prompts by transformers or CTranslate2, for `benchmarks.rollout_speed`.

That benchmark calls `serve` in a process of another Python, in which `requirements.txt` is
installed and this project is not.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Sample = Callable[[int, int, int], None]  # takes the prompts, their length, and sampled tokens


def serve(*, engine: str, directory: str, threads: int) -> None:
    """Sample for each line of the input, [batch, prompt length, output length]; answer with a line.

    The first line of the output has the versions of what samples. `directory` has a config.json,
    and keeps the converted random weights of its shape. `engine` is LIBRARY-DTYPE.
    """
    library, _, dtype = engine.partition("-")
    start = {"transformers": with_transformers, "ctranslate2": with_ctranslate2}[library]
    sample, versions = start(Path(directory), dtype, threads)
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        sample(*json.loads(line))
        print("done", flush=True)


def with_transformers(directory: Path, dtype: str, threads: int) -> tuple[Sample, dict[str, str]]:
    """Return a `Sample` by `generate`, which is what TRL calls, and its versions."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    policy = random_policy(directory, getattr(torch, dtype))

    def sample(batch: int, prompt_length: int, output_length: int) -> None:
        prompts = torch.randint(1, policy.config.vocab_size, (batch, prompt_length))
        settings = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=output_length, pad_token_id=0
        )
        mask = torch.ones_like(prompts)
        tokens = policy.generate(prompts, attention_mask=mask, generation_config=settings)
        assert tokens.shape == (batch, prompt_length + output_length)

    return sample, {"transformers": transformers.__version__, "torch": torch.__version__}


def with_ctranslate2(directory: Path, dtype: str, threads: int) -> tuple[Sample, dict[str, str]]:
    """Return a `Sample` by CTranslate2, of weights by its own converter, and its version."""
    import random

    import ctranslate2

    converted = directory / dtype
    if not converted.exists():
        convert(directory, converted, dtype)
    generator = ctranslate2.Generator(
        str(converted), compute_type=dtype, inter_threads=1, intra_threads=threads
    )
    vocabulary = json.loads((converted / "vocabulary.json").read_text())

    def sample(batch: int, prompt_length: int, output_length: int) -> None:
        prompts = [random.choices(vocabulary[2:], k=prompt_length) for _ in range(batch)]
        answers = generator.generate_batch(
            prompts,
            sampling_topk=0,
            sampling_temperature=1.0,
            max_length=output_length,
            min_length=output_length,
            include_prompt_in_result=False,
        )
        assert [len(each.sequences_ids[0]) for each in answers] == [output_length] * batch

    return sample, {"ctranslate2": ctranslate2.__version__}


def convert(directory: Path, converted: Path, dtype: str) -> None:
    """Write random weights of this shape as CTranslate2 has them."""
    import tempfile

    import torch
    from ctranslate2.converters import TransformersConverter
    from transformers import Qwen2Tokenizer

    with tempfile.TemporaryDirectory(dir=directory) as written:
        random_policy(directory, torch.bfloat16).save_pretrained(written)
        vocabulary = {"<unk>": 0, "<|endoftext|>": 1}  # the converter names the other tokens
        Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<unk>").save_pretrained(written)
        TransformersConverter(written).convert(str(converted), quantization=dtype)


def random_policy(directory: Path, dtype: Any) -> Any:
    """Return a model with random weights, whose answers have no end."""
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    policy.generation_config.eos_token_id = None
    return policy.eval()

"""GRPO by TRL, and greedy accuracy by transformers.

`benchmarks.peers` calls these functions in processes of another Python, in which `requirements.txt`
is installed and this project is not.
"""

import json
import re
import time
from pathlib import Path
from typing import Any


def train(
    *,
    model: str,
    problems: str,
    reward: str,
    lines: str,
    directory: str,
    steps: int,
    minibatches: int,
    prompts: int,
    completions: int,
    completion_length: int,
    temperature: float,
    learning_rate: float,
    warmup_steps: int,
    beta2: float,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
    seed: int,
    adapter_rank: int,
    adapter_alpha: float,
) -> None:
    """Train `steps` batches, each with an optimizer step a minibatch; save the model.

    After each batch a line with its mean reward and the tokens a second of its rollout is appended
    to the file `lines`. With a rank above 0, peft's adapters of all linear layers are trained, and
    merged in the end.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
    rewards: list[float] = []
    speeds: list[float] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Notes the tokens a second of each rollout."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            generated = super()._generate_single_turn(*args, **kwargs)
            tokens = sum(map(len, generated[0]))
            speeds[:] = [tokens / (time.perf_counter() - start)]
            return generated

    def credit(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        scores = [float(is_right(reward, text, right)) for text, right in pairs]
        rewards[:] = [sum(scores) / len(scores)]
        return scores

    class Lines(TrainerCallback):  # type: ignore[misc]
        """Appends a line when all minibatches of a batch are done."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % minibatches == 0:
                line = {"reward_mean": rewards[0], "rollout_tokens_per_s": speeds[0]}
                with Path(lines).open("a") as file:
                    file.write(json.dumps(line) + "\n")

    sequences = prompts * completions
    trainer = Timed(
        model=model,
        reward_funcs=credit,
        args=GRPOConfig(
            output_dir=directory,
            max_steps=steps * minibatches,
            per_device_train_batch_size=sequences // minibatches,
            steps_per_generation=minibatches,
            num_generations=completions,
            max_completion_length=completion_length,
            temperature=temperature,
            learning_rate=learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=warmup_steps,
            adam_beta2=beta2,
            max_grad_norm=1.0,
            loss_type="grpo",  # the mean of each answer, then of all
            epsilon=eps_low,
            epsilon_high=eps_high,
            delta=dual_clip,  # likewise: no gradient above it
            gradient_checkpointing=False,  # nothing is computed again here
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to="none",
            seed=seed,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["question"], "answer": row["answer"]} for row in rows]
        ),
        callbacks=[Lines()],
        peft_config=LoraConfig(
            r=adapter_rank, lora_alpha=adapter_alpha, target_modules="all-linear"
        )
        if adapter_rank
        else None,
    )
    trainer.train()
    if adapter_rank:
        trainer.model.merge_and_unload().save_pretrained(directory)
        trainer.processing_class.save_pretrained(directory)
    else:
        trainer.save_model(directory)


def is_right(reward: str, text: str, answer: str) -> bool:
    """Tell whether a text is an answer: the same text, or for `gsm8k_flexible` its last number."""
    if reward == "exact":
        return text.strip() == answer.strip()
    numbers = re.findall(r"-?[0-9.,]*[0-9]", text)
    return bool(numbers) and numbers[-1].replace(",", "") == answer


def accuracy(*, model: str, problems: str, completion_length: int, reward: str) -> None:
    """Print the fraction of problems whose greedy answer is right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = tokenizer([row["question"] for row in rows], return_tensors="pt", padding=True)
    tokens = policy.generate(**inputs, do_sample=False, max_new_tokens=completion_length)
    answers = tokens[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    pairs = zip(texts, rows, strict=True)
    right = [is_right(reward, text, row["answer"]) for text, row in pairs]
    print(sum(right) / len(right))

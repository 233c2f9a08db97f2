"""PPO's critic: a Megatron value model that predicts the return of a completion at each token.

It has the policy's architecture with a scalar head in place of the output layer. It stays in full
precision, is never quantized, and runs on the policy's ranks in its own parallel layout.

Megatron keeps the parallel layout of a process in the globals of one module. Outside this file they
describe the policy's layout. Each call to a `Critic` sets the critic's layout, and then restores
the policy's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.advantages import whiten
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import add_up, token_weights
from qurl_megatron.config.schema import Config
from qurl_megatron.extensions.ppo.values import generalized_advantages, value_loss
from qurl_megatron.learner.learner import Learner
from qurl_megatron.learner.model import PolicyModel
from qurl_megatron.learner.shares import Share
from qurl_megatron.model.architecture import Architecture


class Critic:
    """A value model and its optimizer. Every rank makes the same calls."""

    def __init__(self, config: Config) -> None:
        """Build the value model; a `Learner` must have created the process group before.

        Raises:
            ArchitectureError: the model or the layout cannot be used; one line.
        """
        self._config = config.critic
        self._parallel_state = _without_layout()
        with self._critics_parallel_state():
            self._learner = Learner(
                Path(config.critic.model or config.model),
                config.critic.layout(config.learner),
                config.critic.optimizer,
                model=ValueModel,
                steps=config.steps,
            )

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the returns of `batch`; set its values, returns and advantages.

        Global rank 0 has the batch, the others an empty one.

        Returns:
            The fields `value_loss`, `value_clip_fraction` and `value_explained_variance` of
            `StepMetrics`.
        """
        with self._critics_parallel_state():
            values: list[Tensor] = []  # of each sequence, on global rank 0
            for share in self._shares(batch):
                self._learner.score(share, ["values"], temperature=1.0)
                values += share.collect("values")
            explained_variance = device.from_rank_zero(lambda: self._estimate(batch, values))
            updates = [
                self._learner.update(share, self._loss, temperature=1.0)
                for share in self._shares(batch, "values", "returns")
            ]
        sums = add_up(update.stats for update in updates)
        return {
            "value_loss": sum(update.loss for update in updates) / len(updates),
            "value_clip_fraction": sums["clipped"] / sums["tokens"],
            "value_explained_variance": explained_variance,
        }

    def _shares(self, batch: TrainBatch, *names: str) -> Iterator[Share]:
        """Deal out each minibatch, with its loss weights and these tensors of `batch`."""
        for minibatch in batch.only("left_out", *names).split(
            self._config.optimizer.minibatches_per_step
        ):
            minibatch.loss_weights = token_weights(minibatch, "token_mean")
            yield self._learner.share(minibatch)

    def _estimate(self, batch: TrainBatch, values: list[Tensor]) -> float:
        """Set values, returns and advantages of `batch`; return the explained variance."""
        assert batch.rewards is not None
        batch.values = torch.cat(values)
        advantages, batch.returns = generalized_advantages(
            batch.rewards,
            batch.values,
            batch.loss_mask,
            batch.lengths,
            discount=self._config.discount,
            gae_lambda=self._config.gae_lambda,
        )
        batch.advantages = whiten(advantages, batch.loss_mask)
        variance = batch.returns[batch.loss_mask].var()
        unexplained = (batch.returns - batch.values)[batch.loss_mask].var()
        return float(1 - unexplained / variance) if variance > 0 else 0.0

    def sharded_state(self) -> dict[str, Any]:
        """Return `Learner.sharded_state` with its names prefixed by `critic.`."""
        with self._critics_parallel_state():
            state = self._learner.sharded_state()
        add_prefix_for_sharding(state, "critic.")
        return state

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Load the `sharded_state` after a run's `step`."""
        with self._critics_parallel_state():
            self._learner.restore(state, step)

    def leave(self) -> None:
        """Move to the host's memory, as `Learner.leave` does."""
        with self._critics_parallel_state():
            self._learner.leave()

    def come_back(self) -> None:
        """Move back, bit for bit."""
        with self._critics_parallel_state():
            self._learner.come_back()

    def close(self) -> None:
        """Destroy the process groups that the critic created."""
        with self._critics_parallel_state():
            self._learner.close()

    def _loss(
        self, values: Tensor, batch: TrainBatch, loss_weights: Tensor, _: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None
        return value_loss(
            values, batch.values, batch.returns, loss_weights, value_clip=self._config.value_clip
        )

    @contextmanager
    def _critics_parallel_state(self) -> Iterator[None]:
        policy = _parallel_state()
        vars(parallel_state).update(self._parallel_state)
        try:
            yield
        finally:
            self._parallel_state = _parallel_state()
            vars(parallel_state).update(policy)


class ValueModel(PolicyModel):
    """The policy's layers under a scalar head that is initialized to 0."""

    extra_parameters = frozenset({"output_layer.weight"})

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, virtual_stage: int | None
    ) -> None:
        # Untied: without an output layer, no stage needs another stage's embedding.
        super().__init__(config, replace(architecture, tie_word_embeddings=False), virtual_stage)
        if self.post_process:
            self.output_layer = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )
            torch.nn.init.zeros_(self.output_layer.weight)
            # Megatron then adds up the gradients of the tensor-parallel ranks' tokens.
            self.output_layer.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def score(
        self, hidden: Tensor, rows: TrainBatch, scored: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        """Return values [1, tokens] float32; 0 where the loss mask is False.

        A value is the expected return before the policy samples the token of `rows` at its
        position. Every tensor-parallel rank has the whole head, and its own part of `hidden`
        [tokens / tensor-parallel ranks, 1, hidden].
        """
        values = gather_from_sequence_parallel_region(
            self.output_layer(hidden).float(),
            tensor_parallel_output_grad=False,
            group=self.tp_group,
        )
        return (torch.where(rows.loss_mask, values.view(1, -1), 0.0),)


def _parallel_state(module: ModuleType = parallel_state) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


def _without_layout() -> dict[str, Any]:
    """Return the globals of a fresh copy of Megatron's module: the policy has set its layout."""
    spec = find_spec(parallel_state.__name__)
    assert spec and spec.loader
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return _parallel_state(fresh)

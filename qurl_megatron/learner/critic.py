"""PPO's critic: a Megatron value model that says what a completion is worth as it is written.

It is the policy's architecture with one number a token in place of the vocabulary, in full
precision, and lives on the policy's ranks in a layout of its own. No quantized copy of it is made.

Megatron keeps the layout of a process in the globals of one module. Outside this file they are the
policy's; every call to a `Critic` puts its own there for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qurl_megatron.algorithm.advantages import generalized_advantages, whiten
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import token_weights, value_loss
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.learner import Learner, Policy
from qurl_megatron.model.architecture import Architecture


@dataclass(frozen=True)
class CriticMetrics:
    """What a step's values were like, before their update, and what the update did."""

    value_loss: float  # mean over minibatches
    value_clip_fraction: float  # of tokens, no gradient because of the clip
    value_explained_variance: float  # 1 - Var(return - value) / Var(return); 0 is a constant's


class Critic:
    """A value model and its optimizer. Every rank makes the same calls with the same batch."""

    def __init__(self, config: Config) -> None:
        """Build it beside a `Learner`, which has made the process group.

        Raises:
            ArchitectureError: the model or the layout does not fit; one line.
        """
        self._config = config.critic
        self._parallel_state = _EMPTY
        with self._own_parallel_state():
            self._learner = Learner(
                Path(config.critic.model or config.model),
                config.critic.layout(config.learner),
                config.critic.optimizer,
                model=ValueModel,
            )

    def step(self, batch: TrainBatch) -> CriticMetrics:
        """Give `batch` its values, returns and advantages, then learn from the returns."""
        mask = batch.loss_mask
        with self._own_parallel_state():
            batch.values = self._learner.values(batch.tokens, mask)
            advantages, batch.returns = generalized_advantages(
                batch.rewards,
                batch.values,
                mask,
                discount=self._config.discount,
                gae_lambda=self._config.gae_lambda,
            )
            batch.advantages = whiten(advantages, mask)
            updates = [
                self._learner.update(
                    minibatch,
                    token_weights(minibatch.loss_mask, "token_mean"),
                    self._loss,
                    temperature=1.0,
                )
                for minibatch in batch.split(self._config.optimizer.minibatches_per_step)
            ]
        variance = batch.returns[mask].var()
        unexplained = (batch.returns - batch.values)[mask].var()
        return CriticMetrics(
            value_loss=sum(update.loss for update in updates) / len(updates),
            value_clip_fraction=sum(update.stats["clipped"] for update in updates)
            / sum(update.stats["tokens"] for update in updates),
            value_explained_variance=float(1 - unexplained / variance) if variance > 0 else 0.0,
        )

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """As `Learner.sharded_state`, under names of its own."""
        with self._own_parallel_state():
            state = self._learner.sharded_state(loading=loading)
        add_prefix_for_sharding(state, "critic.")
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a loaded `sharded_state`."""
        with self._own_parallel_state():
            self._learner.restore(state)

    def close(self) -> None:
        """Leave no process group of the critic's making."""
        with self._own_parallel_state():
            self._learner.close()

    def _loss(
        self, values: Tensor, batch: TrainBatch, loss_weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None
        return value_loss(
            values, batch.values, batch.returns, loss_weights, value_clip=self._config.value_clip
        )

    @contextmanager
    def _own_parallel_state(self) -> Iterator[None]:
        policy = _parallel_state()
        vars(parallel_state).update(self._parallel_state)
        try:
            yield
        finally:
            self._parallel_state = _parallel_state()
            vars(parallel_state).update(policy)


class ValueModel(Policy):
    """The policy's layers under one number a token; it begins at 0 everywhere."""

    own_parameters = frozenset({"output_layer.weight"})

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, virtual_stage: int | None
    ) -> None:
        # Untied: no stage needs the embedding of another.
        super().__init__(config, replace(architecture, tie_word_embeddings=False), virtual_stage)
        if self.post_process:
            self.output_layer = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )
            torch.nn.init.zeros_(self.output_layer.weight)

    def score(self, hidden: Tensor, rows: TrainBatch, temperature: float) -> tuple[Tensor, ...]:
        """Values [rows, time] float32 of the masked-in positions, elsewhere 0.

        Position t is what is expected before token t is sampled. Every tensor-parallel rank holds
        the whole head and the whole `hidden`.
        """
        mask = rows.loss_mask
        values = self.output_layer(hidden.transpose(0, 1)[mask[:, 1:]]).float().squeeze(1)
        return (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values),)


def _parallel_state() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


_EMPTY = _parallel_state()  # as Megatron begins

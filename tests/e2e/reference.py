"""Models in plain PyTorch that compute with the tensors a server was sent."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A server is at least this many times nearer to the reference with its own codes than to others.
# The measured ratio is usually hundreds, and 9.5 in the worst of many runs (fp8-block, where
# activation codes flip). A GPU sums attention and logits in BF16, which adds noise.
NEARER = 3 if torch.cuda.is_available() else 5

Weights = dict[str, Tensor]


class Reference:
    """A Qwen2, or Qwen3-MoE, in plain PyTorch that computes with the tensors a server was sent.

    Activations are rounded to bfloat16 where the server rounds them. A difference there could flip
    an activation's code, which changes the log-probs as much as quantization itself.
    """

    def __init__(
        self,
        model_dir: Path,
        weights: Weights,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: torch.dtype = torch.bfloat16,
        expert_parallel_size: int = 1,
    ) -> None:
        self._config = json.loads((model_dir / "config.json").read_text())
        self._weights = weights
        self._ranks = tensor_parallel_size
        self._kv_cache_dtype = kv_cache_dtype
        self._expert_groups = expert_parallel_size
        self.routed_experts: list[Tensor] = []  # by layer, of the last call: [time, top_k] int64

    def logprobs(
        self, prompt: list[int], completion: list[int], temperature: float = 1.0
    ) -> Tensor:
        """Return the natural log-probs of the completion's tokens: float32 `[completion]`."""
        logits = self.logits(torch.tensor(prompt + completion))[len(prompt) - 1 : -1]
        scaled = (logits / temperature).log_softmax(-1)
        return scaled.gather(1, torch.tensor(completion)[:, None])[:, 0]

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens `[time]`: float32 `[time, vocabulary]`."""
        branch = self._embed(tokens)
        stream = torch.zeros_like(branch)
        self.routed_experts = []
        for layer in range(self._config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            hidden, stream = self._add_and_norm(stream, branch, f"{path}.input_layernorm")
            branch = self._attention(hidden, f"{path}.self_attn")
            hidden, stream = self._add_and_norm(stream, branch, f"{path}.post_attention_layernorm")
            if f"{path}.mlp.gate.weight" in self._weights:
                branch = self._experts(hidden, f"{path}.mlp")
                continue
            gate = silu(self._linear(hidden, f"{path}.mlp.gate_proj"))
            up = self._linear(hidden, f"{path}.mlp.up_proj")
            branch = self._row_parallel(gate * up, f"{path}.mlp.down_proj")
        hidden, _ = self._add_and_norm(stream, branch, "model.norm")
        return self._unembed(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._weights["model.embed_tokens.weight"][tokens]

    def _unembed(self, hidden: Tensor) -> Tensor:
        embedding = self._weights["model.embed_tokens.weight"]
        return hidden.float() @ self._weights.get("lm_head.weight", embedding).float().t()

    def _add_and_norm(self, stream: Tensor, branch: Tensor, name: str) -> tuple[Tensor, Tensor]:
        total = stream.float() + branch.float()
        return self._norm(total, name), total.bfloat16()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return (normed * self._weights[f"{name}.weight"]).bfloat16()

    def _attention(self, hidden: Tensor, path: str) -> Tensor:
        size = self._config["head_dim"]
        query, key, value = (
            self._linear(hidden, f"{path}.{name}_proj").unflatten(-1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        if f"{path}.q_norm.weight" in self._weights:
            query, key = self._norm(query, f"{path}.q_norm"), self._norm(key, f"{path}.k_norm")
        out = scaled_dot_product_attention(
            self._rotate(query).float(),
            self._rotate(key).to(self._kv_cache_dtype).float(),
            value.to(self._kv_cache_dtype).float(),
            is_causal=True,
            enable_gqa=True,
        )
        return self._row_parallel(out.transpose(0, 1).flatten(1).bfloat16(), f"{path}.o_proj")

    def _experts(self, hidden: Tensor, path: str) -> Tensor:
        """Sum over each token's experts; each group of ranks has a part of all experts.

        The ranks of a group share each expert's channels, and round their sums to bfloat16.
        """
        scores = self._linear(hidden, f"{path}.gate").float().softmax(-1)
        weights, chosen = scores.topk(self._config["num_experts_per_tok"])
        weights /= weights.sum(-1, keepdim=True)
        self.routed_experts.append(chosen)
        num_experts = scores.shape[-1]
        per_group = num_experts // self._expert_groups
        sharing = self._ranks // self._expert_groups
        width = self._config["moe_intermediate_size"] // sharing
        sums = []
        for first in range(0, num_experts, per_group):
            sums += [torch.zeros(hidden.shape, dtype=torch.float64) for _ in range(sharing)]
            for expert in range(first, first + per_group):
                tokens, place = torch.where(chosen == expert)
                x, name = hidden[tokens], f"{path}.experts.{expert}"
                gate = silu(self._linear(x, f"{name}.gate_proj").float())
                product = (gate * self._linear(x, f"{name}.up_proj").float()).bfloat16()
                for rank, total in enumerate(sums[-sharing:]):
                    part = slice(rank * width, (rank + 1) * width)
                    down = self._linear(product[:, part], f"{name}.down_proj", part).double()
                    total.index_add_(0, tokens, down * weights[tokens, place, None])
        return torch.stack([total.bfloat16() for total in sums]).sum(dim=0)

    def _rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary position embeddings to `[heads, time, head_dim]`."""
        size, theta = heads.shape[-1], self._config["rope_parameters"]["rope_theta"]
        frequency = 1.0 / theta ** (torch.arange(0, size, 2) / size)
        angle = torch.arange(heads.shape[1])[:, None] * frequency
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def _linear(self, x: Tensor, name: str, columns: slice = slice(None)) -> Tensor:
        """Map `[time, in]` to `[time, out]` in float64, with codes if the weight has scales."""
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        scale = self._weights.get(f"{name}.weight_scale")
        if weight.dtype == torch.uint8:  # INT4, two codes a byte
            assert scale is not None
            codes = torch.stack([weight % 16, weight // 16], dim=2).flatten(1).float() - 8
            weight = codes.unflatten(1, (scale.shape[1], -1)) * scale[:, :, None].float()
            weight, scale = weight.flatten(1).bfloat16(), None
        weight, x = weight[:, columns], x.float()
        block_scale = self._weights.get(f"{name}.weight_scale_inv")
        if scale is not None:
            codes, x_scale = self._codes(x, weight.dtype)
            out = codes.double() @ weight.double().t() * x_scale * scale.t()
        elif block_scale is not None:
            first, *_ = columns.indices(block_scale.shape[1] * 128)
            out = self._block_product(x, weight, block_scale[:, first // 128 :])
        else:
            out = x.double() @ weight.double().t()
        return (out if bias is None else out + bias.double()).bfloat16()

    @staticmethod
    def _codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the codes of x `[time, in]` and one scale per row."""
        scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE[dtype]
        codes = x / scale
        return codes.round() if dtype == torch.int8 else codes.to(dtype), scale

    def _block_product(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Multiply by each 128 x 128 block of the weight, with the scales of both factors."""
        out = torch.zeros(len(x), len(weight), dtype=torch.float64)
        for column, x_block in enumerate(x.split(128, dim=1)):
            codes, x_scale = self._codes(x_block, weight.dtype)
            weight_blocks = weight[:, column * 128 : (column + 1) * 128].split(128)
            for row, weight_block in enumerate(weight_blocks):
                product = codes.double() @ weight_block.double().t()
                out[:, row * 128 : (row + 1) * 128] += product * x_scale * scale[row, column]
        return out

    def _row_parallel(self, x: Tensor, name: str) -> Tensor:
        """Sum over ranks; each quantizes its part of x and rounds its product."""
        width = x.shape[1] // self._ranks
        columns = [slice(start, start + width) for start in range(0, x.shape[1], width)]
        return torch.stack([self._linear(x[:, part], name, part) for part in columns]).sum(dim=0)


class MixedReference(Reference):
    """A `Reference` in which every position computes with the weights of its own version.

    Positions attend to keys and values of other versions, like requests that keep theirs while a
    server is updated.
    """

    def __init__(
        self,
        model_dir: Path,
        weights: dict[int, Weights],
        versions: Tensor,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Store the weights by version, and the version of each position: `[time]`."""
        self._parts = [
            (versions == version, Reference(model_dir, weights[version], tensor_parallel_size))
            for version in sorted(set(versions.tolist()))
        ]
        super().__init__(model_dir, {}, tensor_parallel_size)

    def _select(self, compute: Callable[[Reference], Tensor]) -> Tensor:
        """Return the rows that each version's reference computes for its positions."""
        rows = [(is_own, compute(reference)) for is_own, reference in self._parts]
        out = torch.empty_like(rows[0][1])
        for is_own, computed in rows:
            out[is_own] = computed[is_own]
        return out

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._select(lambda reference: reference._embed(tokens))

    def _unembed(self, hidden: Tensor) -> Tensor:
        return self._select(lambda reference: reference._unembed(hidden))

    def _linear(self, x: Tensor, name: str, columns: slice = slice(None)) -> Tensor:
        return self._select(lambda reference: reference._linear(x, name, columns))

    def _add_and_norm(self, stream: Tensor, branch: Tensor, name: str) -> tuple[Tensor, Tensor]:
        normed = self._select(lambda reference: reference._add_and_norm(stream, branch, name)[0])
        return normed, self._parts[0][1]._add_and_norm(stream, branch, name)[1]

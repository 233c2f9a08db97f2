"""Models in plain PyTorch that compute with the tensors a server was sent."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv1d, scaled_dot_product_attention, sigmoid, silu, softplus

from qurl_megatron.model.delta_rule import chunk_plan, gated_delta_rule

MIXED = ("query", "key", "value")  # the parts of what a linear attention convolves
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A server is at least this many times nearer to the reference with its own codes than to others.
# The measured ratio is usually hundreds, and 9.5 in the worst of many runs (fp8-block, where
# activation codes flip). A GPU sums attention and logits in BF16, which adds noise.
NEARER = 3 if torch.cuda.is_available() else 5

Weights = dict[str, Tensor]


class Reference:
    """A Qwen2, Qwen3-MoE or Qwen3.5 in plain PyTorch that computes with what a server was sent.

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
        self._is_hybrid = "linear_num_value_heads" in self._config
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
        num_layers = self._config["num_hidden_layers"]
        kinds = self._config.get("layer_types") or ["full_attention"] * num_layers
        for layer, kind in enumerate(kinds):
            path = f"model.layers.{layer}"
            hidden, stream = self._add_and_norm(stream, branch, f"{path}.input_layernorm")
            if kind == "linear_attention":
                branch = self._linear_attention(hidden, f"{path}.linear_attn")
            else:
                branch = self._attention(hidden, f"{path}.self_attn")
            hidden, stream = self._add_and_norm(stream, branch, f"{path}.post_attention_layernorm")
            if f"{path}.mlp.gate.weight" in self._weights:
                branch = self._experts(hidden, f"{path}.mlp")
            else:
                branch = self._mlp(hidden, f"{path}.mlp").sum(dim=0)
        hidden, _ = self._add_and_norm(stream, branch, "model.norm")
        return self._unembed(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._weights["model.embed_tokens.weight"][tokens]

    def _unembed(self, hidden: Tensor) -> Tensor:
        embedding = self._weights["model.embed_tokens.weight"]
        return hidden.float() @ self._weights.get("lm_head.weight", embedding).float().t()

    def _add_and_norm(self, stream: Tensor, branch: Tensor, name: str) -> tuple[Tensor, Tensor]:
        total = stream.float() + branch.float()
        if self._is_hybrid:
            total = total.bfloat16()
        return self._norm(total, name), total.bfloat16()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"].float()
        return (self._normed(x) * (1 + weight if self._is_hybrid else weight)).bfloat16()

    def _normed(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"])

    def _attention(self, hidden: Tensor, path: str) -> Tensor:
        size = self._config["head_dim"]
        query, key, value = (
            self._linear(hidden, f"{path}.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv"
        )
        gate = None
        if self._is_hybrid:  # each head's queries, then its gates
            query, gate = query[:, ::2], query[:, 1::2]
        if self._is_hybrid or f"{path}.q_norm.weight" in self._weights:
            query, key = self._norm(query, f"{path}.q_norm"), self._norm(key, f"{path}.k_norm")
        query, key, value = (heads.transpose(0, 1) for heads in (query, key, value))
        out = scaled_dot_product_attention(
            self._rotate(query).float(),
            self._rotate(key).to(self._kv_cache_dtype).float(),
            value.to(self._kv_cache_dtype).float(),
            is_causal=True,
            enable_gqa=True,
        )
        out = out.transpose(0, 1).bfloat16()
        if gate is not None:
            out = (out.float() * sigmoid(gate.float())).bfloat16()
        return self._row_parallel(out.flatten(1), f"{path}.o_proj").sum(dim=0)

    def _linear_attention(self, hidden: Tensor, path: str) -> Tensor:
        key_dim, value_dim = (self._config[f"linear_{x}_head_dim"] for x in ("key", "value"))
        mixed = [self._linear(hidden, f"{path}.in_proj_qkv:{part}") for part in MIXED]
        mixed = [self._convolve(x, f"{path}.conv1d:{p}") for x, p in zip(mixed, MIXED, strict=True)]
        sizes = key_dim, key_dim, value_dim
        query, key, value = (
            x.unflatten(1, (-1, size)) for x, size in zip(mixed, sizes, strict=True)
        )
        decay = self._decay(self._linear(hidden, f"{path}.in_proj_a"), path)
        beta = sigmoid(self._linear(hidden, f"{path}.in_proj_b")).float()
        plan = chunk_plan((0, len(hidden)), hidden.device)
        out = gated_delta_rule(query, key, value, decay, beta, plan)[0].bfloat16()
        gate = self._linear(hidden, f"{path}.in_proj_z").unflatten(1, (-1, value_dim))
        out = self._gated_norm(out, gate, f"{path}.norm").flatten(1)
        return self._row_parallel(out, f"{path}.out_proj").sum(dim=0)

    def _convolve(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"].float()
        width = weight.shape[1]
        padded = torch.nn.functional.pad(x.float().T, (width - 1, 0))
        return silu(conv1d(padded, weight[:, None], groups=len(weight))).T.bfloat16()

    def _decay(self, a: Tensor, path: str) -> Tensor:
        rates = softplus(a.float() + self._weights[f"{path}.dt_bias"].float())
        return -self._weights[f"{path}.A_log"].exp() * rates

    def _gated_norm(self, x: Tensor, gate: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"].float()
        return (self._normed(x) * weight * silu(gate.float())).bfloat16()

    def _mlp(self, hidden: Tensor, path: str) -> Tensor:
        """Return what each rank adds: bfloat16 `[ranks, time, hidden]`."""
        gate = silu(self._linear(hidden, f"{path}.gate_proj"))
        return self._row_parallel(
            gate * self._linear(hidden, f"{path}.up_proj"), f"{path}.down_proj"
        )

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
        ranks = torch.stack([total.bfloat16() for total in sums])
        if self._is_hybrid:
            gate = hidden.float() @ self._weights[f"{path}.shared_expert_gate.weight"].float().T
            ranks = ranks.float() + sigmoid(gate) * self._mlp(hidden, f"{path}.shared_expert")
        return ranks.bfloat16().sum(dim=0)

    def _rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary position embeddings to the first channels of `[heads, time, head_dim]`."""
        fields = self._config["rope_parameters"]
        theta, share = fields["rope_theta"], fields.get("partial_rotary_factor", 1.0)
        size = int(heads.shape[-1] * share)
        heads, rest = heads.split([size, heads.shape[-1] - size], dim=-1)
        frequency = 1.0 / theta ** (torch.arange(0, size, 2) / size)
        angle = torch.arange(heads.shape[1])[:, None] * frequency
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)

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
        """Return the product of each rank, which quantizes its part of x and rounds."""
        width = x.shape[1] // self._ranks
        columns = [slice(start, start + width) for start in range(0, x.shape[1], width)]
        return torch.stack([self._linear(x[:, part], name, part) for part in columns])


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

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._select(lambda reference: reference._norm(x, name))

    def _convolve(self, x: Tensor, name: str) -> Tensor:
        return self._select(lambda reference: reference._convolve(x, name))

    def _decay(self, a: Tensor, path: str) -> Tensor:
        return self._select(lambda reference: reference._decay(a, path))

    def _gated_norm(self, x: Tensor, gate: Tensor, name: str) -> Tensor:
        return self._select(lambda reference: reference._gated_norm(x, gate, name))

    def _linear(self, x: Tensor, name: str, columns: slice = slice(None)) -> Tensor:
        return self._select(lambda reference: reference._linear(x, name, columns))

"""Check planned times of steps and rollouts against published and hand-computed numbers."""

import dataclasses
import random
from statistics import fmean
from typing import Any

import pytest

from published import PARAMETERS
from qurl_megatron.config.gpus import Gpu, Node
from qurl_megatron.config.schema import Config, LearnerConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.planning import step_time
from qurl_megatron.extensions.planning.lengths import CompletionLengths, Workload
from qurl_megatron.extensions.planning.plan import plan
from qurl_megatron.extensions.planning.rollout_time import (
    ServerLoad,
    rollout_s,
    server_load,
    steady_state,
)
from qurl_megatron.extensions.planning.step_time import HBM_EFFICIENCY, PRODUCT_EFFICIENCY
from qurl_megatron.memory import estimate as memory
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes.scaling_32b import study

QWEN2, QWEN3 = KNOWN_MODELS["Qwen2.5-32B"], KNOWN_MODELS["Qwen3-32B"]
QWEN3_8B = dataclasses.replace(
    QWEN3, num_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32
)
# Weights of Qwen2.5-32B: in the linear layers of a block, of all blocks, and in the output layer.
LAYER = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27648 * 5120
LINEAR = 64 * LAYER
OUTPUT = 152064 * 5120
HBM = 3.35e12  # H100 datasheet, as are 989 and 1979 TFLOP/s below


def load_of(servers: int = 4, slots: int = 200, mean: float = 4096) -> ServerLoad:
    """Return the share of 2048 completions to 256 prompts of 512 tokens, on servers of 4 GPUs."""
    config = study("", 64, "int8")
    config.rollout.servers = servers
    return server_load(QWEN2, config, Workload(512, mean), slots, publish_s=0.0)


@pytest.mark.parametrize(
    ("architecture", "weight_format", "gpus", "sequences", "context", "latency_ms", "tolerance"),
    [
        # vLLM 0.30, github.com/tgarg01/silybench-data: 6 of the 26 that the constants fit.
        (QWEN3_8B, "bf16", 1, 1, 640, 6.858, 0.04),
        (QWEN3_8B, "bf16", 1, 256, 640, 18.084, 0.04),
        (QWEN3_8B, "bf16", 1, 10, 8448, 11.779, 0.04),
        (QWEN3_8B, "fp8", 1, 1, 640, 4.662, 0.04),
        (QWEN3_8B, "fp8", 1, 256, 640, 16.129, 0.04),
        (QWEN3_8B, "fp8", 1, 48, 3072, 12.252, 0.04),
        # Nothing is fitted to these: ML.ENERGY leaderboard, gpqa, about 7000 output tokens.
        (QWEN3, "bf16", 2, 8, 7000, 16.72, 0.12),
        (QWEN3, "bf16", 2, 64, 7000, 32.28, 0.12),
    ],
)
def test_token_latency_is_near_published_ones(
    architecture: Architecture,
    weight_format: Any,
    gpus: int,
    sequences: int,
    context: int,
    latency_ms: float,
    tolerance: float,
) -> None:
    """`context` tokens per sequence; `benchmarks/plan.py` has all published latencies."""
    planned_s = step_time.decode_s(
        architecture, weight_format, gpus, sequences, sequences * context
    )
    assert 1000 * planned_s == pytest.approx(latency_ms, rel=tolerance)


def test_more_servers_or_slots_shorten_a_rollout_and_longer_completions_lengthen_it() -> None:
    by_servers = [rollout_s(load_of(servers=servers)) for servers in range(1, 65)]
    assert by_servers == sorted(by_servers, reverse=True)
    by_slots = [rollout_s(load_of(slots=slots)) for slots in (16, 32, 64, 128, 256)]
    assert by_slots == sorted(by_slots, reverse=True)
    by_length = [rollout_s(load_of(mean=mean)) for mean in (512, 1024, 4096, 6000, 8192)]
    assert by_length == sorted(by_length)


def test_no_rollout_is_shorter_than_its_longest_completion() -> None:
    """With one sequence per server, 8192 tokens follow one another."""
    alone = 8192 * step_time.decode_s(QWEN2, "int8", 4, 1, 512 + 4096)
    assert rollout_s(load_of(servers=2048, mean=8192)) == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("slots", [100, 200, 512])
def test_a_rollout_decodes_every_token_once_and_reads_its_context(slots: int) -> None:
    """If decoding takes a second per sequence, 512 completions of 4096 tokens take 512 x 4096 s.

    A completion of L tokens after 512 reads 512 L + L^2 / 2 tokens of KV cache.
    """
    load = dataclasses.replace(load_of(slots=slots), prompts_s=0.0)
    decode = dataclasses.replace(load, token_s=lambda sequences, age: sequences)
    assert rollout_s(decode) == pytest.approx(512 * 4096, rel=1e-3)
    read = dataclasses.replace(load, token_s=lambda sequences, age: sequences * (512 + age))
    square = CompletionLengths(4096, 8192, 1.0).mean_square
    assert rollout_s(read) == pytest.approx(512 * (512 * 4096 + square / 2), rel=1e-3)


def test_waiting_sequences_prolong_a_rollout_by_their_turns_and_prompts_are_read_once() -> None:
    """If a token takes a second, 512 sequences in 200 slots take 312 x 4096 / 200 s more.

    A server reads 64 prompts of 512 tokens, one per group, at 2 FLOPs per weight on four GPUs.
    """
    prompts_s = 2 * LINEAR * 64 * 512 / (4 * 1979e12 * PRODUCT_EFFICIENCY["8-bit"])
    for slots, waited_s in ((512, 0), (200, 312 * 4096 / 200)):
        load = dataclasses.replace(load_of(slots=slots), token_s=lambda sequences, age: 1.0)
        assert rollout_s(load) == pytest.approx(prompts_s + 8192 + waited_s, rel=1e-9)


def test_a_token_of_a_servers_load_reads_prompts_and_completions() -> None:
    planned_s = load_of().token_s(16, 1000)
    assert planned_s == step_time.decode_s(QWEN2, "int8", 4, 16, 16 * 1512)


def test_a_token_for_one_sequence_reads_the_weights_once() -> None:
    """BF16 on one GPU: 2 B per weight at the efficiency of HBM, and overheads."""
    expected = 2 * (LINEAR + OUTPUT) / (HBM * HBM_EFFICIENCY["weights"])
    expected += 64 * step_time.LAYER_S + step_time.SEQUENCE_S
    assert step_time.decode_s(QWEN2, "bf16", 1, 1, 0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("sequences", "compute_bound"), [(16, False), (256, True)])
def test_decoding_is_limited_by_memory_or_by_products(sequences: int, compute_bound: bool) -> None:
    """INT8 on four GPUs, 4608 tokens of context per sequence, two all-reduces per layer."""
    # Scales of q, k, v, gate and up are divided; those of o and down are on every GPU.
    scales = 64 * ((5120 + 2 * 1024 + 2 * 27648) // 4 + 2 * 5120)
    if compute_bound:
        expected = 2 * sequences * LINEAR / 4 / (1979e12 * PRODUCT_EFFICIENCY["8-bit"])
        expected += 2 * sequences * OUTPUT / 4 / (989e12 * PRODUCT_EFFICIENCY["bf16"])
    else:
        expected = (LINEAR / 4 + 4 * scales + 2 * OUTPUT / 4) / (HBM * HBM_EFFICIENCY["weights"])
    expected += sequences * 4608 * 2**16 / (HBM * HBM_EFFICIENCY["kv"])
    expected += 64 * step_time.LAYER_S + sequences * step_time.SEQUENCE_S
    ring_s = 2 * 3 / 4 * 2 * sequences * 5120 / 450e9
    expected += 2 * 64 * (step_time.ALL_REDUCE_S + ring_s)
    planned = step_time.decode_s(QWEN2, "int8", 4, sequences, sequences * 4608)
    assert planned == pytest.approx(expected, rel=1e-6)


def learner_config(**sizes: Any) -> Config:
    sizes = {"layers_in_last_pipeline_stage": "none", **sizes}
    return with_overrides(
        study("", 64, "int8"), [f"learner.{name}={value}" for name, value in sizes.items()]
    )


# Each of 2048 sequences has 100 + 900 tokens. 389 TFLOP/s is NeMo's published rate of a learner.
WORKLOAD = Workload(100, 900, log_deviation=1e-6)
LAYER_FLOPS = 2048 * (2 * LINEAR * 1000 + 64 * 2 * 1000**2 * 5120)
OUTPUT_FLOPS = 2048 * 900 * 2 * OUTPUT


def test_a_pass_takes_two_operations_per_weight_and_token() -> None:
    """One GPU: an update is three passes, and four of the output layer."""
    config = learner_config(tensor_parallel_size=1, pipeline_parallel_size=1)
    config.objective.kl_coefficient = 0
    layers, output = LAYER_FLOPS / 389e12, OUTPUT_FLOPS / 389e12
    times = step_time.learner_time(QWEN2, config, WORKLOAD)
    assert times.proximal == pytest.approx(layers + output, rel=1e-6)
    optimizer = 2 * 2 * 16 * PARAMETERS["Qwen2.5-32B"] / HBM
    assert times.update == pytest.approx(3 * layers + 4 * output + optimizer, rel=1e-6)
    # A reference takes a pass of its own; with one minibatch it is the only one before the update.
    config.objective.kl_coefficient = 1e-3
    assert proximal_s(config) == pytest.approx(2 * times.proximal, rel=1e-6)
    config.optimizer.minibatches_per_step = 1
    assert proximal_s(config) == pytest.approx(times.proximal, rel=1e-6)
    config.objective.kl_coefficient = 0
    assert proximal_s(config) == 0


def proximal_s(config: Config) -> float:
    return step_time.learner_time(QWEN2, config, WORKLOAD).proximal


def test_parallel_passes_have_all_reduces_and_a_pipeline_bubble() -> None:
    """TP 2 x PP 4 x DP 2, two virtual stages, recomputation, 2 minibatches of 512 micro batches."""
    config = learner_config(
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        data_parallel_size=2,
        virtual_pipeline_parallel_size=2,
        recompute="full",
    )
    config.objective.kl_coefficient = 0
    # Two all-reduces per layer of 2 B x 5120 for half of the tokens; 16 layers per stage.
    all_reduces = 2 * 16 * (2 * 1 / 2) * 2 * 5120 * (2048 * 1000 / 2) / 450e9
    layers = LAYER_FLOPS / (16 * 389e12) + all_reduces
    output = OUTPUT_FLOPS / (4 * 389e12)  # on the four ranks of the last stage
    times = step_time.learner_time(QWEN2, config, WORKLOAD)
    assert times.proximal == pytest.approx((layers + output) * (1 + 3 / (1024 * 2)), rel=1e-6)
    # The last stage has half of the output layer, the final norm, and 16 layers: half of their
    # weights and biases, and two norms each.
    numel = OUTPUT / 2 + 5120 + 16 * ((LAYER + 5120 + 2 * 1024) / 2 + 2 * 5120)
    # A minibatch scatters half of the 4-byte gradients and gathers half of the 2-byte weights.
    gradients = 2 * (1 / 2) * (4 + 2) * numel / 50e9
    optimizer = 2 * 2 * 16 * (numel / 2) / HBM
    expected = (4 * layers + 4 * output) * (1 + 3 / (512 * 2)) + gradients + optimizer
    assert times.update == pytest.approx(expected, rel=1e-6)


def test_recomputation_and_offload_take_their_own_time() -> None:
    """One replica on TP 2 x PP 4, two minibatches; each stage has 16 layers."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    bubble = 1 + 3 / 1024

    def update_s(**fields: Any) -> float:
        config = learner_config(**sizes, **fields)
        return step_time.learner_time(QWEN2, config, WORKLOAD).update

    all_reduces = 2 * 16 * (2 * 1 / 2) * 2 * 5120 * 2048 * 1000 / 450e9
    layer_s = (LAYER_FLOPS / (8 * 389e12) + all_reduces) / 16
    kept = update_s()
    assert update_s(recompute="full") - kept == pytest.approx(16 * layer_s * bubble, rel=1e-6)
    in_three = update_s(recompute="full", recompute_layers=3) - kept
    assert in_three == pytest.approx(3 * layer_s * bubble, rel=1e-6)
    assert update_s(recompute="selective") == kept
    numel = OUTPUT / 2 + 5120 + 16 * ((LAYER + 5120 + 2 * 1024) / 2 + 2 * 5120)
    copies = 2 * 2 * 12 * numel / 64e9  # 12 B there and back, for each minibatch
    assert update_s(offload_optimizer="true") - kept == pytest.approx(copies, rel=1e-6)


def test_a_batch_reads_the_experts_that_its_sequences_choose() -> None:
    """One sequence reads 8 of 128 experts, 512 sequences all; each multiplies by its own 8."""
    architecture = KNOWN_MODELS["Qwen3-30B-A3B"]
    of_gpu = memory.server_weight_bytes(architecture, "int8", 1)
    one = step_time.decode_s(architecture, "int8", 1, 1, 0)
    two = step_time.decode_s(architecture, "int8", 1, 2, 0)
    # The second sequence chooses experts that the first did not with probability 15/16.
    efficiency = step_time.EXPERT_DECODE["8-bit"].hbm_efficiency
    further = of_gpu["experts"] * (8 / 128) * (15 / 16) / (HBM * efficiency)
    assert two - one == pytest.approx(further + step_time.SEQUENCE_S, rel=1e-6)


def test_tokens_go_to_their_experts_and_back_over_the_links_of_the_layout() -> None:
    """Each of 8 choices goes and returns, 7/8 of them to other ranks; 16 ranks are two nodes.

    They are sorted by expert, and back: each copy is written and read twice.
    """
    architecture = KNOWN_MODELS["Qwen3-30B-A3B"]
    num_bytes = 2 * 8 * (1000 / 2) * 2 * 2048
    of_eight = LearnerConfig(tensor_parallel_size=2, data_parallel_size=4, expert_parallel_size=8)
    of_two_nodes = dataclasses.replace(of_eight, data_parallel_size=8, expert_parallel_size=16)
    whole = dataclasses.replace(of_eight, expert_parallel_size=1)
    for learner, sent_s in (
        (of_eight, num_bytes * 7 / 8 / 450e9),
        (of_two_nodes, num_bytes * 8 / 16 / 50e9),  # half of them stay in the node
        (whole, 0),
    ):
        seconds = step_time.exchange_with_experts_s(architecture, learner, 1000)
        assert seconds == pytest.approx(sent_s + 2 * num_bytes / HBM)


def test_an_update_sends_tokens_to_their_experts_and_back_twice() -> None:
    """512 sequences of 1000 tokens on eight ranks, which share the experts or all have them."""
    architecture = KNOWN_MODELS["Qwen3-30B-A3B"]
    config = learner_config(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=8)
    config.objective.kl_coefficient = 0
    config.rollout.prompts_per_step = 64
    config.optimizer.minibatches_per_step = 1

    def passes_s(experts: int) -> float:
        learner = dataclasses.replace(config.learner, expert_parallel_size=experts)
        sampled = dataclasses.replace(config, learner=learner)
        empty = dataclasses.replace(sampled.rollout, prompts_per_step=0)
        times = [
            step_time.learner_time(architecture, of_prompts, WORKLOAD).update
            for of_prompts in (sampled, dataclasses.replace(sampled, rollout=empty))
        ]
        return times[0] - times[1]

    copied_bytes = 2 * 8 * 2 * 2048 * 512 * 1000 / 8
    sent_s = 2 * 48 * copied_bytes * 7 / 8 / 450e9
    assert passes_s(8) - passes_s(1) == pytest.approx(sent_s, rel=1e-6)


def test_a_node_of_faster_gpus_and_links_leaves_only_overheads() -> None:
    """With endless rates, a token takes the host's and the kernels' time and a pass takes none."""
    endless = Node(Gpu("endless", (9, 0), 2**40, *[1e30] * 6))
    for name in ("Qwen2.5-32B", "Qwen3-30B-A3B"):
        architecture = KNOWN_MODELS[name]
        config = learner_config(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            recompute="selective",
            offload_optimizer="true",
        )
        times_s = [
            step_time.learner_time(architecture, config, WORKLOAD, endless).total,
            step_time.plan_publish(architecture, config, endless).time_s,
            step_time.prefill_s(architecture, "int8", 4, 1e6, endless),
        ]
        assert 0 < max(times_s) < 1e-9
        load = server_load(architecture, config, WORKLOAD, 256, 0.0, endless)
        experts = step_time.EXPERT_DECODE["8-bit"].layer_s if architecture.num_experts else 0
        layer_s = step_time.LAYER_S + experts + 2 * step_time.ALL_REDUCE_S
        expected = architecture.num_layers * layer_s + 16 * step_time.SEQUENCE_S
        assert load.token_s(16, 1000) == pytest.approx(expected)


def test_an_eight_bit_kv_cache_halves_what_a_token_reads() -> None:
    config = study("", 64, "int8")
    plain = server_load(QWEN2, config, WORKLOAD, 256, 0.0)
    config.rollout.server.options["kv_cache_dtype"] = "fp8_e4m3"
    halved = server_load(QWEN2, config, WORKLOAD, 256, 0.0)
    read_s = 16 * 1100 * 2**16 / (HBM * HBM_EFFICIENCY["kv"])
    assert plain.token_s(16, 1000) - halved.token_s(16, 1000) == pytest.approx(read_s / 2)


def test_attention_is_that_of_the_mean_square_of_lengths() -> None:
    """Long completions cost more attention than short ones of the same mean save."""
    config = learner_config(tensor_parallel_size=1, pipeline_parallel_size=1)
    config.objective.kl_coefficient = 0
    spread = Workload(100, 900)
    square = spread.mean_square_length(config)
    assert square > 1.5 * 1000**2
    attention = 2048 * 64 * 2 * 5120 * (square - 1000**2) / 389e12
    longer = step_time.learner_time(QWEN2, config, spread).proximal - proximal_s(config)
    assert longer == pytest.approx(attention, rel=1e-4)


# 100 completions a step, 500 tokens on average and 1000 at most, a token every 10 ms.
LOAD = ServerLoad(
    token_s=lambda sequences, mean_age: 0.01,
    prompts_s=0.0,
    pause_s=lambda running: 0.0,
    sequences=100,
    slots=1000,
    lengths=CompletionLengths(500, 1000, 0.5),
)


def test_a_slow_learner_determines_the_step() -> None:
    """100 x 500 tokens in 40 s are 1250 a second; at 100 a second each, 12.5 sequences run."""
    state = steady_state(LOAD, learner_s=40, max_staleness=1)
    assert (state.step_s, state.limit) == (40, "learner")
    assert state.running == pytest.approx(12.5)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_the_longest_completion_and_the_learner_share_the_steps_it_spans(
    max_staleness: int,
) -> None:
    """The longest completion takes 10 s and the learner 2 s, which decides in the end."""
    assert steady_state(LOAD, learner_s=2, max_staleness=5).limit == "learner"
    state = steady_state(LOAD, learner_s=2, max_staleness=max_staleness)
    assert state.step_s == pytest.approx(12 / (max_staleness + 1), rel=1e-4)  # by halving
    assert state.limit == "longest completion"


def test_what_an_agent_observes_is_read_once_and_not_decoded() -> None:
    """Half of 2000 tokens: half the decoding, and 64 times 1000 tokens more to read."""
    config = with_overrides(Config(), ["rollout.servers=1", "rollout.completions_per_prompt=1"])
    config.rollout.agent = "a:b"
    answer, episode = Workload(512, 2000), Workload(512, 2000, observed=0.5)
    plain, turns = (
        server_load(QWEN2, config, lengths, slots=64, publish_s=1.0)
        for lengths in (answer, episode)
    )
    assert turns.token_s(64, 500) == pytest.approx(plain.token_s(64, 500) / 2)
    read = step_time.prefill_s(QWEN2, "int8", 1, 64 * 1000)
    assert turns.prompts_s == pytest.approx(plain.prompts_s + read)
    assert turns.pause_s(64) > 1.0  # the next turn of each running episode reads it again
    config.rollout.agent, config.rollout.pause_mode = "", "in_place"
    assert server_load(QWEN2, config, answer, slots=64, publish_s=1.0).pause_s(64) == 1.0


def test_few_slots_determine_the_step() -> None:
    """100 x 500 tokens of 10 ms in 20 slots take 25 s."""
    state = steady_state(dataclasses.replace(LOAD, slots=20), learner_s=2, max_staleness=4)
    assert (state.step_s, state.limit, state.running) == (pytest.approx(25), "servers", 20)


def test_a_pause_is_time_in_which_nothing_is_decoded() -> None:
    """Twenty running sequences pause for 3 s, prompts take 1 s."""
    load = dataclasses.replace(
        LOAD, slots=20, prompts_s=1.0, pause_s=lambda running: 3.0 * running / 20
    )
    assert steady_state(load, learner_s=2, max_staleness=4).step_s == pytest.approx(29)


@pytest.mark.parametrize("log_deviation", [0.1, 0.5, 1.5])
def test_lengths_have_their_mean_and_mean_age(log_deviation: float) -> None:
    lengths = CompletionLengths(2000, 8000, log_deviation)
    generator = random.Random(0)
    drawn = [generator.lognormvariate(lengths._log_median, log_deviation) for _ in range(100_000)]
    sample = [min(length, 8000) for length in drawn]
    assert fmean(sample) == pytest.approx(2000, rel=0.01)
    squares = fmean(length**2 for length in sample)
    assert lengths.mean_age == pytest.approx(squares / (2 * 2000), rel=0.02)
    for length in (500, 2000, 7900):
        longer = fmean(sampled > length for sampled in sample)
        assert lengths.fraction_longer(length) == pytest.approx(longer, abs=0.005)


def planned_step_s(*words: str) -> float:
    config = with_overrides(study("", 64, "int8"), list(words))
    return plan(QWEN2, config, 64, Workload(512, 2048, log_deviation=1.0)).total_s


def test_the_plan_of_a_stale_run_overlaps_rollout_and_learner() -> None:
    synchronous = planned_step_s()
    one_step_off = planned_step_s("rollout.max_staleness=1")
    assert synchronous / 2 < one_step_off < synchronous


def test_reading_contexts_again_takes_time_that_keeping_them_does_not() -> None:
    few_servers = [
        "rollout.max_staleness=4",
        "rollout.server.max_running_requests=64",
        "rollout.server.tensor_parallel_size=8",
    ]
    retract = planned_step_s(*few_servers, "rollout.pause_mode=retract")
    assert planned_step_s(*few_servers, "rollout.pause_mode=in_place") < retract

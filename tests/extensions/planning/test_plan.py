"""Check which plans are refused and suggested, what `qurl plan` prints, and what limits a step."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.plan import STEPS
from published import PARAMETERS
from qurl_megatron.cli import app
from qurl_megatron.config.gpus import DGX_H100, GIB, H100, node_of
from qurl_megatron.config.nodes import nodes_of_run
from qurl_megatron.config.schema import Config, ConfigError, FormatName, ServerConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.colocated.fit import LEFT_BYTES
from qurl_megatron.extensions.planning import plan, step_time
from qurl_megatron.extensions.planning.command import plan_input
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.page import PUBLISHED
from qurl_megatron.extensions.planning.plan import REMEDIES, Plan, largest_part
from qurl_megatron.extensions.planning.scaling import planned_row
from qurl_megatron.extensions.planning.step_time import GLOO_BYTES_PER_S
from qurl_megatron.launch.nodes import smallest_plan
from qurl_megatron.memory.estimate import (
    published_by_stage,
    rollout_weights,
    state_bytes_per_sequence,
    total_bytes,
)
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.model.weight_map import num_parameters
from qurl_megatron.recipes import qwen3_5, scaling_32b
from qurl_megatron.recipes.scaling_32b import LAYOUTS, study
from tiny import build_tiny_model

DOCS = Path(__file__).parents[3] / "docs"
SLURM_PAGE, COLOCATED_PAGE = DOCS / "slurm.md", DOCS / "colocated.md"
HYBRIDS_PAGE = DOCS / "hybrids.md"
QWEN2, QWEN3 = KNOWN_MODELS["Qwen2.5-32B"], KNOWN_MODELS["Qwen3-32B"]
FORMATS = ("bf16", "int8", "fp8")


def plan_of(gpus: int = 64, *words: str) -> Plan:
    return plan.plan(QWEN2, with_overrides(study("", 64, "int8"), list(words)), gpus)


@pytest.mark.parametrize(
    ("gpus", "name", "weight_format"),
    [
        *zip(
            LAYOUTS,
            itertools.cycle(("Qwen2.5-32B", "Qwen3-32B")),
            itertools.cycle(FORMATS),
            strict=False,
        )
    ],
)
def test_a_run_of_the_study_fits_and_is_within_a_seventh_of_the_fastest_layout(
    gpus: int, name: str, weight_format: FormatName
) -> None:
    config, node = study(name, gpus, weight_format), node_of("H200" if gpus == 8 else "H100", 8)
    planned = plan.plan(KNOWN_MODELS[name], config, gpus, node=node)
    best = plan.suggest(KNOWN_MODELS[name], config, gpus, node=node)
    assert planned.total_s < 8 / 7 * best.total_s
    assert planned.config.rollout.servers == config.rollout.servers
    nodes = [*itertools.chain(*smallest_plan(config, 8))]
    assert [node.gpus for node in nodes] == [8] * (gpus // 8)  # as a job it fills whole nodes


def test_the_page_on_slurm_has_the_words_and_nodes_of_each_layout_of_the_study() -> None:
    rows = re.findall(r"\| (\d+) \| (\d+) \+ (\d+) \| `(.*)` \|", SLURM_PAGE.read_text())
    assert [int(gpus) for gpus, *_ in rows] == [gpus for gpus in LAYOUTS if gpus != 64]
    for gpus, learner_nodes, rollout_nodes, words in rows:
        config = with_overrides(scaling_32b.recipe(), words.split())
        assert config == study("", int(gpus), "int8")
        nodes = [len(part) for part in smallest_plan(config, 8)]
        assert nodes == [int(learner_nodes), int(rollout_nodes)]


def test_suggested_layout_on_24_gpus_is_the_one_in_the_findings() -> None:
    """docs/findings/planning.md: 554 s with the optimizer offloaded, 610 s with recomputation."""
    config = study("Qwen2.5-32B", 64, "int8")
    best = plan.suggest(QWEN2, config, 24)
    assert best.total_s == pytest.approx(554, abs=0.5)
    words = plan.layout_overrides(best.config)
    assert "learner.offload_optimizer=true" in words and "learner.recompute=none" in words
    kept = with_overrides(config, [*words, "learner.offload_optimizer=false"])
    with pytest.raises(ConfigError, match="the activations do not fit"):
        plan.plan(QWEN2, kept, 24)
    full = with_overrides(kept, ["learner.recompute=full"])
    assert plan.plan(QWEN2, full, 24).total_s == pytest.approx(610, abs=0.5)


def test_a_given_field_keeps_its_value_and_the_others_are_searched() -> None:
    config = study("Qwen2.5-32B", 64, "int8")
    config.rollout.server.max_running_requests = 256
    free = plan.suggest(QWEN2, config, 64)
    assert free.config.rollout.server.max_running_requests == 512
    given = {"rollout.server.tensor_parallel_size": 8, "learner.recompute": "full"}
    words = [f"{field}={value}" for field, value in given.items()]
    best = plan.suggest(QWEN2, with_overrides(config, words), 64, given=given)
    assert best.config.rollout.server.tensor_parallel_size == 8
    assert best.config.learner.recompute == "full"
    frozen = plan.plan(QWEN2, with_overrides(config, words), 64)
    assert free.total_s < best.total_s < 0.95 * frozen.total_s


def test_a_run_is_planned_on_the_nodes_that_it_takes() -> None:
    """A learner of 40 ranks takes five nodes, five servers of four GPUs three."""
    config = study("", 64, "int8")
    config.rollout.servers = 5
    run = plan.plan_run(QWEN2, config, Workload(512, 2048), DGX_H100)
    assert (run.gpus, run.config.rollout.servers) == (64, 5)
    config.rollout.servers = 6
    run = plan.plan_run(QWEN2, config, Workload(512, 2048), DGX_H100)
    assert (run.gpus, run.step_s) == (64, plan_of().step_s)
    config.evaluation.problems, config.evaluation.every_steps = 8, 1
    config.evaluation.server.tensor_parallel_size = 4
    assert plan.plan_run(QWEN2, config, Workload(512, 2048), DGX_H100).gpus == 72


@pytest.mark.parametrize(
    ("gpu", "per_node", "gpus", "fits"),
    [("H200", 8, 16, True), ("H100", 8, 8, False), ("A100", 4, 64, True), ("B200", 4, 16, True)],
)
def test_other_gpus_and_nodes_have_their_own_memory_and_layouts(
    gpu: str, per_node: int, gpus: int, fits: bool
) -> None:
    """The learner of a 32B model that a node of H100s does not hold fits on one of H200s."""
    node, config = node_of(gpu, per_node), study("", 64, "fp8")
    if not fits:
        with pytest.raises(ConfigError, match="needs 113.3 of 79.1 GiB"):
            plan.suggest(QWEN2, config, gpus, node=node)
        return
    best = plan.suggest(QWEN2, config, gpus, node=node)
    assert total_bytes(best.learner_bytes) <= node.gpu.memory_bytes
    assert best.config.learner.tensor_parallel_size <= per_node
    assert best.config.rollout.server.tensor_parallel_size <= per_node
    assert sum(nodes_of_run(best.config, per_node)) * per_node == gpus


def test_the_error_to_expect_is_that_of_published_steps_of_its_kind() -> None:
    """Dense steps took up to 1.4 times as long as planned, those with experts up to 2.9 times."""
    ratios: dict[str, list[float]] = {}
    for step in STEPS:
        kind = "dense, long answers" if step.mean_length >= 2048 else "dense, short answers"
        kind = "experts" if KNOWN_MODELS[step.model].num_experts else kind
        ratios.setdefault(kind, []).append(step.published_s / step.planned_s())
    rounded = {
        kind: (len(of_kind), round(min(of_kind), 1), round(max(of_kind), 1))
        for kind, of_kind in ratios.items()
    }
    assert rounded == PUBLISHED


def test_a_dense_step_that_the_learner_decides_is_planned_within_a_hundredth() -> None:
    """Qwen3-32B on 64 H100, one step off: 215 s."""
    (step,) = [step for step in STEPS if step.published_s == 215]
    assert step.planned_s() == pytest.approx(215, rel=0.01)


@pytest.mark.parametrize(
    ("learner", "evaluation", "gpus", "servers"),
    [
        # One node: the servers have what the learner leaves.
        (3, 0, 8, 2),
        (3, 1, 8, 2),
        (3, 2, 8, 1),
        # Nodes: they also have what it leaves on its own.
        (8, 0, 16, 4),
        (4, 0, 16, 6),
        (12, 0, 16, 2),
        (12, 2, 16, 1),
        (16, 0, 24, 4),
        (16, 1, 24, 3),
        # The evaluation server, the largest, is dealt out first.
        (8, 4, 24, 6),
    ],
)
def test_servers_have_all_gpus_that_the_learner_leaves(
    learner: int, evaluation: int, gpus: int, servers: int
) -> None:
    config = Config()
    config.learner.data_parallel_size = learner
    config.rollout.server.tensor_parallel_size = 2
    config.evaluation.problems = evaluation
    config.evaluation.server.tensor_parallel_size = max(1, evaluation)
    assert plan.most_servers(config, gpus) == servers
    if gpus > 8:
        config.rollout.servers = servers
        learner_nodes, rollout_nodes = smallest_plan(config, 8)
        assert len(learner_nodes) + len(rollout_nodes) == gpus // 8


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        ("learner.tensor_parallel_size=4 learner.pipeline_parallel_size=1 "
         "learner.layers_in_last_pipeline_stage=none", 64,
         "the optimizer does not fit: a rank of stage 0 needs"),
        ("learner.tensor_parallel_size=4 learner.pipeline_parallel_size=4 "
         "learner.layers_in_last_pipeline_stage=none learner.micro_batch_size=2", 64,
         "the activations do not fit"),
        ("rollout.server.tensor_parallel_size=1 rollout.server.mem_fraction_static=0.79 "
         "quantization.format=bf16", 64,
         "the KV cache does not fit: mem_fraction_static=0.79 of a GPU is 62.5 GiB, bf16 weights "
         "take 61.0 GiB"),
        ("rollout.server.mem_fraction_static=0.2 rollout.server.tensor_parallel_size=2", 64,
         "the weights do not fit"),
        ("learner.tensor_parallel_size=3", 64, "40 attention heads are not divisible by"),
        ("objective.advantage_estimator=gae", 64, "plans do not support a critic"),
        ("rollout.servers_at=[https://a:1]", 64, "plans do not support servers elsewhere"),
        ("rollout.routing=replay", 64, "rollout.routing=replay: the model has no experts"),
        ("rollout.server.tensor_parallel_size=5", 64, "must divide the 8 GPUs of a node"),
        ("", 40, "beside the learner's 40 there is no room for a rollout server of 4"),
        ("evaluation.problems=8 evaluation.server.tensor_parallel_size=8", 48,
         "there is no room for a rollout server of 4 and the evaluation server"),
        ("", 44, "44 GPUs: a node has 8, so several nodes have a multiple of that"),
        ("learner.pipeline_parallel_size=11 learner.layers_in_last_pipeline_stage=4 "
         "learner.tensor_parallel_size=4", 64,
         "the learner's 44 ranks: 6 nodes of 8 GPUs would not get equally many"),
        ("learner.tensor_parallel_size=2", 64,
         "the learner's 10 ranks: 2 nodes of 8 GPUs would not get equally many, in whole "
         "tensor-parallel groups of 2; take a multiple of 8"),
        ("learner.data_parallel_size=3", 192, "2048 completions are not divisible by 6"),
        ("quantization.transport=direct", 64,
         "64 GPUs are not all in one node of 8; set it to broadcast or auto"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_the_part_that_does_not(
    words: str, gpus: int, message: str
) -> None:
    config = with_overrides(study("Qwen2.5-32B", 64, "int8"), words.split())
    with pytest.raises(ConfigError) as refusal:
        plan.plan(QWEN2, config, gpus)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_refusal_suggests_a_layout_that_fits() -> None:
    config = with_overrides(study("Qwen2.5-32B", 64, "int8"), ["learner.tensor_parallel_size=2"])
    half = Workload.of(config)
    with pytest.raises(ConfigError, match="this layout fits: ") as refusal:
        plan.plan_or_suggest(QWEN2, config, 64, half)
    words = str(refusal.value).partition("this layout fits: ")[2].split()
    plan.plan(QWEN2, with_overrides(config, words), 64)


def test_completions_of_32k_tokens_fit_on_24_gpus_and_not_on_8() -> None:
    config = with_overrides(study("", 64, "int8"), ["rollout.max_completion_length=31744"])
    half = Workload.of(config)
    suggested = plan.suggest(QWEN2, config, 24, half)
    peak = total_bytes(suggested.learner_bytes)
    assert peak < H100.memory_bytes
    assert suggested.kv_tokens >= 32768
    with pytest.raises(ConfigError, match="no layout of 8 GPUs fits .* 32768 tokens; .* use more"):
        plan.suggest(QWEN2, config, 8, half)


def test_the_kv_cache_of_a_server_fills_the_memory_that_weights_leave() -> None:
    """Qwen3-32B in FP8 on four GPUs; a token takes 64 layers x 2 heads x 128 x 2 x 2 B."""
    linear = 64 * (2 * 5120 * 8192 + 2 * 1024 * 5120 + 3 * 25600 * 5120)
    # Scales of q, k, v, gate and up are divided; those of o and down are on every GPU.
    scales = 64 * ((8192 + 2 * 1024 + 2 * 25600) // 4 + 2 * 5120)
    vocabulary = 2 * 151936 * 5120  # embedding and output layer
    norms = 64 * (2 * 5120 + 2 * 128) + 5120
    weights = linear // 4 + 4 * scales + 2 * vocabulary // 4 + 2 * norms
    kv_tokens = (int(0.85 * 79.1 * GIB) - weights) // 65536
    planned = plan.plan(QWEN3, study("", 64, "fp8"), 64, Workload(512, 4096))
    assert planned.server_bytes["linear"] + planned.server_bytes["unquantized"] == weights
    assert planned.kv_tokens == pytest.approx(kv_tokens, abs=1)
    assert planned.load.slots == kv_tokens // (512 + 4096)


def test_a_server_of_a_hybrid_decodes_as_many_sequences_as_it_has_states_for() -> None:
    """27B on four GPUs: one state a sequence without a cache of prefixes, and five with one."""
    model, config = KNOWN_MODELS["Qwen3.5-27B"], qwen3_5.study("", 64)
    planned = plan.plan(model, config, 64)
    state = 153_944_064 // 4
    assert planned.server_bytes["states of linear attention"] == 513 * state
    assert planned.load.slots == 512
    cached = with_overrides(config, ["rollout.server.options.disable_radix_cache=false"])
    with_cache = plan.plan(model, cached, 64)
    states = with_cache.server_bytes["states of linear attention"] // state - 1
    assert with_cache.load.slots == states // 5 < 200
    room = int(0.85 * H100.memory_bytes) - sum(
        with_cache.server_bytes[part] for part in ("linear", "unquantized")
    )
    assert states == int(room * 0.9 / 1.9) // state - 1
    assert with_cache.load.prompts_s == pytest.approx(planned.load.prompts_s / 8)


def test_layouts_of_a_hybrid_have_no_context_parallel_ranks() -> None:
    config = qwen3_5.study("", 64)
    tried = plan.layouts(KNOWN_MODELS["Qwen3.5-27B"], config, 64)
    assert {layout.learner.context_parallel_size for layout in tried} == {1}


@pytest.mark.parametrize(
    ("words", "lengths", "said"),
    [
        ([], (1024, 1024), ["max_completion_length=1024, not the recipe's 8192"]),
        (["rollout.max_prompt_length=1500"], (1500, 548), ["max_completion_length=548, not"]),
        (
            ["rollout.max_completion_length=1500"],
            (548, 1500),
            ["max_prompt_length=548, not the recipe's 1024: the model has 2048 positions"],
        ),
        (["rollout.max_completion_length=1000"], (1024, 1000), []),
    ],
)
def test_lengths_of_a_recipe_are_shortened_to_the_models_positions(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    lengths: tuple[int, int],
    said: list[str],
) -> None:
    build_tiny_model(tmp_path, max_position_embeddings=2048)
    for subject in ([str(tmp_path)], ["grpo", f"model={tmp_path}"]):
        _, config, _ = plan_input(subject[0], [*subject[1:], *words])
        found = config.rollout.max_prompt_length, config.rollout.max_completion_length
        written = capsys.readouterr().err.splitlines()
        lines = [line for line in written if line.startswith("qurl: ")]
        assert found == lengths and len(lines) == len(said)
        assert all(text in line for text, line in zip(said, lines, strict=True))
    own = tmp_path / "own.yaml"  # whose fields are given
    own.write_text(f"model: {tmp_path}\nrollout: {{max_completion_length: 4096}}\n")
    with pytest.raises(ConfigError, match="set it to 1024 or less"):
        plan_input(str(own), [])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["qwen3_5", "model=Qwen3.6-27B"], 0, "states of linear attention"),
        (
            [*"Qwen3-32B --gpus 32 quantization.format=fp8 rollout.placement=separate".split()],
            0,
            "rollout.servers=2, in fp8, of 4 GPUs",
        ),
        (
            ["Qwen2.5-32B", "--gpus", "16"],
            0,
            "separate 873.9 s, ahead 427",
        ),
        (["MODEL", "--gpus", "4", "--mean-completion", "100"], 0, "4 H100:\nlearner."),
        (["MODEL/config.json", "--gpus", "4", "--gpu", "A100"], 0, "4 A100:\nlearner."),
        (["scaling_32b", "model=Qwen2.5-32B"], 0, "learner, 40 GPUs"),
        (["scaling_32b"], 2, "model=: missing"),
        (["Qwen2.5-32B", "--gpus", "8"], 2, "no layout of 8 GPUs fits"),
        *(
            (["Qwen2.5-32B", "--log-deviation", value], 2, f"--log-deviation {value}: must be fro")
            for value in ("0.0", "-1.0", "nan", "inf")
        ),
        (["Qwen4-32B"], 2, "Qwen4-32B: no such directory, model (Qwen2.5-0.5B, Qwen2.5-1.5B, "),
        (["Qwen3-30B-A3B", "--gpus", "16"], 0, "learner.expert_parallel_size=8"),
        (["Qwen3-30B-A3B", "learner.expert_parallel_size=3"], 2, "128 experts are not divisible"),
        # Refused as the run would be.
        (
            [
                "qwen3_moe",
                "model=Qwen3-30B-A3B",
                "rollout.routing=replay",
                "learner.recompute=full",
                "--gpus",
                "16",
            ],
            2,
            "would replay ",
        ),
        (["Qwen2.5-32B", "--gpu", "B200"], 2, "--gpu B200 has 10.0, which serves bf16, int4, fp8"),
        (["Qwen2.5-32B", "--gpu", "V100"], 2, "--gpu V100: GPUs are A100, H100, H200, B200"),
        (["Qwen2.5-32B", "--gpus", "1", "adapters.rank=16"], 0, "1 H100:\nlearner."),
        (["Qwen3-32B", "rollout.max_completion_length=64000"], 2, "the model has 40960 positions"),
        (["Qwen2.5-32B", "--gpus", "24,x"], 2, "--gpus 24,x: must be numbers from 1 to 16384"),
        (
            ["Qwen2.5-32B", "rollout.server.tensor_parallel_size=3"],
            2,
            "no layout of 64 GPUs with rollout.server.tensor_parallel_size=3 fits",
        ),
        (["qwen3_moe", "model=Qwen3-30B-A3B", "quantization.uaq.scale=1.5"], 2, "a power of two"),
        (["qwen3_moe", "model=Qwen3-30B-A3B"], 0, "learner, 8 GPUs"),
    ],
)
def test_the_command_prints_a_plan_or_one_line(
    tmp_path: Path, words: list[str], code: int, text: str
) -> None:
    """A model directory needs nothing but config.json."""
    if words[0].startswith("MODEL"):
        build_tiny_model(tmp_path, max_position_embeddings=16384)
        for path in tmp_path.iterdir():
            if path.name != "config.json":
                path.unlink()
        words = [word.replace("MODEL", str(tmp_path)) for word in words]
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == code, result.output
    assert text in (result.stdout if code == 0 else result.stderr)
    assert ("Limit: " in result.stdout) == (code == 0)
    if code:
        assert len(result.stderr.splitlines()) == 1 and not result.stdout


def test_turns_leave_each_phase_its_memory_and_copy_what_waits() -> None:
    """32B on two nodes: weights, reference, masters and moments of 16 ranks wait in the hosts."""
    config = study("", 16, "int8")
    run = plan.plan(QWEN2, config, 16)
    assert run.colocation and run.config.rollout.servers == 4
    assert all(needed <= H100.memory_bytes for needed in run.colocation.gpu_bytes.values())
    parts = run.learner_bytes
    waiting = parts["weights"] + parts["reference"] + parts["optimizer, between passes"]
    assert run.colocation.waiting_bytes == pytest.approx(waiting, rel=1e-4)  # of its fullest stage
    copies_s = 2 * run.colocation.waiting_bytes / H100.host_bytes_per_s
    assert run.colocation.copies_s == run.parts_s["copies"] == copies_s
    # A parameter has 2 B twice and 12 B.
    on_hosts = 16 * num_parameters(QWEN2)
    assert 2 * run.colocation.node_bytes == pytest.approx(on_hosts, rel=0.1)
    assert sum(run.parts_s.values()) == pytest.approx(run.total_s)
    beside = run.colocation.gpu_bytes["train"] - total_bytes(parts)
    stays = sum(rollout_weights(QWEN2, run.config).values())
    kept = run.config.rollout.server.releases == "cache"
    assert beside == pytest.approx(LEFT_BYTES + (stays if kept else 0), abs=2**20)


@pytest.mark.parametrize(
    ("page", "name", "gpus", "config"),
    [
        (COLOCATED_PAGE, "Qwen2.5-7B", 8, study("", 64, "int8")),
        (COLOCATED_PAGE, "Qwen2.5-32B", 16, study("", 64, "int8")),
        (HYBRIDS_PAGE, "Qwen3.5-27B", 16, qwen3_5.recipe()),
    ],
    ids=["7B", "32B", "hybrid"],
)
def test_a_page_has_the_steps_of_each_placement(
    page: Path, name: str, gpus: int, config: Config
) -> None:
    (cells,) = re.findall(rf"^\| {name} \| {gpus} \| (.*) \|$", page.read_text(), re.MULTILINE)
    row = planned_row(KNOWN_MODELS[name], config, gpus, Workload.of(config), DGX_H100, given=set())
    steps = row.placements_s
    assert cells.split(" | ") == [f"{steps[key]:.0f}" if steps[key] else "-" for key in steps]
    assert [*steps] == ["separate", "ahead", "colocated"]
    synchronous = [steps[key] for key in ("separate", "colocated") if steps[key]]
    assert row.plan.total_s == min(filter(None, synchronous))
    only = planned_row(
        KNOWN_MODELS[name],
        with_overrides(config, ["rollout.placement=colocated"]),
        gpus,
        Workload.of(config),
        DGX_H100,
        given={"rollout.placement"},
    )
    assert only.placements_s == {"colocated": steps["colocated"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("learner.data_parallel_size=2", r"has a rank on each of the 16 GPUs, and this layout has"),
        ("rollout.max_staleness=1", r"servers sleep while the learner trains"),
        ("rollout.server.mem_fraction_static=0.95", r"=0.95: beside it .* set it to at most 0.91"),
        ("learner.pipeline_parallel_size=2 learner.data_parallel_size=2 "
         "learner.offload_optimizer=false rollout.server.releases=cache", r"while learner rank 0"),
    ],
)  # fmt: skip
def test_turns_that_do_not_fit_are_not_planned(words: str, message: str) -> None:
    config = with_overrides(study("", 16, "int8"), words.split())
    with pytest.raises(ConfigError, match=message):
        plan.plan(QWEN2, config, 16)


def test_weights_cross_the_hosts_memory_where_nobody_writes_in_place() -> None:
    config = study("", 8, "int8")
    node = node_of("H200", 8)
    direct = plan.plan(QWEN2, config, 8, node=node)
    assert direct.config.rollout.server.releases == "cache" and direct.publish.is_direct
    config = with_overrides(config, ["rollout.server.releases=all"])
    through_host = plan.plan(QWEN2, config, 8, node=node)
    assert not through_host.publish.is_direct
    # Each of two senders has half of the bytes, for each of two servers, at 2 GB/s and over PCIe.
    byte_s = 1 / GLOO_BYTES_PER_S + 2 / node.gpu.host_bytes_per_s
    expected = byte_s * direct.publish.num_bytes
    assert through_host.publish.time_s == pytest.approx(expected, rel=0.05)
    assert through_host.colocation and direct.colocation
    less = direct.colocation.gpu_bytes["train"] - through_host.colocation.gpu_bytes["train"]
    assert less == sum(rollout_weights(QWEN2, config).values())


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_the_parts_add_up_to_the_step(staleness: int) -> None:
    whole = plan_of(64, f"rollout.max_staleness={staleness}")
    assert sum(whole.parts_s.values()) == pytest.approx(whole.total_s)
    assert set(whole.parts_s) <= set(REMEDIES)


def test_the_pipeline_bubble_is_that_of_its_formula() -> None:
    """1024 sequences of 4608 tokens in micro batches of 9216 are 512, over five stages."""
    config = with_overrides(study("", 64, "int8"), ["learner.tokens_per_micro_batch=9216"])
    parts = plan.plan(QWEN2, config, 64, Workload(512, 4096)).parts_s
    passes = {"proximal": 2, "update": 3}  # with a reference
    total = sum(passes.values())
    # The proximal passes run over both minibatches of 512 micro batches.
    fraction = (passes["proximal"] * 4 / 1024 + passes["update"] * 4 / 512) / total
    assert parts["pipeline bubble"] / parts["passes"] == pytest.approx(fraction, rel=0.03)


def test_gradients_are_summed_and_applied_for_each_minibatch() -> None:
    """Two replicas of 8 x 5 ranks; the first stage has the embedding and 13 of 64 layers."""
    words = ["learner.data_parallel_size=2", "objective.kl_coefficient=0"]
    parts = plan_of(128, *words).parts_s
    vocabulary = 152064 * 5120
    numel = (13 / 64 * (PARAMETERS["Qwen2.5-32B"] - 2 * vocabulary) + vocabulary) / 8
    summed = (1 / 2) * (4 + 2) * numel / H100.infiniband_bytes_per_s
    applied = 2 * 16 * (numel / 2) / H100.hbm_bytes_per_s
    assert parts["gradients"] == pytest.approx(2 * (summed + applied), rel=0.001)


def test_more_servers_shorten_decoding_alone_and_lengthen_the_publish() -> None:
    few, many = plan_of(64).parts_s, plan_of(88).parts_s  # 6 and 12 servers of four GPUs
    assert few["longest completion"] == many["longest completion"]
    alone = 8192 * step_time.decode_s(QWEN2, "int8", 4, 1, 512 + 4096)
    assert many["longest completion"] == pytest.approx(alone)
    assert many["decoding"] < 0.6 * few["decoding"]
    fullest = max(sent.dense for sent in published_by_stage(QWEN2, plan_of().config))
    sent = 6 * fullest / H100.infiniband_bytes_per_s  # a copy to each server
    assert many["publish"] - few["publish"] == pytest.approx(sent)
    assert many["passes"] == few["passes"]


def test_a_run_ahead_of_the_learner_has_the_parts_that_decide() -> None:
    learner = {"passes", "pipeline bubble", "gradients", "publish"}
    assert set(plan_of(64, "rollout.max_staleness=8").parts_s) == learner
    few = ["rollout.max_staleness=1", "rollout.prompts_per_step=8"]
    ahead, in_turn = plan_of(512, *few).parts_s, plan_of(512, *few[1:]).parts_s
    assert set(ahead) == {"longest completion", *learner}
    assert {name: ahead[name] for name in learner} == pytest.approx(
        {name: in_turn[name] / 2 for name in learner}
    )


def test_the_line_names_the_largest_part_and_what_shortens_it() -> None:
    line = largest_part({"passes": 30.0, "publish": 60.0, "decoding": 10.0})
    assert line == f"publish, 60 % of the step; {REMEDIES['publish']}"


def test_the_page_says_what_was_planned_what_it_costs_and_what_was_left_out() -> None:
    words = ["scaling_32b", "model=Qwen2.5-32B", "steps=1000"]
    page = CliRunner().invoke(app, ["plan", *words, "--mean-completion", "3000"]).stdout
    config = with_overrides(study("Qwen2.5-32B", 64, "int8"), words[2:])
    planned = plan.plan(QWEN2, config, 64, Workload(512, 3000))
    hours = 1000 * planned.total_s / 3600
    for sentence in (
        "A step has 256 prompts x 8 completions. Prompts have 512 tokens; lengths of completions "
        "are lognormal (deviation 1), with a mean of 3,000 and at most 8,192 tokens.",
        f"1000 steps take {hours:,.1f} hours, {64 * hours:,.0f} GPU-hours, without evaluation and "
        f"checkpoints. A checkpoint takes {14 * PARAMETERS['Qwen2.5-32B'] / 1e9:.0f} GB.",
        "6 published steps (dense, long answers; NeMo-RL on H100) took 0.9 to 1.3 times",
    ):
        assert sentence in page


def test_sglang_divides_memory_between_states_and_keys_of_a_hybrid() -> None:
    """With a cache of prefixes it needs five states a request, without one a single one."""
    model, server = KNOWN_MODELS["Qwen3.5-27B"], ServerConfig(4, max_running_requests=100)
    state = state_bytes_per_sequence(model, 4)
    assert plan.num_states(model, server, 19 * 10**9) == 9 * 10**9 // state - 1
    without = dataclasses.replace(server, options={"disable_radix_cache": True})
    assert plan.num_states(model, without, 19 * 10**9) == 100


def test_the_cheapest_recomputation_that_fits_is_chosen() -> None:
    """Qwen2.5-32B on a learner of 4 x 5 GPUs, with longer and longer completions."""
    chosen = []
    for length in (8192, 12288, 16384, 24576, 130048):
        words = [f"rollout.max_completion_length={length}", "learner.tensor_parallel_size=4"]
        config = with_overrides(study("", 64, "int8"), words)
        learner = plan.with_cheapest_recomputation(QWEN2, config, H100.memory_bytes).learner
        chosen.append((learner.recompute, learner.recompute_layers, learner.offload_optimizer))
    assert chosen == [
        (None, None, False),
        ("selective", None, False),
        ("selective", None, True),
        ("full", 6, True),  # of 13 layers
        ("full", None, True),
    ]

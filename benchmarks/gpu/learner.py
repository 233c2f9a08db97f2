"""The learner on a GPU: `python -m benchmarks.gpu.learner`.

Runs the parity tests as they are, on NCCL: logits, log-probs and three optimizer steps against
transformers and torch, the converter's codes, checkpoints. What needs more ranks than there are
GPUs is skipped and says so. Where Transformer Engine is installed, the learner's layers are its
layers, and the codes of `fp8-tensor` and `fp8-block` are compared with its own quantizers' bit for
bit; where it is not, that is skipped and says so.
"""

from __future__ import annotations

from benchmarks.gpu import record, tested

PATHS = [
    "tests/gpu/test_transformer_engine.py",
    "tests/test_quantize.py",
    "tests/test_learner.py",
    "tests/test_reshard.py",
    "tests/test_checkpoint.py",
]
REHEARSED = "transformer_engine or (TP1 and qwen2-tied)"


def main() -> None:
    results = record.Record("learner", record.parser(__doc__).parse_args())
    rehearsed = [*PATHS[:1], "tests/test_learner.py"]
    paths, selection = (rehearsed, REHEARSED) if results.rehearsal else (PATHS, "")
    tested.run_tests(results, paths, selection)
    tested.end(results)


if __name__ == "__main__":
    main()

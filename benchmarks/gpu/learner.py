"""Test the learner on a GPU: `python -m benchmarks.gpu.learner`.

This runs the parity tests over NCCL. They compare logits, log-probs and three optimizer steps with
transformers and PyTorch, and check the converter's codes and the checkpoints. Tests that need more
ranks than there are GPUs are skipped with a reason. With Transformer Engine installed, the learner
uses its layers, and the codes of `fp8-tensor` and `fp8-block` are compared bit for bit with those
of its quantizers. Without it, that comparison is skipped with a reason.
"""

from __future__ import annotations

from benchmarks.gpu import pytest_rows, record

PATHS = [
    "tests/gpu/test_transformer_engine.py",
    "tests/test_quantize.py",
    "tests/test_learner.py",
    "tests/test_reshard.py",
    "tests/test_checkpoint.py",
]
REHEARSAL_PATHS = ["tests/gpu/test_transformer_engine.py", "tests/test_learner.py"]
REHEARSAL_SELECTION = "transformer_engine or (TP1 and qwen2)"


def main() -> None:
    results = record.Record("learner", record.parser(__doc__).parse_args())
    if results.rehearsal:
        pytest_rows.run_tests(results, REHEARSAL_PATHS, REHEARSAL_SELECTION)
    else:
        pytest_rows.run_tests(results, PATHS)
    pytest_rows.finish(results)


if __name__ == "__main__":
    main()

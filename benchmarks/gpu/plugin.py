"""Test the reloadable layers in a real server on a GPU: `python -m benchmarks.gpu.plugin`.

This runs the server's own tests with CUDA graphs. They compare log-probs in BF16, INT8, FP8 and
FP8 by blocks with a plain PyTorch computation on the CPU from the same codes. They check that 20
reloads end with bit-equal results, that the prefix cache serves no old weights, and the checksum of
each layer. Further tests compare the layers' products on the GPU with those on the CPU, and check
the codes of the quantization kernel.
"""

from __future__ import annotations

from benchmarks.gpu import pytest_rows, record

PATHS = [
    "tests/gpu/test_linear.py",
    "tests/gpu/test_moe.py",
    "tests/test_quantize_kernels.py",
    "tests/e2e/test_server.py",
    "tests/e2e/test_moe_server.py",
]
# A rehearsal runs the server in one format: the formats differ only in their linear layers.
REHEARSAL_SELECTION = "int8 or codes_and_scales"


def main() -> None:
    results = record.Record("plugin", record.parser(__doc__).parse_args())
    pytest_rows.run_tests(results, PATHS, REHEARSAL_SELECTION if results.rehearsal else "")
    pytest_rows.finish(results)


if __name__ == "__main__":
    main()

"""The reloadable layers in a real server: `python -m benchmarks.gpu.plugin`.

Runs the tests of the server as they are, on a GPU with CUDA graphs: log-probs of BF16, INT8, FP8
and FP8 by blocks against a plain PyTorch computation on the CPU from the very codes that were sent,
20 reloads with a bit-equal return, the prefix cache, checksums of what each layer holds. Then the
layers' products on the GPU against those on the CPU, and the quantizing kernel's codes.
"""

from __future__ import annotations

from benchmarks.gpu import record, tested

PATHS = ["tests/gpu/test_linear.py", "tests/test_channel_kernel.py", "tests/e2e/test_server.py"]
# One format of the server is enough to rehearse: they differ in what they multiply.
REHEARSED = "int8 or codes_and_scales"


def main() -> None:
    results = record.Record("plugin", record.parser(__doc__).parse_args())
    tested.run_tests(results, PATHS, REHEARSED if results.rehearsal else "")
    tested.end(results)


if __name__ == "__main__":
    main()

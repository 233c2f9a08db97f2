"""SGLang's fused kernels for experts, in Triton's interpreter where there is no GPU."""

import re
from pathlib import Path

import triton_program

BFLOAT16_STEP = 2.0**-8  # the largest, relative to the number


def test_sglangs_fused_kernels_take_codes_and_scales_as_the_layer_holds_them() -> None:
    """They differ from the CPU by less than if every result were the next bfloat16 number.

    The CPU rounds where the kernels round. What is left is the order of sums in float32, which can
    flip a last bit. A single wrong scale is a larger error.
    """
    done = triton_program.run(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import moe_layer; moe_layer.main()"
    )
    lines = re.findall(r"relative error (\S+) (\S+) (\S+)", done.stdout)
    names = {name for name, *_ in lines}
    assert names == {"int8", "int4-g32", "fp8", "fp8-block"}, done.stderr
    for name, error, error_of_a_wrong_scale in lines:
        assert float(error) < BFLOAT16_STEP < float(error_of_a_wrong_scale), (name, lines)

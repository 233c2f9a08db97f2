"""Compile Triton kernels for a Hopper GPU, on any machine, and read their resource usage."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled_usage(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, cubin: Path
) -> dict[str, int]:
    """Return the registers (`REG`) and the bytes of stack (`STACK`) of each thread.

    Values that do not fit in registers are spilled to the stack.

    Args:
        signature: the Triton type of each argument, in order.
        constants: values of the arguments that are compile-time constants.
        warps: warps per program.
        cubin: path to write the compiled kernel to.
    """
    signature = {name: "constexpr" if name in constants else signature[name] for name in signature}
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}

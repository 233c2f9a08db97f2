"""Triton kernels compiled for a Hopper GPU, which needs none: what the compiler made of them."""

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
    """Registers a thread and bytes of stack, where what does not fit in registers goes.

    `signature` has each argument's Triton type, in order; those in `constants` are compiled in.
    """
    signature = {name: "constexpr" if name in constants else signature[name] for name in signature}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    cubin.write_bytes(made.asm["cubin"])
    told = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", told)}

"""Compile Triton kernels for a GPU, on any machine, and read what the GPU would run."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BYTES = {"": 4, "64": 8, "128": 16, "U8": 1, "U16": 2, "S8": 1, "S16": 2}


@dataclass(frozen=True)
class Compiled:
    """The machine code of a kernel, as each thread runs it."""

    registers: int
    stack_bytes: int  # values that do not fit in registers are spilled to the stack
    code: tuple[tuple[int, str], ...]  # address and text of each instruction but NOP

    @functools.cached_property
    def loops(self) -> list[list[str]]:
        """Return the instructions of each loop: from the target of a jump back, to the jump."""
        loops = []
        for end, instruction in self.code:
            jump = re.search(r"\bBRA\b.* (0x[0-9a-f]+)", instruction)
            if jump and (start := int(jump[1], 16)) < end:
                loops.append([text for address, text in self.code if start <= address <= end])
        return loops

    @property
    def once(self) -> int:
        """Return the number of instructions up to the end of the kernel that are in no loop."""
        end = next(at for at, (_, text) in enumerate(self.code) if text.strip() == "EXIT")
        return end + 1 - sum(map(len, self.loops))


def moved_bytes(loop: list[str], operation: str) -> int:
    """Return the bytes that a loop's global loads (LDG) or stores (STG) move."""
    moved = 0
    for text in loop:
        if operation in text:
            width = re.search(rf"{operation}\.E\S*?\.(64|128|[US](?:8|16))\b", text)
            moved += BYTES[width[1] if width else ""]
    return moved


@functools.cache
def _compile(
    kernel: Any, signature: tuple[tuple[str, str], ...], constants: Any, warps: int, target: int
) -> Compiled:
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(signature)
        if kind.startswith("*") or "columns" in name or name.endswith(("stride", "bytes"))
    }
    source = ASTSource(
        fn=kernel, signature=dict(signature), constexprs=dict(constants), attrs=aligned
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        listing = subprocess.run(
            [DISASSEMBLER, "-res-usage", "-sass", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", listing))
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", listing)
    return Compiled(
        int(usage["REG"]),
        int(usage["STACK"]),
        tuple((int(address, 16), text) for address, text in code if "NOP" not in text),
    )


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, target: int
) -> Compiled:
    """Compile a kernel; pointers, `columns`, strides and bytes are multiples of 16, as in models.

    Args:
        types: the Triton type of each argument that is no constant, in order.
        constants: values of the arguments that are compile-time constants, which come last.
        warps: warps per program.
        target: compute capability, without its point: 90 is Hopper.
    """
    signature = (*types.items(), *((name, "constexpr") for name in constants))
    return _compile(kernel, signature, tuple(constants.items()), warps, target)

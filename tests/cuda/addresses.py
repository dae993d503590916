"""Uniform registers of a program that some way through it reads before anything sets them.

They hold the addresses of products' operands. The assembler (13.0) takes the same product in two branches for one: in
the branch that it does not set them in, the product reads anywhere. No emulator sees this.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ +)?([\w.]+)\s*(.*?);")
# Those whose first operand is a uniform register that they set, but for predicates before it.
_SETS = re.compile(r"U(?!TMA|BLK|SETMAXREG)|R2UR|S2UR|VOTEU|REDUX")
_PREDICATE, _REGISTER = re.compile(r"U?P(?:\d|T)"), re.compile(r"UR(\d+)")
_READS, _PRODUCT = re.compile(r"\bUR(\d+)(\.64)?"), re.compile(r"gdesc\[UR(\d+)\]")
_FROM_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")


def unset(cubin: bytes) -> list[str]:
    """The registers of a program, in the form of the GPU."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return unset_in(text)


def unset_in(text: str) -> list[str]:
    """:func:`unset` of a program as ``nvdisasm -c`` writes it."""
    labels, instructions = {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append(found.groups())
    steps = [(_next(i, *x, labels), *_sets_and_reads(*x[1:])) for i, x in enumerate(instructions)]
    needed = [set() for _ in range(len(steps) + 1)]
    changed = True
    while changed:
        changed = False
        for i in range(len(steps) - 1, -1, -1):
            after, sets, reads = steps[i]
            now = set().union(*(needed[n] for n in after if n < len(steps))) - sets | reads
            changed |= now != needed[i]
            needed[i] = now
    return [f"UR{n}" for n in sorted(needed[0])]


def _next(i: int, predicate: str | None, name: str, operands: str, labels: dict[str, int]) -> list[int]:
    """The instructions that may follow; one that a predicate leaves out is taken to set its register all the same."""
    kind, target = name.partition(".")[0], re.search(r"\.L_x_\d+", operands)
    if kind == "BRA" and target:
        may_not = predicate or re.match(r"!?U?P\d", operands)
        return [labels[target[0]], i + 1] if may_not else [labels[target[0]]]
    return [] if kind in ("EXIT", "RET", "BRX", "BRXU") and not predicate else [i + 1]


def _sets_and_reads(name: str, operands: str) -> tuple[set[int], set[int]]:
    """The registers that an instruction sets, and those that it reads."""
    parts, sets = operands.split(", "), set()
    if _SETS.match(name):
        while parts and _PREDICATE.fullmatch(parts[0]):
            parts = parts[1:]
        if parts and (own := _REGISTER.fullmatch(parts[0])):
            first, parts = int(own[1]), parts[1:]
            sets = set(range(first, first + (2 if ".64" in name or "WIDE" in name else 1)))
    rest = ", ".join(parts)
    # Four, of which a product whose left operand is in registers reads the last two.
    skipped = 2 if _FROM_REGISTERS.match(operands) else 0
    reads = {n for x in _PRODUCT.findall(rest) for n in range(int(x) + skipped, int(x) + 4)}
    for number, pair in _READS.findall(_PRODUCT.sub("", rest)):
        reads |= {int(number), int(number) + 1} if pair or (sets and ".64" in name) else {int(number)}
    return sets, reads

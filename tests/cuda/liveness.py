"""Shared memory that Gluon's compiler gives to something else while a product may still read it.

A buffer lives from its allocation to the last operation that names it. A product that nobody waits for at once reads on
after that: what is allocated before the wait, or takes memory of its own for an exchange between threads, may then lie
where the product reads. A wait that has the buffer among its ``deps`` keeps it.
"""

from __future__ import annotations

import re

_ALLOCATED = re.compile(r"\s*(%\w+) = ttg\.local_alloc")
_VIEW = re.compile(r"\s*(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_PRODUCT = re.compile(r"\s*(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+), .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait ([^{]*)\{pendings = (\d+)")
_TAKES = re.compile(r"ttg\.(convert_layout|local_alloc)|tt\.(reduce|scan|gather|histogram|atomic)")


def reused(program: str) -> list[str]:
    """The products of a program, in TTGIR, whose operands may be overwritten before they are waited for."""
    lines = program.splitlines()
    buffers, begins, named = {}, {}, {}
    for n, line in enumerate(lines):
        if made := _ALLOCATED.match(line):
            buffers[made[1]], begins[made[1]] = made[1], n
        elif made := _VIEW.match(line):
            buffers[made[1]] = buffers.get(made[2])
        for name in re.findall(r"%\w+", line):
            if buffer := buffers.get(name):
                named.setdefault(buffer, []).append(n)
    loops = _loops(lines)
    found = []
    for n, line in enumerate(lines):
        if not (product := _PRODUCT.match(line)):
            continue
        wait = next(i for i in range(n + 1, len(lines)) if _ends(product[1], lines[i]))
        for buffer in {buffers.get(product[2]), buffers.get(product[3])} - {None}:
            # What is named in a loop, and was there before, lives to the loop's end.
            over = [end for begin, end in loops if any(begins[buffer] < begin <= x <= end for x in named[buffer])]
            last = max([*named[buffer], *over])
            if any(_TAKES.search(lines[i]) for i in range(last + 1, wait)):
                found.append(f"{buffer}: {line.strip()}")
    return found


def _ends(product: str, line: str) -> bool:
    wait = _WAIT.search(line)
    return wait is not None and (wait[2] == "0" or product in re.findall(r"%\w+", wait[1]))


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """The first and the last line of each loop."""
    found, begun = [], []
    for n, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if re.search(r"scf\.(for|while)", line):
            begun.append((n, depth))
        while begun and n > begun[-1][0] and depth == begun[-1][1] and re.match(r"\s*\}(?! do)", line):
            found.append((begun.pop()[0], n))
    return found

"""A Triton kernel that hands a vector straight to the other GPUs of a host, and waits for theirs.

Each rank has a buffer that the others can write. Program j of a rank has only to do with the programs j of the others:
each has a part of every vector, a place in the buffers for it, and counts its exchanges. In exchange e it::

    wait until all to whom a part goes have begun their exchange e - 1: so they have read what came in e - 2
    write the part to them, in the half of their buffer that e - 2 had, and the number e to all (release)
    wait for the number e of those from whom a part comes (acquire), and take it

So nothing is overwritten that somebody still reads, whatever the ranks' exchanges are, as long as all have the same
ones in the same order, on the device one after the other. Programs are no more than the GPU has room for at once: none
waits for one that cannot begin.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def missing(p_number, m, number):
    """The ranks, as bits, whose numbers are below that. They go round: it is their difference that counts."""
    b_number = tl.atomic_add(p_number, 0, mask=m, sem="acquire", scope="sys")
    bit = tl.full(m.shape, 1, tl.int32) << tl.arange(0, m.shape[0])
    return tl.sum(tl.where(m & (b_number - number < 0), bit, 0))


@triton.jit
def wait(p_number, m, number, patience, TIMED: tl.constexpr):
    """The ranks that are still missing after so many nanoseconds; without a clock, it waits for ever."""
    ranks = missing(p_number, m, number)
    end = number.to(tl.int64)
    if TIMED:
        end = globaltimer() + patience
    waits = ranks != 0
    while waits:
        ranks = missing(p_number, m, number)
        waits = ranks != 0
        if TIMED:
            waits = waits & (globaltimer() < end)
    return ranks


@triton.jit
def exchange_kernel(
    x, own, peers, counts, late, n, part, place, patience,
    made,
    SIZE: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    RIGHT: tl.constexpr, TIMED: tl.constexpr,
):
    """``made`` [SIZE, n]: the vectors ``x`` [n] of the ranks before this one, or after it if not RIGHT.

    A program has ``part`` values of each, and a ``place`` for so many at most. A buffer: the numbers that each rank's
    programs have written, [SIZE, PROGRAMS], then [2, SIZE, PROGRAMS, place] values. ``counts``: the exchanges of each
    program, and the ranks that it has missed. If there are any it sends nothing more, and ``made`` is no number;
    ``late``, which the host reads, says which they were.
    """
    i = tl.program_id(0)
    number = tl.load(counts + i) + 1
    o_r = tl.arange(0, RANKS)
    others = (o_r < SIZE) & (o_r != RANK)
    after, before = others & (o_r > RANK), others & (o_r < RANK)
    p_number = own.to(tl.pointer_type(tl.int32)) + o_r * PROGRAMS + i
    o_half = (SIZE * PROGRAMS + 15) // 16 * 16 + ((number & 1) * SIZE).to(tl.int64) * PROGRAMS * place
    o_part = i * part
    gone = tl.load(counts + PROGRAMS + i)
    if gone == 0:
        gone = wait(p_number, after if RIGHT else before, number - 1, patience, TIMED)
    if gone == 0:
        for o in range(0, part, BLOCK):
            o_x = o + tl.arange(0, BLOCK)
            m_x = (o_x < part) & (o_part + o_x < n)
            b_x = tl.load(x + o_part + o_x, mask=m_x)
            # First to the next one: then each link has one rank's at a time.
            for d in tl.static_range(1, SIZE):
                if (RANK + d < SIZE) if RIGHT else (d <= RANK):
                    p_peer = peers + (RANK + d if RIGHT else RANK - d)
                    p_peer = tl.multiple_of(tl.load(p_peer).to(tl.pointer_type(tl.float32)), 16)
                    tl.store(p_peer + o_half + (RANK * PROGRAMS + i) * place + o_x, b_x, mask=m_x)
        # All that the program has written is there before its number.
        tl.debug_barrier()
        p_peers = tl.load(peers + o_r, mask=others, other=0).to(tl.pointer_type(tl.int32))
        b_number = tl.zeros([RANKS], dtype=tl.int32) + number
        tl.atomic_xchg(p_peers + RANK * PROGRAMS + i, b_number, mask=others, sem="release", scope="sys")
        gone = wait(p_number, before if RIGHT else after, number, patience, TIMED)
        tl.debug_barrier()
    for o in range(0, part, BLOCK):
        o_x = o + tl.arange(0, BLOCK)
        m_x = (o_x < part) & (o_part + o_x < n)
        for r in tl.static_range(SIZE):
            if (r < RANK) if RIGHT else (r > RANK):
                p_x = own + o_half + (r * PROGRAMS + i) * place + o_x
                b_x = tl.load(p_x, mask=m_x, cache_modifier=".cg")
                b_x = tl.where(gone == 0, b_x, float("nan"))
                tl.store(made + r * n.to(tl.int64) + o_part + o_x, b_x, mask=m_x)
    tl.store(counts + i, number)
    if gone != 0:
        tl.store(counts + PROGRAMS + i, gone)
        tl.store(late, gone)

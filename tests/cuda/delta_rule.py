"""Runs the platform ``cuda`` of the gated delta rule without a GPU: its own host code, its kernels in the emulator."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import triton

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.kernels.gated_delta_rule.contract import Args, Options
from keraunos.kernels.gated_delta_rule.cuda import call as calls
from keraunos.kernels.gated_delta_rule.cuda import dimensions_passes, passes
from keraunos.kernels.gated_delta_rule.reference import EPSILON
from keraunos.kernels.host.arrays import spec_of
from keraunos.ops.invocation import Config
from tests.cuda.builds import launched
from tests.cuda.platform import emulated
from tests.gated_delta_rule.cases import Case
from tests.linear_attention.cases import tensor_array, torch_tensor


def small(**fields):
    """A case of bfloat16 with one head and head dims of 64, unless others are given."""
    return Case(**{"B": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16", **fields})


CHUNK = 64
WIDE = dict(K=128, V=128)
# Calls whose values are checked, in the emulator and on a GPU.
CASES = [
    *(small(T=T, H=4 if T == 1 else 1, state=True, **kind) for T in (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5)
      for kind in (dict(), dict(reverse=True))),
    small(**WIDE, T=200, H=2, state=True),
    small(**WIDE, T=130, B=2, gate="none", beta=None, reverse=True),
    small(**WIDE, T=130, norm=True, state=True),
    small(T=130, norm=True, reverse=True, state=True, scale=-0.3),
    small(**WIDE, T=70, H=2, HQ=1, G=1, HV=2, HG=1, HB=1, state=True),
    small(T=70, H=4, HQ=2, G=1, HV=4, HG=2, HB=1, B=2, state=True),
    small(T=70, H=2, HQ=2, G=1, HV=1, HG=1, HB=2),
    small(**WIDE, T=3 * CHUNK + 5, H=4, HQ=1, G=1, HV=4, keys="some equal", gate="none", beta=1.0, norm=True),
    small(T=3 * CHUNK, H=6, HQ=2, G=2, HV=6, lengths=(70, 0, 130), reverse=True, dtype="float16"),
    small(lengths=(70, 0, 1, 64, 63), state=True),
    small(lengths=(0, 65, 0, 130, 0), reverse=True, state=True, norm=True),
    small(**WIDE, lengths=(3, 66), gate="none", H=2),
    *(small(T=200, decay=decay, reverse=reverse, state=True)
      for decay in (0.0, 40.0, None) for reverse in (False, True)),
    *(small(T=200, beta=beta, gate=gate, state=True) for beta in (0.0, 2.0) for gate in ("none", "scalar")),
    *(small(**WIDE, T=200, keys="equal", beta=beta, gate=gate, state=gate == "scalar", reverse=beta == 1, decay=0.01)
      for beta in (1.0, 2.0) for gate in ("none", "scalar")),
    small(T=200, keys="equal", beta=1.0, decay=None, state=True),
    *(small(T=5 * CHUNK + 3, keys="some equal", beta=1.0, gate=gate, state=True, reverse=gate == "none", norm=True)
      for gate in ("none", "scalar")),
    small(T=200, keys="longer", state=True),
    small(T=200, keys="longer", gate="none", beta=1.0),
    small(K=128, V=64, T=70, state=True),
    small(K=64, V=128, T=130, state=True, reverse=True),
    small(K=96, V=40, T=70, H=2, norm=True, state=True),
    small(K=40, V=72, lengths=(65, 0, 9), state=True, reverse=True),
    small(dtype="float16", T=130, state=True),
    small(dtype="float16", T=200, keys="equal", beta=1.0, gate="none"),
]
# Calls with gates per token and dimension.
PER_DIMENSION = dict(gate="vector", state=True)
DIMENSIONS_CASES = [
    *(small(**PER_DIMENSION, T=130, decay=decay, reverse=reverse, gate_dtype="bfloat16")
      for decay in (0.1, 40.0) for reverse in (False, True)),
    small(**PER_DIMENSION, **WIDE, T=70, decay=3.0, HG=1, H=2, norm=True),
    small(**PER_DIMENSION, T=130, decay=None, keys="equal", beta=1.0, gate_dtype="float16"),
    small(**PER_DIMENSION, **WIDE, T=130, keys="equal", beta=1.0, decay=0.01, norm=True),
    small(**PER_DIMENSION, T=70, H=4, HQ=2, G=1, HV=4, HG=2, HB=1, B=2, scale=-0.3),
    small(**PER_DIMENSION, K=96, V=40, lengths=(70, 0, 1, 64), norm=True),
    small(**PER_DIMENSION, K=40, V=72, lengths=(0, 65, 0), beta=None, reverse=True),
    small(**PER_DIMENSION, dtype="float16", T=70, decay=1.0),
]

# Calls whose builds have budgets, and are recorded.
BUILDS = {
    "delta rule": small(K=128, V=128, H=4),
    "delta rule, everything": small(K=128, V=128, H=4, lengths=(60, 40), state=True, norm=True, reverse=True),
    "delta rule, no gates": small(K=128, V=128, H=4, gate="none", beta=None, state=True),
    "delta rule, float16": small(K=128, V=128, H=4, dtype="float16"),
    "delta rule, 64": small(H=4, state=True),
    "delta rule, 96 and 40": small(K=96, V=40, H=4, state=True),
    "delta rule, shared": small(K=128, V=128, H=4, HQ=2, G=2),
    "delta rule, dimensions": small(K=128, V=128, H=4, gate="vector"),
    "delta rule, dimensions, everything": small(K=128, V=128, H=4, gate="vector", lengths=(60, 40), state=True,
                                                norm=True, reverse=True),
    "delta rule, dimensions, many heads": small(K=128, V=128, H=128, gate="vector", T=64),
    "delta rule, dimensions, 64": small(H=4, gate="vector", state=True),
}


# Bytes of stack of each kernel: what waits outside of the loop over chunks, or is read where keys are alike. With gates
# per dimension a step that strong ones need has the results of those before.
STACK = {"prepare_kernel": 80, "walk_kernel": 184, "adjoint_kernel": 144, "gradients_kernel": 24,
         "prepare_dimensions_kernel": 112, "remake_dimensions_kernel": 752, "walk_dimensions_kernel": 168,
         "adjoint_dimensions_kernel": 136, "gradients_dimensions_kernel": 272}
# What newer versions take, where it is more: as measured; and kernels whose products wait for each other. No GPU has
# run these, and "auto" does not take them.
NEWER_STACK = {
    "3.7": dict(prepare_kernel=88, adjoint_kernel=184, remake_dimensions_kernel=760),
    "3.8": dict(prepare_kernel=128, gradients_kernel=88, remake_dimensions_kernel=760,
                gradients_dimensions_kernel=744),
    "3.9": dict(prepare_kernel=168, walk_kernel=288, adjoint_kernel=192, gradients_kernel=144,
                prepare_dimensions_kernel=176, remake_dimensions_kernel=912, walk_dimensions_kernel=208,
                gradients_dimensions_kernel=512),
}
NEWER_WAITS = {"3.9": ("walk_kernel", "gradients_kernel")}


def most(kernel):
    """The budget of a kernel, by its name."""
    version = ".".join(triton.__version__.split(".")[:2])
    return dict(registers=255 if kernel == "remake_dimensions_kernel" else 168,
                stack=(STACK | NEWER_STACK.get(version, {}))[kernel],
                shared=frontends.SHARED_MEMORY, waits=int(kernel in NEWER_WAITS.get(version, ())))


def options(case, stages=3):
    """The options of a case's call."""
    return Options(case.scale or case.K**-0.5, case.reverse, Config(num_stages=stages), use_qk_l2norm=case.norm)


def joined(call, args, local, matrices, start, adjoint, pool=None):
    """The states that segments start from, as ``passes._joined`` makes them."""
    if pool:
        start = pool.states[pool.slots.clamp(min=0)].float().nan_to_num()
        if pool.has_initial is not None:
            start = start * pool.has_initial[:, None, None, None]
    starts = torch.full_like(local[..., : call.V], torch.nan)
    ends = [call.T] * call.N if args.cu_seqlens is None else args.cu_seqlens.diff().tolist()
    first = 0
    for n, length in enumerate(ends):
        if args.cu_seqlens is not None:
            first = int(args.cu_seqlens[n]) // call.L + n
        count = max(-(-length // call.L), 1)
        order = range(first, first + count)[:: -1 if adjoint else 1]
        for i, at in enumerate(order):
            matrix = matrices[order[i - 1], ..., call.V :]
            if i == 0:
                starts[at] = 0 if start is None else start[n]
            else:
                starts[at] = local[order[i - 1], ..., : call.V]
            if i > 1:
                starts[at] += (matrix.mT if adjoint else matrix) @ starts[order[i - 1]]
        first += count
    return starts


@contextlib.contextmanager
def in_torch():
    """Within it what is launched of Triton's kernels is computed by PyTorch: the emulator runs Gluon only."""
    def summed(call, dx, x):
        if x is None or dx is None or call.ratio(x) == 1:
            return dx
        return dx.float().unflatten(2, (x.shape[2], -1)).sum(3).to(getattr(torch, x.dtype))

    def gradient(x, dy):
        x = x.float().requires_grad_()
        (made,) = torch.autograd.grad(x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt(), x, dy.float())
        return made.to(dy.dtype)

    if interpreter.ON:
        yield
        return
    with (mock.patch.multiple(passes, over_shared=summed, _joined=joined),
          mock.patch.object(passes.norms, "gradient", gradient)):
        yield


def run(case, *, mode="late", seed=0, replaced=None, segments=None, stages=3):
    """The output, the final state and the gradients of a case, whose sequences are cut into so many segments.

    With gates per dimension a kernel of Triton makes the gradients: Triton's interpreter has to be on.
    """
    args, *grads = case.arrays
    args, opts = Args(*map(torch_tensor, args)), options(case, stages)
    with emulated(mode, seed, replaced), in_torch(), mock.patch.object(calls, "SEGMENTS", segments):
        results, residuals = passes.forward(args, opts)
        made = passes.backward(args, residuals, tuple(map(torch_tensor, grads)), opts)
    return [None if x is None else tensor_array(x) for x in (*results, *made[:6])]


def walks(case, *, mode="late", seed=0, replaced=None, stages=3, kept=None):
    """The results with gates per dimension, the last ones first, and what the forward walk has kept.

    Of gradients only those that no kernel of Triton makes. kept: by another run; then nothing is done forward.
    """
    args, *grads = case.arrays
    args = passes._all_aligned(Args(*map(torch_tensor, args)))
    call, results = calls.call_of(Args(*map(spec_of, args)), options(case, stages)), ()
    with emulated(mode, seed, replaced):
        if kept is None:
            results, kept = dimensions_passes.forward(call, args, True, True)
        do, dfinal = map(torch_tensor, grads)
        back = dimensions_passes.walked_back(call, args, kept, do, dfinal)
        made = dimensions_passes.gradients_of_chunks(call, args, kept, do, back)
    _, _, _, errors, _, states, *_ = kept
    return [None if x is None else tensor_array(x) for x in (*made[:5], *back, errors, states, *results)], kept


def check(case, **how):
    """Run a case; hold it to the tolerance rule."""
    case.hold(run(case, **how))


def build(case, gradients=True):
    """``(kernel, types of its arguments, constants)`` of each build in Gluon that a call launches."""
    args = Args(*(None if x is None else torch.empty(x.shape, dtype=getattr(torch, x.dtype.name))
                  for x in case.arrays[0]))

    def call():
        passes.forward(args, options(case)._replace(kept=False))
        if gradients:
            outputs, residuals = passes.forward(args, options(case))
            passes.backward(args, residuals, outputs, options(case))

    found = launched(call)
    return [(kernel, dict(types), dict(constants)) for kernel, types, constants in dict.fromkeys(found)
            if ".cuda." in kernel.fn.__module__]

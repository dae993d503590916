"""Run the kernels of the platform ``cuda`` on small shapes, for compute-sanitizer to watch.

``python -m tests.cuda.sanitize linear`` runs those of linear attention forward and backward, and prefills; ``delta``
those of the gated delta rule, likewise, and ``delta-dimensions`` those with gates per dimension; ``softmax`` those of
softmax attention, also with few queries.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from keraunos import frontends, serving
from keraunos.kernels.gated_delta_rule import contract as delta_contract
from keraunos.kernels.gated_delta_rule.cuda import call as delta_calls
from keraunos.kernels.gated_delta_rule.cuda import passes as delta_passes
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.ops import Config
from tests.cuda import delta_rule, softmax_attention
from tests.cuda.platform import delta_prefill, small, small_prefill
from tests.linear_attention.cases import torch_tensor
from tests.sanitizer import limit_time
from tests.serving.cases import arguments

# The last two are cut into segments of two pieces.
CALLS = [
    (small(B=2, T=150, H=2, gamma=1, state=True), ("g_gamma",)),
    (small(H=2, lengths=(70, 0, 1, 129), gate="scalar", gamma=1, state=True, reverse=True), ()),
    (small(B=1, T=150, H=4, G=2, HQ=1, HV=4, HG=2, gate="scalar", gamma=1, gate_dtype="bfloat16"), ()),
    (small(K=128, V=64, B=1, T=150, H=4, G=2, HQ=1, HV=4, HG=2, gate="scalar", gamma=1, state=True), ()),
    (small(K=96, V=40, H=2, lengths=(70, 0, 1, 129), gate="scalar", gamma=1, state=True, reverse=True), ()),
    (small(B=2, T=150, H=2, gate="vector", gate_dtype="bfloat16", state=True), ()),
    (small(H=2, lengths=(70, 0, 1, 129), gate="vector", gamma=1, decay="strong", state=True, reverse=True), ()),
    (small(K=96, V=40, B=1, T=150, H=4, G=2, HQ=1, HV=4, HG=2, gate="vector", decay="strong"), ()),
    (small(B=1, T=600, H=2, gate="vector", state=True), ()),
    (small(B=1, T=600, H=2, gate="scalar", gamma=1, state=True), ()),
]
PREFILLS = [
    small_prefill(lengths=(70, 0, 129, 1), fresh=(1,), tail=70, gate="scalar"),
    small_prefill(K=96, V=40, slots=(-1, 3), lengths=(65, 3), pool="bfloat16"),
]
LINEAR = {"outputs_kernel", "gradients_kernel", "starts_kernel", "sum_kernel", "dimensions_kernel", "keys_kernel",
          "queries_kernel"}

WIDE = dict(K=128, V=128)
DELTAS = {"prepare_kernel", "walk_kernel", "adjoint_kernel", "gradients_kernel"}
DELTA = [
    delta_rule.small(**WIDE, B=2, T=150, H=2, state=True),
    delta_rule.small(**WIDE, H=2, lengths=(70, 0, 1, 129), state=True, reverse=True, norm=True),
    delta_rule.small(**WIDE, T=150, keys="equal", beta=1.0, gate="none"),
    delta_rule.small(B=2, T=300, H=2, gate="none", state=True),
    delta_rule.small(K=96, V=40, lengths=(65, 0, 9), H=4, HQ=2, G=1, HV=4, HG=2, HB=1, state=True),
    delta_rule.small(**WIDE, T=150, H=4, HQ=2, G=2, HV=4),
]
DELTA_DIMENSIONS = [
    delta_rule.small(**WIDE, B=2, T=150, H=2, gate="vector", gate_dtype="bfloat16", state=True),
    delta_rule.small(**WIDE, H=2, lengths=(70, 0, 1, 129), gate="vector", decay=None, state=True, reverse=True,
                     norm=True),
    delta_rule.small(**WIDE, T=150, gate="vector", keys="equal", beta=1.0),
    delta_rule.small(K=96, V=40, lengths=(65, 0, 9), H=4, HQ=2, G=1, HV=4, HG=2, HB=1, gate="vector", state=True),
]
DIMENSIONS = {"prepare_dimensions_kernel", "remake_dimensions_kernel", "walk_dimensions_kernel",
              "adjoint_dimensions_kernel", "gradients_dimensions_kernel"}
DELTA_PREFILLS = [
    delta_prefill(**WIDE, lengths=(70, 0, 129, 1), fresh=(1,), tail=70, norm=True),
    delta_prefill(K=96, V=40, slots=(-1, 3), lengths=(65, 3), pool="bfloat16", gate="none"),
]

EVERYTHING = dict(H=4, causal=True, window=(90, 10), offset=(7,), soft_cap=30.0, sinks=1)
PACKED = (100, 60, -20, 50), (100, 60, -20, 50)
ATTENTION = [
    softmax_attention.Case(T=300, B=2, causal=True),
    softmax_attention.Case(T=230, segments=PACKED, **EVERYTHING),
    softmax_attention.Case(T=230, D=64, dtype="float16", segments=PACKED, **EVERYTHING),
    softmax_attention.Case(T=150, S=200, H=4, G=2, D=96, V=40),
    softmax_attention.Case(T=300, S=260, mask=(1, 1), window=(280, 20)),
    softmax_attention.Case(T=150, S=170, B=2, H=4, G=1, bias=(1, 4), dropout=0.3),
    softmax_attention.Case(T=130, D=256, causal=True),  # its gradients are Triton's
    softmax_attention.Case(T=1, S=1500, H=4, G=2, B=3, causal=True, offset=(1499, 700, -1)),
    softmax_attention.Case(T=4, S=800, G=2, segments=((4,), (750, -50)), **EVERYTHING | dict(offset=(700,))),
]
SOFTMAX = {"forward_kernel", "range_kernel", "zero_kernel", "gradients_kernel", "queries_kernel", "decode_kernel",
           "join_kernel"}


@contextlib.contextmanager
def launching(kernels: set[str]) -> Iterator[None]:
    """All of these kernels are launched within, and no others in Gluon."""
    launched = set()

    def launch(kernel, *args, **options):
        if ".cuda." in kernel.fn.__module__:
            launched.add(kernel.fn.__name__)
        return real(kernel, *args, **options)

    real = frontends.launch
    with mock.patch.object(frontends, "launch", launch):
        yield
    torch.cuda.synchronize()
    if launched != kernels:
        raise SystemExit(f"launched {sorted(launched)}; there are {sorted(kernels)}")


def linear() -> None:
    """Linear attention: outputs, gradients, prefill."""
    for case, constant in CALLS:
        args, *grads = case.arrays
        args, grads = ([x if x is None else torch_tensor(x).cuda() for x in group] for group in (args, grads))
        opts = Options(case.K**-0.5, case.reverse, Config(num_stages=3), constant)
        pieces = (256, 2) if case.T == 600 else (0, 1)
        with mock.patch.object(passes, "segmentation", lambda *_, pieces=pieces: pieces):
            _, residuals = passes.forward(Args(*args), opts)
            passes.backward(Args(*args), residuals, grads, opts)
    for case in PREFILLS:
        _prefill(case)


def _prefill(case) -> None:
    given, options = arguments("prefill", {name: torch_tensor(x, "cuda") for name, x in case.arrays.items()})
    serving.prefill(*given, **options, **case.options, platform="cuda")


def _run_delta(cases) -> None:
    for case in cases:
        args, *grads = case.arrays
        args, grads = ([x if x is None else torch_tensor(x).cuda() for x in group] for group in (args, grads))
        with mock.patch.object(delta_calls, "SEGMENTS", 3 if case.T == 300 else None):
            _, residuals = delta_passes.forward(delta_contract.Args(*args), delta_rule.options(case))
            delta_passes.backward(delta_contract.Args(*args), residuals, grads, delta_rule.options(case))


def delta() -> None:
    """The gated delta rule: outputs, gradients, prefill."""
    _run_delta(DELTA)
    for case in DELTA_PREFILLS:
        _prefill(case)


def dimensions() -> None:
    """The gated delta rule with gates per dimension: outputs, gradients."""
    _run_delta(DELTA_DIMENSIONS)
    # A program has all values of a head.
    with mock.patch.object(delta_calls, "AT_ONCE", 1):
        _run_delta(DELTA_DIMENSIONS[:1])


def softmax() -> None:
    """Softmax attention: outputs, gradients."""
    for case in ATTENTION:
        softmax_attention.call(case, gradients=True, device="cuda")


if __name__ == "__main__":
    limit_time()
    run, kernels = {
        "linear": (linear, LINEAR), "delta": (delta, DELTAS), "delta-dimensions": (dimensions, DIMENSIONS),
        "softmax": (softmax, SOFTMAX),
    }[sys.argv[1]]
    with launching(kernels):
        run()

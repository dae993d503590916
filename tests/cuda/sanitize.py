"""Run the kernels of the platform ``cuda`` on small shapes, for compute-sanitizer to watch.

``python -m tests.cuda.sanitize`` runs them forward and backward, and prefills.
"""

from __future__ import annotations

from unittest import mock

import torch

from keraunos import frontends, serving
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.ops import Config
from tests.cuda.platform import small, small_prefill
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
KERNELS = {"outputs_kernel", "gradients_kernel", "starts_kernel", "sum_kernel", "dimensions_kernel", "keys_kernel",
           "queries_kernel"}


def main() -> None:
    launched = set()

    def launch(kernel, *args, **options):
        launched.add(kernel.fn.__name__)
        return real(kernel, *args, **options)

    real = frontends.launch
    with mock.patch.object(frontends, "launch", launch):
        for case, constant in CALLS:
            args, *grads = case.arrays
            args, grads = ([x if x is None else torch_tensor(x).cuda() for x in group] for group in (args, grads))
            opts = Options(case.K**-0.5, case.reverse, Config(num_stages=3), constant)
            pieces = (256, 2) if case.T == 600 else (0, 1)
            with mock.patch.object(passes, "segmentation", lambda *_, pieces=pieces: pieces):
                _, residuals = passes.forward(Args(*args), opts)
                passes.backward(Args(*args), residuals, grads, opts)
        for case in PREFILLS:
            given, options = arguments("prefill", {name: torch_tensor(x, "cuda") for name, x in case.arrays.items()})
            serving.prefill(*given, **options, platform="cuda")
    torch.cuda.synchronize()
    if launched != KERNELS:
        raise SystemExit(f"launched {sorted(launched)}; there are {sorted(KERNELS)}")


if __name__ == "__main__":
    limit_time()
    main()

"""Compile what fla will try, on all cores: `compile_all` starts processes of this file.

For each number of heads fla compiles hundreds of variants of its kernels, one after the other, and keeps the fastest.
Here every process compiles a share of each kernel's variants into Triton's cache. The choice among them is left to the
run that times fla, which has the GPU for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from contestants import PEERS
from workloads import Shape, Workload

# Processes for a number of heads: chunk_gla has more variants of its kernels than chunk_simple_gla.
SHARES = {"gla_attention": 6, "lightning_attention": 4}


def compile_all(operations: list[str], heads: list[int], seconds: float, say) -> dict[str, dict[int, str]]:
    """Compile for all numbers of heads at once.

    Args:
        operations: public operations.
        heads: numbers of heads, for which fla compiles anew.
        seconds: after these the processes that still compile are ended; 0: none are started.
        say: called with a line for each operation and number of heads.

    Returns:
        operation -> heads -> why it is not ready.
    """
    if not seconds:
        return {operation: dict.fromkeys(heads, "not asked for") for operation in operations}
    end = time.monotonic() + seconds
    found: dict[str, dict[int, str]] = {operation: {} for operation in operations}
    reason = PEERS["fla"].unsupported(Workload(operations[0], Shape(1, 1024, heads[0])))
    if reason is not None:
        return {operation: dict.fromkeys(heads, reason) for operation in operations}

    def compile_share(operation: str, H: int, share: int) -> str | None:
        command = [sys.executable, __file__, operation, str(H), str(share)]
        # What it would remember is the choice among a share.
        environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
        left = max(end - time.monotonic(), 0.1)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, env=environment, check=False)
        except subprocess.TimeoutExpired:
            return f"did not compile in {seconds:.0f} s"
        return None if done.returncode == 0 else f"failed: {(done.stderr.splitlines() or ['no message'])[-1]}"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        asked = {
            (operation, H): [threads.submit(compile_share, operation, H, i) for i in range(SHARES[operation])]
            for operation in operations
            for H in heads
        }
        for (operation, H), answers in asked.items():
            wrong = next((text for answer in answers if (text := answer.result()) is not None), None)
            if wrong is not None:
                found[operation][H] = wrong
            say(f"fla, {operation}, {H} heads: {wrong or 'compiled'} after {time.monotonic() - end + seconds:.0f} s")
    return found


def compile_share(operation: str, H: int, share: int) -> None:
    """Call fla once, with gradients, with a tuner that runs each variant of the share once and tries no other."""
    from triton.runtime.autotuner import Autotuner

    from keraunos import frontends

    everything = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, kwargs: (
        everything(self, kwargs)[share :: SHARES[operation]] or everything(self, kwargs)[:1]
    )

    def run_once(self):
        def measure(call, quantiles):
            call()
            return [0.0] * len(quantiles)

        return measure

    Autotuner.do_bench = property(run_once)
    workload = Workload(operation, Shape(1, 1024, H), backward=True)
    arrays, cotangents = workload.arguments("torch", 0)
    fn = PEERS["fla"].function(workload, workload.log_decay())
    frontends.get("torch.measure").program(fn, arrays, cotangents)()


if __name__ == "__main__":
    compile_share(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

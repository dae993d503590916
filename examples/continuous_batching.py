"""Continuous batching: requests come and go, prompts are read in parts, and every step serves all that are there.

    python examples/continuous_batching.py                          64 requests, on a GPU if there is one
    python examples/continuous_batching.py --requests 256 --heads 64 --graph

One step is one call of ``prefill`` for parts of prompts, ``budget`` tokens in all, and one of ``decode`` for a token of
every request whose prompt has been read. Their shapes never change: what a step does not need is padding, a slot of -1.
So both calls can be captured in a CUDA graph once (--graph), and JAX would compile them once. A request that ends
leaves its slot to the next one, whose first part of a prompt starts from zeros by ``has_initial``.

The model is one layer's attention: its inputs are random, as if some projection had made them. Each request's outputs
are those of its own recurrence, whoever else is there; ``tests/serving/test_example.py`` holds them to that.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from keraunos import decay, serving


@dataclass(eq=False)
class Request:
    """Queries, keys and values ``[tokens, 3, H, D]`` of a prompt, then of the tokens that are generated after it."""

    inputs: torch.Tensor
    prompt: int
    arrives: int  # step
    done: int = 0
    slot: int = -1
    outputs: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """A pool of states, and calls of fixed shapes on it.

    Args:
        slots: requests that are served at a time.
        budget: tokens of prompts per step.
        parts: requests whose prompts are read in one step, at most.
        log_decay: ``[H]``.
        dim: K and V.
        device, dtype: of the tokens; states are float32.
        graph: capture a step in a CUDA graph and replay it.
    """

    def __init__(self, slots: int, budget: int, parts: int, log_decay: torch.Tensor, dim: int, device: str,
                 dtype: torch.dtype, graph: bool = False):
        self.budget, self.parts, self.device = budget, parts, device
        heads = len(log_decay)
        self.log_decay, self.free = log_decay.to(device), list(range(slots))

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.states = zeros(slots, heads, dim, dim, dtype=torch.float32)
        self.prompts, self.tokens = zeros(budget, 3, heads, dim, dtype=dtype), zeros(slots, 3, heads, dim, dtype=dtype)
        self.outputs = zeros(budget, heads, dim, dtype=dtype), zeros(slots, heads, dim, dtype=dtype)
        # What changes from step to step, as one array, so that it takes one copy to the device: the slots of prompts,
        # their offsets, whether they are resumed, and the slots of tokens.
        self.plan = zeros(3 * parts + 1 + slots)
        self.step: Callable[[], None] = self.run
        if graph:
            self.run()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self.run()
            self.states.zero_()
            self.step = captured.replay

    def run(self) -> None:
        """The calls of one step."""
        n = self.parts
        slots, offsets, resumed, decoding = self.plan.split((n, n + 1, n, len(self.tokens)))
        options = dict(log_decay=self.log_decay)
        serving.prefill(*self.prompts.unbind(1), self.states, slots, offsets, has_initial=resumed != 0,
                        out=self.outputs[0], **options)
        serving.decode(*self.tokens.unbind(1), self.states, decoding, out=self.outputs[1], **options)

    def serve(self, requests: list[Request]) -> Iterator[int]:
        """Serve requests until all are done; yields, step after step, how many tokens it had."""
        coming, running = deque(sorted(requests, key=lambda r: r.arrives)), []
        step = 0
        while coming or running:
            while coming and coming[0].arrives <= step and self.free:
                coming[0].slot = self.free.pop()
                running.append(coming.popleft())
            yield self._serve_step(running)
            for request in [r for r in running if r.done == len(r.inputs)]:
                running.remove(request)
                self.free.append(request.slot)
            step += 1

    def _serve_step(self, running: list[Request]) -> int:
        decoding = [r for r in running if r.done >= r.prompt]
        # Parts of prompts, in the order in which requests came.
        parts, used = [], 0
        for request in [r for r in running if r.done < r.prompt][: self.parts]:
            size = min(request.prompt - request.done, self.budget - used)
            if size:
                self.prompts[used : used + size] = request.inputs[request.done : request.done + size]
                parts.append((request, used, size))
                used += size
        for i, request in enumerate(decoding):
            self.tokens[i] = request.inputs[request.done]
        missing = self.parts - len(parts)
        plan = [
            *(r.slot for r, _, _ in parts), *[-1] * missing, *(begin for _, begin, _ in parts), *[used] * (missing + 1),
            *(int(r.done > 0) for r, _, _ in parts), *[0] * missing,
            *(r.slot for r in decoding), *[-1] * (len(self.tokens) - len(decoding)),
        ]
        self.plan.copy_(torch.tensor(plan, dtype=torch.int32), non_blocking=True)
        self.step()
        for request, begin, size in parts:
            request.outputs.append(self.outputs[0][begin : begin + size].clone())
            request.done += size
        for i, request in enumerate(decoding):
            request.outputs.append(self.outputs[1][i : i + 1].clone())
            request.done += 1
        return used + len(decoding)


def random_requests(count: int, longest: int, heads: int, dim: int, device: str, dtype: torch.dtype) -> list[Request]:
    """Requests with prompts and answers of random lengths, which come at random steps."""
    generator, values = torch.Generator().manual_seed(0), torch.Generator(device).manual_seed(0)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    made = []
    for n in range(count):
        prompt, answer = integer(1, longest), integer(1, max(longest // 8, 2))
        inputs = torch.randn(prompt + answer, 3, heads, dim, generator=values, device=device, dtype=dtype)
        made.append(Request(inputs, prompt, integer(0, n + 1)))
    return made


def measure(engine: Engine, requests: list[Request]) -> tuple[int, int, float]:
    """Serve requests, after a few of them for warmth; tokens, steps, and the seconds they took."""
    for few in (requests[:4], requests):
        for request in few:
            request.done, request.slot = 0, -1
            request.outputs.clear()
        start = time.perf_counter()
        steps = list(engine.serve(few))
        if engine.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return sum(steps), len(steps), seconds


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32 if gpu else 2)
    parser.add_argument("--dim", type=int, default=128 if gpu else 16)
    parser.add_argument("--longest", type=int, default=2048 if gpu else 128)
    parser.add_argument("--budget", type=int, default=2048 if gpu else 64)
    parser.add_argument("--graph", action="store_true", help="capture a step in a CUDA graph")
    args = parser.parse_args()
    if args.graph and not gpu:
        parser.error("--graph needs a GPU that PyTorch can use")
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    log_decay = torch.from_numpy(decay.minimax(args.heads, 5, 32))
    engine = Engine(args.slots, args.budget, 8, log_decay, args.dim, device, dtype, args.graph)
    requests = random_requests(args.requests, args.longest, args.heads, args.dim, device, dtype)
    tokens, steps, seconds = measure(engine, requests)
    print(f"{len(requests)} requests, {tokens} tokens in {steps} steps: {tokens / seconds:.0f} tokens/s, "
          f"{seconds / steps * 1e3:.2f} ms a step")


if __name__ == "__main__":
    main()

"""The demo of `language_model` in PyTorch: it trains the same model on the same text, and makes the same three checks.

    python examples/language_model_torch.py --minutes 1.75
    python examples/language_model_torch.py --text FILE --steps 500 --length 200

Exits with 1 if a check fails. The text, the sizes, the learning rate and the checks are shared with it.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from language_model import DemoError, data
from language_model.checks import beats_bigram, constant_state, same_logits
from language_model.config import TEMPERATURE, ModelConfig
from language_model.schedule import NATS_PER_BIT, learning_rate
from language_model.torch_model import LanguageModel
from torch.nn import functional

BATCH = 4
# The highest rate, for the matrices; other parameters, norms', take less.
RATE, OTHERS = 1.5e-2, 0.3


def bits_per_byte(model: LanguageModel, windows: np.ndarray) -> torch.Tensor:
    """The mean loss over windows `[N, context + 1]`."""
    tokens = torch.from_numpy(windows).long()
    logits, _ = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / NATS_PER_BIT


def train(model: LanguageModel, config: ModelConfig, corpus: data.Corpus, steps: int | None, seconds: float,
          seed: int) -> None:
    """Take so many steps, or as many as the time has: Muon for the matrices, Adam for the rest."""
    matrices = [x for x in model.parameters() if x.ndim == 2]
    rest = [x for x in model.parameters() if x.ndim != 2]
    optimizers = (
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), torch.optim.Adam(rest)
    )
    began = said = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        rate = learning_rate(progress, RATE)
        for optimizer, scale in zip(optimizers, (1.0, OTHERS), strict=True):
            optimizer.param_groups[0]["lr"] = scale * rate
            optimizer.zero_grad()
        bits = bits_per_byte(model, data.training_batch(corpus.train, config.context, BATCH, seed, step))
        bits.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, now = step + 1, time.monotonic()
        progress = step / steps if steps else (now - began) / seconds
        if now - said > 10 or progress >= 1:
            said = now
            speed = step * BATCH * config.context / (now - began)
            print(f"step {step}  {bits.item():.2f} bits/byte  {speed:,.0f} tokens/s", flush=True)


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, length: int, seed: int) -> tuple[bytes, np.ndarray, list[int]]:
    """Bytes drawn one after another from the state, the logits of each, and the state's sizes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[*prompt]])
    states, text, drawn_from, sizes = None, bytearray(), [], []
    for _ in range(length):
        logits, states = model(tokens, states)
        drawn_from.append(logits[0, -1])
        sizes.append(sum(state.nbytes for state in states))
        tokens = torch.multinomial(functional.softmax(logits[0, -1] / TEMPERATURE, -1), 1, generator=generator)[None]
        text.append(int(tokens))
    return bytes(text), torch.stack(drawn_from).numpy(), sizes


def main(arguments: Sequence[str] | None = None, config: ModelConfig = ModelConfig()) -> int:  # noqa: B008
    """Train, write, check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to learn from; the standard library's sources if not given")
    parser.add_argument("--minutes", type=float, default=1.75, help="training time")
    parser.add_argument("--steps", type=int, help="train for so many steps instead, repeatably")
    parser.add_argument("--length", type=int, default=512, help="bytes to generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--platform", default="auto", help="what computes the attention")
    parser.add_argument("--layers", help="all blocks alike: lightning, gla, or delta; a mixture if not given")
    options = parser.parse_args(arguments)
    try:
        config = config.alike(options.layers) if options.layers else config
        corpus = data.text_file(options.text, config.context) if options.text else data.python_library()
    except DemoError as error:
        parser.error(str(error))
    torch.manual_seed(options.seed)
    model = LanguageModel(config, options.platform)
    train(model, config, corpus, options.steps, 60 * options.minutes, options.seed)

    text, logits, sizes = generate(model, corpus.prompt, options.length, options.seed)
    print((corpus.prompt + text).decode(errors="replace"))
    windows = data.held_out_windows(corpus.held_out, config.context)
    with torch.no_grad():
        whole, _ = model(torch.tensor([[*corpus.prompt, *text]]))
        size = min(len(windows), data.EVALUATION_BATCH)
        judged = [bits_per_byte(model, windows[i : i + size]).item() for i in range(0, len(windows), size)]
    checks = [
        same_logits(logits, whole[0, len(corpus.prompt) - 1 : -1].numpy()),
        constant_state(sizes, len(corpus.prompt), config.cache_bytes_per_token),
        beats_bigram(float(np.mean(judged)), data.bigram_bits_per_byte(corpus.train, windows), windows[:, 1:].size),
    ]
    for number, check in enumerate(checks, start=1):
        print(f"\n{number}. {'passed' if check.passed else 'FAILED'}: {check.claim}")
        print(textwrap.indent(check.figures, "   "))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

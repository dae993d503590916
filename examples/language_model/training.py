"""Training that can stop at any step and go on as if it had not."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from language_model import DemoError, checkpoint
from language_model.config import ModelConfig
from language_model.data import EVALUATION_BATCH, Corpus, training_batch
from language_model.model import Params, forward, init_params, init_states
from language_model.schedule import NATS_PER_BIT, learning_rate

# How often the held-out text is looked at, as a share of the training, and the file written, in seconds.
_HELD_OUT_EVERY = 1 / 16
_SAVE_SECONDS = 10.0
_FORMAT = 1
# The fields of a run, other than its arrays, that a checkpoint holds.
_COUNTERS = ("step", "elapsed", "train_bits", "held_out_bits")


@dataclass(frozen=True)
class Settings:
    """The settings that decide the numbers of a training run: a checkpoint continues under the same ones only.

    Args:
        model: Sizes of the model.
        batch: Windows per step.
        learning_rate: The highest one, after the warm-up.
        seed: Decides the first parameters and every batch.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 4
    learning_rate: float = 1.5e-2
    seed: int = 0


@dataclass(frozen=True)
class Budget:
    """How long to train: for a time, or, to get the same numbers on every run, for a number of steps.

    Args:
        seconds: Training time, compilation not included.
        steps: Steps instead.
    """

    seconds: float
    steps: int | None = None

    def progress(self, run: "Run") -> float:
        """The share of the budget that is used up, 1.0 at the end."""
        return min(1.0, run.elapsed / self.seconds if self.steps is None else run.step / self.steps)


@dataclass
class Run:
    """Everything that changes while training, and all that a checkpoint holds.

    Args:
        params: The model's parameters.
        optimizer: The optimizer's state.
        step: Steps taken; with the seed it also says which batches come next.
        elapsed: Seconds of training so far, over all sessions.
        train_bits: Bits per byte of every step's batch.
        held_out_bits: Pairs of a step and the held-out bits per byte after it.
    """

    params: Params
    optimizer: optax.OptState
    step: int = 0
    elapsed: float = 0.0
    train_bits: list[float] = field(default_factory=list)
    held_out_bits: list[tuple[int, float]] = field(default_factory=list)


def new_run(settings: Settings) -> Run:
    """A run before its first step."""
    params = init_params(settings.model, jax.random.key(settings.seed))
    return Run(params, _optimizer().init(params))


def save_run(path: Path, run: Run, settings: Settings, corpus: Corpus) -> None:
    """Writes a run to a checkpoint; see `checkpoint.save`."""
    about = {name: getattr(run, name) for name in _COUNTERS} | {"identity": _identity(settings, corpus)}
    checkpoint.save(path, {name: np.asarray(leaf) for name, leaf in _named_leaves(run).items()}, about)


def load_run(path: Path, settings: Settings, corpus: Corpus) -> Run:
    """Reads a run back from a checkpoint.

    Raises:
        CorruptCheckpointError: The file cannot be used.
        DemoError: The file is of another text, seed or model: going on from it would mix two runs.
        FileNotFoundError: There is none.
    """
    arrays, about = checkpoint.load(path)
    identity = about.get("identity", {})
    different = [name for name, value in _identity(settings, corpus).items() if identity.get(name) != value]
    if different:
        raise DemoError(
            f"{path} is of a run with another {' and another '.join(different)}: "
            "give --fresh to start over, or another --out to keep both"
        )
    run = new_run(settings)
    try:
        leaves = [jnp.asarray(arrays[name]) for name in _named_leaves(run)]
        counters = {name: about[name] for name in _COUNTERS}
        counters["held_out_bits"] = [(step, bits) for step, bits in counters["held_out_bits"]]
    except KeyError as missing:
        raise checkpoint.CorruptCheckpointError(f"{path} has no {missing}") from missing
    structure = jax.tree.structure((run.params, run.optimizer))
    params, optimizer = jax.tree.unflatten(structure, leaves)
    return Run(params, optimizer, **counters)


class Programs:
    """The two programs of a training run; making one traces them, and their first use compiles them.

    Args:
        settings: Sizes and batch.
        evaluation_batch: Windows per call of `bits`.
        platform: The platform that computes the attention.

    Raises:
        ValueError: The platform cannot train this model here.
    """

    def __init__(self, settings: Settings, evaluation_batch: int, platform: str | None):
        model, optimizer = settings.model, _optimizer()

        def bits(params: Params, windows: jax.Array) -> jax.Array:
            logits, _ = forward(params, windows[:, :-1], init_states(model, len(windows)), model, platform)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
            return losses.mean() / NATS_PER_BIT

        def step(params, state, windows, learning_rate):
            loss, gradients = jax.value_and_grad(bits)(params, windows)
            updates, state = optimizer.update(gradients, state, params)
            params = jax.tree.map(lambda p, u: p + learning_rate * u, params, updates)
            return params, state, loss

        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        state = jax.eval_shape(optimizer.init, params)
        batch, evaluated = (
            jax.ShapeDtypeStruct((count, model.context + 1), jnp.int32) for count in (settings.batch, evaluation_batch)
        )
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        self._step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch, rate)
        self._bits = jax.jit(bits).lower(params, evaluated)

    @cached_property
    def step(self) -> jax.stages.Compiled:
        """`(params, optimizer state, windows, learning rate) -> (params, optimizer state, bits per byte before)`."""
        return self._step.compile()

    @cached_property
    def bits(self) -> jax.stages.Compiled:
        """`(params, windows) -> mean bits per byte`."""
        return self._bits.compile()


def evaluation_batch(windows: np.ndarray) -> int:
    """How many of these windows are evaluated at once."""
    return min(len(windows), EVALUATION_BATCH)


def evaluate(programs: Programs, params: Params, windows: np.ndarray) -> float:
    """Mean bits per byte over windows `[N, context + 1]`, N a multiple of the evaluation batch."""
    batch = evaluation_batch(windows)
    return float(np.mean([programs.bits(params, windows[i : i + batch]) for i in range(0, len(windows), batch)]))


def train(
    run: Run,
    corpus: Corpus,
    settings: Settings,
    budget: Budget,
    programs: Programs,
    windows: np.ndarray,
    *,
    stop: Callable[[], bool],
    save: Callable[[Run], None],
    report: Callable[[Run], None],
) -> None:
    """Takes steps until the budget is used up, changing `run` in place.

    Args:
        run: Where to go on from.
        corpus: The text.
        settings: The same that `run` was made with.
        budget: When to end; the learning rate falls to zero towards it.
        programs: Compiled for these settings.
        windows: Held-out windows; a batch of them gives the points of the curve.
        stop: Asked after every step whether the user wants to stop.
        save: Called now and then, and before the end, with the run between two steps.
        report: Called after every step.

    Raises:
        KeyboardInterrupt: `stop` said so; the run was saved first.
        DemoError: The loss is no longer a number; the last checkpoint is from before that.
    """
    sample = windows[:: len(windows) // evaluation_batch(windows)][: evaluation_batch(windows)]
    last = saved = time.perf_counter()
    while (progress := budget.progress(run)) < 1:
        batch = training_batch(corpus.train, settings.model.context, settings.batch, settings.seed, run.step)
        rate = np.float32(learning_rate(progress, settings.learning_rate))
        run.params, run.optimizer, bits = programs.step(run.params, run.optimizer, batch, rate)
        run.step += 1
        run.train_bits.append(float(bits))
        if not math.isfinite(run.train_bits[-1]):
            raise DemoError(f"the loss is {run.train_bits[-1]} at step {run.step}; --fresh starts over")
        now = time.perf_counter()
        run.elapsed, last = run.elapsed + now - last, now
        if progress // _HELD_OUT_EVERY != budget.progress(run) // _HELD_OUT_EVERY:
            run.held_out_bits.append((run.step, evaluate(programs, run.params, sample)))
        report(run)
        if stop():
            save(run)
            raise KeyboardInterrupt
        if now - saved > _SAVE_SECONDS:
            save(run)
            saved = now
    save(run)


def _optimizer() -> optax.GradientTransformation:
    # Muon for the matrices, Adam for the rest: in the same time it gets about 0.2 bits per byte further than Adam for
    # all. The rates are relative: the step multiplies the real one in, because it depends on the time left.
    muon = optax.contrib.muon(1.0, adam_learning_rate=0.3, consistent_rms=0.2)
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _identity(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    identity = {
        "format": _FORMAT,
        "text": corpus.fingerprint,
        "seed": settings.seed,
        "model": asdict(settings.model),
        "batch": settings.batch,
        "learning rate": settings.learning_rate,
    }
    # Through JSON, to compare with what was read from JSON: there are no tuples there.
    return json.loads(json.dumps(identity))


def _named_leaves(run: Run) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path((run.params, run.optimizer))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

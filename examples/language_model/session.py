"""One run of the demo, from the text to the verdict, as the user sees it."""

import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from rich.console import Console

from language_model import DemoError, checkpoint, data, generation, plot, training
from language_model.checks import Check, beats_bigram, constant_state, same_logits
from language_model.display import ByteDisplay, TrainingDisplay, minutes
from language_model.interrupts import HeldBackInterrupt


@dataclass(frozen=True)
class Options:
    """The user's options; see ``python examples/language_model --help``."""

    text: Path | None
    seconds: float
    steps: int | None
    out: Path
    prompt: str | None
    length: int
    seed: int
    fresh: bool
    platform: str
    layers: str | None = None


class Session:
    """Reads the text, prepares the folder and traces the model; `run` does the rest.

    Raises:
        DemoError: The text, the folder or the platform cannot be used.
    """

    def __init__(self, options: Options, console: Console):
        self._options, self._console = options, console
        self._began = time.monotonic()
        self._settings = training.Settings(seed=options.seed)
        if options.layers is not None:
            self._settings = replace(self._settings, model=self._settings.model.alike(options.layers))
        self._budget = training.Budget(options.seconds, options.steps)
        context = self._settings.model.context
        self._corpus = data.text_file(options.text, context) if options.text else data.python_library()
        # What the shell gave as bytes that are no UTF-8 becomes those bytes again.
        self._prompt = options.prompt.encode(errors="surrogateescape") if options.prompt else self._corpus.prompt
        self._windows = data.held_out_windows(self._corpus.held_out, context)
        self._checkpoint = options.out / "checkpoint.npz"
        self._saved_step: int | None = None
        _require_writable(options.out)
        try:
            batch = training.evaluation_batch(self._windows)
            self._programs = training.Programs(self._settings, batch, options.platform)
        except ValueError as error:
            raise DemoError(f"--platform {options.platform}: {error}") from error

    def run(self) -> bool:
        """Trains, writes and checks; returns whether all checks passed."""
        corpus = self._corpus
        self._print(
            f"Text: {corpus.name}; {len(corpus.train):,} bytes to learn from, {len(corpus.held_out):,} held out."
        )
        run = self._train()
        with self._console.status("Judging the held-out text"):
            bits = training.evaluate(self._programs, run.params, self._windows)
            bigram = data.bigram_bits_per_byte(corpus.train, self._windows)
            curve = self._options.out / "loss.png"
            title = f"keraunos demo, trained on {corpus.name}"
            plot.loss_curve(curve, run.train_bits, run.held_out_bits, bits, bigram, title)
        sample = self._generate(run)
        written = self._options.out / "text.txt"
        written.write_bytes(sample.prompt + sample.text)
        with self._console.status("Reading the whole text once more, in parallel"):
            model = self._settings.model
            parallel = generation.parallel_logits(run.params, model, sample, self._options.platform)
        checks = [
            same_logits(sample.logits, parallel),
            constant_state(sample.state_bytes, len(sample.prompt), model.cache_bytes_per_token),
            beats_bigram(bits, bigram, self._windows[:, 1:].size),
        ]
        self._show(checks)
        self._print(f"\nCheckpoint {self._checkpoint}, plot {curve}, text {written}.")
        self._print(f"{minutes(time.monotonic() - self._began)} in all, {minutes(run.elapsed)} of it training.")
        return all(check.passed for check in checks)

    def whereabouts(self) -> str:
        """One line for a user who pressed Ctrl-C: what is kept, and how to go on."""
        if self._saved_step is None:
            return "Interrupted before training went on; nothing is lost, the same command starts again."
        same = "the same command without --fresh" if self._options.fresh else "the same command"
        return f"Interrupted; {same} goes on from step {self._saved_step} ({self._checkpoint})."

    def _train(self) -> training.Run:
        run = self._resume()
        with HeldBackInterrupt() as interrupt:
            # Now there is something to go on from, even if the user stops the compiler.
            self._save(run)
            if self._budget.progress(run) >= 1:
                self._print("Training is complete; --fresh trains anew, more --minutes go on.")
                return run
            with self._console.status("Compiling"):
                began = time.monotonic()
                _ = self._programs.step, self._programs.bits
            self._print(f"Compiled in {time.monotonic() - began:.0f} s.")
            with TrainingDisplay(self._console, self._settings, self._budget, run) as display:
                training.train(
                    run,
                    self._corpus,
                    self._settings,
                    self._budget,
                    self._programs,
                    self._windows,
                    stop=lambda: interrupt.requested,
                    save=self._save,
                    report=display.update,
                )
        return run

    def _resume(self) -> training.Run:
        if not self._options.fresh:
            try:
                run = training.load_run(self._checkpoint, self._settings, self._corpus)
                self._print(f"Going on from step {run.step} of {self._checkpoint}.")
                return run
            except FileNotFoundError:
                pass
            except checkpoint.CorruptCheckpointError as error:
                kept = checkpoint.set_aside(self._checkpoint)
                self._print(f"{error}: kept as {kept.name}, training starts afresh.", style="yellow")
        run = training.new_run(self._settings)
        model = self._settings.model
        parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
        self._print(f"Model: {parameters:,} parameters, {model.width} channels, blocks {', '.join(model.blocks)}.")
        return run

    def _save(self, run: training.Run) -> None:
        try:
            training.save_run(self._checkpoint, run, self._settings, self._corpus)
        except OSError as error:
            raise DemoError(f"cannot write {self._checkpoint}: {error.strerror}") from error
        self._saved_step = run.step

    def _generate(self, run: training.Run) -> generation.Sample:
        self._console.rule("generated from the state, byte by byte")
        display = ByteDisplay(self._console)
        display.write(self._prompt, style="bold")
        sample = generation.generate(
            run.params,
            self._settings.model,
            self._prompt,
            self._options.length,
            self._options.seed,
            self._options.platform,
            display.write,
        )
        self._console.out("")
        self._console.rule()
        return sample

    def _show(self, checks: Sequence[Check]) -> None:
        for number, check in enumerate(checks, start=1):
            verdict, style = ("passed", "green") if check.passed else ("FAILED", "bold red")
            self._console.out(f"\n{number}. {verdict}: {check.claim}", style=style, highlight=False)
            self._print(textwrap.indent(check.figures, "   "))

    def _print(self, line: str, style: str | None = None) -> None:
        # No markup: names of files may hold brackets. A line in a log stays one.
        self._console.print(line, style=style, markup=False, soft_wrap=not self._console.is_terminal)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DemoError(f"cannot write into {folder}: {error.strerror}") from error

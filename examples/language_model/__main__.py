"""``python examples/language_model [--help]``, from the root of the repository."""

import io
import sys
from pathlib import Path

if not __package__:
    # Python was given this folder and looks for modules inside it: the package is found from the folder above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
if isinstance(sys.stdout, io.TextIOWrapper):
    # Text that a terminal cannot show must not end the run.
    sys.stdout.reconfigure(errors="replace")
try:
    from language_model.command import app
except ModuleNotFoundError as error:
    sys.exit(f"demo: needs {error.name}: pip install -e '.[demo]'")
app(prog_name="python examples/language_model")

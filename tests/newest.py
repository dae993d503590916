"""The names of all that the tests need, without the bounds that pyproject.toml sets: pip then takes the newest."""

import pathlib
import re
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
names = {re.match(r"[\w.-]+(\[\w+\])?", one)[0] for one in wanted}
print(*sorted(name for name in names if not re.match(rf"{project['name']}\b|jax\[", name)))

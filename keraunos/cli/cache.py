"""`keraunos cache`: look at the configurations that were measured on this machine, and clear them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from keraunos.cli.console import fields
from keraunos.text import printable

cache = typer.Typer(help="The configurations measured on this machine.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Only = Annotated[str, typer.Option("--only", help="Only entries whose key contains this, such as 'gla |'.")]


@cache.command("path")
def path(as_json: _Json = False) -> None:
    """Print the folder of the files; KERAUNOS_CACHE_DIR moves it."""
    folder = str(_folder())
    typer.echo(json.dumps({"path": folder}) if as_json else printable(folder))


@cache.command("list")
def list_files(as_json: _Json = False) -> None:
    """List the files, one for each kind of device, and how many entries each has."""
    folder = _folder()
    found = [
        {"file": str(file), "entries": len(entries), "bytes": file.stat().st_size} for file, entries in _files().items()
    ]
    if as_json:
        typer.echo(json.dumps({"path": str(folder), "files": found}, indent=1))
    for row in () if as_json else found:
        typer.echo(printable(f"{row['file']}: {row['entries']} entries, {row['bytes']} bytes"))
    if not found and not as_json:
        typer.echo(printable(f"nothing in {folder}"))


@cache.command("show")
def show(only: _Only = "", as_json: _Json = False) -> None:
    """Show the entries: key, winner, its time and the number of candidates; --json has all measurements."""
    found = {key: entry for entries in _files().values() for key, entry in entries.items() if only in key}
    if as_json:
        typer.echo(json.dumps({"entries": found}, indent=1))
        return
    for key, entry in found.items():
        typer.echo(f"{printable(key)}\n    {printable(_summary(entry))}")
    if not found:
        typer.echo("no such entry")


def _summary(entry: dict[str, Any]) -> str:
    """One line of what we write into an entry, as far as it is there: a file may hold any JSON."""
    winner, measurements = entry.get("winner"), entry.get("measurements")
    measured = [m for m in measurements if isinstance(m, dict)] if isinstance(measurements, list) else []
    parts = [fields(winner)]
    for found in measured:
        times = found.get("microseconds")
        if found.get("config") == winner and isinstance(times, dict) and "median" in times:
            parts.append(f"{times['median']} µs")
    if measured:
        parts.append(f"of {len(measured)} candidates")
    if "note" in entry:
        parts.append(str(entry["note"]))
    return " · ".join(parts)


@cache.command("clear")
def clear(only: _Only = "", as_json: _Json = False) -> None:
    """Drop entries, all or those whose key contains the text of --only."""
    store, dropped, failed = _cache(), 0, []
    for file, entries in _files().items():
        chosen = [key for key in entries if only in key]
        if chosen and not store.clear(file, keep=lambda key: only not in key):
            failed.append(str(file))
        else:
            dropped += len(chosen)
    if as_json:
        typer.echo(json.dumps({"dropped": dropped, "failed": failed}))
    else:
        typer.echo(f"dropped {dropped} entries")
    if failed:
        raise typer.Exit(1)


def _cache() -> Any:
    from keraunos.ops.cache import PersistentCache

    return PersistentCache("configurations")


def _folder() -> Path:
    """The folder; without one the command ends here."""
    try:
        return _cache().directory()
    except OSError as error:
        typer.secho(f"keraunos cache: there is no folder: {printable(error)}", err=True)
        raise typer.Exit(1) from None


def _files() -> dict[Path, dict[str, dict]]:
    _folder()
    store = _cache()
    found = {file: store.entries(file) for file in store.files()}
    # A damaged one is moved aside when it is read.
    return {file: entries for file, entries in found.items() if file.exists()}

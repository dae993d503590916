"""`keraunos cache`: look at the configurations that were measured on this machine, and clear them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

cache = typer.Typer(help="The configurations measured on this machine.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Only = Annotated[str, typer.Option("--only", help="Only entries whose key contains this, such as 'gla |'.")]


@cache.command("path")
def path(as_json: _Json = False) -> None:
    """Print the folder of the files; KERAUNOS_CACHE_DIR moves it."""
    folder = str(_cache().directory())
    typer.echo(json.dumps({"path": folder}) if as_json else folder)


@cache.command("list")
def list_files(as_json: _Json = False) -> None:
    """List the files, one for each kind of device, and how many entries each has."""
    found = [
        {"file": str(file), "entries": len(entries), "bytes": file.stat().st_size} for file, entries in _files().items()
    ]
    if as_json:
        typer.echo(json.dumps({"path": str(_cache().directory()), "files": found}, indent=1))
    for row in () if as_json else found:
        typer.echo(f"{row['file']}: {row['entries']} entries, {row['bytes']} bytes")
    if not found and not as_json:
        typer.echo(f"nothing in {_cache().directory()}")


@cache.command("show")
def show(only: _Only = "", as_json: _Json = False) -> None:
    """Show the entries: key, winner, its time and the number of candidates; --json has all measurements."""
    found = {key: entry for entries in _files().values() for key, entry in entries.items() if only in key}
    if as_json:
        typer.echo(json.dumps({"entries": found}, indent=1))
        return
    for key, entry in found.items():
        winner = entry.get("winner")
        measurements = entry.get("measurements", [])
        median = next((m["microseconds"]["median"] for m in measurements if m["config"] == winner), None)
        time = "" if median is None else f", {median} µs"
        typer.echo(f"{key}\n    {winner}{time}, of {len(measurements)} candidates: {entry.get('note', '')}")
    if not found:
        typer.echo("no such entry")


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


def _files() -> dict[Path, dict[str, dict]]:
    store = _cache()
    found = {file: store.entries(file) for file in store.files()}
    # A damaged one is moved aside when it is read.
    return {file: entries for file, entries in found.items() if file.exists()}

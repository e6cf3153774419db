"""The command ``keras-gradwatch``: look at saved runs, compare them, check a saved model.

Nothing is imported before it is needed, so that what needs no model answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_gradwatch import __version__

if TYPE_CHECKING:
    from keras_gradwatch.pictures import View

#: Exit statuses: all is well, something was found, the command could not be carried out.
WELL, FOUND, FAILED = 0, 1, 2

#: Rows a history file may hold: ten times what the callback keeps. A hundred bytes of Parquet can claim any number.
MOST_ROWS = 50_000_000
#: Bytes of a CSV file, for the same reason.
MOST_BYTES = 8 * 1024**3

_SEVERITIES = ("info", "warning", "error", "never")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: words after the command's name; those of the process by default.

    Returns:
        0: all is well. 1: something at least as severe as ``--fail-on`` was found. 2: bad input, explained on stderr.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal without "✗" must not make the command fail
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except BrokenPipeError:  # somebody reads only the first lines; keep the interpreter from complaining at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WELL
    except (ValueError, TypeError, OSError, MemoryError, ImportError) as error:
        from keras_gradwatch.words import plain

        text = str(error) or type(error).__name__
        print(f"keras-gradwatch: error: {plain(text)}", file=sys.stderr)  # noqa: T201
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-gradwatch",
        description="Look at the gradients of saved runs, compare runs, check a saved model.",
        epilog="exit status: 0 all is well, 1 findings of the severity asked for, 2 bad input",
    )
    parser.add_argument("--version", action="version", version=f"keras-gradwatch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run_help = "a history: .parquet, .csv or .csv.gz"

    show = _command(commands, "show", _show, "what was found in a run, in words")
    show.add_argument("run", metavar="RUN", help=run_help)

    report = _command(commands, "report", _report, "the same with pictures and tables, as one HTML file")
    report.add_argument("run", metavar="RUN", help=run_help)
    report.add_argument("-o", "--output", metavar="FILE", help="where to write it; next to RUN by default")

    compare = _command(commands, "compare", _compare, "what differs between two runs, by layer")
    compare.add_argument("first", metavar="RUN", help=run_help)
    compare.add_argument("second", metavar="RUN", help="another one; findings that only it has set the exit status")

    check = _command(commands, "check", _check, "check the gradients of a saved model on some samples")
    check.add_argument(
        "model", metavar="MODEL.keras", help="a compiled model; loaded without running code from the file"
    )
    check.add_argument("--data", metavar="FILE.npz", required=True, help="arrays x, y and, if wanted, sample_weight")
    check.add_argument("--samples", type=int, default=8, metavar="N", help="samples to check on, from the first (8)")
    check.add_argument("--seed", type=int, default=0, metavar="N", help="of the check's directions (0)")
    text = "import this module of yours first: it registers custom layers; may be repeated"
    check.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)

    replay = _command(commands, "replay", _replay, "run the step of an incident again, and compare every number")
    replay.add_argument("incident", metavar="INCIDENT", help="a folder that IncidentSink wrote")
    replay.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)

    demo = _command(commands, "demo", _demo, "train a small model with a planted fault, and look at it")
    demo.add_argument(
        "-o", "--output", metavar="FOLDER", default=".", help="where to put the history and the report (.)"
    )
    return parser


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--json", action="store_true", help="print JSON instead of words")
    command.add_argument("--fail-on", choices=_SEVERITIES, default="never" if name == "demo" else "error",
                         help="severity of findings from which on the exit status is 1 (%(default)s)")  # fmt: skip
    command.set_defaults(command=function)
    return command


def _show(options: argparse.Namespace) -> int:
    view = _view(options.run)
    _print(_run_json(view) if options.json else _displayed(view.account.summary()))
    return _status(view, options)


def _report(options: argparse.Namespace) -> int:
    from keras_gradwatch.report import write_report

    view = _view(options.run)
    path = write_report(view, options.output or _beside(options.run))
    _print({**_run_json(view), "report": str(path)} if options.json else f"wrote {path}")
    return _status(view, options)


def _compare(options: argparse.Namespace) -> int:
    from keras_gradwatch.comparison import compare, comparison_words, new_findings

    first, second = _view(options.first), _view(options.second)
    new = new_findings(first, second)
    if options.json:
        rows = compare(first, second).reset_index().to_dict("records")
        _print({"new_findings": [_finding_json(f) for f in new], "layers": rows})
    else:
        _print(comparison_words(first, second, names=(options.first, options.second)))
    return _severity_status([finding.severity for finding in new], options)


def _check(options: argparse.Namespace) -> int:
    for name in (options.model, options.data):  # before anything that takes seconds to import
        with Path(name).open("rb"):
            pass
    if options.samples < 1:
        raise ValueError(f"Received --samples {options.samples}. Expected 1 or more. Use 8 if in doubt.")
    from keras_gradwatch.model_files import load_data, load_model

    data = load_data(options.data)
    with _own_modules():
        for module in options.modules:
            importlib.import_module(module)
        model = load_model(options.model)
    return _checked(model, data, options)


def _checked(model: Any, data: Any, options: argparse.Namespace) -> int:
    from keras_gradwatch.checks import check_gradients
    from keras_gradwatch.probe import Batch

    batch = Batch(*data).head(options.samples)
    report = check_gradients(model, batch.x, batch.y, batch.sample_weight, seed=options.seed)
    if options.json:
        rows = report.frame.to_dict("records")
        _print({"verdict": report.verdict, "ok": report.ok, "tensors": rows})
    else:
        _print(str(report))
    return _severity_status([] if report.ok else ["error"], options)


def _replay(options: argparse.Namespace) -> int:
    with (Path(options.incident) / "incident.json").open("rb"):
        pass
    from keras_gradwatch.replays import replay_incident

    with _own_modules():
        for module in options.modules:
            importlib.import_module(module)
        replay = replay_incident(options.incident)
    if options.json:
        _print(
            {
                "same": replay.same,
                "shows_again": replay.shows_again,
                "then": _finding_json(replay.finding),
                "now": [_finding_json(finding) for finding in replay.findings],
                "samples": list(replay.samples),
                "numbers": replay.frame.to_dict("records"),
                "notes": list(replay.notes),
            }
        )
    else:
        _print(str(replay))
    return _severity_status([replay.finding.severity] if replay.shows_again else [], options)


def _demo(options: argparse.Namespace) -> int:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    print("training a small model with a planted fault; this takes a moment", file=sys.stderr)  # noqa: T201
    from keras_gradwatch.demo import run_demo
    from keras_gradwatch.files import write_history
    from keras_gradwatch.pictures import View
    from keras_gradwatch.report import write_report

    view = View(run_demo().history)
    write_history(view.frame, folder / "demo.csv")
    path = write_report(view, folder / "demo.html")
    words = f"{view.account.summary()}\n\nhistory: {folder / 'demo.csv'}\nreport: {path}, open it in a browser"
    _print({**_run_json(view), "report": str(path)} if options.json else _displayed(words))
    return _status(view, options)


def _view(path: str) -> View:
    """The run in a file, which may come from a stranger."""
    from keras_gradwatch.files import read_history
    from keras_gradwatch.pictures import View

    _refuse_absurd(path)
    try:
        view = View(read_history(path))
        view.account  # noqa: B018  read now, so that what is wrong with it is told under the file's name
    except MemoryError:
        raise ValueError(
            f"{path!r} does not fit into memory. Expected a history. Thin it out, or use a larger machine."
        ) from None
    return view


def _refuse_absurd(path: str) -> None:
    """Refuse sizes that would take the machine down, before reading."""
    size = Path(path).stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path!r} has {size:,} bytes. Expected at most {MOST_BYTES:,}. Keep every tenth step only.")
    if path.lower().endswith(".gz") and _unpacks_beyond(path, MOST_BYTES):
        raise ValueError(
            f"{path!r} unpacks to more than {MOST_BYTES:,} bytes. Expected less. Keep every tenth step only."
        )
    if not path.lower().endswith(".parquet"):
        return
    from keras_gradwatch._optional import require

    arrow = require("pyarrow", "parquet")
    try:
        rows = require("pyarrow.parquet", "parquet").ParquetFile(path).metadata.num_rows
    except arrow.ArrowException:
        return  # read_history says what is wrong with it
    if rows > MOST_ROWS:
        raise ValueError(f"{path!r} claims {rows:,} rows. Expected at most {MOST_ROWS:,}. Keep every tenth step only.")


def _unpacks_beyond(path: str, most: int) -> bool:
    """Counts without keeping; unpacking takes a tenth of the time that reading the numbers will."""
    import gzip
    import zlib

    count = 0
    try:
        with gzip.open(path) as file:
            while count <= most and (chunk := file.read(1 << 20)):
                count += len(chunk)
    except (OSError, EOFError, zlib.error):
        return False  # read_history says what is wrong with it
    return count > most


@contextlib.contextmanager
def _own_modules() -> Any:
    """Modules in the current folder can be imported, as with ``python -m``."""
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def _beside(run: str) -> Path:
    name = Path(run).name
    for ending in (".gz", ".csv", ".parquet"):
        name = name[: -len(ending)] if name.lower().endswith(ending) else name
    return Path(run).with_name(f"{name}.html")


def _status(view: View, options: argparse.Namespace) -> int:
    return FOUND if view.account.fails(options.fail_on) else WELL


def _severity_status(severities: Sequence[str], options: argparse.Namespace) -> int:
    if options.fail_on == "never":
        return WELL
    return FOUND if any(_SEVERITIES.index(name) >= _SEVERITIES.index(options.fail_on) for name in severities) else WELL


def _run_json(view: View) -> dict[str, Any]:
    from keras_gradwatch.account import verdict_counts

    account = view.account
    checks = zip(account.check_steps, account.checks, strict=True)
    return {
        "steps": account.steps,
        "weights": sum(tensor.role == "weight" for tensor in account.tensors),
        "findings": [_finding_json(finding) for finding in account.findings],
        "checks": [{"step": step, "verdicts": verdict_counts(result)} for step, result in checks],
        "cost": dict(account.cost),
        "attributes": dict(account.attributes),
    }


def _finding_json(finding: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(finding)


def _displayed(words: str) -> str:
    from keras_gradwatch.display import DisplayText

    return DisplayText(words)


def _print(content: str | dict[str, Any]) -> None:
    text = content if isinstance(content, str) else json.dumps(_jsonable(content), indent=2, allow_nan=False)
    print(text, flush=True)  # noqa: T201


def _jsonable(value: Any) -> Any:
    """The same with ``null`` for NaN and Inf, which JSON does not know."""
    if isinstance(value, dict):
        return {str(name): _jsonable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

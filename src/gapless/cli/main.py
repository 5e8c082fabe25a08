"""The command ``gapless`` and ``python3 -m gapless.cli.main``.

Commands import what they need when they run, so ``gapless --help`` starts without torch. ``main`` turns
every outcome into an exit code: 0 all went well, 1 a request failed, 2 the command line or the configuration
is wrong. Mistakes of the second kind are one sentence on standard error, never a traceback; a traceback is a
bug of ours. Read ``generate.py`` next.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gapless.cli.bench import bench
from gapless.cli.chat import chat
from gapless.cli.check import check
from gapless.cli.demo import demo
from gapless.cli.deploy import deploy
from gapless.cli.environment import env
from gapless.cli.generate import generate
from gapless.cli.inspect import inspect
from gapless.cli.options import Command, expand
from gapless.cli.serve import serve
from gapless.env import read_env
from gapless.errors import GaplessError, GraphError

EXIT_FAILED = 1
EXIT_USAGE = 2

# The class of all command-line mistakes: typer has it inside itself, or in click, depending on its version.
_CommandLineError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="gapless",
    help="LLM inference in which every step, prefill included, runs as a CUDA graph.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        import gapless

        print(f"gapless {gapless.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""
    logger = logging.getLogger("gapless")
    logger.setLevel(read_env().logging_level or "WARNING")
    if not logger.handlers:
        handler = _StandardErrorHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


class _StandardErrorHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is now: while progress bars are drawn that is a stream above them."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


for _command in (generate, serve, chat, demo, inspect, check, env):
    app.command(cls=Command)(expand(_command))
app.add_typer(bench)
app.add_typer(deploy)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is the answer."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if sys.stderr is None:  # closed (`2>&-`): print() would then write complaints to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return _complain("standard output is closed: there is nowhere to write to", EXIT_FAILED)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a prompt or an answer may hold what it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="gapless", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except _CommandLineError as error:
        return _complain(_say_with_help(error), EXIT_USAGE)
    except GraphError as error:
        return _complain(str(error), EXIT_FAILED)
    except GaplessError as error:
        return _complain(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except OSError as error:
        # Standard output, as a rule; a sink keeps Python from complaining about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader went away (`gapless … | head`)
            return EXIT_FAILED
        where = f": {error.filename}" if error.filename is not None else ""
        return _complain(f"{error.strerror or error}{where}", EXIT_FAILED)


def _say_with_help(error: Any) -> str:
    """The complaint, and the command whose ``--help`` lists what there is."""
    command = error.ctx.command_path if error.ctx is not None else "gapless"
    return f"{error.format_message()} (see {command} --help)"


def _complain(message: str, code: int) -> int:
    print(f"gapless: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The ``numba-kv`` command: plan, replay, inspect, bench, demo.

Knows arguments and exit codes. What a command does is in `numba_kv.replay.commands`, imported when it runs, so that
``--help`` and a wrong argument answer at once.

A refusal names options where the package names arguments: `numba_kv.replay.wording`.

Exit codes: 0 done; 1 the output cannot be written, or its reader has gone; 2 something given was wrong, one line on stderr
says what; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from numba_kv.errors import NumbaKVError
from numba_kv.replay.sizes import parse_bytes
from numba_kv.replay.wording import in_options

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["main"]

_CONFIG_HELP = "config.json of a model (Hugging Face or TensorRT Edge-LLM), or the name of one that is built in: gemma3_270m"
_TRACE_HELP = "a Mooncake JSONL, an Azure CSV, a JSONL of arrival_s, input_tokens, output_tokens, or generated[:SEED]"


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Write the help; argparse's own goes on where it cannot be written."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _integer(low: int) -> Callable[[str], int]:
    # argparse shows the name of a type in its complaint; these complaints name the range instead.
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return parse


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except NumbaKVError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_integer(1)(part) for part in text.split(","))


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON; '-': to stdout, and everything else to stderr"
    )


def _add_model(parser: argparse.ArgumentParser, rows: str, capacity: str) -> None:
    positive = _integer(1)
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    parser.add_argument("--capacity", type=positive, metavar="TOKENS", help=f"most tokens of a row (default: {capacity})")
    parser.add_argument("--batch", "--rows", type=positive, metavar="ROWS", help=rows)
    text = "tokens of a page, a power of two up to 256 (default 16; 128 with a config of TensorRT Edge-LLM)"
    parser.add_argument("--page-tokens", type=positive, metavar="P", help=text)
    parser.add_argument("--dtype", metavar="D", help="float16, bfloat16, float8_e4m3 or float32; default: the model's own")
    parser.add_argument(
        "--max-step-tokens",
        type=positive,
        default=1,
        metavar="C",
        help="tokens a step may append to a row with every key readable from pages, and a row may be rewound (default 1)",
    )
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="budget for everything, such as 24GiB, 24GB, 512MiB or bytes"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=("cuda", "cpu", "sim"), help="default: cuda where there is a GPU, else cpu")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    capacity = "the longest request rounded up to 256 tokens, at most the model's positions"
    _add_model(parser, "rows, that is sequences at once (default 64)", capacity)
    parser.add_argument("trace", metavar="TRACE", help=_TRACE_HELP)
    parser.add_argument("--limit", type=_integer(1), metavar="N", help="take the first N requests (generated: default 200)")
    parser.add_argument(
        "--chunk",
        type=_integer(1),
        default=2048,
        metavar="N",
        help="most prompt tokens of a step, beside one token of every row that generates (default 2048)",
    )
    parser.add_argument(
        "--audit-every",
        type=_integer(0),
        default=1000,
        metavar="N",
        help="compare the device with the ledger every N steps, and at the end (default 1000; 0: only at the end)",
    )
    text = "keep what prompts compute for later ones that begin alike; the trace needs hash_ids"
    parser.add_argument("--reuse", action="store_true", help=text)
    text = "with --reuse: keep window pages and states after every N tokens of a prompt too (default 4096; 0: never)"
    parser.add_argument("--reuse-every", type=_integer(0), metavar="N", help=text)
    text = "with --reuse: pages for copies in each window's pool (default: two rings for --reuse-every tokens of full pages)"
    parser.add_argument("--kept-window-pages", type=_integer(1), metavar="N", help=text)
    text = "with --reuse: pages of the full-attention pool (default: every row at full length, or what --memory leaves of it)"
    parser.add_argument("--kv-pages", type=_integer(1), metavar="N", help=text)
    text = "with --reuse: snapshots of recurrent states (default: as many as rows)"
    parser.add_argument("--kept-states", type=_integer(1), metavar="N", help=text)
    text = "with --reuse: page-locked memory for what the device has to give up (default: none)"
    parser.add_argument("--host-memory", type=_size, metavar="SIZE", help=text)
    text = "propose tokens with this model (as CONFIG) and verify them: rounds of random acceptance instead of single tokens"
    parser.add_argument("--draft", metavar="CONFIG", help=text)
    text = "with --draft: steps of the draft in a round (default 3)"
    parser.add_argument("--draft-steps", type=_integer(1), metavar="K", help=text)
    text = "with --draft: branches of each level of a tree; its accepted paths move together (default 1: a chain)"
    parser.add_argument("--draft-branches", type=_integer(1), metavar="N", help=text)
    text = "with --draft: probability that a proposal is accepted (default 0.7)"
    parser.add_argument("--acceptance", type=float, metavar="P", help=text)
    parser.add_argument("--skip-too-long", action="store_true", help="leave out requests that are longer than the capacity")
    parser.add_argument("--report", metavar="FILE.html", help="write figures and picture as one HTML file (needs matplotlib)")
    parser.add_argument("--picture", metavar="FILE.png", help="write pages over time as a picture (needs matplotlib)")
    _add_target(parser)
    _add_json(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    capacity = "enough for --tokens, --steps and more than the largest window, at most the model's positions"
    _add_model(parser, "rows of the batch (default: as many as --tokens has lengths)", capacity)
    parser.add_argument(
        "--tokens", type=_lengths, default=(40, 700, 1500), metavar="N,N,...", help="prompt lengths (default 40,700,1500)"
    )
    parser.add_argument("--steps", type=_integer(0), default=3, metavar="N", help="decode steps after the prompts (default 3)")
    _add_target(parser)
    _add_json(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    text = "advance, import, replay, copy, step, reuse, load, kv, host, rope, lora, spec or all (default)"
    parser.add_argument("measure", nargs="?", default="all", metavar="MEASURE", help=text)
    text = "sequences of the measure advance (default 256); step sweeps its rows, and replay takes 64"
    parser.add_argument("--batch", type=_integer(1), default=256, metavar="ROWS", help=text)
    text = "steps that the measure advance times (default 2000)"
    parser.add_argument("--repeat", type=_integer(1), default=2000, metavar="N", help=text)
    parser.add_argument("--picture", metavar="FILE.png", help="plot the measure `step` (needs the extra viz)")
    _add_target(parser)
    _add_json(parser)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="numba-kv", description="The KV caches of a language model: what fits, what happens, how fast.")
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    plan = commands.add_parser(
        "plan", help="what fits: pages, pools and bytes of a model", description="Plan the caches of a model."
    )
    rows = "rows, that is sequences at once (default 16; with a config of TensorRT Edge-LLM what it says)"
    _add_model(plan, rows, "the model's positions; with a config of TensorRT Edge-LLM what it says")
    text = "most tokens of all rows in one step (default 8192; with a config of TensorRT Edge-LLM rows x max_input_len)"
    plan.add_argument("--max-batch-tokens", type=_integer(1), metavar="T", help=text)
    text = "count external weights, too: a safetensors file, an index, or a folder of them"
    plan.add_argument("--weights", metavar="PATH", help=text)
    _add_json(plan)
    text = "Drive the caches of a model with the requests of a trace, as fast as rows allow, and audit them."
    _add_replay(commands.add_parser("replay", help="drive the caches with a trace of requests", description=text))
    text = "Admit a few sequences and show where their pages are."
    _add_inspect(commands.add_parser("inspect", help="show a page map", description=text))
    text = "Measure on this machine."
    _add_bench(commands.add_parser("bench", help="figures on this machine", description=text))
    text = "Replay a generated trace on the caches of Gemma 3 270M and draw its pages."
    demo = commands.add_parser("demo", help="a first look: replay made-up requests, draw the pages", description=text)
    demo.add_argument(
        "--out", default="demo_output", metavar="DIR", help="where demo.png and demo.json go (default ./demo_output)"
    )
    _add_target(demo)
    _add_json(demo)
    return parser


def _run(args: argparse.Namespace) -> None:
    if args.version:
        from numba_kv import __version__

        sys.stdout.write(f"numba-kv {__version__}\n")
    elif args.command is None:
        _parser().print_help()
    else:
        from numba_kv.replay import commands

        commands.COMMANDS[args.command](args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process if left out.
    """
    if sys.stdout is None:  # it was closed before Python started
        return _complain("stdout is closed; redirect it to the null device to see nothing", 1)
    command = code = None
    try:
        try:
            args = _parser().parse_args(argv)
            command = args.command
            _run(args)
        except SystemExit as end:  # argparse: --help and wrong arguments
            code = end.code
        sys.stdout.flush()
    except NumbaKVError as error:
        return _complain(in_options(error, command), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except OSError as error:
        if error.filename is not None:  # then it is not about a stream that is open already
            raise
        _forget_stdout()
        return _complain(f"stdout cannot be written: {error.strerror or error}", 1)
    return code if isinstance(code, int) else 0


def _complain(text: str, code: int) -> int:
    with suppress(AttributeError, OSError):  # stderr may be closed or full too; the exit code is left
        sys.stderr.write(f"numba-kv: {text}\n")
        sys.stderr.flush()
    return code


def _forget_stdout() -> None:
    """Keep Python from complaining once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

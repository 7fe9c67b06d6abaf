"""What each command of ``numba-kv`` does with its arguments.

Knows the way from arguments to a plan, a trace, a replay and files. Does not know how arguments are written (`numba_kv.cli`).
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from numba_kv.config import DeploymentConfig, LLMEngineConfig, load_engine_config
from numba_kv.config.read import show, show_path
from numba_kv.errors import ConfigError, InputError
from numba_kv.geometry import INT32_MAX, ceil_div, round_up
from numba_kv.plan import plan_memory
from numba_kv.replay.fit import most_rows
from numba_kv.replay.generate import GeneratorOptions, generate_trace
from numba_kv.replay.loading import largest_window, load_model, merged_windows, model_name
from numba_kv.replay.models import find_config
from numba_kv.replay.output import Output, check_writable, dumps, write_text
from numba_kv.replay.report import check_drawing, check_picture, write_picture, write_report
from numba_kv.replay.request import Trace, fit_to_capacity
from numba_kv.replay.reuse import ReplayReuse
from numba_kv.replay.run import ReplayOptions, ReplayResult, replay
from numba_kv.replay.speculation import ReplaySpeculation, chain_or_tree
from numba_kv.replay.tables import Budget, plan_json, plan_table, replay_table
from numba_kv.replay.trace import read_trace

__all__ = ["COMMANDS"]

_DEFAULT_ROWS = 64
_DEFAULT_REQUESTS = 200


def _plan(args: Namespace) -> None:
    output = Output(args.json)
    config = load_model(args, rows=args.batch, capacity=args.capacity, max_batch_tokens=args.max_batch_tokens)
    if args.weights == "":
        raise InputError("--weights: the path is empty; name a file or a folder")
    if args.weights is not None:
        from numba_kv.weights import arena_nbytes

        config = replace(config, external_weights_nbytes=arena_nbytes(args.weights))
    plan = plan_memory(config, args.memory)
    budget = None if args.memory is None else Budget(args.memory, most_rows(config, args.memory))
    name = model_name(args.config, config)
    output.show(plan_table(plan, budget, name, merged_windows(args, config)))
    output.write_json(plan_json(plan, budget, name))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A replay that is about to run."""

    config: LLMEngineConfig
    name: str
    trace: Trace
    deployment: DeploymentConfig | None = None
    skipped: int
    options: ReplayOptions
    notes: tuple[str, ...] = ()
    memory: int | None = None
    target: str | None = None


def _read(args: Namespace, most: int) -> Trace:
    name, _, seed = args.trace.partition(":")
    if not args.trace:
        raise InputError("TRACE: the name is empty; name a file, or write generated")
    if name != "generated" or os.path.exists(args.trace):  # pathlib's raises for names that no file can have
        return read_trace(args.trace, limit=args.limit)
    if not re.fullmatch(r"-?[0-9]{1,18}|", seed, re.ASCII):
        raise InputError(f"TRACE: the seed of {show(args.trace)} is not an integer of at most 18 digits; write generated:7")
    number = int(seed or 0)
    if most < 2:
        raise InputError(f"--capacity: {most} token holds no request of a generated trace; at least 2 are wanted")
    options = GeneratorOptions(seed=number, max_total_tokens=min(most, GeneratorOptions.max_total_tokens))
    return generate_trace(args.limit or _DEFAULT_REQUESTS, options)


def _replay(args: Namespace) -> None:
    output = Output(args.json)
    report, picture = check_writable("--report", args.report), check_writable("--picture", args.picture)
    if report:
        check_drawing()
    if picture:
        check_picture(picture)
    rows = args.batch or _DEFAULT_ROWS
    if args.chunk > INT32_MAX:
        raise InputError(f"--chunk: {args.chunk} is not in 1..{INT32_MAX}")
    _check_partners(args)
    if args.draft is not None and args.reuse:
        raise InputError("--draft: not together with --reuse; a draft's pages are not kept")
    proposed = 0 if args.draft is None else args.draft_steps * args.draft_branches  # verified behind the last kept token
    # Without --capacity the file's own limit is the most; what the trace needs of it is known when both have been read.
    widest = load_model(args, rows=rows, capacity=args.capacity, max_batch_tokens=rows + args.chunk)
    most = widest.max_kv_cache_capacity - proposed
    if proposed and most < 2:
        raise InputError(
            f"--draft-steps: {proposed} proposals a round leave no room in the {widest.max_kv_cache_capacity} tokens of a row"
        )
    trace, skipped = fit_to_capacity(_read(args, most), most, skip_too_long=args.skip_too_long)
    capacity = args.capacity or min(most + proposed, round_up(trace.longest + proposed, 256))
    config = load_model(args, rows=rows, capacity=capacity, max_batch_tokens=rows + args.chunk)
    if args.reuse:
        config = _with_kept(replace(config, num_kv_pages=args.kv_pages), args)
    deployment = None if args.draft is None else _with_draft(args, config, rows, capacity)
    job = _Job(
        config=config,
        deployment=deployment,
        name=model_name(args.config, widest),
        trace=trace,
        skipped=skipped,
        options=ReplayOptions(
            chunk=args.chunk,
            audit_every=args.audit_every,
            reuse=ReplayReuse(every_tokens=args.reuse_every, host_bytes=args.host_memory) if args.reuse else None,
            speculation=ReplaySpeculation(acceptance=args.acceptance) if deployment is not None else None,
        ),
        notes=tuple(merged_windows(args, config)),
        memory=args.memory,
        target=args.target,
    )
    result = _serve(job, output)
    if picture:
        write_picture(picture, result.figures, result.history)
        output.show(f"The picture is {picture}")
    if report:
        write_report(report, result.figures, result.history)
        output.show(f"The report is {report}")


def _check_partners(args: Namespace) -> None:
    """Refuse options that say something about what is not asked for, and give the others their defaults."""
    for partner, is_given, options in (
        ("--reuse", args.reuse, {"reuse_every": 4096, "kept_window_pages": None, "kept_states": None, "host_memory": 0}),
        ("--draft", args.draft is not None, {"draft_steps": 3, "draft_branches": 1, "acceptance": 0.7}),
    ):
        for name, default in options.items():
            if getattr(args, name) is None:
                setattr(args, name, default)
            elif not is_given:
                raise InputError(f"--{name.replace('_', '-')}: says something about {partner}, which is not given")


def _with_draft(args: Namespace, base: LLMEngineConfig, rows: int, capacity: int) -> DeploymentConfig:
    """Return the base with the draft that `args` name."""
    steps, branches = args.draft_steps, args.draft_branches
    own = Namespace(**{**vars(args), "config": args.draft})
    draft = load_model(own, rows=rows, capacity=capacity + steps * branches, max_batch_tokens=rows + args.chunk)
    return chain_or_tree(base, draft, steps, branches)


def _with_kept(config: LLMEngineConfig, args: Namespace) -> LLMEngineConfig:
    """Return a configuration that plans room for what a replay keeps beside full pages.

    Without options, two rings for every ``--reuse-every`` tokens that the full pool holds (prompts are kept at that distance,
    and at their ends and branches), and as many states as rows.
    """
    rows, groups = config.max_batch_size, plan_memory(config).groups
    ring = max((group.ring for group in groups[1:]), default=0)
    pages, slots = args.kept_window_pages, args.kept_states
    if pages is None:
        points = ceil_div(groups[0].usable_pages * config.page_tokens, args.reuse_every) if args.reuse_every else 0
        pages = max(rows, 2 * points) * ring
    return replace(
        config,
        kept_window_pages=pages if ring else 0,
        kept_states=(rows if slots is None else slots) if config.recurrent_layer is not None else 0,
    )


def _serve(job: _Job, output: Output) -> ReplayResult:
    """Run a replay with a progress bar, show its tables and write its JSON."""
    from numba_kv.shared_resources import SharedResources

    if job.deployment is None:
        made = SharedResources.create_for_llm(job.config, target=job.target, memory_bytes=job.memory)
    else:
        made = SharedResources.create_for_spec_decode(job.deployment, target=job.target, memory_bytes=job.memory)
    with (
        made as resources,
        _progress(output, job.trace) as on_progress,
    ):
        result = replay(resources, job.trace, job.options, config_name=job.name, skipped=job.skipped, on_progress=on_progress)
    output.show(replay_table(result.figures, job.notes))
    output.write_json(result.figures.to_json())
    return result


@contextmanager
def _progress(output: Output, trace: Trace) -> Iterator[Callable[[int, int], None] | None]:
    if not output.progress_console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.progress_console, transient=True) as progress:
        task = progress.add_task("replay", total=trace.input_tokens + trace.output_tokens)

        def on_progress(tokens: int, requests: int) -> None:
            progress.update(task, completed=tokens, description=f"{requests:,} of {len(trace.requests):,} requests")

        yield on_progress


def _demo(args: Namespace) -> None:
    output = Output(args.json)
    check_drawing()
    if not args.out:
        raise InputError("--out: the name is empty; name a folder")
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: the folder {show_path(args.out)} cannot be made: {error.strerror or error}") from None
    for name in ("demo.png", "demo.json"):
        check_writable("--out", str(folder / name))
    name, chunk, rows = "gemma3_270m", 2048, 32
    trace = generate_trace(_DEFAULT_REQUESTS)
    config = load_engine_config(
        find_config(name),
        max_batch_size=rows,
        max_kv_cache_capacity=round_up(trace.longest, 256),
        max_batch_tokens=rows + chunk,
        num_kv_pages=4096,  # an eighth of what every row at full length would take
    )
    options = ReplayOptions(chunk=chunk, audit_every=100)
    job = _Job(config=config, name=name, trace=trace, skipped=0, options=options, target=args.target)
    result = _serve(job, output)
    write_picture(folder / "demo.png", result.figures, result.history)
    write_text(folder / "demo.json", dumps(result.figures.to_json()))
    output.show(f"The picture is {folder / 'demo.png'}, the figures are {folder / 'demo.json'}")


def _inspect(args: Namespace) -> None:
    from numba_kv.replay.page_map import page_map, page_map_table
    from numba_kv.shared_resources import SharedResources

    output = Output(args.json)
    rows = args.batch or len(args.tokens)
    if rows < len(args.tokens):
        raise InputError(f"--batch: {rows} rows do not hold the {len(args.tokens)} sequences of --tokens")
    longest = max(args.tokens) + args.steps
    widest = load_model(args, rows=rows, capacity=args.capacity, max_batch_tokens=None)
    if longest > widest.max_kv_cache_capacity:
        raise ConfigError(
            f"--tokens: {max(args.tokens)} and {args.steps} steps are over the capacity of {widest.max_kv_cache_capacity} "
            "tokens; raise --capacity"
        )
    # Beyond the largest window, or its layers would be full attention and there would be no ring to see.
    least = max(longest, largest_window(widest) + 1)
    capacity = args.capacity or min(widest.max_kv_cache_capacity, round_up(least, 256))
    config = load_model(args, rows=rows, capacity=capacity, max_batch_tokens=rows + sum(args.tokens))
    with SharedResources.create_for_llm(config, target=args.target, memory_bytes=args.memory) as resources:
        shown = page_map(resources, args.tokens, args.steps)
    output.show(page_map_table(shown, merged_windows(args, config)))
    output.write_json(shown.to_json())


def _bench(args: Namespace) -> None:
    from numba_kv.replay.bench import BenchOptions, bench
    from numba_kv.replay.bench_plot import plot_steps
    from numba_kv.replay.bench_tables import bench_table

    output = Output(args.json)
    picture = check_writable("--picture", args.picture)
    if picture is not None:
        check_picture(picture)
    if picture is not None and args.measure not in ("step", "all"):
        raise InputError(f"--picture: shows the measure step, and {args.measure} is taken")
    options = BenchOptions(rows=args.batch, repeat=args.repeat, target=args.target)
    figures = bench(args.measure, options, lambda name: output.progress_console.print(f"measuring {name} ..."))
    output.show(bench_table(figures))
    if picture is not None:
        plot_steps(figures["step"]["points"], picture)  # type: ignore[arg-type]
        output.show(f"The picture is {picture}")
    output.write_json(figures)


#: Name of a command -> what runs it.
COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "plan": _plan,
    "replay": _replay,
    "inspect": _inspect,
    "bench": _bench,
    "demo": _demo,
}

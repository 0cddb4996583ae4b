"""``isobn-finetune sweep``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobn_finetune.commands.options import Debug, quiet_libraries
from isobn_finetune.config import parse_overrides
from isobn_finetune.errors import ConfigError

if TYPE_CHECKING:
    from isobn_finetune.sweep import Sweep

SWEEP_EXAMPLES = (
    "Examples:  isobn-finetune sweep --config configs/small_real.yaml --model bert-base-cased --output-dir runs/small "
    "  |   isobn-finetune sweep --config configs/paper_bert_base_cased.yaml --output-dir runs/paper --jobs 4"
)


def sweep(
    config: Annotated[Path, typer.Option(help="YAML file with base: and grid: or zip:.")],
    output_dir: Annotated[str, typer.Option(help="Folder of the sweep; each run gets a folder in it.")],
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, or 'tiny'; see 'list models'.")] = None,
    data: Annotated[
        str | None, typer.Option(help="'hub', 'demo', or a folder in GLUE's original layout or with parquet.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any config key; may be repeated. A list varies it anew."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes on this machine; each takes a GPU in turn.")] = 1,
    launcher: Annotated[str, typer.Option(help="local, or slurm: one job array.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and stop.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start failed runs afresh.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Print where each run stands and stop.")] = False,
    debug: Debug = False,
) -> int:
    """Do many runs: tasks x norms x seeds x anything. Started again, it goes on where it stopped."""
    if launcher not in ("local", "slurm"):
        raise ConfigError(f"--launcher {launcher}: unknown. Known: local, slurm")
    quiet_libraries()
    from isobn_finetune.sweep import plan_sweep, run_sweep
    from isobn_finetune.sweep_config import load_sweep

    named = [(key, value) for key, value in (("model", model), ("data.source", data)) if value is not None]
    plan = plan_sweep(load_sweep(config, [*read_assignments(overrides or []), *named]), output_dir)
    if status or dry_run:
        jobs_of = {}
        if status:
            from isobn_finetune.slurm import read_jobs

            jobs_of = read_jobs(plan)
        typer.echo(format_plan(plan, jobs, retry_failed, jobs_of))
        return 0
    if launcher == "slurm":
        from isobn_finetune.slurm import submit

        typer.echo(submit(plan, retry_failed))
        return 0
    run_sweep(plan, jobs=jobs, retry_failed=retry_failed)
    typer.echo(format_end(plan))
    return 1 if plan.bad else 0


def read_assignments(assignments: Iterable[str]) -> list[tuple[str, Any]]:
    """``["train.epochs=3"]`` becomes ``[("train.epochs", 3)]``."""
    pairs = []
    for assignment in assignments:
        value: Any = parse_overrides([assignment])
        key = assignment.partition("=")[0].strip()
        for part in key.split("."):
            value = value[part]
        pairs.append((key, value))
    return pairs


def format_plan(plan: Sweep, jobs: int, retry_failed: bool, jobs_of: dict[str, str]) -> str:
    """Each run with its state, their number, and how long the rest will take."""
    from isobn_finetune.live_view import format_seconds, format_state

    width = max(len(run.path) for run in plan.runs)
    lines = []
    for run in plan.runs:
        job = f"  job {jobs_of[run.path]}" if run.path in jobs_of else ""
        lines.append(f"{run.path:<{width}}  {format_state(plan.states[run.path])}{job}".rstrip())
    pending = plan.pending(retry_failed)
    counts = f"{len(plan.runs)} runs: {plan.count('finished')} finished, {len(plan.bad)} failed, {len(pending)} to do"
    estimate = plan.estimate_seconds(pending, jobs)
    if pending and estimate is not None:
        counts += f", about {format_seconds(estimate)}" + (f" with {jobs} jobs" if jobs > 1 else "")
    return "\n".join([*lines, counts])


def format_end(plan: Sweep) -> str:
    """What the sweep came to, and what to do next."""
    from isobn_finetune.live_view import format_state

    bad = plan.bad
    lines = [f"{len(plan.runs)} runs: {plan.count('finished')} finished, {len(bad)} failed."]
    for run in bad:
        lines.append(f"  {run.path}: {format_state(plan.states[run.path])}")
    if bad:
        lines.append("What they said stands in .sweep/logs of the sweep's folder; --retry-failed starts them afresh.")
    lines.append(f"Next: isobn-finetune report {plan.folder} --output-dir {plan.folder}/report")
    return "\n".join(lines)

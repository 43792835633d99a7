"""The report of a comparison: Markdown with plots, and every request as JSON, in a folder of its own.

Knows nothing of how anything was measured.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson

from bench.goodput.comparison import Comparison
from bench.goodput.estimate import share_interval
from bench.goodput.findings import Findings
from bench.goodput.plots import plot_rates, plot_scales, tightest_scales
from bench.goodput.slo import TARGETS, TTFT_FACTOR, Objective, Slo
from bench.goodput.trial import Trial
from bench.goodput.verdict import format_estimate, format_ratio, sentences
from bench.machine import describe_machine, describe_version

RATES_PLOT = "attainment.png"
SCALES_PLOT = "slo-scale.png"
DATA = "requests.json"
CORES = ("client", "gateway", "router", "nats", "prefill", "decode", "elsewhere", "stolen")


def write_report(folder: Path, comparison: Comparison, findings: Findings, arrivals: str) -> Path:
    """Write report.md, both plots and the data; gives the path of report.md. `arrivals` is in words."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_rates(folder / RATES_PLOT, findings)
    rung, base = findings.common_rung(), middle(findings.slos)
    if rung is not None:
        plot_scales(folder / SCALES_PLOT, findings, rung, base)
    parts = [
        _summary(findings),
        _goodputs(findings),
        _plots(findings, rung, base),
        _method(comparison, findings, arrivals),
        _sweep(findings),
        _trials(findings),
        _costs(findings),
    ]
    (folder / DATA).write_bytes(orjson.dumps(data(findings), option=orjson.OPT_INDENT_2))
    report = folder / "report.md"
    report.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return report


def middle(slos: Sequence[Slo]) -> Slo:
    """The SLO that scales count from: k = 1.5 of three."""
    return slos[len(slos) // 2]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _summary(findings: Findings) -> str:
    lines = [f"# Goodput: {findings.workload}", f"{findings.about}. {findings.effort.name.capitalize()} run."]
    lines += ["## In words", "\n".join(f"- {line}" for line in sentences(findings))]
    if warnings := _warnings(findings):
        lines += ["\n".join(f"- **Warning**: {line}" for line in warnings)]
    return "\n\n".join(lines)


def _warnings(findings: Findings) -> list[str]:
    late = [trial for name in findings.names for trial in findings.trials[name] if trial.client_was_late]
    lines = list(findings.problems())
    if late:
        worst = max(late, key=lambda trial: trial.lateness_s)
        lines.append(
            f"the client sent late in {len(late)} trials (p99 up to {1e3 * worst.lateness_s:.0f} ms); "
            "TTFT counts from when requests were due"
        )
    if findings.out_of_time:
        names = ", ".join(dict.fromkeys(findings.out_of_time))
        lines.append(f"the time was up before the search was finished for {names}")
    return lines


def _goodputs(findings: Findings) -> str:
    header = ["requests/s, all cores", *findings.names]
    rows = [
        [
            _objective(objective),
            *(format_estimate(findings.goodput(name, objective)) for name in findings.names),
        ]
        for objective in findings.objectives
    ]
    parts = [
        "## Goodput",
        table(header, rows),
        "≤: even the lowest rate tried missed; ≥: the highest one met.",
    ]
    if len(findings.names) > 1:
        ratios = [
            [
                f"{one} over {other}",
                *(format_ratio(findings.ratio(one, other, objective)) for objective in findings.objectives),
            ]
            for at, one in enumerate(findings.names)
            for other in findings.names[:at]
        ]
        parts += [
            "Ratios, with the 90 % interval of a bootstrap over the requests (chance of who came when; "
            "not of the machine's moods):",
            table(["", *map(_objective, findings.objectives)], ratios),
        ]
    return "\n\n".join(parts)


def _plots(findings: Findings, rung: int | None, base: Slo) -> str:
    parts = ["## Attainment", f"![attainment against rate]({RATES_PLOT})"]
    if rung is not None:
        parts.append(f"![attainment against SLO scale]({SCALES_PLOT})")
        scales = tightest_scales(findings, rung, base, TARGETS[0])
        told = ", ".join(f"{name} {scale:.2f}" for name, scale in scales.items())
        missing = [name for name in findings.names if findings.at(name, rung) is None]
        lacking = f" {', '.join(missing)}: that rate was not tried to its end." if missing else ""
        rate = findings.ladder.rate(rung)
        parts.append(f"Tightest scale with 90 % at {rate:.3g} requests/s: {told or 'none'}.{lacking}")
    return "\n\n".join(parts)


def _method(comparison: Comparison, findings: Findings, arrivals: str) -> str:
    alone, instances = findings.alone, comparison.instances
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items() if value)
    lines = [
        f"Version {describe_version()}; {machine}.",
        f"Unloaded, one worker alone: TTFT {1e3 * alone.ttft_s:.1f} ms, step of eight streams "
        f"{1e3 * alone.step_s:.2f} ms.",
        _budgets(findings, fixed=bool(comparison.fixed)),
        f"Cores {','.join(map(str, instances.cores))}: split topologies {instances.prefill} prefill and "
        f"{instances.decode} decode, the others {instances.total} workers, each on its own share; client, "
        "gateway, router and NATS on all of them.",
        f"{arrivals}, open loop; {comparison.effort.requests} requests a rate, the same lengths and gaps "
        "for all, contents never the same twice.",
        "One rate in turn for each, the others frozen meanwhile.",
        *(f"{name}: {_member(findings, name)}." for name in findings.names),
        *(f"Given up for speed: {line}." for line in findings.effort.gave_up()),
    ]
    return "\n\n".join(["## How it was measured", "\n".join(f"- {line}" for line in lines)])


def _budgets(findings: Findings, *, fixed: bool) -> str:
    told = "; ".join(
        f"{slo.name} TTFT {1e3 * slo.ttft_s:.0f} ms and TPOT {1e3 * slo.tpot_s:.2f} ms"
        for slo in findings.slos
    )
    origin = "as given" if fixed else f"TTFT {TTFT_FACTOR:g} x, TPOT k x the unloaded times"
    return f"SLOs, {origin}: {told}."


def _member(findings: Findings, name: str) -> str:
    contestant = findings.members[name]
    modes = ", ".join(dict.fromkeys(filter(None, findings.modes.get(name, ()))))
    where = ", ".join(contestant.urls) or contestant.how
    return f"{where}{f'; engine {modes}' if modes else ''}"


def _sweep(findings: Findings) -> str:
    if not findings.sweep:
        return ""
    chosen = {(one.name, one.how) for one in findings.members.values()}
    rows = [
        [
            f"{row.contestant.name}, {row.contestant.how}",
            f"{row.trial.rate:.3g}",
            f"{len(row.trial.records)}",
            *(f"{row.trial.attainment(slo):.0%}" for slo in findings.slos),
            _ms(row.trial, "ttft_s", 50),
            _ms(row.trial, "tpot_s", 50),
            "goes on" if (row.contestant.name, row.contestant.how) in chosen else "",
        ]
        for row in findings.sweep
    ]
    header = ["settings", "requests/s", "requests", *(slo.name for slo in findings.slos)]
    return "## Sweep\n\n" + table([*header, "TTFT p50 ms", "TPOT p50 ms", ""], rows)


def _trials(findings: Findings) -> str:
    header = ["", "requests/s", "sent", *(f"{slo.name} (90 %)" for slo in findings.slos)]
    header += ["TTFT p50 / p90 / p99 ms", "TPOT p50 / p90 ms", "ITL p99 ms", "client late p99 ms", "errors"]
    rows = []
    for name in findings.names:
        for trial in sorted(findings.trials[name], key=lambda trial: trial.rate):
            sent = f"{len(trial.records)}" if trial.complete else f"{len(trial.records)} of {trial.asked}"
            rows.append(
                [
                    name,
                    f"{trial.rate:.3g}",
                    sent,
                    *(_share(trial, slo) for slo in findings.slos),
                    " / ".join(_ms(trial, "ttft_s", q) for q in (50, 90, 99)),
                    " / ".join(_ms(trial, "tpot_s", q) for q in (50, 90)),
                    _ms(trial, "itl_s", 99),
                    f"{1e3 * trial.lateness_s:.1f}",
                    "; ".join(f"{text} ({count})" for text, count in trial.errors.items()),
                ]
            )
    note = "Where fewer were sent than planned, no target that was sought could be met any more."
    return "\n\n".join(["## Every trial", table(header, rows), note])


def _costs(findings: Findings) -> str:
    rows = [
        [name, f"{trial.rate:.3g}", *(f"{100 * trial.cores.get(group, 0.0):.1f}" for group in CORES)]
        for name in findings.names
        for trial in findings.best_trials(name)[-2:]
    ]
    note = (
        "% of a core while a trial ran, at each one's two highest rates. Client, gateway, router and NATS "
        "take their share from the workers' cores, in every topology; `elsewhere` is what ran on these cores "
        "besides, `stolen` what the machine's host kept."
    )
    return "\n\n".join(["## Who used the cores", table(["", "requests/s", *CORES], rows), note])


def _objective(objective: Objective) -> str:
    return f"{objective.slo.name}, {objective.target:.0%}"


def _share(trial: Trial, slo: Slo) -> str:
    low, high = share_interval(trial.met(slo), len(trial.records), seed=f"{trial.contestant}/{trial.rung}")
    return f"{trial.attainment(slo):.0%} ({low:.0%} to {high:.0%})"


def _ms(trial: Trial, quantity: str, q: float) -> str:
    found = trial.percentile(quantity, q)
    return "-" if found is None else f"{1e3 * found:.1f}" if found < 0.1 else f"{1e3 * found:.0f}"


def data(findings: Findings) -> dict[str, object]:
    """Every trial and request, for other tools."""
    return {
        "workload": findings.workload,
        "unloaded": {"ttft_s": findings.alone.ttft_s, "step_s": findings.alone.step_s},
        "slos": [{"name": slo.name, "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s} for slo in findings.slos],
        "trials": [_trial_data(trial) for name in findings.names for trial in findings.trials[name]],
        "sweep": [
            {"settings": dict(row.contestant.settings), **_trial_data(row.trial)} for row in findings.sweep
        ],
    }


def _trial_data(trial: Trial) -> dict[str, object]:
    return {
        "contestant": trial.contestant,
        "rate": trial.rate,
        "asked": trial.asked,
        "cores": dict(trial.cores),
        "requests": [
            {
                "due_s": record.due,
                "sent_s": record.sent,
                "ended_s": record.ended,
                "ttft_s": record.ttft_s,
                "tpot_s": record.tpot_s,
                "longest_gap_s": max(record.itl_s, default=None),
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "cached_tokens": record.cached_tokens,
                "error": record.error,
            }
            for record in trial.records
        ],
    }

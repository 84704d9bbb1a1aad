#!/usr/bin/env python3
"""Shows what Larder gains, each step beside plain QEMU on the same work.

usage: demo/demo.py [STEP]...       (cache, qcow2, memory, migration; all by default; also from $DEMO)

Prints a table and writes target/demo/report.html. `make demo` sets up what it needs. A step that fails says why, and the
others are run all the same; then the exit code is 1.
"""

import html
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from datetime import date

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import disk
import memory
import metadata
import migration
from lib import LARDER, WORK, Step, StepFailed, WrongData, figure, run

STEPS = {module.NAME: module for module in (disk, metadata, memory, migration)}


def perform(module):
    """Runs one step, whatever becomes of it."""
    print(f"\n{module.TITLE}", flush=True)
    begun = time.monotonic()
    try:
        result = module.step()
    except (StepFailed, OSError, ValueError, KeyError, subprocess.SubprocessError) as failure:
        why = str(failure) if isinstance(failure, StepFailed) else f"{type(failure).__name__}: {failure}"
        result = Step(module.NAME, module.TITLE, module.ABOUT, failure=why)
        if isinstance(failure, WrongData):
            result.checks.append(("pages or blocks, at least", 1, 1))
        print(f"    FAILED: {why}", flush=True)
    result.seconds = time.monotonic() - begun
    print(f"    this step took {result.seconds:.0f} s", flush=True)
    return result


def cells(row):
    """A row's figures as text: QEMU alone, with Larder, gain, noise."""
    side = lambda samples, words: words or (figure(statistics.median(samples), row.unit) if samples else "-")
    gain, noise = row.gain(), row.noise()
    return (
        row.what,
        side(row.alone, row.alone_words),
        side(row.larder, ""),
        "-" if gain is None else f"{gain:.1f} x",
        "-" if noise is None else f"{100 * noise:.0f} %",
    )


def print_table(results):
    """The table, in 80 columns."""
    print(f"\n{'':<26}{'QEMU alone':>15}{'with Larder':>15}{'gain':>11}{'noise':>9}")
    for result in results:
        print(result.title + (f": FAILED, {result.failure}" if result.failure else ""))
        for row in result.rows:
            what, alone, larder, gain, noise = cells(row)
            print(f"  {what:<24}{alone:>15}{larder:>15}{gain:>11}{noise:>9}")
    checks = [check for result in results for check in result.checks]
    total, wrong = (sum(check[index] for check in checks) for index in (1, 2))
    print(f"\nChecked meanwhile for being right: {total:,} pages and blocks, {wrong} of them wrong.")
    print("noise: how far the samples of one side lie apart; a gain within it says nothing.")


STYLE = """
:root { color-scheme: light dark; --line: #8884; --alone: #8a8f98; --larder: #1f7a5c; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.row { margin: .9rem 0; } .head { display: flex; justify-content: space-between; gap: 1rem; flex-wrap: wrap; }
.gain { font-weight: 600; } .bar { display: flex; align-items: center; gap: .6rem; margin: .2rem 0; font-size: .9rem; }
.bar span { white-space: nowrap; } .bar span:first-child { flex: 0 0 6rem; } .track { flex: 1; min-width: 3rem; } .fill { height: .9rem; border-radius: 2px; }
.alone { background: var(--alone); } .larder { background: var(--larder); } .figure { flex: 0 0 7.5rem; text-align: right; }
.failed { color: #b3261e; } footer { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: 1rem; font-size: .9rem; }
@media (max-width: 30rem) { .bar { font-size: .8rem; } .bar span:first-child { flex-basis: 4.9rem; } .figure { flex-basis: 6rem; } }
"""


def bars(row):
    """One comparison: a bar for each side, as long as its figure."""
    what, alone, larder, gain, noise = cells(row)
    values = [statistics.median(samples) if samples else 0 for samples in (row.alone, row.larder)]
    most = max(values) or 1
    better = "more is better" if row.more_is_better else "less is better"
    if gain != "-" and noise != "-":
        gain += f" <small>noise {noise}</small>"
    lines = [
        f'<div class="row"><div class="head"><span>{html.escape(what)} <small>({better})</small></span>'
        f'<span class="gain">{"" if gain == "-" else gain}</span></div>'
    ]
    for name, kind, value, text in (("QEMU alone", "alone", values[0], alone), ("with Larder", "larder", values[1], larder)):
        width = max(0.5, 100 * value / most) if value else 0
        lines.append(
            f'<div class="bar"><span>{name}</span><div class="track"><div class="fill {kind}" style="width:{width:.1f}%"></div>'
            f'</div><span class="figure">{html.escape(text)}</span></div>'
        )
    return "".join(lines) + "</div>"


def write_report(results):
    """target/demo/report.html, which needs nothing else."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>What Larder gains</title><style>{STYLE}</style><h1>What Larder gains</h1>",
        f"<p>Each figure beside plain QEMU on the same work, on this machine, on {date.today().isoformat()}.</p>",
    ]
    for result in results:
        parts.append(f"<h2>{html.escape(result.title)}</h2><p>{html.escape(result.about)}</p>")
        if result.failure:
            parts.append(f'<p class="failed">This step failed: {html.escape(result.failure)}</p>')
        parts.extend(bars(row) for row in result.rows)
        for what, count, wrong in result.checks:
            parts.append(f"<p>Checked for being right: {count:,} {html.escape(what)}; {wrong} were wrong.</p>")
    version = run([LARDER, "--version"]).strip()
    parts.append(
        f"<footer>{html.escape(version)}, {os.cpu_count()} processors, Linux {html.escape(platform.release())}. Noise is how far "
        "the samples of one side lie apart. <code>make demo</code> repeats it; <code>make demo DEMO=memory</code> one step.</footer>"
    )
    path = WORK / "report.html"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def main():
    """Runs the steps that were asked for."""
    wanted = sys.argv[1:] or os.environ.get("DEMO", "").replace(",", " ").split() or list(STEPS)
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        sys.exit(f"no step is called {', '.join(unknown)}: there are {', '.join(STEPS)}")
    # Leaving a step's contexts ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    WORK.mkdir(parents=True, exist_ok=True)
    results = [perform(STEPS[name]) for name in wanted]
    print_table(results)
    report = write_report(results)
    print(f"\nThe page with these figures: {report}")
    sys.exit(any(result.failure for result in results))


if __name__ == "__main__":
    main()

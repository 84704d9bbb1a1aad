//! `larder bench policy`: replays traces through Larder's cache policy and the policies that it is compared with.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use larder_codec::measure::cpu_time;
use larder_policy::curve::{MissRatioCurve, SAMPLE_DEFAULT};
use larder_policy::replay::{LineTrace, ReplayCounts, ReplayPolicy};
use larder_policy::synthetic::SyntheticTrace;
use larder_policy::trace;
use serde_json::{Value, json};

use crate::cli::{BenchPolicyArguments, Output};
use crate::disk_image::format_size;
use crate::output::print;

/// Sizes of the cache at which the miss-ratio curve is printed for people, in percent of the footprint.
const CURVE_PERCENTS: [usize; 10] = [1, 2, 5, 10, 20, 30, 40, 60, 80, 100];

/// Formats a table cell from a policy's outcome and the line size in bytes.
type Cell = fn(&PolicyOutcome, u64) -> String;

/// Results of one trace.
struct PolicyReport {
    name: String,
    lines: LineTrace,
    line_bytes: u64,
    sizes: Vec<SizeResults>,
    curve: MissRatioCurve,
}

/// Results of one trace at one cache size.
struct SizeResults {
    /// Cache size in percent of the trace's footprint.
    percent: u32,
    /// Capacity of the cache, in lines.
    lines: usize,
    results: Vec<PolicyOutcome>,
}

/// Result of one policy at one cache size.
struct PolicyOutcome {
    contender: ReplayPolicy,
    counts: ReplayCounts,
    ns_per_access: f64,
}

pub(crate) fn run(arguments: BenchPolicyArguments) -> anyhow::Result<ExitCode> {
    let line_bytes = arguments.line.get();
    ensure!(
        line_bytes.is_power_of_two() && (512..=1 << 20).contains(&line_bytes),
        "--line {}: give a power of two from 512 to 1MiB",
        arguments.line
    );
    let mut reports = Vec::new();
    for path in &arguments.traces {
        // A block of the ARC paper's traces counts as one line, whatever its size was.
        let trace = trace::read(path, line_bytes)?;
        ensure!(
            arguments.budget.is_none() || trace.requests[0].at.is_some(),
            "{}: its requests have no timestamps, so a daily budget cannot be applied; omit --budget",
            path.display()
        );
        let lines = LineTrace::new(&trace.requests, line_bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        reports.push(report(&name, lines, &arguments));
        print_report(&reports, &arguments)?;
    }
    if arguments.synthetic {
        for synthetic in SyntheticTrace::ALL {
            let lines = LineTrace::new(&synthetic.requests(), larder_policy::synthetic::LINE_BYTES);
            reports.push(report(synthetic.name(), lines, &arguments));
            print_report(&reports, &arguments)?;
        }
    }
    if arguments.output == Output::Json {
        let traces: Vec<Value> = reports.iter().map(to_json).collect();
        print(&format!("{:#}\n", json!({ "traces": traces })))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the newest report at once, so that text output does not wait for the last trace.
fn print_report(reports: &[PolicyReport], arguments: &BenchPolicyArguments) -> anyhow::Result<()> {
    if arguments.output == Output::Json {
        return Ok(());
    }
    let last = reports.last().context("there is a report")?;
    print(&format_text(last)?)
}

fn report(name: &str, lines: LineTrace, arguments: &BenchPolicyArguments) -> PolicyReport {
    let mut curve = MissRatioCurve::new(SAMPLE_DEFAULT);
    for access in &lines.accesses {
        curve.record_use(lines.lines[access.key as usize]);
    }
    let line_bytes = arguments.line.get();
    let budget = arguments.budget.map(|budget| budget.get());
    let sizes = arguments.sizes.iter().map(|percent| {
        let capacity = (lines.footprint() * *percent as usize / 100).max(1);
        let results = ReplayPolicy::ALL.into_iter().map(|contender| {
            let begin = cpu_time();
            let counts = contender.replay(&lines, capacity, line_bytes as u32, budget);
            PolicyOutcome {
                contender,
                counts,
                ns_per_access: (cpu_time() - begin).as_nanos() as f64 / counts.accesses as f64,
            }
        });
        SizeResults { percent: *percent, lines: capacity, results: results.collect() }
    });
    PolicyReport { name: name.to_owned(), sizes: sizes.collect(), curve, lines, line_bytes }
}

fn format_text(report: &PolicyReport) -> anyhow::Result<String> {
    let PolicyReport { lines, line_bytes, .. } = report;
    let writes = lines.accesses.iter().filter(|access| access.write).count();
    let accesses = lines.accesses.len();
    let mut text = format!(
        "{}: {accesses} accesses ({:.1} % writes) to {} lines of {}\n\n",
        report.name,
        100.0 * writes as f64 / accesses as f64,
        lines.footprint(),
        format_size(*line_bytes),
    );
    let tables: [(&str, Cell); 3] = [
        ("hits, %", |outcome, _| format!("{:.2}", outcome.counts.hit_ratio())),
        ("written to the SSD", |outcome, line| format_size(outcome.counts.written * line)),
        ("CPU ns per access", |outcome, _| format!("{:.0}", outcome.ns_per_access)),
    ];
    for (title, cell) in tables {
        write!(text, "{title:<20}")?;
        for size in &report.sizes {
            write!(text, "{:>12}", format!("{} %", size.percent))?;
        }
        text.push('\n');
        for (index, contender) in ReplayPolicy::ALL.into_iter().enumerate() {
            write!(text, "  {:<18}", contender.name())?;
            for size in &report.sizes {
                write!(text, "{:>12}", cell(&size.results[index], *line_bytes))?;
            }
            text.push('\n');
        }
        text.push('\n');
    }
    writeln!(text, "misses of an LRU cache (SHARDS)")?;
    for percent in CURVE_PERCENTS {
        let size = (lines.footprint() * percent / 100) as u64;
        let ratio = 100.0 * report.curve.miss_ratio(size);
        writeln!(text, "  {percent:>3} %{:>14}{ratio:>12.2} %", format_size(size * line_bytes))?;
    }
    text.push('\n');
    Ok(text)
}

fn to_json(report: &PolicyReport) -> Value {
    let line = report.line_bytes;
    let result = |outcome: &PolicyOutcome| {
        json!({
            "policy": outcome.contender.name(),
            "hits": outcome.counts.hits,
            "hit-percent": outcome.counts.hit_ratio(),
            "filled-bytes": outcome.counts.filled * line,
            "written-bytes": outcome.counts.written * line,
            "cpu-ns-per-access": outcome.ns_per_access,
        })
    };
    let size = |size: &SizeResults| {
        json!({
            "percent": size.percent,
            "bytes": size.lines as u64 * line,
            "results": size.results.iter().map(result).collect::<Vec<Value>>(),
        })
    };
    let points = report.curve.points();
    let point = |point: &larder_policy::curve::CurvePoint| {
        json!({
            "bytes": point.lines * line,
            "miss-percent": 100.0 * point.miss_ratio,
        })
    };
    json!({
        "name": report.name,
        "accesses": report.lines.accesses.len(),
        "written": report.lines.accesses.iter().filter(|ask| ask.write).count(),
        "footprint-bytes": report.lines.footprint() as u64 * line,
        "line-bytes": line,
        "sizes": report.sizes.iter().map(size).collect::<Vec<Value>>(),
        "miss-ratio-curve": points.iter().map(point).collect::<Vec<Value>>(),
    })
}

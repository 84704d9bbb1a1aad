//! `larder advise`: the resource use of this host's VMs, and the advice that follows from it.

use std::process::ExitCode;

use anyhow::Context;
use larder_advise::Procfs;
use larder_advise::judge::{Advice, AdvicePolicy, Fit, Level, Practice, judge, percent, size, time};
use larder_advise::measured::{Measured, MeasuredHost, MeasurementGap};
use larder_advise::observe::Observation;
use larder_block::ByteLen;
use serde_json::json;

use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::cli::watch::AdviseArguments;
use crate::output::print;

/// Exit status: the VM would fit only with over-commit, or at a stall above the accepted one.
const EXIT_OVERCOMMITTED: u8 = 3;

/// Exit status: the measurements do not show whether the VM would fit.
const EXIT_UNKNOWN: u8 = 4;

/// Version of the JSON output. Fields may be added within a version; none is removed or changes its meaning.
const JSON_VERSION: u32 = 1;

pub(crate) fn run(arguments: &AdviseArguments) -> anyhow::Result<ExitCode> {
    let policy = AdvicePolicy {
        reserve: arguments.reserve.get(),
        active_share: arguments.active_share,
        overcommit: arguments.overcommit,
        stall: arguments.stall,
        latency_seconds: arguments.disk_latency.as_secs_f64(),
    };
    let sampler =
        Observation { window: arguments.window, controls: arguments.control.clone(), procfs: Procfs::default() };
    let measured = sampler.run().context("cannot measure this host")?;
    let advice = judge(&measured, &policy, arguments.would_fit.map(ByteLen::get));
    print(&match (arguments.output, &advice.would_fit) {
        (Output::Json, _) => format_json(&measured, &advice),
        (Output::Text, Some(would_fit)) => format!("{}\n", would_fit.text),
        (Output::Text, None) => format_text(&measured, &advice),
    })?;
    Ok(match advice.would_fit.map(|would_fit| would_fit.answer) {
        None | Some(Fit::Fits) => ExitCode::SUCCESS,
        Some(Fit::DoesNotFit) => ExitCode::from(EXIT_NEGATIVE),
        Some(Fit::OnlyOvercommitted) => ExitCode::from(EXIT_OVERCOMMITTED),
        Some(Fit::CannotTell) => ExitCode::from(EXIT_UNKNOWN),
    })
}

fn format_json(measured: &Measured, advice: &Advice) -> String {
    let all = json!({
        "version": JSON_VERSION,
        "policy": advice.policy,
        "findings": advice.findings,
        "room": advice.room,
        "would_fit": advice.would_fit,
        "measured": measured,
    });
    format!("{all:#}\n")
}

fn format_text(measured: &Measured, advice: &Advice) -> String {
    let mut text = format_host(&measured.host, measured.window_seconds);
    if measured.vms.is_empty() {
        text.push_str("no VM runs here: no process of QEMU (qemu-system-*) is visible\n");
    }
    for (practice, title) in
        [(Practice::RightSize, "right-size"), (Practice::OverCommit, "over-commit"), (Practice::Storage, "storage")]
    {
        let findings: Vec<_> = advice.findings.iter().filter(|it| it.practice == practice).collect();
        if findings.is_empty() {
            continue;
        }
        text.push_str(&format!("\n{title}\n"));
        for finding in findings {
            let subject = finding.vm.as_deref().unwrap_or("host");
            text.push_str(&format!("{} {subject}: {}\n", level_symbol(finding.level), finding.text));
        }
    }
    if !measured.gaps.is_empty() {
        text.push_str("\nnot measured\n");
        for (subject, what, why) in merge_gaps(&measured.gaps) {
            text.push_str(&format!("  {subject}: {what}: {why}\n"));
        }
    }
    text
}

/// Returns the character that is printed in front of a finding of this level.
fn level_symbol(level: Level) -> &'static str {
    match level {
        Level::Warning => "!",
        Level::Advice => "*",
        Level::Unknown => "?",
        Level::Fine => " ",
    }
}

fn format_host(host: &MeasuredHost, seconds: f64) -> String {
    let or_none = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), percent);
    let cpus = host.cpus.map_or_else(|| "?".to_owned(), |cpus| cpus.to_string());
    format!(
        "in {}: {cpus} CPUs, {} busy; {} of memory, {} available; waited for CPUs {}, memory {}, disks {} of the time\n",
        time(seconds),
        or_none(host.cpu_busy),
        size(host.memory_total),
        size(host.memory_available),
        or_none(host.cpu_stall),
        or_none(host.memory_stall),
        or_none(host.io_stall)
    )
}

/// Merges gaps that differ only in their VM into one entry, which lists all of these VMs.
fn merge_gaps(gaps: &[MeasurementGap]) -> Vec<(String, &str, &str)> {
    let mut all: Vec<(String, &str, &str)> = Vec::new();
    for gap in gaps {
        let subject = gap.vm.as_deref().unwrap_or("host");
        match all.iter_mut().find(|(_, what, why)| (*what, *why) == (&gap.what, &gap.why)) {
            Some((others, ..)) => others.push_str(&format!(", {subject}")),
            None => all.push((subject.to_owned(), &gap.what, &gap.why)),
        }
    }
    all
}

//! The last events of disks, as their servers have stored them.

use std::process::ExitCode;

use larder_vm::control::trace::{DiskEvents, Traces};
use larder_vm::control::{ControlClientError, fetch_trace};
use larder_vm::vm::find::{self, KnownVm};
use serde_json::{Value, json};

use super::explain;
use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::concurrent::query_each;
use crate::disk_image::format_date;
use crate::output::{Table, print, print_stderr};
use crate::rates::is_not_served;

/// Prints the events of one VM's disks, or of the disks of all served VMs.
pub(super) fn run(vm: Option<&KnownVm>, output: Output) -> anyhow::Result<ExitCode> {
    let Some(vm) = vm else {
        return print_all(output);
    };
    let (answer, traces) = fetch_trace(&vm.control).map_err(|error| explain(error, vm))?;
    print(&match output {
        Output::Text => text([("", &traces)]),
        Output::Json => format!("{answer:#}\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn print_all(output: Output) -> anyhow::Result<ExitCode> {
    let responses = query_all(&find::known_vms());
    let mut answered = Vec::new();
    for (vm, response) in &responses {
        match response {
            Ok((_, traces)) => answered.push((vm.as_str(), traces)),
            Err(error) => print_stderr(&format!("{vm}: {error}")),
        }
    }
    let all_answered = answered.len() == responses.len();
    print(&match output {
        Output::Text => text(answered),
        Output::Json => json_text(&responses),
    })?;
    Ok(if all_answered { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

/// Name of a VM, and the events of its disks as JSON and in parsed form.
type VmResponse = (String, Result<(Value, Traces), ControlClientError>);

/// Queries all served VMs concurrently.
fn query_all(vms: &[KnownVm]) -> Vec<VmResponse> {
    let responses = query_each(vms, |vm| (vm.name.clone(), fetch_trace(&vm.control)));
    let is_served = |(_, response): &VmResponse| !response.as_ref().is_err_and(is_not_served);
    responses.into_iter().filter(is_served).collect()
}

fn json_text(responses: &[VmResponse]) -> String {
    let vms = responses.iter().map(|(name, response)| match response {
        Ok((answer, _)) => json!({"name": name, "disks": answer["disks"], "error": null}),
        Err(error) => json!({"name": name, "disks": [], "error": error.to_string()}),
    });
    let vms: Vec<Value> = vms.collect();
    format!("{:#}\n", json!({"vms": vms}))
}

/// Formats the events of the disks of these VMs, one per line. The name of a disk has that of its VM in front, unless
/// that is empty.
fn text<'a>(vms: impl IntoIterator<Item = (&'a str, &'a Traces)>) -> String {
    let mut table = Table::new(["time", "disk", "event", "text"]);
    for (vm, traces) in vms {
        for (index, disk) in traces.disks.iter().enumerate() {
            let name = disk.name.clone().unwrap_or_else(|| index.to_string());
            let name = if vm.is_empty() { name } else { format!("{vm}/{name}") };
            add_rows(&mut table, &name, disk);
        }
    }
    table.into_text()
}

fn add_rows(table: &mut Table<4>, name: &str, disk: &DiskEvents) {
    let mut row = |time: &str, kind: &str, text: &str| table.row([time, name, kind, text].map(str::to_owned));
    if disk.dropped > 0 {
        let text = format!("earlier events that are not stored any more: {}", disk.dropped);
        row("-", "-", &text);
    }
    for event in &disk.events {
        row(&utc(event.time_ms), &event.kind, &event.text);
    }
}

/// Formats a time, in milliseconds since 1970 (UTC), by RFC 3339.
fn utc(time_ms: u64) -> String {
    let (seconds, ms) = (time_ms / 1000, time_ms % 1000);
    format!("{}.{ms:03}Z", format_date(seconds).replace(' ', "T"))
}

#[cfg(test)]
mod tests {
    use larder_vm::control::trace::TraceEvent;

    use super::*;

    #[test]
    fn times_follow_rfc_3339() {
        for (time_ms, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (1_709_251_200_000, "2024-03-01T00:00:00.000Z"),
            (1_767_225_599_042, "2025-12-31T23:59:59.042Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(time_ms), expected);
        }
    }

    /// Each event is one line, with the number of dropped events first; a text cannot produce further lines.
    #[test]
    fn each_event_is_one_line() {
        let event = |time_ms, text: &str| TraceEvent { time_ms, kind: "opened".to_owned(), text: text.to_owned() };
        let disk = |name: Option<&str>, dropped| DiskEvents {
            name: name.map(str::to_owned),
            dropped,
            events: vec![event(0, "a\nb"), event(1, "c")],
        };
        let traces = Traces { disks: vec![disk(Some("vda"), 7), disk(None, 0)] };
        let output = text([("web", &traces)]);
        let lines: Vec<Vec<&str>> = output.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["time", "disk", "event", "text"]);
        assert_eq!(lines[1][..3], ["-", "web/vda", "-"]);
        assert_eq!(lines[1].last(), Some(&"7"));
        assert_eq!(lines[2], ["1970-01-01T00:00:00.000Z", "web/vda", "opened", "a\\u000ab"]);
        assert_eq!(lines[4], ["1970-01-01T00:00:00.000Z", "web/1", "opened", "a\\u000ab"]);
        assert_eq!(lines.len(), 6);
        assert!(text([("", &traces)]).contains("  vda  "), "{output}");
    }
}

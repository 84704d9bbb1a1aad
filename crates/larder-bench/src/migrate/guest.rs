//! A guest that is moved back and forth, and the cost of each move.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use larder_bench::campaign::migration::LIMIT;
use larder_bench::campaign::migration::vm::{Machine, Vm, counted};
use serde_json::{Value, json};

use super::Bench;
use super::cpu::VcpuThreads;
use super::link::Side;
use super::method::Method;
use super::moving::{Carrier, Outcome};
use crate::undo::Undo;

/// Console lines to wait for after a move, before the next one.
const WARMUP_TICKS: usize = 10;

/// Measurements of a move.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub(super) outcome: Outcome,
    /// Rate at which the guest changed memory during the move, in 10^6 bytes per second.
    pub(super) kept: f64,
    /// Time from the command until the guest ran at the destination.
    pub(super) total_s: f64,
    /// Time from the source's STOP to the destination's RESUME, by the host's clock.
    pub(super) downtime_ms: Option<f64>,
    /// Number of dirty bitmap syncs of the source's QEMU.
    pub(super) rounds: u64,
    /// Pages sent that were not zero, and those that were.
    pub(super) pages: u64,
    pub(super) zeros: u64,
    pub(super) there_bytes: u64,
    pub(super) back_bytes: u64,
    /// CPU seconds at the source and at the destination: QEMU's without its vCPUs, and Larder's.
    pub(super) cpu_s: [f64; 2],
}

/// A guest with one load and rate.
pub(super) struct Guest<'a> {
    bench: &'a Bench<'a>,
    /// Configured rate, in 10^6 bytes per second.
    rate: u64,
    machine: Machine,
    vm: Vm,
    side: Side,
    /// Consoles of the QEMUs where the guest was.
    consoles: Vec<String>,
    /// Methods of all moves and attempts so far, in order.
    moved_by: Vec<&'static str>,
    /// QEMU's counter, which it does not reset between migrations.
    xbzrle_pages: u64,
    _undo: Undo,
}

impl<'a> Guest<'a> {
    /// Boots the guest; `rate` is in 10^6 bytes per second.
    pub(super) fn boot(bench: &'a Bench<'a>, rate: u64) -> anyhow::Result<Self> {
        let arguments = bench.arguments;
        let script = bench.load.script(arguments.size, rate, arguments.check);
        let machine = Machine::running(arguments.release(), arguments.memory, &script)?.preallocated();
        let undo = Undo::new(r#"rm -rf -- "$1""#, [machine.folder()])?;
        let vm = machine.boot_by(&bench.link.enter(Side::A))?;
        Ok(Self {
            bench,
            rate,
            machine,
            vm,
            side: Side::A,
            consoles: Vec::new(),
            moved_by: Vec::new(),
            xbzrle_pages: 0,
            _undo: undo,
        })
    }

    /// Returns the rate at which the guest changes memory without a move, in 10^6 bytes per second. A busy host makes
    /// the guest slow for a moment, so the measurement is repeated until it reaches `rate_enough`, and the best one
    /// counts.
    pub(super) fn alone(&self, rate_enough: f64) -> anyhow::Result<f64> {
        const TICKS: usize = 15;
        const TIMES: usize = 4;
        let mut best = 0.0_f64;
        for _ in 0..TIMES {
            let before = self.vm.console().len();
            self.vm.wait_for_console("TICK", TICKS)?;
            best = best.max(rate(&self.vm.console()[before..]));
            if best >= rate_enough {
                break;
            }
        }
        Ok(best)
    }

    /// Moves the guest to the other side, where it continues to check its memory.
    pub(super) fn moves(&mut self, method: Method) -> anyhow::Result<Move> {
        let bench = self.bench;
        let (from, to) = (self.side, self.side.other());
        let mut destination = self.machine.start_incoming_with_prefix(&bench.link.enter(to))?;
        method.prepare(&mut self.vm, bench.arguments)?;
        method.prepare(&mut destination, bench.arguments)?;
        let carrier = Carrier::ready(bench, method, &mut destination, to)?;

        let vcpus = [VcpuThreads::of(&mut self.vm)?, VcpuThreads::of(&mut destination)?];
        let qemus_cpu =
            |vms: [&Vm; 2]| -> anyhow::Result<[f64; 2]> { Ok([vcpus[0].others(vms[0])?, vcpus[1].others(vms[1])?]) };
        let source_id = self.vm.process.id();
        self.vm.monitor().take_events();
        let console = self.vm.console().len();
        let link_before = bench.link.carried(source_id)?;
        let cpu_before = qemus_cpu([&self.vm, &destination])?;
        let started = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let run = carrier.carry(bench, &mut self.vm, from)?;
        let ended = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let cpu_after = qemus_cpu([&self.vm, &destination])?;
        let link_after = bench.link.carried(source_id)?;

        let at_destination = run.outcome.is_there();
        let active_vm = if at_destination { &mut destination } else { &mut self.vm };
        wait_running(active_vm)?;
        let (mut total_s, mut downtime_ms) = (ended - started, None);
        if at_destination {
            let stopped = last_event(&mut self.vm, "STOP")?;
            let resumed = last_event(&mut destination, "RESUME")?;
            total_s = resumed - started;
            downtime_ms = Some((resumed - stopped) * 1e3);
        }
        let number = |of: &Value| of.as_u64().unwrap_or(0);
        let (ram, cache) = (&run.info["ram"], &run.info["xbzrle-cache"]);
        // A page whose XBZRLE delta overflows is sent, and counted, as a normal one.
        let xbzrle = number(&cache["pages"]).saturating_sub(number(&cache["overflow"]));
        let pages = number(&ram["normal"]) + xbzrle.saturating_sub(self.xbzrle_pages);
        self.xbzrle_pages = self.xbzrle_pages.max(xbzrle);
        let cpu_s = |side: usize| cpu_after[side] - cpu_before[side] + run.larder_cpu_s[side];
        let result = Move {
            outcome: run.outcome,
            kept: rate(&self.vm.console()[console..]),
            total_s,
            downtime_ms,
            rounds: number(&ram["dirty-sync-count"]),
            pages,
            zeros: number(&ram["duplicate"]),
            there_bytes: link_after[0] - link_before[0],
            back_bytes: link_after[1] - link_before[1],
            cpu_s: [cpu_s(0), cpu_s(1)],
        };
        if at_destination {
            self.consoles.push(self.vm.console());
            self.vm = destination;
            self.side = to;
            self.xbzrle_pages = 0;
        } else {
            drop(destination);
        }
        self.moved_by.push(method.name());
        // Before the next move the guest must reach its former speed: an emulator translates its code anew.
        self.vm.wait_for_console("TICK", WARMUP_TICKS).with_context(|| self.history())?;
        Ok(result)
    }

    /// Checks that all of the guest's memory is right, and that it has counted without a gap wherever it ran.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        let checked = self.verify();
        self.consoles.push(self.vm.console());
        checked.and_then(|()| counted(&self.consoles).map(drop)).with_context(|| self.history())
    }

    /// Waits until the guest has checked all of its memory once more, which takes a slow one minutes.
    fn verify(&self) -> anyhow::Result<()> {
        // The first round is in progress.
        const ROUNDS: usize = 2;
        let round_s = (self.bench.arguments.size << 20).div_ceil(self.rate.max(1) * 1_000_000);
        let deadline = Instant::now() + LIMIT + 4 * ROUNDS as u32 * Duration::from_secs(round_s);
        let rounds = || self.vm.console().matches("ROUND").count();
        let goal = rounds() + ROUNDS;
        while rounds() < goal {
            self.vm.wait_for_console("TICK", 1)?;
            ensure!(Instant::now() < deadline, "the guest makes no progress at {} MB/s", self.rate);
        }
        Ok(())
    }

    /// Describes the guest's moves.
    fn history(&self) -> String {
        format!("a guest that was moved by {}", self.moved_by.join(", "))
    }
}

/// Returns the mean of the rates in whole lines of a console: the last line may be cut off where the guest left.
fn rate(console: &str) -> f64 {
    let complete_lines = console.rfind('\n').map_or("", |end| &console[..end]);
    let rates: Vec<f64> = complete_lines
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let is_tick = fields.next() == Some("TICK") && fields.next().is_some();
            fields.next().filter(|_| is_tick)?.parse().ok()
        })
        .collect();
    rates.iter().sum::<f64>() / rates.len() as f64
}

fn wait_running(vm: &mut Vm) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = vm.run_state()?;
        if state == "running" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest is {state}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the time of the last such event, in seconds since 1970, and discards all other events.
fn last_event(vm: &mut Vm, name: &str) -> anyhow::Result<f64> {
    // Events arrive with answers.
    vm.ask("query-status", &json!({}))?;
    let events = vm.monitor().take_events();
    let parsed = events.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let event = parsed.rev().find(|event| event["event"] == name);
    let time = &event.with_context(|| format!("QEMU sent no event {name}"))?["timestamp"];
    let part = |unit: &str| time[unit].as_f64().context("an event without a timestamp");
    Ok(part("seconds")? + part("microseconds")? / 1e6)
}

#[cfg(test)]
mod tests {
    #[test]
    /// Only complete lines of a console count for the rate.
    fn rate_ignores_unfinished_line() {
        assert_eq!(super::rate("K 3 7\nTICK 4 40\nROUND 1\nTICK 5 42\nTICK 6 4"), 41.0);
        assert!(super::rate("TICK 1 4").is_nan());
    }
}

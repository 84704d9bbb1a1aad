//! A guest that is moved to and fro, and what each move costs.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use larder_bench::campaign::migration::LIMIT;
use larder_bench::campaign::migration::vm::{Machine, Vm, counted};
use serde_json::{Value, json};

use super::Bench;
use super::cpu::Processors;
use super::link::Side;
use super::method::Method;
use super::moving::{Carrier, Outcome};
use crate::undo::Undo;

/// Lines of how it goes after a move, before the next.
const SETTLED_TICKS: usize = 10;

/// What was measured of a move.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub(super) outcome: Outcome,
    /// How much memory the guest changed while it was moved, in 10^6 bytes per second.
    pub(super) kept: f64,
    /// From the command until the guest ran at the destination.
    pub(super) total_s: f64,
    /// From the source's STOP to the destination's RESUME, by the host's clock.
    pub(super) downtime_ms: Option<f64>,
    /// How often the source's QEMU looked which pages are dirty.
    pub(super) rounds: u64,
    /// Pages sent that were not zero; and those that were.
    pub(super) pages: u64,
    pub(super) zeros: u64,
    pub(super) there_bytes: u64,
    pub(super) back_bytes: u64,
    /// At the source, and at the destination: QEMU's without its guest's processors, and Larder's.
    pub(super) cpu_s: [f64; 2],
}

/// A guest of one load and rate.
pub(super) struct Guest<'a> {
    bench: &'a Bench<'a>,
    /// That it was told, in 10^6 bytes per second.
    rate: u64,
    machine: Machine,
    vm: Vm,
    side: Side,
    /// Of the QEMUs where it was.
    consoles: Vec<String>,
    /// Who moved it, or tried to, in turn.
    moved_by: Vec<&'static str>,
    /// QEMU counts these on from one migration to the next.
    xbzrle_pages: u64,
    _undo: Undo,
}

impl<'a> Guest<'a> {
    /// Boots it; `rate` in 10^6 bytes per second.
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

    /// How much memory it changes when it is left alone, in 10^6 bytes per second. A host that is busy for a moment is no
    /// guest that is slow: this is done again until it comes to `enough`, and the best one counts.
    pub(super) fn alone(&self, enough: f64) -> anyhow::Result<f64> {
        const TICKS: usize = 15;
        const TIMES: usize = 4;
        let mut best = 0.0_f64;
        for _ in 0..TIMES {
            let before = self.vm.console().len();
            self.vm.wait_for_console("TICK", TICKS)?;
            best = best.max(rate(&self.vm.console()[before..]));
            if best >= enough {
                break;
            }
        }
        Ok(best)
    }

    /// Moves it to the other side. It goes on checking its memory there, and on its way to the next.
    pub(super) fn moves(&mut self, method: Method) -> anyhow::Result<Move> {
        let bench = self.bench;
        let (from, to) = (self.side, self.side.other());
        let mut destination = self.machine.incoming_by(&bench.link.enter(to))?;
        method.prepare(&mut self.vm, bench.arguments)?;
        method.prepare(&mut destination, bench.arguments)?;
        let carrier = Carrier::ready(bench, method, &mut destination, to)?;

        let processors = [Processors::of(&mut self.vm)?, Processors::of(&mut destination)?];
        let qemus_cpu = |vms: [&Vm; 2]| -> anyhow::Result<[f64; 2]> {
            Ok([processors[0].others(vms[0])?, processors[1].others(vms[1])?])
        };
        let source_id = self.vm.process.id();
        self.vm.monitor().take_events();
        let console = self.vm.console().len();
        let link_before = bench.link.carried(source_id)?;
        let cpu_before = qemus_cpu([&self.vm, &destination])?;
        let begun = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let carried = carrier.carry(bench, &mut self.vm, from)?;
        let ended = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let cpu_after = qemus_cpu([&self.vm, &destination])?;
        let link_after = bench.link.carried(source_id)?;

        let is_there = carried.outcome.is_there();
        let runs = if is_there { &mut destination } else { &mut self.vm };
        wait_until_it_runs(runs)?;
        let (mut total_s, mut downtime_ms) = (ended - begun, None);
        if is_there {
            let stopped = last_event(&mut self.vm, "STOP")?;
            let resumed = last_event(&mut destination, "RESUME")?;
            total_s = resumed - begun;
            downtime_ms = Some((resumed - stopped) * 1e3);
        }
        let number = |of: &Value| of.as_u64().unwrap_or(0);
        let (ram, cache) = (&carried.info["ram"], &carried.info["xbzrle-cache"]);
        // A page that overflows is sent, and counted, as a normal one.
        let xbzrle = number(&cache["pages"]).saturating_sub(number(&cache["overflow"]));
        let pages = number(&ram["normal"]) + xbzrle.saturating_sub(self.xbzrle_pages);
        self.xbzrle_pages = self.xbzrle_pages.max(xbzrle);
        let cpu_s = |side: usize| cpu_after[side] - cpu_before[side] + carried.larder_cpu_s[side];
        let figures = Move {
            outcome: carried.outcome,
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
        if is_there {
            self.consoles.push(self.vm.console());
            self.vm = destination;
            self.side = to;
            self.xbzrle_pages = 0;
        } else {
            drop(destination);
        }
        self.moved_by.push(method.name());
        // It is as fast as before when it is moved again: an emulator translates its code anew.
        self.vm
            .wait_for_console("TICK", SETTLED_TICKS)
            .with_context(|| self.history())?;
        Ok(figures)
    }

    /// Looks whether all of its memory is as it must be, and whether it has counted on wherever it was.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        let checked = self.verify();
        self.consoles.push(self.vm.console());
        checked
            .and_then(|()| counted(&self.consoles).map(drop))
            .with_context(|| self.history())
    }

    /// Waits until it has gone over all of its memory once more. A slow one takes minutes for that.
    fn verify(&self) -> anyhow::Result<()> {
        // The first is under way.
        const ROUNDS: usize = 2;
        let round_s = (self.bench.arguments.size << 20).div_ceil(self.rate.max(1) * 1_000_000);
        let give_up = Instant::now() + LIMIT + 4 * ROUNDS as u32 * Duration::from_secs(round_s);
        let rounds = || self.vm.console().matches("ROUND").count();
        let goal = rounds() + ROUNDS;
        while rounds() < goal {
            self.vm.wait_for_console("TICK", 1)?;
            ensure!(
                Instant::now() < give_up,
                "the guest does not get on with {} MB/s",
                self.rate
            );
        }
        Ok(())
    }

    /// What was done to it.
    fn history(&self) -> String {
        format!("a guest that was moved by {}", self.moved_by.join(", "))
    }
}

/// The mean of the rates that whole lines of a console show: one may be cut off where the guest left.
fn rate(console: &str) -> f64 {
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    let rates: Vec<f64> = whole
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let is_tick = words.next() == Some("TICK") && words.next().is_some();
            words.next().filter(|_| is_tick)?.parse().ok()
        })
        .collect();
    rates.iter().sum::<f64>() / rates.len() as f64
}

fn wait_until_it_runs(vm: &mut Vm) -> anyhow::Result<()> {
    let give_up = Instant::now() + LIMIT;
    loop {
        let state = vm.run_state()?;
        if state == "running" {
            return Ok(());
        }
        ensure!(Instant::now() < give_up, "the guest is {state}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// When QEMU last told of such an event, in seconds since 1970; others are forgotten.
fn last_event(vm: &mut Vm, name: &str) -> anyhow::Result<f64> {
    // Events come with answers.
    vm.ask("query-status", &json!({}))?;
    let events = vm.monitor().take_events();
    let parsed = events
        .iter()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let event = parsed.rev().find(|event| event["event"] == name);
    let time = &event.with_context(|| format!("QEMU told of no {name}"))?["timestamp"];
    let part = |unit: &str| time[unit].as_f64().context("an event without a time");
    Ok(part("seconds")? + part("microseconds")? / 1e6)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_line_that_the_guest_has_not_ended_is_not_counted() {
        assert_eq!(super::rate("K 3 7\nTICK 4 40\nROUND 1\nTICK 5 42\nTICK 6 4"), 41.0);
        assert!(super::rate("TICK 1 4").is_nan());
    }
}

//! Moves a guest from QEMU to QEMU, and cuts or kills something at a random moment of each move. Afterwards the guest
//! must run on exactly one side, with its state intact, and the mover must report the correct side. With `--disks`
//! its disk moves too. The disk must be open on at most one host at a time, and contain all flushed data.

mod disks;
mod report;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::json;

pub use self::disks::DiskOptions;
use self::disks::{Disks, script};
pub use self::report::{Fault, Report};
use self::report::{Place, Stage};
use super::Random;
use super::disk::Format;
use super::migration::larder::{Side, take_back_command, verdict, whole_move_command, whole_receive_command};
use super::migration::relay::Relay;
use super::migration::vm::{Load, Machine, Release, Vm};
use super::process::Process;

/// Repeatedly move a guest, and cut or kill something in the middle of each move
#[derive(Args)]
pub struct Arguments {
    /// Number of moves
    #[arg(long, default_value_t = 300)]
    count: u32,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Use QEMU 10 of the test bed, not the host's QEMU
    #[arg(long)]
    debian13: bool,
    /// Move the guest's disk too, to which it writes, and which `larder vm` serves on both sides. Needs root
    #[arg(long)]
    disks: bool,
    /// Format of the disk's image; by default raw and qcow2 in turn, one for each guest
    #[arg(long, value_enum, requires = "disks")]
    format: Option<Format>,
    /// Put the image behind an NBD server
    #[arg(long, requires = "disks")]
    nbd: bool,
    /// Directory of the disk's image and of its caches
    #[arg(long, default_value = ".", requires = "disks")]
    folder: PathBuf,
    /// Fault of every move; by default all faults in turn
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Memory of the guests in MiB.
const MEMORY_MIB: u64 = 320;
/// Limit for a move on a busy machine, including the repair of the fault.
const LIMIT: Duration = Duration::from_secs(180);
/// Time for which a mover may query a dead destination before it is told to stop.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which an answer of QEMU's is not expected any more.
const QEMU_HANG_TIMEOUT: Duration = Duration::from_secs(10);
/// Range of the random moments. A move takes about 2 s at `words`'s bandwidth; some faults come after its end.
const FAULT_DELAY_MS_MAX: u64 = 2_500;
/// Range of random moments after the source stops.
const HAND_OVER_DELAY_US_MAX: u64 = 60_000;
/// Range of random moments after the disk is released or opened.
const DISK_DELAY_US_MAX: u64 = 8_000;

/// Moment of a fault.
enum Moment {
    /// At any time.
    Any,
    /// When the guest stops.
    Stop,
    /// When the source has closed the disk and it is open nowhere.
    Left,
    /// When the destination has opened the disk.
    Come,
}

/// A running move.
struct Move<'a> {
    larder: &'a Path,
    disks: Option<&'a mut Disks>,
    source: &'a mut Vm,
    destination: &'a mut Vm,
    receiver: Side,
    relay: Relay,
    mover: Process,
    words: Vec<&'static str>,
    stage: Stage,
    log: Vec<String>,
}

/// Run states of a QEMU, as far as they matter here.
const QEMU_RUNNING: u8 = 1;
const QEMU_NOT_RUNNING: u8 = 2;

/// State of both QEMUs, updated by a watching thread.
#[derive(Default)]
struct Watched {
    source: AtomicU8,
    over: AtomicBool,
    both: AtomicBool,
    both_open: AtomicBool,
}

/// Moves a guest `count` times, with a disk or without.
///
/// # Errors
/// If the guest runs nowhere, on both sides, or with wrong state, or if a report contradicts its location.
pub fn campaign(
    larder: &Path,
    release: Release,
    disk: Option<&DiskOptions>,
    faults: &[Fault],
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let machine = match disk {
        Some(_) => Machine::running(release, MEMORY_MIB, &script())?,
        None => Machine::new(release, MEMORY_MIB, &Load::default())?,
    };
    let mut report = Report::default();
    let mut guests = 0;
    let mut boot = || {
        let disks = disk.map(|disk| disk.disk(larder, guests)).transpose()?;
        guests += 1;
        let guest = disks.as_ref().map_or_else(|| machine.boot(), |disks| disks.here().boot(&machine))?;
        anyhow::Ok((disks, guest))
    };
    let (mut disks, mut source) = boot()?;
    let mut consoles = Vec::new();
    for number in 0..count {
        let fault = faults[number as usize % faults.len()];
        let mut destination = match &disks {
            Some(disks) => disks.there().incoming(&machine)?,
            None => machine.incoming()?,
        };
        let mut options = words(random, disks.is_some());
        if fault == Fault::LoseLink {
            options.extend(["--patience", "0"]);
        }
        let started = Instant::now();
        let mut running_move = Move::begin(larder, disks.as_mut(), &mut source, &mut destination, options.clone())?;
        let location = running_move.inject_and_recover(fault, random);
        let (log, stage) = (running_move.log(), running_move.stage);
        drop(running_move);
        let location = location.with_context(|| format!("move {number}, {fault:?} ({}):\n{log}", options.join(" ")))?;
        println!(
            "{number}: {fault:?} {stage} ({}): {location:?}, {:.1} s",
            options.join(" "),
            started.elapsed().as_secs_f64()
        );
        let should_have_moved = fault == Fault::Nothing || stage == Stage::After;
        ensure!(
            !should_have_moved || location != Place::Source,
            "move {number}, {fault:?}: the guest did not move although no fault had occurred:\n{log}"
        );
        report.count((fault, stage), location);
        let check = || -> anyhow::Result<()> {
            disks.as_ref().map_or(Ok(()), |disks| disks.check(location))?;
            match location {
                Place::Source => source.verifies(),
                Place::Destination => destination.verifies(),
                Place::Lost => Ok(()),
            }
        };
        check().with_context(|| format!("move {number}, {fault:?}, the guest is at the {location:?}:\n{log}"))?;
        match location {
            Place::Source => {}
            Place::Destination => {
                consoles.push(source.console());
                source = destination;
                disks.iter_mut().for_each(Disks::switch_hosts);
            }
            Place::Lost => {
                source.process.kill();
                destination.process.kill();
                // The ticks that it counted still count.
                consoles.push(source.console());
                consoles.push(destination.console());
                report
                    .ends(&std::mem::take(&mut consoles), disks)
                    .with_context(|| format!("after move {number}, {fault:?}:\n{log}"))?;
                (disks, source) = boot()?;
            }
        }
    }
    source.process.kill();
    consoles.push(source.console());
    report.ends(&consoles, disks).context("at the end of the campaign")?;
    Ok(report)
}

fn words(random: &mut Random, disks: bool) -> Vec<&'static str> {
    // Limits the bandwidth, so that the move lasts.
    let slow = ["--bandwidth", "64MiB"];
    let how: &[&str] = match random.below(4) {
        1 => &["--channels", "3", "--lanes", "3"],
        // With so little downtime the move does not converge. QEMU does not support post-copy with such disks.
        2 | 3 if !disks => &["--postcopy", "--downtime", "1"],
        _ => &[],
    };
    [&slow, how].concat()
}

impl<'a> Move<'a> {
    fn begin(
        larder: &'a Path,
        disks: Option<&'a mut Disks>,
        source: &'a mut Vm,
        destination: &'a mut Vm,
        words: Vec<&'static str>,
    ) -> anyhow::Result<Self> {
        let mut disks = disks;
        disks.iter_mut().for_each(|disks| disks.begins());
        let receiver = receiver(larder, disks.as_deref(), "127.0.0.1:0", destination)?;
        let relay = Relay::start(receiver.address())?;
        let command = mover(larder, disks.as_deref(), source, &relay, &words);
        Ok(Self {
            mover: Process::start(command)?,
            larder,
            disks,
            source,
            destination,
            receiver,
            relay,
            words,
            stage: Stage::Before,
            log: Vec::new(),
        })
    }

    fn inject_and_recover(&mut self, fault: Fault, random: &mut Random) -> anyhow::Result<Place> {
        let mut monitors = [&*self.source, &*self.destination].map(|vm| vm.observer_monitor().ok());
        let watched = Watched::default();
        let disk_observer = self.disks.as_ref().map(|disks| disks.opens());
        std::thread::scope(|scope| {
            if let Some(disk_observer) = disk_observer {
                let watched = &watched;
                scope.spawn(move || {
                    while !watched.over.load(Ordering::Relaxed) {
                        if disk_observer.both() {
                            watched.both_open.store(true, Ordering::Relaxed);
                        }
                        std::thread::sleep(Duration::from_millis(2));
                    }
                });
            }
            scope.spawn(|| {
                let mut run_state = |of: usize| match monitors[of].as_mut().map(|of| of.run("query-status", "{}")) {
                    Some(Ok(line)) if line.contains("\"running\": true") => QEMU_RUNNING,
                    Some(Ok(_)) | None => QEMU_NOT_RUNNING,
                    Some(Err(_)) => {
                        // This QEMU has exited, or hangs.
                        monitors[of] = None;
                        QEMU_NOT_RUNNING
                    }
                };
                let mut before = QEMU_NOT_RUNNING;
                while !watched.over.load(Ordering::Relaxed) {
                    let destination_state = run_state(1);
                    let source_state = run_state(0);
                    watched.source.store(source_state, Ordering::Relaxed);
                    // The guest ran here before and after it ran there.
                    if [before, destination_state, source_state] == [QEMU_RUNNING; 3] {
                        watched.both.store(true, Ordering::Relaxed);
                    }
                    before = source_state;
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            let place =
                self.wait(&watched, random).and_then(|()| self.carry_out(fault)).and_then(|()| self.mend(fault));
            watched.over.store(true, Ordering::Relaxed);
            place
        })
        .and_then(|place| {
            ensure!(!watched.both.load(Ordering::Relaxed), "the guest ran on both hosts");
            ensure!(!watched.both_open.load(Ordering::Relaxed), "the disk was open on both hosts");
            Ok(place)
        })
    }

    /// Waits for a random moment of the move.
    fn wait(&mut self, watched: &Watched, random: &mut Random) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_millis(random.below(FAULT_DELAY_MS_MAX));
        let source_stopped = || watched.source.load(Ordering::Relaxed) == QEMU_NOT_RUNNING;
        let moment_kinds = if self.disks.is_some() { 5 } else { 2 };
        let (fault_moment, within_us) = match random.below(moment_kinds) {
            0 => (Moment::Any, 1),
            1 | 2 => (Moment::Stop, HAND_OVER_DELAY_US_MAX),
            3 => (Moment::Left, DISK_DELAY_US_MAX),
            _ => (Moment::Come, DISK_DELAY_US_MAX),
        };
        let moment_reached = |disks: Option<&Disks>| match (&fault_moment, disks) {
            (Moment::Any, _) => Instant::now() >= until,
            (Moment::Left, Some(disks)) => disks.has_left(),
            (Moment::Come, Some(disks)) => disks.destination_opened_image(),
            (Moment::Stop | Moment::Left | Moment::Come, _) => Instant::now() >= until && source_stopped(),
        };
        while !moment_reached(self.disks.as_deref()) && !self.mover.has_ended() {
            std::thread::sleep(Duration::from_micros(300));
        }
        std::thread::sleep(Duration::from_micros(random.below(within_us)));
        self.stage = match (self.mover.has_ended(), source_stopped()) {
            (true, _) => Stage::After,
            (false, true) => Stage::HandOver,
            (false, false) => Stage::Before,
        };
        Ok(())
    }

    fn carry_out(&mut self, fault: Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Nothing => {}
            Fault::CutLink | Fault::LoseLink => self.relay.cut(),
            Fault::StallLink => {
                self.relay.stall();
                // Longer than the silence after which either side gives the connection up.
                std::thread::sleep(Duration::from_secs(12));
                self.relay.cut();
                self.relay.release();
            }
            Fault::KillMover => {
                self.mover.signal(libc::SIGKILL);
                // The mover may have exited before.
                if !self.mover.wait(LIMIT)?.success() {
                    self.record_mover_output();
                    self.start_mover()?;
                }
            }
            Fault::KillReceiver => {
                let address = self.receiver.address().to_string();
                self.receiver.process.kill();
                self.record_receiver_output();
                if let Ok(receiver) = receiver(self.larder, self.disks.as_deref(), &address, self.destination) {
                    self.receiver = receiver;
                }
            }
            Fault::KillSource => end(&mut self.source.process)?,
            Fault::KillDestination => end(&mut self.destination.process)?,
            Fault::Cancel => self.mover.signal(libc::SIGTERM),
            Fault::KillServer => self.kill(|disks| disks.kill_server(true))?,
            Fault::KillServerThere => self.kill(|disks| disks.kill_server(false))?,
            Fault::KillHost => {
                self.mover.kill();
                self.record_mover_output();
                end(&mut self.source.process)?;
                self.kill(|disks| disks.kill_host(true))?;
            }
            Fault::KillHostThere => {
                self.receiver.process.kill();
                self.record_receiver_output();
                end(&mut self.destination.process)?;
                self.kill(|disks| disks.kill_host(false))?;
            }
        }
        Ok(())
    }

    /// Kills a server of the disk, and keeps its output.
    fn kill(&mut self, kill: impl FnOnce(&mut Disks) -> anyhow::Result<String>) -> anyhow::Result<()> {
        let disks = self.disks.as_mut().context("there is no disk (--disks)")?;
        let output = kill(disks)?;
        self.log.push(format!("output of the killed server: {output}"));
        Ok(())
    }

    fn start_mover(&mut self) -> anyhow::Result<()> {
        let command = mover(self.larder, self.disks.as_deref(), self.source, &self.relay, &self.words);
        self.mover = Process::start(command)?;
        Ok(())
    }

    /// Returns the output of all processes, and the actions of the campaign.
    fn log(&self) -> String {
        let servers = self.disks.as_ref().map(|disks| disks.said());
        let all = self.log.iter().cloned().chain(servers);
        all.collect::<Vec<String>>().join("\n")
    }

    fn record_receiver_output(&mut self) {
        self.log.push(format!("receiver: {}", self.receiver.process.output()));
    }

    fn record_mover_output(&mut self) {
        let output = self.mover.output();
        // Omits the statistics.
        let lines =
            output.lines().filter(|line| !line.starts_with([' ', '{', '}']) || line.starts_with("  \"failed\""));
        self.log.extend(lines.map(|line| format!("mover: {line}")));
    }

    /// Does what an operator would do, until the guest's location is known.
    fn mend(&mut self, fault: Fault) -> anyhow::Result<Place> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            ensure!(!remaining.is_zero(), "the move does not finish");
            if self.mover.wait(remaining.min(UNREACHABLE_TIMEOUT)).is_err() && self.destination.process.has_ended() {
                // The mover queries a destination that will never answer.
                self.mover.signal(libc::SIGTERM);
                self.mover.wait(Duration::from_secs(30)).context("the mover does not stop")?;
            }
            if !self.mover.has_ended() {
                continue;
            }
            if fault == Fault::KillHost {
                self.wait_receiver_done();
            }
            self.record_mover_output();
            self.record_receiver_output();
            let verdict = verdict(&self.mover.output());
            let reported = verdict.as_ref().map(|verdict| match &verdict["vm"] {
                serde_json::Value::String(place) => place.clone(),
                _ => "moved".to_owned(),
            });
            let [source_is_dead, destination_is_dead] =
                [&self.source.process, &self.destination.process].map(Process::has_ended);
            self.log.push(format!(
                "reported: {reported:?}; QEMU exited: source {source_is_dead}, destination {destination_is_dead}"
            ));
            match reported.as_deref() {
                Some("moved") if fault.kills_destination() && destination_is_dead => return Ok(Place::Lost),
                Some("moved") => {
                    ensure!(
                        self.runs_there()?,
                        "the move is reported as completed, but the guest does not run at the destination"
                    );
                    // The mover has told QEMU to quit. QEMU 7.2 with multifd sometimes hangs if the connection breaks
                    // then.
                    if self.mover.output().contains("received the command to quit and still runs: kill it") {
                        self.source.process.kill();
                    }
                    let ended = self.source.process.wait(QEMU_HANG_TIMEOUT).map(drop);
                    ended.context("the source's QEMU does not exit")?;
                    return Ok(Place::Destination);
                }
                // The source was killed before the mover began.
                _ if source_is_dead && fault.kills_source() => {
                    if !destination_is_dead && self.runs_there()? {
                        return Ok(Place::Destination);
                    }
                    return Ok(Place::Lost);
                }
                // The mover was killed just after it had ended the source's QEMU.
                _ if source_is_dead && fault == Fault::KillMover && self.runs_there()? => {
                    return Ok(Place::Destination);
                }
                _ if source_is_dead => bail!("the source's QEMU has exited"),
                Some("here") => {
                    ensure!(self.runs_at_source()?, "the guest is reported at the source, but does not run there");
                    // QEMU 7.2 with multifd sometimes hangs and answers no command when its incoming migration breaks
                    // off.
                    self.destination.monitor().set_timeout(QEMU_HANG_TIMEOUT)?;
                    let runs_there = !destination_is_dead && self.runs_there().unwrap_or(false);
                    ensure!(!runs_there, "the guest also runs at the destination");
                    return Ok(Place::Source);
                }
                // The mover was told to stop, or its destination's QEMU has exited for good.
                Some("in doubt") if destination_is_dead => return self.take_back(fault),
                Some("between") if destination_is_dead => return Ok(Place::Lost),
                Some("in doubt" | "between" | "unknown") => {}
                other => bail!("the mover reports {other:?}"),
            }
            std::thread::sleep(Duration::from_millis(500));
            self.start_mover()?;
        }
    }

    /// Takes the guest back after the destination's QEMU, which may have run it, has exited.
    fn take_back(&mut self, fault: Fault) -> anyhow::Result<Place> {
        if let Some(disks) = &self.disks
            && !disks.there().disk()?.away
        {
            // The destination may have written to the disk, which is then newer than the source's memory.
            return Ok(Place::Lost);
        }
        let output = take_back(self.larder, self.disks.as_deref(), self.source).output()?;
        self.log.push(String::from_utf8_lossy(&output.stderr).into_owned());
        if self.runs_at_source()? {
            return Ok(Place::Source);
        }
        // In post-copy there is no way back, and a destination's QEMU without the whole device state exits.
        let postcopy = self.words.contains(&"--postcopy");
        ensure!(postcopy || fault.kills_destination(), "the guest cannot be resumed at the source");
        Ok(Place::Lost)
    }

    /// Waits until a receiver without a source has finished, or reports that the source is absent or uninformed.
    fn wait_receiver_done(&mut self) {
        let until = Instant::now() + UNREACHABLE_TIMEOUT;
        let has_output = |of: &Process, what: &str| of.output().contains(what);
        while !self.receiver.process.has_ended()
            && !has_output(&self.receiver.process, "waiting for the source")
            && !has_output(&self.receiver.process, "may not know that")
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn runs_at_source(&mut self) -> anyhow::Result<bool> {
        runs(self.source)
    }

    fn runs_there(&mut self) -> anyhow::Result<bool> {
        runs(self.destination)
    }
}

fn end(qemu: &mut Process) -> anyhow::Result<()> {
    qemu.signal(libc::SIGKILL);
    qemu.wait(LIMIT).map(drop)
}

/// Returns whether the guest runs; false too for a QEMU that is exiting.
fn runs(vm: &mut Vm) -> anyhow::Result<bool> {
    match vm.ask("query-status", &json!({})) {
        Ok(status) => Ok(status["running"] == true),
        Err(error) => vm.process.wait(QEMU_HANG_TIMEOUT).map(|_| false).map_err(|_| error),
    }
}

fn receiver(larder: &Path, disks: Option<&Disks>, listen: &str, destination: &Vm) -> anyhow::Result<Side> {
    let command = whole_receive_command(larder, listen, destination.external_qmp(), &[]);
    Side::listening(match disks {
        Some(disks) => disks.there().has(command),
        None => command,
    })
}

fn mover(larder: &Path, disks: Option<&Disks>, source: &Vm, relay: &Relay, words: &[&str]) -> Command {
    let command = whole_move_command(larder, source.external_qmp(), &relay.address().to_string(), words);
    match disks {
        Some(disks) => disks.here().has(command),
        None => command,
    }
}

fn take_back(larder: &Path, disks: Option<&Disks>, source: &Vm) -> Command {
    let command = take_back_command(larder, source.external_qmp());
    match disks {
        Some(disks) => disks.here().has(command),
        None => command,
    }
}

/// Runs the campaign and prints its results.
///
/// # Errors
/// If a guest's state or a report is wrong, or something is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::find_larder(arguments.larder.as_deref())?;
    let release = if arguments.debian13 { Release::Debian13 } else { Release::Host };
    let mut random = Random::new(arguments.seed);
    let disk = arguments.disks.then(|| DiskOptions {
        format: arguments.format,
        nbd: arguments.nbd,
        folder: arguments.folder.clone(),
    });
    let all = match (&disk, release) {
        (None, _) => Fault::ALL.to_vec(),
        (Some(_), Release::Debian13) => Fault::WITH_DISKS.to_vec(),
        // QEMU 7.2 never again notices a server's exit once one has exited while QEMU waited for its guest.
        (Some(_), Release::Host) => {
            let faults = Fault::WITH_DISKS.into_iter();
            faults.filter(|fault| *fault != Fault::KillServerThere).collect()
        }
    };
    let faults = arguments.fault.map_or(all, |fault| vec![fault]);
    let report = campaign(&larder, release, disk.as_ref(), &faults, arguments.count, &mut random)?;
    print!("{report}");
    Ok(())
}

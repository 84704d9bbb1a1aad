//! A guest is moved from QEMU to QEMU, and something is cut or killed at a random moment of each move. Afterwards it must
//! run at one place, with all that it had, and whoever was asked must have said where.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::Random;
use super::migration::larder::{Side, move_command, receive_whole_command, verdict};
use super::migration::relay::Relay;
use super::migration::vm::{Load, Machine, Release, Vm, counted};
use super::process::Process;

/// Move a guest over and over, and cut or kill something in the middle of each move
#[derive(Args)]
pub struct Arguments {
    /// How many moves
    #[arg(long, default_value_t = 300)]
    count: u32,
    /// The larder to move with; by default the one beside this program
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Move by QEMU 10 of the test bed, not the host's QEMU
    #[arg(long)]
    debian13: bool,
    /// What happens, each time; by default one after the other
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// Where the random moments come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Memory of the guests in MiB.
const MEMORY_MIB: u64 = 320;
/// How long a move may take on a busy machine, with all that is done about what broke.
const LIMIT: Duration = Duration::from_secs(180);
/// How long a mover asks a destination that is dead before it is told to stop.
const ASKS_IN_VAIN_FOR: Duration = Duration::from_secs(30);
/// An answer of QEMU's that takes longer will not come.
const HUNG_AFTER: Duration = Duration::from_secs(10);
/// Moves take some 2 s, at the rate of which `words` tells; some things happen after they have ended.
const MOMENTS_MS: u64 = 2_500;
/// So long around the moment when the source stops.
const MOMENTS_OF_HAND_OVER_US: u64 = 60_000;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// It just moves
    Nothing,
    /// All connections end, and can be made again
    CutLink,
    /// Nothing goes over for 12 s, then all connections end, and can be made again
    StallLink,
    /// All connections end, and the mover was told not to make them again
    LoseLink,
    /// The mover is killed, and started again
    KillMover,
    /// The receiver is killed, and started again
    KillReceiver,
    /// The source's QEMU is killed
    KillSource,
    /// The destination's QEMU is killed
    KillDestination,
    /// The mover is told to stop
    Cancel,
}

impl Fault {
    /// Each of them.
    pub const ALL: [Self; 9] = [
        Self::Nothing,
        Self::CutLink,
        Self::StallLink,
        Self::LoseLink,
        Self::KillMover,
        Self::KillReceiver,
        Self::KillSource,
        Self::KillDestination,
        Self::Cancel,
    ];
}

/// Where the guest is in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Source,
    Destination,
    /// The QEMU that had it was killed.
    Lost,
}

/// What came of the moves, by what happened.
#[derive(Debug, Default)]
pub struct Report {
    /// Moves.
    pub moves: u32,
    rows: Vec<(Fault, [u32; 3])>,
    /// How far the guests have counted.
    pub ticks: u64,
}

/// A move under way.
struct Move<'a> {
    larder: &'a Path,
    source: &'a mut Vm,
    destination: &'a mut Vm,
    receiver: Side,
    relay: Relay,
    mover: Process,
    words: Vec<&'static str>,
    log: Vec<String>,
}

/// Run states, as far as they matter.
const RUNS: u8 = 1;
const STANDS: u8 = 2;

/// Both QEMUs, watched by a thread.
#[derive(Default)]
struct Watched {
    source: AtomicU8,
    over: AtomicBool,
    both: AtomicBool,
}

/// Moves a guest `count` times.
///
/// # Errors
/// It runs nowhere, at both places, or not as it was; or somebody said otherwise.
pub fn campaign(
    larder: &Path,
    release: Release,
    faults: &[Fault],
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let machine = Machine::new(release, MEMORY_MIB, &Load::default())?;
    let mut report = Report::default();
    let mut source = machine.boot()?;
    let mut consoles = Vec::new();
    for number in 0..count {
        let fault = faults[number as usize % faults.len()];
        let mut destination = machine.incoming()?;
        let mut how = words(random);
        if fault == Fault::LoseLink {
            how.extend(["--patience", "0"]);
        }
        let begun = Instant::now();
        let mut the_move = Move::begin(larder, &mut source, &mut destination, how.clone())?;
        let place = the_move.break_and_mend(fault, random);
        let log = std::mem::take(&mut the_move.log).join("\n");
        drop(the_move);
        let place = place.with_context(|| format!("move {number}, {fault:?} ({}):\n{log}", how.join(" ")))?;
        println!(
            "{number}: {fault:?} ({}): {place:?}, {:.1} s",
            how.join(" "),
            begun.elapsed().as_secs_f64()
        );
        report.count(fault, place);
        let check = || -> anyhow::Result<()> {
            match place {
                Place::Source => source.verifies(),
                Place::Destination => destination.verifies(),
                Place::Lost => Ok(()),
            }
        };
        check().with_context(|| format!("move {number}, {fault:?}, then at the {place:?}:\n{log}"))?;
        match place {
            Place::Source => {}
            Place::Destination => {
                consoles.push(source.console());
                source = destination;
            }
            Place::Lost => {
                // What it had counted stays.
                consoles.push(source.console());
                consoles.push(destination.console());
                report.ticks += counted(&std::mem::take(&mut consoles))?;
                source = machine.boot()?;
            }
        }
    }
    consoles.push(source.console());
    report.ticks += counted(&consoles).context("in the end")?;
    Ok(report)
}

fn words(random: &mut Random) -> Vec<&'static str> {
    // So that it lasts.
    let slow = ["--bandwidth", "64MiB"];
    let how: &[&str] = match random.below(4) {
        0 => &["--channels", "0"],
        1 => &["--channels", "3", "--lanes", "3"],
        // With so little downtime it does not converge.
        _ => &["--postcopy", "--downtime", "1"],
    };
    [&slow, how].concat()
}

impl Report {
    fn count(&mut self, fault: Fault, place: Place) {
        self.moves += 1;
        let at = self.rows.iter().position(|(of, _)| *of == fault).unwrap_or_else(|| {
            self.rows.push((fault, [0; 3]));
            self.rows.len() - 1
        });
        self.rows[at].1[place as usize] += 1;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "{} moves; the guest has counted to {} without a gap or a mismatch",
            self.moves, self.ticks
        )?;
        writeln!(
            out,
            "| what happened | stayed | moved | lost with its QEMU |\n|---|---|---|---|"
        )?;
        for (fault, [source, destination, lost]) in &self.rows {
            writeln!(out, "| {fault:?} | {source} | {destination} | {lost} |")?;
        }
        Ok(())
    }
}

impl<'a> Move<'a> {
    fn begin(
        larder: &'a Path,
        source: &'a mut Vm,
        destination: &'a mut Vm,
        words: Vec<&'static str>,
    ) -> anyhow::Result<Self> {
        let receiver = receiver(larder, "127.0.0.1:0".parse()?, destination)?;
        let relay = Relay::start(receiver.address())?;
        let command = move_command(larder, source.qmp_for_others(), &relay.address().to_string(), &words);
        Ok(Self {
            mover: Process::start(command)?,
            larder,
            source,
            destination,
            receiver,
            relay,
            words,
            log: Vec::new(),
        })
    }

    fn break_and_mend(&mut self, fault: Fault, random: &mut Random) -> anyhow::Result<Place> {
        let mut monitors = [&*self.source, &*self.destination].map(|vm| vm.second_monitor().ok());
        let watched = Watched::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut run = |of: usize| match monitors[of].as_mut().map(|of| of.run("query-status", "{}")) {
                    Some(Ok(line)) if line.contains("\"running\": true") => RUNS,
                    Some(Ok(_)) | None => STANDS,
                    Some(Err(_)) => {
                        // It has ended, or hangs.
                        monitors[of] = None;
                        STANDS
                    }
                };
                let mut before = STANDS;
                while !watched.over.load(Ordering::Relaxed) {
                    let there = run(1);
                    let here = run(0);
                    watched.source.store(here, Ordering::Relaxed);
                    // It ran here before and after it ran there.
                    if [before, there, here] == [RUNS; 3] {
                        watched.both.store(true, Ordering::Relaxed);
                    }
                    before = here;
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            let place = self
                .wait(&watched, random)
                .and_then(|()| self.carry_out(fault))
                .and_then(|()| self.mend(fault));
            watched.over.store(true, Ordering::Relaxed);
            place
        })
        .and_then(|place| {
            ensure!(!watched.both.load(Ordering::Relaxed), "it ran at both places");
            Ok(place)
        })
    }

    /// Until the moment.
    fn wait(&mut self, watched: &Watched, random: &mut Random) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_millis(random.below(MOMENTS_MS));
        let around_hand_over = random.below(2) == 0;
        while Instant::now() < until || around_hand_over && watched.source.load(Ordering::Relaxed) != STANDS {
            if self.mover.has_ended() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        if around_hand_over {
            std::thread::sleep(Duration::from_micros(random.below(MOMENTS_OF_HAND_OVER_US)));
        }
        Ok(())
    }

    fn carry_out(&mut self, fault: Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Nothing => {}
            Fault::CutLink | Fault::LoseLink => self.relay.cut(),
            Fault::StallLink => {
                self.relay.stall();
                // More than either side takes it for alive.
                std::thread::sleep(Duration::from_secs(12));
                self.relay.cut();
                self.relay.release();
            }
            Fault::KillMover => {
                self.mover.signal(libc::SIGKILL);
                // It may have ended before.
                if !self.mover.wait(LIMIT)?.success() {
                    self.hear_mover();
                    self.start_mover()?;
                }
            }
            Fault::KillReceiver => {
                let address = self.receiver.address();
                self.receiver.process.kill();
                self.log.push(format!("receiver: {}", self.receiver.process.output()));
                if let Ok(receiver) = receiver(self.larder, address, self.destination) {
                    self.receiver = receiver;
                }
            }
            Fault::KillSource => end(&mut self.source.process)?,
            Fault::KillDestination => end(&mut self.destination.process)?,
            Fault::Cancel => self.mover.signal(libc::SIGTERM),
        }
        Ok(())
    }

    fn start_mover(&mut self) -> anyhow::Result<()> {
        let qmp = self.source.qmp_for_others();
        let command = move_command(self.larder, qmp, &self.relay.address().to_string(), &self.words);
        self.mover = Process::start(command)?;
        Ok(())
    }

    fn hear_mover(&mut self) {
        let said = self.mover.output();
        // Figures are left out.
        let words = said
            .lines()
            .filter(|line| !line.starts_with([' ', '{', '}']) || line.starts_with("  \"failed\""));
        self.log.extend(words.map(|line| format!("mover: {line}")));
    }

    /// Does what a user would, until it is clear where the guest is.
    fn mend(&mut self, fault: Fault) -> anyhow::Result<Place> {
        let give_up = Instant::now() + LIMIT;
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "it does not come to an end");
            if self.mover.wait(left.min(ASKS_IN_VAIN_FOR)).is_err() && self.destination.process.has_ended() {
                // It asks somebody who will never answer.
                self.mover.signal(libc::SIGTERM);
                self.mover
                    .wait(Duration::from_secs(30))
                    .context("the mover does not stop")?;
            }
            if !self.mover.has_ended() {
                continue;
            }
            self.hear_mover();
            self.log.push(format!("receiver: {}", self.receiver.process.output()));
            let verdict = verdict(&self.mover.output());
            let is = verdict.as_ref().map(|verdict| match &verdict["vm"] {
                serde_json::Value::String(place) => place.clone(),
                _ => "moved".to_owned(),
            });
            let [source_is_dead, destination_is_dead] =
                [&self.source.process, &self.destination.process].map(Process::has_ended);
            self.log.push(format!(
                "{is:?}; ended: source {source_is_dead}, destination {destination_is_dead}"
            ));
            match is.as_deref() {
                Some("moved") if fault == Fault::KillDestination && destination_is_dead => return Ok(Place::Lost),
                Some("moved") => {
                    ensure!(self.runs_there()?, "it is said to have moved, and does not run there");
                    ensure!(source_is_dead || !self.runs_here()?, "it runs on here, too");
                    return Ok(Place::Destination);
                }
                // It was killed before the mover had begun.
                _ if source_is_dead && fault == Fault::KillSource => {
                    if !destination_is_dead && self.runs_there()? {
                        return Ok(Place::Destination);
                    }
                    return Ok(Place::Lost);
                }
                // It was killed when it had just ended the source's QEMU.
                _ if source_is_dead && fault == Fault::KillMover && self.runs_there()? => {
                    return Ok(Place::Destination);
                }
                _ if source_is_dead => bail!("the source's QEMU has ended"),
                Some("here") => {
                    ensure!(self.runs_here()?, "it is said to be here, and does not run");
                    // QEMU 7.2 with multifd hangs at times when what it takes in breaks off, and answers nobody.
                    self.destination.monitor().set_patience(HUNG_AFTER)?;
                    let runs_there = !destination_is_dead && self.runs_there().unwrap_or(false);
                    ensure!(!runs_there, "it runs there, too");
                    return Ok(Place::Source);
                }
                // It was told to stop, or ends with a QEMU that will not come back.
                Some("in doubt") if destination_is_dead => {
                    let mut command = std::process::Command::new(self.larder);
                    command
                        .args(["migrate", "--take-back", "--qmp"])
                        .arg(self.source.qmp_for_others());
                    let output = command.output()?;
                    self.log.push(String::from_utf8_lossy(&output.stderr).into_owned());
                    if self.runs_here()? {
                        return Ok(Place::Source);
                    }
                    // In post-copy it cannot be had back, and a destination's QEMU that has not got all of the beginning ends.
                    let switched = self.words.contains(&"--postcopy");
                    ensure!(switched || fault == Fault::KillDestination, "it cannot be taken back");
                    return Ok(Place::Lost);
                }
                Some("between") if destination_is_dead => return Ok(Place::Lost),
                Some("in doubt" | "between" | "unknown") => {}
                other => bail!("the mover says {other:?}"),
            }
            std::thread::sleep(Duration::from_millis(500));
            self.start_mover()?;
        }
    }

    fn runs_here(&mut self) -> anyhow::Result<bool> {
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

fn runs(vm: &mut Vm) -> anyhow::Result<bool> {
    Ok(vm.ask("query-status", &json!({}))?["running"] == true)
}

fn receiver(larder: &Path, listen: SocketAddr, destination: &Vm) -> anyhow::Result<Side> {
    let listen = listen.to_string();
    Side::listening(receive_whole_command(
        larder,
        &listen,
        destination.qmp_for_others(),
        &[],
    ))
}

/// Runs the campaign and prints what came of it.
///
/// # Errors
/// Something was not as it should be, or is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::larder_beside(arguments.larder.as_deref())?;
    let release = if arguments.debian13 {
        Release::Debian13
    } else {
        Release::Debian12
    };
    let mut random = Random::new(arguments.seed);
    let faults = arguments.fault.map_or(Fault::ALL.to_vec(), |fault| vec![fault]);
    let report = campaign(&larder, release, &faults, arguments.count, &mut random)?;
    print!("{report}");
    Ok(())
}

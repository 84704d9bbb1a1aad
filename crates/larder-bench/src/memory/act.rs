//! A program that uses its memory as a certain kind of VM does, and reports how long it waited for pages: the load of
//! `memory --part density`.
//!
//! Its work arrives by the clock, however late the previous work was: a slow VM does not get less work. The reported
//! stall is the time of each page access beyond that of a page in memory.

use std::io::{BufRead as _, Write as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::{Args, ValueEnum};

use super::touch::Memory;
use crate::campaign::Random;

/// Use memory as a VM does until standard input is closed; "report" there prints the time spent waiting for memory
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Amount of memory, in MiB
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Kind of VM to imitate
    #[arg(long = "as", value_enum)]
    kind: Kind,
    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Kinds of VMs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Kind {
    /// Daemons that wake from time to time: 50 times a second they access 4 pages of 8 MiB, and once a second 16
    /// pages of a fourth of the memory
    Idle,
    /// Server for 100 requests a second: each computes for 0.2 ms and accesses 16 pages of the whole memory, whose
    /// popularity falls with their rank (Zipf, exponent 1); one access in ten writes
    Web,
    /// Backup or virus scan: every 10 seconds it reads the next fourth of the memory
    Scan,
}

impl Kind {
    /// All kinds, each with its number in a mix of four VMs.
    pub(super) const MIX: [(Self, usize); 3] = [(Self::Idle, 2), (Self::Web, 1), (Self::Scan, 1)];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Web => "web",
            Self::Scan => "scan",
        }
    }

    /// Returns the interval at which work arrives.
    pub(super) fn every(self) -> Duration {
        match self {
            Self::Idle => Duration::from_millis(20),
            Self::Web => Duration::from_millis(10),
            Self::Scan => Duration::from_secs(10),
        }
    }
}

/// Number of pages that daemons use all the time.
const IDLE_HOT_PAGES: u64 = (8 << 20) / 4096;
const REQUEST_PAGES: u32 = 16;
const REQUEST_CPU_TIME: Duration = Duration::from_micros(200);
/// Maximum time of an access to a page in memory, including the process's first access.
const RESIDENT_ACCESS_MAX: Duration = Duration::from_micros(2);

/// Statistics since the last report.
#[derive(Default)]
struct Told {
    touches: u64,
    stalled: Duration,
    longest: Duration,
    /// Number of work items, and their longest delay.
    turns: u64,
    latest: Duration,
}

/// Returns a random rank, from 0, that follows Zipf's law with exponent 1: the logarithm of the rank counted from 1
/// is uniformly distributed.
fn rank(random: &mut Random, ranks: u64) -> u64 {
    let share = random.below(1 << 32) as f64 / (1_u64 << 32) as f64;
    ((ranks as f64).powf(share) as u64).clamp(1, ranks) - 1
}

struct VmLoad {
    kind: Kind,
    memory: Memory,
    random: Random,
    told: Told,
    turn: u64,
}

pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let memory = Memory::new("acted", (arguments.mib << 20) / 4096)?;
    let mut random = Random::new(arguments.seed);
    println!("\nbegins {}", std::process::id());
    let lines = lines();
    // The pager attaches before the process fills its memory.
    ensure!(lines.recv()? == "fill", "the first command must be \"fill\"");
    (0..memory.pages()).for_each(|page| memory.write_vm_like_page(page, &mut random));
    println!("\nready");
    std::io::stdout().flush()?;
    let mut actor = VmLoad { kind: arguments.kind, memory, turn: random.below(1000), random, told: Told::default() };
    actor.act(&lines)
}

/// Returns the lines of standard input.
fn lines() -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if send.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

impl VmLoad {
    fn act(&mut self, lines: &Receiver<String>) -> anyhow::Result<()> {
        let every = self.kind.every();
        // A random phase, so that the VMs do not all start at once.
        let phase = self.random.below(every.as_micros() as u64);
        let mut next = Instant::now() + Duration::from_micros(phase);
        let mut since = Instant::now();
        loop {
            let now = Instant::now();
            match lines.recv_timeout(next.saturating_duration_since(now)) {
                Ok(line) => match line.as_str() {
                    "report" => {
                        self.report(since.elapsed())?;
                        since = Instant::now();
                    }
                    _ => bail!("unknown command '{line}': the only command is report"),
                },
                Err(RecvTimeoutError::Timeout) => {
                    self.told.turns += 1;
                    self.told.latest = self.told.latest.max(next.elapsed());
                    self.work();
                    self.turn += 1;
                    next += every;
                    // Missed work is dropped, as by clients that wait for answers.
                    next = next.max(Instant::now());
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    fn report(&mut self, elapsed: Duration) -> anyhow::Result<()> {
        let Told { touches, stalled, longest, turns, latest } = std::mem::take(&mut self.told);
        println!(
            "\nacted touches={touches} stalled_us={} longest_us={} turns={turns} latest_us={} took_us={}",
            stalled.as_micros(),
            longest.as_micros(),
            latest.as_micros(),
            elapsed.as_micros()
        );
        Ok(std::io::stdout().flush()?)
    }

    fn work(&mut self) {
        let pages = self.memory.pages() as u64;
        match self.kind {
            Kind::Idle => {
                (0..4).for_each(|_| self.touch_random(0, IDLE_HOT_PAGES));
                if self.turn.is_multiple_of(50) {
                    (0..16).for_each(|_| self.touch_random(0, pages / 4));
                }
            }
            Kind::Web => {
                let worked = Instant::now();
                while worked.elapsed() < REQUEST_CPU_TIME {
                    std::hint::spin_loop();
                }
                for _ in 0..REQUEST_PAGES {
                    let rank = rank(&mut self.random, pages);
                    // Scatters the ranks over all pages, always in the same way.
                    let page = rank.wrapping_mul(0x9e37_79b1) % pages;
                    let writes = self.random.below(10) == 0;
                    self.touch(page as usize, writes);
                }
            }
            Kind::Scan => {
                let quarter = pages / 4;
                let from = self.turn % 4 * quarter;
                (from..from + quarter).for_each(|page| self.touch(page as usize, false));
            }
        }
    }

    fn touch_random(&mut self, from: u64, pages: u64) {
        let page = from + self.random.below(pages);
        let writes = self.random.below(10) == 0;
        self.touch(page as usize, writes);
    }

    fn touch(&mut self, page: usize, writes: bool) {
        let (word, access_time) = self.memory.access_page(page, writes);
        assert_eq!(word, page as u64, "a page has wrong content");
        self.told.touches += 1;
        self.told.stalled += access_time.saturating_sub(RESIDENT_ACCESS_MAX);
        self.told.longest = self.told.longest.max(access_time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// Access frequencies follow Zipf's law: popular pages and a long tail.
    fn ranks_follow_zipf_distribution() {
        let (mut random, mut counts) = (Random::new(3), vec![0_u32; 1 << 16]);
        for _ in 0..1 << 16 {
            counts[rank(&mut random, 1 << 16) as usize] += 1;
        }
        // A share of n/16 of the accesses goes to the ranks up to 2^n.
        let share_of_first = |ranks: usize| counts[..ranks].iter().sum::<u32>() / (1 << 12);
        assert_eq!([1 << 4, 1 << 8, 1 << 16].map(share_of_first), [4, 8, 16]);
    }
}

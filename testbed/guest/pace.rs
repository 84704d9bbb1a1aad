//! What the loads of the guest have in common: their options, numbers without a pattern, how much is to be done when, and
//! what they say.
//!
//! ```text
//! --size   how much memory, in MiB; 64 if not given
//! --rate   how much of it is changed in a second, in 10^6 bytes; 0, or not given: as fast as it can
//! --check  one of so many is checked, each if not given
//! ```
//!
//! ```text
//! FILLED          all memory has been written once
//! TICK n RATE     every 100 ms: n counts up from 0, RATE is in 10^6 bytes a second
//! ROUND n         all memory has been gone over n times
//! MISMATCH ...    something is not as it was written; the load ends then, with 1
//! ```

use std::convert::Infallible;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Between two lines of how it goes.
const TICK: Duration = Duration::from_millis(100);

pub struct Options {
    pub mib: u64,
    /// Bytes in a second; 0: as many as it can.
    pub rate: f64,
    pub check: u64,
}

impl Options {
    pub fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            mib: 64,
            rate: 0.0,
            check: 1,
        };
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("{name} wants a value"))?;
            let wrong = || format!("{name} {value}: that is no number for it");
            match name.as_str() {
                "--size" => options.mib = value.parse().map_err(|_| wrong())?,
                "--rate" => options.rate = value.parse::<f64>().map_err(|_| wrong())? * 1e6,
                "--check" => options.check = value.parse().map_err(|_| wrong())?,
                _ => return Err(format!("no option is called '{name}'")),
            }
        }
        if options.mib == 0 || options.check == 0 || !(0.0..1e12).contains(&options.rate) {
            return Err("sizes, rates and shares are 1 at least, a rate may be 0".to_owned());
        }
        Ok(options)
    }
}

/// Numbers without a pattern, the same ones for the same seed (splitmix64, Steele, Lea and Flood 2014).
pub struct Numbers(u64);

impl Numbers {
    /// Of a place, which has less than 32 bits, and its version.
    pub fn of(place: u64, version: u64) -> Self {
        Self((place << 32 | version & 0xffff_ffff).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn fill(&mut self, words: &mut [u64]) {
        for word in words {
            *word = self.next();
        }
    }
}

/// Memory that is changed step by step, from its beginning to its end and again.
pub trait Load {
    /// What a step changes.
    const STEP_BYTES: usize;
    /// Steps between two looks at the clock, at most.
    const AT_ONCE: u64;

    /// Checks what comes next, and changes it, so many times.
    fn steps(&mut self, count: u64) -> Result<(), String>;

    /// How often all of it was gone over.
    fn rounds(&self) -> u64;
}

/// What `program` does when it has read its command line: of what kind its load is, and the options.
pub fn run<K, L: Load>(
    program: &str,
    read: Result<(K, Options), String>,
    fill: impl FnOnce(K, &Options) -> Result<L, String>,
) -> ExitCode {
    let (kind, options) = match read {
        Ok(read) => read,
        Err(why) => {
            say(&format!("{program}: {why}"));
            return ExitCode::from(2);
        }
    };
    match fill(kind, &options) {
        Ok(load) => {
            say("FILLED");
            let Err(what) = work(load, options.rate);
            say(&format!("MISMATCH {what}"));
        }
        Err(why) => say(&format!("{program}: {why}")),
    }
    ExitCode::FAILURE
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A console that does not take it is no reason to stop.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// How much is to be done when.
struct Schedule {
    /// Steps in a second; 0: no end.
    steps_per_s: f64,
    at_once: u64,
    since: Instant,
    done: u64,
}

impl Schedule {
    fn new<L: Load>(bytes_per_s: f64) -> Self {
        Self {
            steps_per_s: bytes_per_s / L::STEP_BYTES as f64,
            at_once: L::AT_ONCE,
            since: Instant::now(),
            done: 0,
        }
    }

    /// Steps to make now. What a guest that stood still has missed is not made up for.
    fn due(&mut self) -> u64 {
        if self.steps_per_s == 0.0 {
            return self.at_once;
        }
        let due = (self.since.elapsed().as_secs_f64() * self.steps_per_s) as u64;
        let behind = due.saturating_sub(self.done);
        if behind as f64 > self.steps_per_s * TICK.as_secs_f64() + self.at_once as f64 {
            (self.since, self.done) = (Instant::now(), 0);
            return self.at_once;
        }
        behind.min(self.at_once)
    }
}

fn work<L: Load>(mut load: L, bytes_per_s: f64) -> Result<Infallible, String> {
    let mut schedule = Schedule::new::<L>(bytes_per_s);
    let mut told = Instant::now();
    let mut steps = 0;
    let mut ticks = 0_u64;
    loop {
        let due = schedule.due();
        let rounds = load.rounds();
        load.steps(due)?;
        schedule.done += due;
        steps += due;
        if load.rounds() > rounds {
            say(&format!("ROUND {}", load.rounds()));
        }
        let passed = told.elapsed();
        if passed >= TICK {
            let bytes = steps * L::STEP_BYTES as u64;
            say(&format!(
                "TICK {ticks} {:.0}",
                bytes as f64 / 1e6 / passed.as_secs_f64()
            ));
            ticks += 1;
            steps = 0;
            told = Instant::now();
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

//! guest-load: a guest's work for the tests of migration. It changes its memory at a rate, page after page, and checks
//! every page before it changes it again.
//!
//! ```text
//! guest-load KIND [--size MIB] [--rate MB/S] [--check N]
//!
//! constant   each page is one word all over
//! sequence   numbers that count up
//! random     nothing that could be compressed
//! partial    random, of which each write changes one half
//! mixed      of 20 pages 8 of text, 6 of a heap's objects, 3 of few words, 3 random
//!
//! --size   how much memory, 64 if not given
//! --rate   how much of it is changed in a second, in 10^6 bytes; 0, or not given: as fast as it can
//! --check  one of N pages is checked, each if not given
//! ```
//!
//! What it says, a line each:
//!
//! ```text
//! FILLED          all memory has been written once
//! TICK n RATE     every 100 ms: n counts up from 0, RATE is in 10^6 bytes a second
//! ROUND n         all pages have been gone over n times
//! MISMATCH ...    a page is not as it was written; it ends then, with 1
//! ```
//!
//! Which version a page must have follows from how many were written so far, and a page's words from its number and its
//! version. So a page that is older than what was written is found out as one that is damaged, or another's, and nothing
//! that says what is right lies in the memory that is checked.
//!
//! One file, without dependencies: testbed/build-guest.sh compiles it.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
const HALF_WORDS: usize = PAGE_WORDS / 2;

/// Between two lines of how it goes.
const TICK: Duration = Duration::from_millis(100);
/// Pages between two looks at the clock.
const AT_ONCE: u64 = 64;

type Page = [u64; PAGE_WORDS];

#[derive(Clone, Copy)]
enum Kind {
    Constant,
    Sequence,
    Random,
    Partial,
    Mixed,
}

struct Options {
    kind: Kind,
    mib: u64,
    /// Bytes in a second; 0: as many as it can.
    rate: f64,
    check: u64,
}

impl Options {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let kind = words.next().ok_or("which kind?")?;
        let kind = match kind.as_str() {
            "constant" => Kind::Constant,
            "sequence" => Kind::Sequence,
            "random" => Kind::Random,
            "partial" => Kind::Partial,
            "mixed" => Kind::Mixed,
            other => return Err(format!("no kind is called '{other}'")),
        };
        let mut options = Self {
            kind,
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
struct Numbers(u64);

impl Numbers {
    fn of(page: u64, version: u64) -> Self {
        Self((page << 32 | version & 0xffff_ffff).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn fill(&mut self, words: &mut [u64]) {
        for word in words {
            *word = self.next();
        }
    }
}

impl Kind {
    /// What a page holds after it was written `version` times more than once.
    fn content(self, page: u64, version: u64, out: &mut Page) {
        match self {
            Self::Constant => out.fill(Numbers::of(page, version).next()),
            Self::Sequence => {
                let first = (page.wrapping_mul(1_000_003) + version.wrapping_mul(7919)).wrapping_mul(PAGE_WORDS as u64);
                for (word, number) in out.iter_mut().zip(first..) {
                    *word = number;
                }
            }
            Self::Random => Numbers::of(page, version).fill(out),
            Self::Partial => {
                // The other half is as the version before has left it.
                let last = (version & 1) as usize;
                let (first_half, second_half) = out.split_at_mut(HALF_WORDS);
                for (half, words) in [first_half, second_half].into_iter().enumerate() {
                    let version = if half == last {
                        version
                    } else {
                        version.saturating_sub(1)
                    };
                    Numbers::of(page << 1 | half as u64, version).fill(words);
                }
            }
            Self::Mixed => mixed(page, version, out),
        }
    }
}

/// As what guests have in their memory: see the top.
fn mixed(page: u64, version: u64, out: &mut Page) {
    let mut numbers = Numbers::of(page, version);
    match page % 20 {
        0..8 => text(&mut numbers, out),
        8..14 => {
            // Objects: a type, a count, where they are, a small number, and another one's place.
            for object in out.chunks_mut(8) {
                let number = numbers.next();
                object.fill(0);
                object[0] = 0x7f00_4000_0000 + (number & 7) * 0x150;
                object[1] = number >> 8 & 3;
                object[2] = 0x7f00_1000_0000 + (page << 12 | number >> 16 & 0xff0);
                object[3] = number >> 32 & 0xffff;
                if number >> 63 == 0 {
                    object[4] = 0x7f00_1000_0000 + (number >> 20 & 0x3ff_fff0);
                }
            }
        }
        14..17 => {
            out.fill(0);
            for _ in 0..8 {
                let number = numbers.next();
                out[(number % PAGE_WORDS as u64) as usize] = number >> 40;
            }
        }
        _ => numbers.fill(out),
    }
}

fn text(numbers: &mut Numbers, out: &mut Page) {
    // What follows from its first letters, and is as long as a word is in the mean.
    const WORDS: [&[u8]; 32] = [
        b"the ",
        b"of ",
        b"and ",
        b"to ",
        b"in ",
        b"is ",
        b"that ",
        b"it ",
        b"page ",
        b"memory ",
        b"host ",
        b"guest ",
        b"value=",
        b"error: ",
        b"request ",
        b"server\n",
        b"disk ",
        b"cache ",
        b"reads ",
        b"write ",
        b"<td>",
        b"</td>\n",
        b"return ",
        b"while (",
        b");\n",
        b"const ",
        b"struct ",
        b"offset ",
        b"length ",
        b"which ",
        b"was ",
        b"time ",
    ];
    let mut bytes = [0; PAGE_BYTES];
    let mut at = 0;
    let mut picks = 0;
    while at < PAGE_BYTES {
        if picks < 32 {
            picks = numbers.next() | 1 << 63;
        }
        let word = WORDS[(picks & 31) as usize];
        picks >>= 5;
        let len = word.len().min(PAGE_BYTES - at);
        bytes[at..at + len].copy_from_slice(&word[..len]);
        at += len;
    }
    for (word, bytes) in out.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    }
}

/// Memory that is changed page after page, from the first to the last and again.
struct Load {
    options: Options,
    pages: Vec<Page>,
    /// Pages written, all rounds together.
    written: u64,
}

impl Load {
    fn filled(options: Options) -> Self {
        let mut pages = vec![[0; PAGE_WORDS]; (options.mib << 20) as usize / PAGE_BYTES];
        for (number, page) in pages.iter_mut().enumerate() {
            options.kind.content(number as u64, 0, page);
        }
        let written = pages.len() as u64;
        Self {
            options,
            pages,
            written,
        }
    }

    /// Pages in all.
    fn count(&self) -> u64 {
        self.pages.len() as u64
    }

    /// How often all of them were gone over.
    fn rounds(&self) -> u64 {
        self.written / self.count() - 1
    }

    /// Checks the next page, and changes it.
    fn step(&mut self) -> Result<(), String> {
        let number = self.written % self.count();
        let version = self.written / self.count();
        let kind = self.options.kind;
        let page = &mut self.pages[number as usize];
        let mut content = [0; PAGE_WORDS];
        if self.written.is_multiple_of(self.options.check) {
            kind.content(number, version - 1, &mut content);
            if *page != content {
                return Err(mismatch(kind, number, version - 1, page, &content));
            }
        }
        kind.content(number, version, &mut content);
        *page = content;
        self.written += 1;
        Ok(())
    }
}

/// What is wrong with a page, in a line.
fn mismatch(kind: Kind, number: u64, version: u64, found: &Page, wanted: &Page) -> String {
    const OLDER_MAX: u64 = 64;
    let differ = found.iter().zip(wanted).filter(|(a, b)| a != b).count();
    let first = found.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
    let mut older = [0; PAGE_WORDS];
    let is_older = (1..=OLDER_MAX.min(version)).find(|age| {
        kind.content(number, version - age, &mut older);
        older == *found
    });
    let what = match is_older {
        Some(age) => format!("it is {age} versions old"),
        None if found.iter().all(|&word| word == 0) => "it is zero".to_owned(),
        None => format!(
            "{differ} of its words differ, the first is {first}: {:#x}",
            found[first]
        ),
    };
    format!("page {number} version {version}: {what}")
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A console that does not take it is no reason to stop.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// How much is to be done when.
struct Schedule {
    /// Pages in a second; 0: no end.
    pages_per_s: f64,
    since: Instant,
    done: u64,
}

impl Schedule {
    fn new(bytes_per_s: f64) -> Self {
        Self {
            pages_per_s: bytes_per_s / PAGE_BYTES as f64,
            since: Instant::now(),
            done: 0,
        }
    }

    /// Pages to change now. What a guest that stood still has missed is not made up for.
    fn due(&mut self) -> u64 {
        if self.pages_per_s == 0.0 {
            return AT_ONCE;
        }
        let due = (self.since.elapsed().as_secs_f64() * self.pages_per_s) as u64;
        let behind = due.saturating_sub(self.done);
        if behind as f64 > self.pages_per_s * TICK.as_secs_f64() + AT_ONCE as f64 {
            (self.since, self.done) = (Instant::now(), 0);
            return AT_ONCE;
        }
        behind.min(AT_ONCE)
    }
}

fn work(mut load: Load) -> Result<(), String> {
    let mut schedule = Schedule::new(load.options.rate);
    let mut told = (Instant::now(), load.written);
    let mut ticks = 0_u64;
    loop {
        let due = schedule.due();
        let rounds = load.rounds();
        for _ in 0..due {
            load.step()?;
        }
        schedule.done += due;
        if load.rounds() > rounds {
            say(&format!("ROUND {}", load.rounds()));
        }
        let passed = told.0.elapsed();
        if passed >= TICK {
            let bytes = (load.written - told.1) * PAGE_BYTES as u64;
            say(&format!(
                "TICK {ticks} {:.0}",
                bytes as f64 / 1e6 / passed.as_secs_f64()
            ));
            ticks += 1;
            told = (Instant::now(), load.written);
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn main() -> ExitCode {
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(why) => {
            say(&format!("guest-load: {why}"));
            return ExitCode::from(2);
        }
    };
    let load = Load::filled(options);
    say("FILLED");
    if let Err(what) = work(load) {
        say(&format!("MISMATCH {what}"));
    }
    ExitCode::FAILURE
}

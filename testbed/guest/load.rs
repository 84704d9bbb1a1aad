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
//! ```
//!
//! Its options, and what it says: pace.rs. Of so many pages as `--check` says one is checked.
//!
//! Which version a page must have follows from how many were written so far, and a page's words from its number and its
//! version. So a page that is older than what was written is found out as one that is damaged, or another's, and nothing
//! that says what is right lies in the memory that is checked.
//!
//! Without dependencies: testbed/build-guest.sh compiles it.

mod pace;

use std::process::ExitCode;

use pace::{Numbers, Options};

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
const HALF_WORDS: usize = PAGE_WORDS / 2;

type Page = [u64; PAGE_WORDS];

/// One that is a page of the guest's memory too, not the end of one and the beginning of the next.
#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Aligned(Page);

#[derive(Clone, Copy)]
enum Kind {
    Constant,
    Sequence,
    Random,
    Partial,
    Mixed,
}

impl Kind {
    fn of(word: Option<String>) -> Result<Self, String> {
        match word.ok_or("which kind?")?.as_str() {
            "constant" => Ok(Self::Constant),
            "sequence" => Ok(Self::Sequence),
            "random" => Ok(Self::Random),
            "partial" => Ok(Self::Partial),
            "mixed" => Ok(Self::Mixed),
            other => Err(format!("no kind is called '{other}'")),
        }
    }

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
    kind: Kind,
    check: u64,
    pages: Vec<Aligned>,
    /// Pages written, all rounds together.
    written: u64,
}

impl Load {
    fn filled(kind: Kind, options: &Options) -> Self {
        let mut pages = vec![Aligned([0; PAGE_WORDS]); (options.mib << 20) as usize / PAGE_BYTES];
        for (number, page) in pages.iter_mut().enumerate() {
            kind.content(number as u64, 0, &mut page.0);
        }
        let written = pages.len() as u64;
        Self {
            kind,
            check: options.check,
            pages,
            written,
        }
    }

    /// Pages in all.
    fn count(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Checks the next page, and changes it.
    fn step(&mut self) -> Result<(), String> {
        let number = self.written % self.count();
        let version = self.written / self.count();
        let kind = self.kind;
        let page = &mut self.pages[number as usize].0;
        let mut content = [0; PAGE_WORDS];
        if self.written.is_multiple_of(self.check) {
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

impl pace::Load for Load {
    const STEP_BYTES: usize = PAGE_BYTES;
    const AT_ONCE: u64 = 64;

    fn steps(&mut self, count: u64) -> Result<(), String> {
        (0..count).try_for_each(|_| self.step())
    }

    fn rounds(&self) -> u64 {
        self.written / self.count() - 1
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

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let read = Kind::of(words.next()).and_then(|kind| Ok((kind, Options::read(words)?)));
    pace::run("guest-load", read, |kind, options| Ok(Load::filled(kind, options)))
}

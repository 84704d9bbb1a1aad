//! Pages for measurements: of files of this machine, and generated ones that are the same everywhere.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use larder_codec::PAGE;

/// Pages of one kind, 16 MiB of them at most: more than the caches close to a core hold.
pub(crate) struct Corpus {
    pub(crate) name: String,
    pub(crate) pages: Vec<[u8; PAGE]>,
}

const PAGES_MAX: usize = 4096;
/// Largest number of pages of one file, so that many files are used.
const FILE_PAGES_MAX: usize = 64;

/// Reads the files below `path`, or that file alone, in the order of their names.
pub(crate) fn of_files(name: &str, path: &Path, wanted: fn(&[u8; PAGE]) -> bool) -> Corpus {
    let file_pages_max = if path.is_file() { PAGES_MAX } else { FILE_PAGES_MAX };
    let mut pages = Vec::new();
    let mut to_visit = vec![path.to_path_buf()];
    while let Some(path) = to_visit.pop() {
        if pages.len() >= PAGES_MAX {
            break;
        }
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            let mut below: Vec<PathBuf> =
                fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect();
            below.sort_by(|a, b| b.cmp(a));
            to_visit.extend(below);
        } else if let Ok(mut file) = fs::File::open(&path) {
            let mut page = [0; PAGE];
            for _ in 0..file_pages_max {
                if pages.len() >= PAGES_MAX || file.read_exact(&mut page).is_err() {
                    break;
                }
                if wanted(&page) {
                    pages.push(page);
                }
            }
        }
    }
    Corpus { name: name.to_owned(), pages }
}

/// Returns whether a page is mostly printable.
pub(crate) fn is_text(page: &[u8; PAGE]) -> bool {
    page.iter().filter(|&&byte| byte == b'\n' || byte == b'\t' || (b' '..0x7f).contains(&byte)).count() > PAGE * 9 / 10
}

fn made(name: &str, mut fill: impl FnMut(&mut Random, &mut Vec<u8>)) -> Corpus {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut pages = Vec::new();
    let mut bytes = Vec::new();
    while pages.len() < PAGES_MAX {
        while bytes.len() < PAGE {
            fill(&mut random, &mut bytes);
        }
        pages.push(bytes[..PAGE].try_into().expect("a page"));
        bytes.drain(..PAGE);
    }
    Corpus { name: name.to_owned(), pages }
}

/// Generates a heap as `malloc` leaves it: objects of 32 to 96 bytes, each after its size, with pointers into one
/// arena, small integers, zeros and now and then a double.
pub(crate) fn heap() -> Corpus {
    made("heap", |random, out| {
        let words = 4 + random.below(9);
        let mut word = |value: u64| out.extend_from_slice(&value.to_le_bytes());
        word((words * 8) | 1);
        word(0x0000_5581_4c20_0000 + random.below(64) * 64);
        for _ in 2..words {
            word(match random.below(10) {
                0..3 => 0x0000_7f3a_1800_0000 + random.below(1 << 18) * 16,
                3..6 => random.below(1000),
                6..9 => 0,
                _ => (random.below(1 << 40) as f64 / 1000.0).to_bits(),
            });
        }
    })
}

/// Generates records as in a web service.
pub(crate) fn json() -> Corpus {
    let names = ["Anna", "Bernd", "Chiara", "Dmitri", "Eve", "Farid", "Grace", "Hiro", "Irene", "Juan"];
    let states = ["active", "suspended", "invited", "deleted"];
    let mut id = 100_000;
    made("json", |random, out| {
        id += 1 + random.below(5);
        let (name, state) = (names[random.below(10) as usize], states[random.below(4) as usize]);
        let (day, hour, cents) = (1 + random.below(28), random.below(24), random.below(1_000_000));
        let hash = random.next();
        out.extend_from_slice(
            format!(
                r#"{{"id":{id},"name":"{name}","email":"{}{}@example.org","state":"{state}","balance":{}.{:02},"last_seen":"2026-11-{day:02}T{hour:02}:00:00Z","etag":"{hash:016x}","roles":["user","reader"]}},"#,
                name.to_lowercase(),
                random.below(1000),
                cents / 100,
                cents % 100,
            )
            .as_bytes(),
        );
    })
}

/// Generates words of which one in 64 is not zero.
pub(crate) fn sparse() -> Corpus {
    made("sparse", |random, out| {
        let value = if random.below(64) == 0 { random.next() } else { 0 };
        out.extend_from_slice(&value.to_le_bytes());
    })
}

/// Generates a column of a database: growing 64-bit integers.
pub(crate) fn sequence() -> Corpus {
    let mut value = 1 << 33;
    made("sequence", |random, out| {
        value += random.below(100);
        out.extend_from_slice(&u64::to_le_bytes(value));
    })
}

pub(crate) fn random() -> Corpus {
    made("random", |random, out| out.extend_from_slice(&random.next().to_le_bytes()))
}

/// Pseudo-random numbers by xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

//! Generated memory for measurements, which is the same on every machine.

use crate::PAGE;

/// Kind of memory contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryContent {
    /// Seven of eight pages are zeros; the others contain a few words.
    Zeros,
    /// Runs of one word as `memset` leaves them, a page each, that begin 16 bytes into a page.
    Filled,
    /// Words of a language, frequent and rare ones.
    Text,
    /// Records as in a web service.
    Json,
    /// Heap as `malloc` leaves it: small objects of pointers, small numbers, zeros and now and then a double.
    Heap,
    /// One word in 64 is not zero.
    Sparse,
    /// Column of a database: 64-bit integers that grow by less than 100.
    Sequence,
    /// 64-bit integers that grow by a constant step.
    Counter,
    /// Machine instructions, as far as random bytes resemble them.
    Code,
    /// Random bits as letters: only entropy coding helps.
    Base64,
    /// Compressed or encrypted data.
    Random,
    /// Runs of 1 to 64 pages of all the other kinds.
    Mixed,
}

impl MemoryContent {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::Zeros,
        Self::Filled,
        Self::Text,
        Self::Json,
        Self::Heap,
        Self::Sparse,
        Self::Sequence,
        Self::Counter,
        Self::Code,
        Self::Base64,
        Self::Random,
        Self::Mixed,
    ];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Filled => "filled",
            Self::Text => "text",
            Self::Json => "json",
            Self::Heap => "heap",
            Self::Sparse => "sparse",
            Self::Sequence => "sequence",
            Self::Counter => "counter",
            Self::Code => "code",
            Self::Base64 => "base64",
            Self::Random => "random",
            Self::Mixed => "mixed",
        }
    }

    /// Returns the kind with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Generates `bytes` bytes of this kind; another `seed` gives other bytes.
    #[must_use]
    pub fn generate(self, bytes: usize, seed: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes + PAGE);
        let mut source = Generator::new(self, seed);
        while out.len() < bytes {
            source.append(&mut out);
        }
        out.truncate(bytes);
        out
    }
}

struct Generator {
    kind: MemoryContent,
    random: Random,
    value: u64,
    vocabulary: Vec<String>,
    instructions: Vec<Vec<u8>>,
}

impl Generator {
    fn new(kind: MemoryContent, seed: u64) -> Self {
        // The vocabulary that all text or all programs share is generated from a constant seed.
        let mut common = Random::new(1);
        let mut random = Random::new(seed.wrapping_add(2));
        Self {
            kind,
            value: (1 << 33) + random.below(1 << 20),
            random,
            vocabulary: (0..4000).map(|_| common.word()).collect(),
            instructions: (0..600).map(|_| common.instruction()).collect(),
        }
    }

    fn append(&mut self, out: &mut Vec<u8>) {
        let random = &mut self.random;
        let mut push = |word: u64| out.extend_from_slice(&word.to_le_bytes());
        match self.kind {
            MemoryContent::Zeros => {
                let from = out.len();
                out.resize(from + PAGE, 0);
                if random.below(8) == 0 {
                    for _ in 0..random.below(64) {
                        out[from + random.below(PAGE as u64) as usize] = random.next() as u8;
                    }
                }
            }
            MemoryContent::Filled => {
                let count = if out.is_empty() { 16 } else { PAGE };
                let word = random.next();
                out.extend_from_slice(&word.to_le_bytes().repeat(count / 8));
            }
            MemoryContent::Text => {
                let rank = random.rank(self.vocabulary.len());
                out.extend_from_slice(self.vocabulary[rank].as_bytes());
                out.extend_from_slice(match random.below(12) {
                    0 => b", ",
                    1 => b".\n",
                    _ => b" ",
                });
            }
            MemoryContent::Json => {
                self.value += 1 + random.below(5);
                let record = record(self.value, random);
                out.extend_from_slice(record.as_bytes());
            }
            MemoryContent::Heap => {
                let words = 4 + random.below(9);
                push((words * 8) | 1);
                push(0x0000_5581_4c20_0000 + random.below(64) * 64);
                for _ in 2..words {
                    push(match random.below(10) {
                        0..3 => 0x0000_7f3a_1800_0000 + random.below(1 << 18) * 16,
                        3..6 => random.below(1000),
                        6..9 => 0,
                        _ => (random.below(1 << 40) as f64 / 1000.0).to_bits(),
                    });
                }
            }
            MemoryContent::Sparse => push(if random.below(64) == 0 { random.next() } else { 0 }),
            MemoryContent::Sequence => {
                self.value += random.below(100);
                push(self.value);
            }
            MemoryContent::Counter => {
                self.value += 24;
                push(self.value);
            }
            MemoryContent::Code => {
                let rank = random.rank(self.instructions.len());
                out.extend_from_slice(&self.instructions[rank]);
                // An address or a constant.
                match random.below(3) {
                    0 => out.extend_from_slice(&(random.below(1 << 18) as u32).to_le_bytes()),
                    1 => out.push(random.below(64) as u8),
                    _ => {}
                }
            }
            MemoryContent::Base64 => {
                const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
                out.push(LETTERS[random.below(64) as usize]);
            }
            MemoryContent::Random => push(random.next()),
            MemoryContent::Mixed => {
                let kind = MemoryContent::ALL[random.below(MemoryContent::ALL.len() as u64 - 1) as usize];
                let pages = 1 + random.below(64) as usize;
                out.extend_from_slice(&kind.generate(pages * PAGE, random.next()));
            }
        }
    }
}

fn record(id: u64, random: &mut Random) -> String {
    const NAMES: [&str; 10] = ["anna", "bernd", "chiara", "dmitri", "eve", "farid", "grace", "hiro", "irene", "juan"];
    const STATES: [&str; 4] = ["active", "suspended", "invited", "deleted"];
    let (name, state) = (NAMES[random.below(10) as usize], STATES[random.below(4) as usize]);
    let (day, hour, cents) = (1 + random.below(28), random.below(24), random.below(1_000_000));
    format!(
        r#"{{"id":{id},"name":"{name}","email":"{name}{}@example.org","state":"{state}","balance":{}.{:02},"last_seen":"2026-11-{day:02}T{hour:02}:00:00Z","etag":"{:016x}","roles":["user","reader"]}},"#,
        random.below(1000),
        cents / 100,
        cents % 100,
        random.next(),
    )
}

/// Pseudo-random numbers by xorshift64*.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a rank below `count`; each doubling of the rank is as likely as the one before.
    fn rank(&mut self, count: usize) -> usize {
        let bits = u64::from(count.ilog2()) + 1;
        let end = 1 << (1 + self.below(bits));
        (self.below(end) as usize).min(count - 1)
    }

    /// Returns a word of 2 to 10 letters.
    fn word(&mut self) -> String {
        const LETTERS: &[u8] = b"etaoinshrdlcumwfgypbvk";
        let letters = 2 + self.below(9);
        (0..letters).map(|_| char::from(LETTERS[self.rank(LETTERS.len())])).collect()
    }

    /// Returns an instruction of 1 to 4 bytes.
    fn instruction(&mut self) -> Vec<u8> {
        let bytes = 1 + self.below(4);
        (0..bytes).map(|_| self.next() as u8).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory has the requested length, is reproducible, and depends on the seed.
    #[test]
    fn generated_memory_is_reproducible() {
        for kind in MemoryContent::ALL {
            let memory = kind.generate(50 * PAGE + 9, 7);
            assert_eq!(memory.len(), 50 * PAGE + 9);
            assert!(memory == kind.generate(50 * PAGE + 9, 7));
            assert!(memory != kind.generate(50 * PAGE + 9, 8));
            assert_eq!(MemoryContent::from_name(kind.name()), Some(kind));
        }
    }
}

//! Synthetic traces, each with one trait that is hard for some policy. They are the same in every run.

use crate::hash::mix;
use crate::trace::TraceRequest;

/// Bytes of a line of a synthetic trace.
pub const LINE_BYTES: u64 = 4096;

const LINE_COUNT: u64 = 50_000;
const ACCESS_COUNT: u64 = 1_500_000;

/// Kind of a synthetic trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticTrace {
    /// Zipf's law (exponent 0.9) with a hot set that moves continuously.
    ZipfDrift,
    /// Zipf's law, and after every 2,000 reads a scan of 4,000 lines that are not read again soon.
    ZipfScans,
    /// Loop over all lines.
    Loop,
    /// Half of the reads by Zipf's law, half a loop over as many other lines.
    ZipfLoop,
    /// Uniform distribution over all lines.
    Uniform,
    /// Alternating phases: Zipf's law, a loop over a third of the lines, Zipf's law over other lines, recently read
    /// lines.
    Phases,
    /// Recently read lines (LRU is best).
    Recent,
}

impl SyntheticTrace {
    /// All synthetic traces.
    pub const ALL: [Self; 7] =
        [Self::ZipfDrift, Self::ZipfScans, Self::Loop, Self::ZipfLoop, Self::Uniform, Self::Phases, Self::Recent];

    /// Returns the name for tables and the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::ZipfDrift => "zipf-drift",
            Self::ZipfScans => "zipf-scans",
            Self::Loop => "loop",
            Self::ZipfLoop => "zipf-loop",
            Self::Uniform => "uniform",
            Self::Phases => "phases",
            Self::Recent => "recent",
        }
    }

    /// Returns the requests, of one line each.
    pub fn requests(self) -> Vec<TraceRequest> {
        let zipf = Zipf::new(LINE_COUNT, 0.9);
        let mut random = Random(self as u64);
        let mut recent = vec![0; 1 << 16];
        let lines = (0..ACCESS_COUNT).map(|at| {
            let line = match self {
                Self::ZipfDrift => (zipf.draw(&mut random) + at / 60) % LINE_COUNT,
                Self::ZipfScans => match at % 6_000 {
                    0..2_000 => scatter(zipf.draw(&mut random)),
                    _ => LINE_COUNT + (at / 6_000 * 4_000 + at % 6_000 - 2_000) % (4 * LINE_COUNT),
                },
                Self::Loop => at % LINE_COUNT,
                Self::ZipfLoop if at % 2 == 0 => zipf.draw(&mut random),
                Self::ZipfLoop => LINE_COUNT + at / 2 % LINE_COUNT,
                Self::Uniform => random.below(LINE_COUNT),
                Self::Phases => match at / 150_000 % 4 {
                    0 => zipf.draw(&mut random),
                    1 => at % (LINE_COUNT / 3),
                    2 => scatter(zipf.draw(&mut random)),
                    _ => recent_line(&recent, at, &mut random),
                },
                Self::Recent => recent_line(&recent, at, &mut random),
            };
            recent[at as usize % (1 << 16)] = line;
            line
        });
        let request = |line| TraceRequest { write: false, start: line * LINE_BYTES, len: LINE_BYTES, at: None };
        lines.map(request).collect()
    }
}

/// Returns a recently read line, more recent ones with higher probability; in one of five cases any line.
fn recent_line(recent: &[u64], at: u64, random: &mut Random) -> u64 {
    if random.below(5) == 0 || at == 0 {
        return random.below(LINE_COUNT);
    }
    // The distance is spread evenly over powers of two.
    let power = random.below(16);
    let distance = 1 + random.below(1 << power);
    recent[(at - distance.min(at)) as usize % recent.len()]
}

/// Maps a line to another position, such that neighbours are scattered.
fn scatter(line: u64) -> u64 {
    mix(line) % LINE_COUNT
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        mix(self.0 << 8)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Generator of numbers whose frequency falls with a power of the number.
struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    fn new(count: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Self { sums: sums.collect() }
    }

    fn draw(&self, random: &mut Random) -> u64 {
        let total = self.sums.last().copied().unwrap_or(0.0);
        let wanted = random.next() as f64 / u64::MAX as f64 * total;
        self.sums.partition_point(|sum| *sum < wanted).min(self.sums.len() - 1) as u64
    }
}

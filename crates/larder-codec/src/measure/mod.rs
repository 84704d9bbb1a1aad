//! What each way to send pages takes and leaves on given memory: for choosing the size of batches, and for
//! `larder bench codec`.
//!
//! Each figure is of the pass that took the least CPU of some over the whole memory, which should be larger than the caches close to a
//! core. Encoding reads the memory batch by batch and writes to a place of its own for each, decoding the other way round,
//! as a sender and a receiver do; what did not become smaller is copied, as it would be sent.

mod accelerated;
mod generated;

use std::hint::black_box;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::accelerator::{Accelerator, OpenError};
use crate::batch::{BATCH_PAGES, Decoder, Encoder, Method};
use crate::{PAGE, delta, uniform_word};

pub use generated::Kind;

/// What a page or a batch goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A copy.
    None,
    /// The word of a page that has only one, 8 bytes, else a copy.
    Uniform,
    /// The page's delta against its older version, page by page; a copy where it is no shorter.
    Delta,
    /// A batch by a method; a copy where it is no shorter.
    Method(Method),
}

impl Way {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::None, Self::Uniform, Self::Delta]
            .into_iter()
            .chain(Method::ALL.map(Self::Method))
    }

    /// As it is called in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Uniform => "uniform",
            Self::Delta => "delta",
            Self::Method(method) => method.name(),
        }
    }
}

/// What one pass over all of the memory took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// On the clock.
    pub wall: Duration,
    /// Of this thread's CPU.
    pub cpu: Duration,
}

impl Took {
    const NEVER: Self = Self {
        wall: Duration::MAX,
        cpu: Duration::MAX,
    };

    /// 10^6 bytes of memory in each second on the clock.
    #[must_use]
    pub fn megabytes_per_second(&self, bytes: u64) -> f64 {
        bytes as f64 / 1e6 / self.wall.as_secs_f64().max(1e-9)
    }

    /// CPU seconds for each GiB of memory.
    #[must_use]
    pub fn cpu_seconds_per_gibibyte(&self, bytes: u64) -> f64 {
        self.cpu.as_secs_f64() * (1u64 << 30) as f64 / bytes.max(1) as f64
    }
}

/// What one way made of some memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// What the memory went through.
    pub way: Way,
    /// Pages in a batch.
    pub batch_pages: usize,
    /// Bytes of the memory.
    pub bytes: u64,
    /// Bytes that are left of them, with those that are as they were.
    pub bytes_left: u64,
    /// Bytes of memory that did not become smaller.
    pub bytes_copied: u64,
    /// The best pass.
    pub encode: Took,
    /// The best pass.
    pub decode: Took,
}

impl Measured {
    /// Bytes of memory for each byte that is left.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.bytes as f64 / self.bytes_left.max(1) as f64
    }
}

/// Sends `memory`, whole pages, through `way` in batches of `batch_pages`, `passes` times each way. `older` is the memory as
/// it was before, for [`Way::Delta`].
///
/// # Panics
/// `memory` is not of whole pages, or `older` of another length; `batch_pages` is not from 1 to [`BATCH_PAGES`]; what comes
/// back is not what went in.
#[must_use]
pub fn measure(way: Way, memory: &[u8], older: &[u8], batch_pages: usize, passes: usize) -> Measured {
    assert_eq!(older.len(), memory.len(), "the older memory is of another length");
    let mut encoder = Encoder::new();
    passes_of(way, memory, older, batch_pages, passes, |pipe| {
        pipe.encode(&mut encoder, memory, older);
    })
}

/// As [`measure`], by one instance of an accelerator that makes `method`. The CPU that it takes is this thread's, that of a
/// wait for a device too.
///
/// # Errors
/// There is no instance to be had.
///
/// # Panics
/// As [`measure`]; it does not make `method`, or fails on a batch.
pub fn measure_accelerator(
    accelerator: &dyn Accelerator,
    method: Method,
    memory: &[u8],
    batch_pages: usize,
    passes: usize,
) -> Result<Measured, OpenError> {
    let mut line = accelerated::Line::new(accelerator, method, memory)?;
    let way = Way::Method(method);
    Ok(passes_of(way, memory, memory, batch_pages, passes, |pipe| {
        line.encode(pipe)
    }))
}

/// The best of some passes, each of which `encode` and [`Pipe::decode`] make.
fn passes_of(
    way: Way,
    memory: &[u8],
    older: &[u8],
    batch_pages: usize,
    passes: usize,
    mut encode: impl FnMut(&mut Pipe),
) -> Measured {
    assert!(memory.len().is_multiple_of(PAGE), "not of whole pages");
    assert!(
        (1..=BATCH_PAGES).contains(&batch_pages),
        "{batch_pages} pages in a batch"
    );
    let piece_bytes = piece_bytes(way, batch_pages);
    let mut pipe = Pipe {
        way,
        decoder: Decoder::new(),
        encoded: vec![0; memory.len()],
        lens: vec![0; memory.len().div_ceil(piece_bytes)],
        piece_bytes,
    };
    let mut back = vec![0x5a; memory.len()];
    let (mut encode_took, mut decode_took) = (Took::NEVER, Took::NEVER);
    for _ in 0..passes.max(1) {
        encode_took = fastest(encode_took, || encode(&mut pipe));
        // In place: a delta turns what was before into what is sent.
        if way == Way::Delta {
            back.copy_from_slice(older);
        }
        decode_took = fastest(decode_took, || pipe.decode(&mut back));
        assert!(back == memory, "{} does not give the memory back", way.name());
    }
    let pieces = memory.chunks(piece_bytes).zip(&pipe.lens);
    Measured {
        way,
        batch_pages,
        bytes: memory.len() as u64,
        bytes_left: pieces.clone().map(|(_, &len)| len as u64).sum(),
        bytes_copied: pieces
            .filter(|(piece, len)| piece.len() == **len)
            .map(|(_, &len)| len as u64)
            .sum(),
        encode: encode_took,
        decode: decode_took,
    }
}

/// What is encoded at a time.
const fn piece_bytes(way: Way, batch_pages: usize) -> usize {
    match way {
        Way::Uniform | Way::Delta => PAGE,
        Way::None | Way::Method(_) => PAGE * batch_pages,
    }
}

fn fastest(best: Took, pass: impl FnOnce()) -> Took {
    let cpu_time = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
    };
    let (start, cpu_start) = (Instant::now(), cpu_time());
    pass();
    let took = Took {
        wall: start.elapsed(),
        cpu: cpu_time().saturating_sub(cpu_start),
    };
    if took.cpu < best.cpu { took } else { best }
}

struct Pipe {
    way: Way,
    decoder: Decoder,
    /// What is left of each piece lies where the piece lies in the memory.
    encoded: Vec<u8>,
    lens: Vec<usize>,
    piece_bytes: usize,
}

impl Pipe {
    fn encode(&mut self, encoder: &mut Encoder, memory: &[u8], older: &[u8]) {
        let pieces = memory.chunks(self.piece_bytes).zip(older.chunks(self.piece_bytes));
        let places = self.encoded.chunks_mut(self.piece_bytes).zip(&mut self.lens);
        for ((piece, older), (place, len)) in pieces.zip(places) {
            // What saves nothing does not fit.
            let room = place.len() - 1;
            let encoded = match self.way {
                Way::None => None,
                Way::Uniform => uniform_word(page_of(piece)).map(|word| {
                    place[..8].copy_from_slice(&word.to_ne_bytes());
                    8
                }),
                Way::Delta => delta::encode(page_of(piece), page_of(older), &mut place[..room]),
                Way::Method(method) => encoder.encode(method, &[piece], &mut place[..room]),
            };
            *len = encoded.unwrap_or_else(|| {
                place.copy_from_slice(piece);
                piece.len()
            });
        }
        black_box(&mut self.encoded);
    }

    fn decode(&mut self, back: &mut [u8]) {
        let pieces = self.encoded.chunks(self.piece_bytes).zip(&self.lens);
        for (place, (piece, &len)) in back.chunks_mut(self.piece_bytes).zip(pieces) {
            if len == place.len() {
                place.copy_from_slice(piece);
                continue;
            }
            let data = &piece[..len];
            match self.way {
                Way::None => {}
                Way::Uniform => place.as_chunks_mut::<8>().0.fill(*data.first_chunk().expect("a word")),
                Way::Delta => {
                    let page = place.try_into().expect("a page");
                    delta::apply(page, data).expect("what was encoded applies");
                }
                Way::Method(method) => {
                    let decoded = self.decoder.decode(method, data, place);
                    decoded.expect("what was encoded decodes");
                }
            }
        }
        black_box(back);
    }
}

fn page_of(piece: &[u8]) -> &[u8; PAGE] {
    piece.try_into().expect("a page")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_memory_back_and_says_what_was_left() {
        for kind in Kind::ALL {
            let older = kind.memory(100 * PAGE, 1);
            let mut memory = older.clone();
            for at in (0..memory.len()).step_by(1000) {
                memory[at] = memory[at].wrapping_add(1);
            }
            for way in Way::all() {
                for batch_pages in [1, 7, 64] {
                    let measured = measure(way, &memory, &older, batch_pages, 1);
                    assert_eq!(measured.bytes, memory.len() as u64);
                    assert!(measured.bytes_left <= measured.bytes && measured.ratio() >= 1.0);
                    assert!(measured.bytes_copied <= measured.bytes_left);
                    assert_eq!(
                        measured.bytes_copied == measured.bytes,
                        way == Way::None || measured.ratio() == 1.0
                    );
                }
            }
            assert!(measure(Way::Delta, &memory, &older, 1, 1).ratio() > 100.0);
        }
    }

    #[test]
    fn an_accelerator_makes_the_same_of_memory_as_its_method() {
        let memory = Kind::Mixed.memory(200 * PAGE, 2);
        for accelerator in crate::accelerator::find(crate::accelerator::Software::No).there {
            for &method in accelerator.methods() {
                let alone = measure(Way::Method(method), &memory, &memory, 60, 1);
                let measured = measure_accelerator(&*accelerator, method, &memory, 60, 1).expect("opens");
                assert_eq!(measured.bytes_left, alone.bytes_left, "{method}");
            }
        }
    }
}

//! Measurement of the time and the output size of each encoding on given memory: for choosing the size of batches,
//! and for `larder bench codec`.
//!
//! Each value is the best of several passes over the whole memory, which should be larger than the caches close to a
//! core. Encoding reads the memory batch by batch and writes each result to a place of its own, and decoding does the
//! reverse, as a sender and a receiver do. A batch that did not become smaller is copied, as it would be sent.
//!
//! The result of each decoding pass is compared with the memory. A difference, or any failure, is an error and gives
//! no value.

mod accelerated;
mod generated;

use std::hint::black_box;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use thiserror::Error;

use crate::accelerator::{Accelerator, AcceleratorOpenError};
use crate::batch::{BATCH_PAGES, DecodeError, Decoder, Encoder, Method};
use crate::delta::ApplyError;
use crate::{PAGE, delta, uniform_word};

pub use generated::MemoryContent;

/// Smallest number of passes for each value: an interruption by another program affects one of them, and not all.
pub const PASSES_MIN: u32 = 3;

/// Encoding of a page or a batch that makes it smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// A copy.
    None,
    /// The 8-byte word of a page that repeats it, otherwise a copy.
    Uniform,
    /// The page's delta against its older version, page by page; a copy if the delta is not shorter.
    Delta,
    /// A batch encoded by a method; a copy if it is not shorter.
    Method(Method),
}

impl Reduction {
    /// Returns all reductions.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::None, Self::Uniform, Self::Delta].into_iter().chain(Method::ALL.map(Self::Method))
    }

    /// Returns the name in reports.
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

/// Reason why a measurement gave no values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MeasureError {
    /// No instance of the accelerator can be opened.
    #[error("{accelerator}: {why}")]
    Open {
        /// Name of the accelerator.
        accelerator: &'static str,
        /// Reason that the accelerator gives.
        why: AcceleratorOpenError,
    },
    /// An accelerator returned a batch unencoded.
    #[error("{accelerator} failed on the batch that begins at byte {at} of the memory")]
    Failed {
        /// Name of the accelerator.
        accelerator: &'static str,
        /// Offset of the batch in the memory.
        at: usize,
    },
    /// Encoded data does not decode.
    #[error("the data encoded from byte {at} of the memory does not decode: {why}")]
    Decode {
        /// Offset of the batch in the memory.
        at: usize,
        /// Error of the method.
        why: DecodeError,
    },
    /// A delta does not apply.
    #[error("the delta of the page at byte {at} of the memory does not apply: {why}")]
    Apply {
        /// Offset of the page in the memory.
        at: usize,
        /// Error in the delta.
        why: ApplyError,
    },
    /// Encoded data decodes to something else.
    #[error("{reduction} does not restore the memory: byte {at} is {actual:#04x} instead of {expected:#04x}")]
    Mismatch {
        /// Reduction that was measured.
        reduction: &'static str,
        /// Offset of the first byte that differs.
        at: usize,
        /// Decoded value.
        actual: u8,
        /// Original value.
        expected: u8,
    },
}

/// Best times of one pass over all of the memory; the two need not be of the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassTiming {
    /// Elapsed time.
    pub wall: Duration,
    /// CPU time of this thread.
    pub cpu: Duration,
}

impl PassTiming {
    const MAX: Self = Self { wall: Duration::MAX, cpu: Duration::MAX };

    /// Returns the rate in 10^6 bytes of memory per second of elapsed time.
    #[must_use]
    pub fn megabytes_per_second(&self, bytes: u64) -> f64 {
        bytes as f64 / 1e6 / self.wall.as_secs_f64().max(1e-9)
    }

    /// Returns the CPU seconds per GiB of memory.
    #[must_use]
    pub fn cpu_seconds_per_gibibyte(&self, bytes: u64) -> f64 {
        self.cpu.as_secs_f64() * (1u64 << 30) as f64 / bytes.max(1) as f64
    }
}

/// Result of one reduction on some memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecMeasurement {
    /// Reduction that was measured.
    pub reduction: Reduction,
    /// Pages in a batch.
    pub batch_pages: usize,
    /// Length of the memory, in bytes.
    pub bytes: u64,
    /// Remaining bytes, including those that were copied.
    pub bytes_encoded: u64,
    /// Bytes of memory that did not become smaller.
    pub bytes_copied: u64,
    /// Best times of encoding.
    pub encode: PassTiming,
    /// Best times of decoding.
    pub decode: PassTiming,
}

impl CodecMeasurement {
    /// Returns the bytes of memory per remaining byte.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.bytes as f64 / self.bytes_encoded.max(1) as f64
    }
}

/// Returns an older version of `memory`, for [`Reduction::Delta`]: 16 words of each page differ.
#[must_use]
pub fn older(memory: &[u8]) -> Vec<u8> {
    let mut older = memory.to_vec();
    for (at, page) in older.chunks_exact_mut(PAGE).enumerate() {
        for change in 0..16 {
            page[(at * 1237 + change * 1021) % (PAGE / 8) * 8 + change % 8] ^= 0x5a;
        }
    }
    older
}

/// Encodes `memory`, whole pages, with `reduction` in batches of `batch_pages`, repeatedly until encoding has taken
/// `time`, and then decodes it likewise; at least [`PASSES_MIN`] times each. `older` is an older version of the
/// memory, for [`Reduction::Delta`].
///
/// # Errors
/// The decoded memory differs from the original.
///
/// # Panics
/// `memory` is not of whole pages, or `older` has another length; `batch_pages` is not from 1 to [`BATCH_PAGES`].
pub fn measure(
    reduction: Reduction,
    memory: &[u8],
    older: &[u8],
    batch_pages: usize,
    time: Duration,
) -> Result<CodecMeasurement, MeasureError> {
    assert_eq!(older.len(), memory.len(), "the older memory has a different length");
    let mut encoder = Encoder::new();
    run_passes(reduction, memory, older, batch_pages, time, |pipe| {
        pipe.encode(&mut encoder, memory, older);
        Ok(())
    })
}

/// Measures `method` like [`measure`], encoded by one instance of an accelerator. The CPU time is that of this
/// thread, including waits for a device; the CPU decodes.
///
/// # Errors
/// No instance can be opened, it fails, or the decoded memory differs from the original.
///
/// # Panics
/// As for [`measure`]; or the accelerator does not make `method`.
pub fn measure_accelerator(
    accelerator: &dyn Accelerator,
    method: Method,
    memory: &[u8],
    batch_pages: usize,
    time: Duration,
) -> Result<CodecMeasurement, MeasureError> {
    let line = accelerated::AcceleratedEncoder::new(accelerator, method, memory);
    let mut line = line.map_err(|why| MeasureError::Open { accelerator: accelerator.name(), why })?;
    let reduction = Reduction::Method(method);
    run_passes(reduction, memory, memory, batch_pages, time, |pipe| line.encode(pipe))
}

/// Runs encoding passes with `encode`, and then decoding passes with [`RoundTrip::decode`].
fn run_passes(
    reduction: Reduction,
    memory: &[u8],
    older: &[u8],
    batch_pages: usize,
    time: Duration,
    mut encode: impl FnMut(&mut RoundTrip) -> Result<(), MeasureError>,
) -> Result<CodecMeasurement, MeasureError> {
    assert!(memory.len().is_multiple_of(PAGE), "the memory does not consist of whole pages");
    assert!((1..=BATCH_PAGES).contains(&batch_pages), "a batch cannot have {batch_pages} pages");
    let piece_bytes = piece_bytes(reduction, batch_pages);
    let mut pipe = RoundTrip {
        reduction,
        decoder: Decoder::new(),
        encoded: vec![0; memory.len()],
        lens: vec![0; memory.len().div_ceil(piece_bytes)],
        piece_bytes,
    };
    let mut decoded = vec![0x5a; memory.len()];
    let mut encode_passes = PassTimer::new(time);
    while encode_passes.needs_another_pass() {
        encode_passes.pass(|| encode(&mut pipe))?;
    }
    let mut decode_passes = PassTimer::new(time);
    while decode_passes.needs_another_pass() {
        // Decoding is in place, because a delta turns the older version into the newer one.
        if reduction == Reduction::Delta {
            decoded.copy_from_slice(older);
        } else {
            decoded.fill(0x5a);
        }
        decode_passes.pass(|| pipe.decode(&mut decoded))?;
        compare(reduction, &decoded, memory)?;
    }
    let pieces = memory.chunks(piece_bytes).zip(&pipe.lens);
    Ok(CodecMeasurement {
        reduction,
        batch_pages,
        bytes: memory.len() as u64,
        bytes_encoded: pieces.clone().map(|(_, &len)| len as u64).sum(),
        bytes_copied: pieces.filter(|(piece, len)| piece.len() == **len).map(|(_, &len)| len as u64).sum(),
        encode: encode_passes.best,
        decode: decode_passes.best,
    })
}

fn compare(reduction: Reduction, back: &[u8], memory: &[u8]) -> Result<(), MeasureError> {
    // Far faster than a comparison byte by byte.
    if back == memory {
        return Ok(());
    }
    let mut bytes = back.iter().zip(memory).enumerate();
    match bytes.find(|(_, (found, wanted))| found != wanted) {
        None => Ok(()),
        Some((at, (&found, &wanted))) => {
            Err(MeasureError::Mismatch { reduction: reduction.name(), at, actual: found, expected: wanted })
        }
    }
}

/// Returns the number of bytes that are encoded at a time.
const fn piece_bytes(reduction: Reduction, batch_pages: usize) -> usize {
    match reduction {
        Reduction::Uniform | Reduction::Delta => PAGE,
        Reduction::None | Reduction::Method(_) => PAGE * batch_pages,
    }
}

/// Repetition of passes until they have taken long enough together.
struct PassTimer {
    time_min: Duration,
    spent: Duration,
    count: u32,
    best: PassTiming,
}

impl PassTimer {
    const fn new(time_min: Duration) -> Self {
        Self { time_min, spent: Duration::ZERO, count: 0, best: PassTiming::MAX }
    }

    fn needs_another_pass(&self) -> bool {
        self.count < PASSES_MIN || self.spent < self.time_min
    }

    fn pass(&mut self, pass: impl FnOnce() -> Result<(), MeasureError>) -> Result<(), MeasureError> {
        let (start, cpu_start) = (Instant::now(), cpu_time());
        pass()?;
        let (wall, cpu) = (start.elapsed(), cpu_time().saturating_sub(cpu_start));
        self.spent += wall;
        self.count += 1;
        self.best.wall = self.best.wall.min(wall);
        self.best.cpu = self.best.cpu.min(cpu);
        Ok(())
    }
}

/// Returns the CPU time of this thread, which a busy machine does not increase.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

struct RoundTrip {
    reduction: Reduction,
    decoder: Decoder,
    /// Encoded pieces, each at the offset of the piece in the memory.
    encoded: Vec<u8>,
    lens: Vec<usize>,
    piece_bytes: usize,
}

impl RoundTrip {
    fn encode(&mut self, encoder: &mut Encoder, memory: &[u8], older: &[u8]) {
        let pieces = memory.chunks(self.piece_bytes).zip(older.chunks(self.piece_bytes));
        let targets = self.encoded.chunks_mut(self.piece_bytes).zip(&mut self.lens);
        for ((piece, older), (target, len)) in pieces.zip(targets) {
            // The limit is one byte less than the piece, so a result that saves nothing does not fit.
            let room = target.len() - 1;
            let encoded = match self.reduction {
                Reduction::None => None,
                Reduction::Uniform => uniform_word(page_of(piece)).map(|word| {
                    target[..8].copy_from_slice(&word.to_ne_bytes());
                    8
                }),
                Reduction::Delta => delta::encode(page_of(piece), page_of(older), &mut target[..room]),
                Reduction::Method(method) => encoder.encode(method, &[piece], &mut target[..room]),
            };
            *len = encoded.unwrap_or_else(|| {
                target.copy_from_slice(piece);
                piece.len()
            });
        }
        black_box(&mut self.encoded);
    }

    fn decode(&mut self, memory: &mut [u8]) -> Result<(), MeasureError> {
        let pieces = self.encoded.chunks(self.piece_bytes).zip(&self.lens);
        for (index, (target, (piece, &len))) in memory.chunks_mut(self.piece_bytes).zip(pieces).enumerate() {
            if len == target.len() {
                target.copy_from_slice(piece);
                continue;
            }
            let at = index * self.piece_bytes;
            let data = &piece[..len];
            match self.reduction {
                Reduction::None => {}
                Reduction::Uniform => target.as_chunks_mut::<8>().0.fill(*data.first_chunk().expect("a word")),
                Reduction::Delta => {
                    let page = target.try_into().expect("a page");
                    delta::apply(page, data).map_err(|why| MeasureError::Apply { at, why })?;
                }
                Reduction::Method(method) => {
                    let decoded = self.decoder.decode(method, data, target);
                    decoded.map_err(|why| MeasureError::Decode { at, why })?;
                }
            }
        }
        black_box(memory);
        Ok(())
    }
}

fn page_of(piece: &[u8]) -> &[u8; PAGE] {
    piece.try_into().expect("a page")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduction_restores_memory() {
        for kind in MemoryContent::ALL {
            let memory = kind.generate(100 * PAGE, 1);
            let older = older(&memory);
            let once = |reduction, batch_pages| {
                measure(reduction, &memory, &older, batch_pages, Duration::ZERO).expect("round trip")
            };
            for reduction in Reduction::all() {
                for batch_pages in [1, 7, 64] {
                    let measured = once(reduction, batch_pages);
                    assert_eq!(measured.bytes, memory.len() as u64);
                    assert!(measured.bytes_encoded <= measured.bytes && measured.ratio() >= 1.0);
                    assert!(measured.bytes_copied <= measured.bytes_encoded);
                    assert_eq!(
                        measured.bytes_copied == measured.bytes,
                        reduction == Reduction::None || measured.ratio() == 1.0
                    );
                }
            }
            assert!(once(Reduction::Delta, 1).ratio() > 20.0);
        }
    }

    #[test]
    fn accelerator_output_equals_its_method() {
        let memory = MemoryContent::Mixed.generate(200 * PAGE, 2);
        for accelerator in crate::accelerator::find(crate::accelerator::SoftwarePath::Disabled).available {
            for &method in accelerator.methods() {
                let alone =
                    measure(Reduction::Method(method), &memory, &memory, 60, Duration::ZERO).expect("round trip");
                let measured = measure_accelerator(&*accelerator, method, &memory, 60, Duration::ZERO);
                assert_eq!(measured.map(|one| one.bytes_encoded), Ok(alone.bytes_encoded), "{method}");
            }
        }
    }

    #[test]
    fn wrong_result_is_error_with_offset() {
        let memory = MemoryContent::Text.generate(8 * PAGE, 3);
        // Two possible errors of an encoder: a byte of the memory, and a byte of the output.
        let mut other = memory.clone();
        other[5 * PAGE + 17] ^= 1;
        let mut encoder = Encoder::new();
        let reduction = Reduction::Method(Method::Lz4);
        let differs = run_passes(reduction, &memory, &memory, 4, Duration::ZERO, |pipe| {
            pipe.encode(&mut encoder, &other, &other);
            Ok(())
        });
        let expected = MeasureError::Mismatch {
            reduction: "lz4",
            at: 5 * PAGE + 17,
            actual: other[5 * PAGE + 17],
            expected: memory[5 * PAGE + 17],
        };
        assert_eq!(differs, Err(expected));
        let damaged = run_passes(reduction, &memory, &memory, 4, Duration::ZERO, |pipe| {
            pipe.encode(&mut encoder, &memory, &memory);
            pipe.lens[1] -= 1;
            Ok(())
        });
        assert!(matches!(damaged, Err(MeasureError::Decode { at, .. }) if at == 4 * PAGE), "{damaged:?}");
    }
}

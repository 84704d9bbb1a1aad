//! Requests to encode batches, with their results.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::time::Instant;

use crate::PAGE;
use crate::batch::{BATCH_BYTES, BATCH_PAGES, Encoder, Method};

/// Page-aligned bytes, which an accelerator reads in place. The owner of the only [`Arc`] of it may fill it again
/// (`Arc::get_mut`).
pub struct PageBuffer(Box<[Page]>);

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

impl PageBuffer {
    /// Creates a buffer of zeros.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self(vec![Page([0; PAGE]); pages].into())
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages are adjacent and consist only of bytes, and are borrowed as long as the bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE) }
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is a mutable one.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE) }
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodeOutcome {
    /// No outcome yet.
    Pending,
    /// Length of the output, which [`EncodeRequest::output`] returns.
    Encoded(usize),
    /// The output did not fit the limit.
    Incompressible,
    /// The device failed.
    Failed,
}

/// Batch to encode, with memory for the output: 256 KiB, from a [`RequestPool`].
pub struct EncodeRequest {
    tag: u64,
    method: Method,
    buffer: Option<Arc<PageBuffer>>,
    /// Ranges of whole pages of the buffer.
    runs: Vec<Range<usize>>,
    limit: usize,
    output: Box<[u8]>,
    outcome: EncodeOutcome,
    submitted_at: Option<Instant>,
    ns: u64,
}

impl EncodeRequest {
    fn new() -> Self {
        Self {
            tag: 0,
            method: Method::Lz4,
            buffer: None,
            runs: Vec::with_capacity(BATCH_PAGES),
            limit: 0,
            output: vec![0; BATCH_BYTES].into(),
            outcome: EncodeOutcome::Pending,
            submitted_at: None,
            ns: 0,
        }
    }

    /// Fills the request with the pages in `runs` of `buffer`, and a limit of `limit` bytes for the output. The
    /// caller may use `tag` freely.
    ///
    /// # Panics
    /// The runs are empty, not of whole pages, of more than 64 pages, or outside the buffer; the limit is more than
    /// 64 pages.
    pub fn fill(
        &mut self,
        tag: u64,
        method: Method,
        buffer: Arc<PageBuffer>,
        runs: impl IntoIterator<Item = Range<usize>>,
        limit: usize,
    ) {
        self.runs.clear();
        for run in runs {
            assert!(run.end <= buffer.len() && run.start < run.end && run.len().is_multiple_of(PAGE));
            self.runs.push(run);
        }
        assert!((PAGE..=BATCH_BYTES).contains(&self.input_bytes()) && limit <= BATCH_BYTES);
        self.tag = tag;
        self.method = method;
        self.buffer = Some(buffer);
        self.limit = limit;
        self.outcome = EncodeOutcome::Pending;
        self.submitted_at = None;
        self.ns = 0;
    }

    /// Returns the caller's tag.
    #[must_use]
    pub const fn tag(&self) -> u64 {
        self.tag
    }

    /// Returns the method of encoding.
    #[must_use]
    pub const fn method(&self) -> Method {
        self.method
    }

    /// Returns the length of the input, in bytes.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// Returns the pages, run by run.
    pub fn input(&self) -> impl Iterator<Item = &[u8]> {
        let buffer: &[u8] = self.buffer.as_deref().map_or(&[], |buffer| &buffer[..]);
        self.runs.iter().map(|run| &buffer[run.clone()])
    }

    /// Returns the outcome.
    #[must_use]
    pub const fn outcome(&self) -> EncodeOutcome {
        self.outcome
    }

    /// Returns the output; empty if it does not fit, or is not complete.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        match self.outcome {
            EncodeOutcome::Encoded(bytes) => &self.output[..bytes],
            EncodeOutcome::Pending | EncodeOutcome::Incompressible | EncodeOutcome::Failed => &[],
        }
    }

    /// Returns the nanoseconds that the request took; see [`super::InstanceStatistics::ns`].
    #[must_use]
    pub const fn ns(&self) -> u64 {
        self.ns
    }

    /// Marks the request as failed.
    pub fn mark_failed(&mut self) {
        self.finish(EncodeOutcome::Failed);
    }

    /// Encodes the request on this thread.
    pub(super) fn encode(&mut self, encoder: &mut Encoder) {
        self.start();
        let mut runs: [&[u8]; BATCH_PAGES] = [&[]; BATCH_PAGES];
        let buffer: &[u8] = self.buffer.as_deref().map_or(&[], |buffer| &buffer[..]);
        for (slot, run) in runs.iter_mut().zip(&self.runs) {
            *slot = &buffer[run.clone()];
        }
        let runs = &runs[..self.runs.len()];
        let made = encoder.encode(self.method, runs, &mut self.output[..self.limit]);
        self.finish(made.map_or(EncodeOutcome::Incompressible, EncodeOutcome::Encoded));
    }

    /// Returns the pages as one run, gathered in `gathered` if there are several runs; and the memory for the output.
    pub(super) fn device_buffers<'a>(&'a mut self, gathered: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
        let buffer: &[u8] = self.buffer.as_deref().map_or(&[], |buffer| &buffer[..]);
        let input = match &self.runs[..] {
            [run] => &buffer[run.clone()],
            runs => {
                let mut end = 0;
                for run in runs {
                    gathered[end..end + run.len()].copy_from_slice(&buffer[run.clone()]);
                    end += run.len();
                }
                &gathered[..end]
            }
        };
        (input, &mut self.output[..self.limit])
    }

    /// Records the start of the work.
    pub(super) fn start(&mut self) {
        self.submitted_at = Some(Instant::now());
    }

    /// Records the end of the work and its outcome.
    pub(super) fn finish(&mut self, outcome: EncodeOutcome) {
        self.outcome = match outcome {
            EncodeOutcome::Encoded(bytes) if bytes == 0 || bytes > self.limit => EncodeOutcome::Failed,
            outcome => outcome,
        };
        if let Some(since) = self.submitted_at.take() {
            self.ns += u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
    }
}

/// Pool of requests that are created once, for one thread.
pub struct RequestPool {
    #[expect(clippy::vec_box, reason = "requests are passed around and returned as boxes")]
    free: Vec<Box<EncodeRequest>>,
    requests: usize,
}

impl RequestPool {
    /// Creates a pool of so many requests.
    #[must_use]
    pub fn new(requests: usize) -> Self {
        Self { free: (0..requests).map(|_| Box::new(EncodeRequest::new())).collect(), requests }
    }

    /// Returns a free request, if there is one. The number of requests in use is thus bounded by the pool.
    pub fn take(&mut self) -> Option<Box<EncodeRequest>> {
        self.free.pop()
    }

    /// Takes one of its requests back, and releases its buffer.
    ///
    /// # Panics
    /// All requests of the pool are free already.
    pub fn recycle(&mut self, mut request: Box<EncodeRequest>) {
        assert!(self.free.len() < self.requests, "the request does not belong to this pool");
        request.buffer = None;
        self.free.push(request);
    }

    /// Returns the number of requests in use.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.requests - self.free.len()
    }
}

/// Self-test of a library: encodes known pages with `compress`, and returns a description of the first deviation.
pub(super) fn self_test(mut compress: impl FnMut(&[u8], &mut [u8]) -> EncodeOutcome) -> Result<(), &'static str> {
    let pages: Vec<u8> = (0..40 * 1024_u32)
        .map(|at| match at / 4096 % 3 {
            0 => (at * at / 7) as u8,
            1 => b"the same letters again and again, "[at as usize % 34],
            _ => u8::from(at % 8 == 0),
        })
        .collect();
    let mut out = vec![0; pages.len()];
    // Twice, because the second run starts from the state that the first has left.
    for _ in 0..2 {
        let EncodeOutcome::Encoded(len) = compress(&pages, &mut out) else {
            return Err("self-test: known pages are not encoded");
        };
        let mut decoded = vec![0; pages.len()];
        let mut zlib = flate2::Decompress::new(false);
        let data = out.get(..len).ok_or("self-test: the encoded length exceeds the buffer")?;
        let status = zlib.decompress(data, &mut decoded, flate2::FlushDecompress::Finish);
        if status.ok() != Some(flate2::Status::StreamEnd) || zlib.total_in() != len as u64 || decoded != pages {
            return Err("self-test: known pages are encoded incorrectly");
        }
        if compress(&pages, &mut out[..len / 2]) != EncodeOutcome::Incompressible {
            return Err("self-test: output that exceeds the limit is not refused");
        }
    }
    Ok(())
}

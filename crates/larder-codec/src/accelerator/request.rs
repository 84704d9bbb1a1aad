//! What is to be encoded, and what became of it.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::time::Instant;

use crate::PAGE;
use crate::batch::{BATCH_BYTES, BATCH_PAGES, Encoder, Method};

/// Bytes on a page's bound, which an accelerator reads in place. Whoever has the only [`Arc`] of it may fill it again
/// (`Arc::get_mut`).
pub struct Buffer(Box<[Page]>);

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

impl Buffer {
    /// Of zeros.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self(vec![Page([0; PAGE]); pages].into())
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages lie side by side, each of bytes alone, and are borrowed as long as the bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is a mutable one.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE) }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing yet.
    Pending,
    /// So many bytes, which [`Request::output`] has.
    Made(usize),
    /// It did not fit the limit.
    Misfit,
    /// The device did not do it.
    Failed,
}

/// A batch to encode, and room for what is made of it: 256 KiB, from a [`Pool`].
pub struct Request {
    tag: u64,
    method: Method,
    buffer: Option<Arc<Buffer>>,
    /// Of whole pages of the buffer.
    runs: Vec<Range<usize>>,
    limit: usize,
    output: Box<[u8]>,
    outcome: Outcome,
    submitted_at: Option<Instant>,
    ns: u64,
}

impl Request {
    fn new() -> Self {
        Self {
            tag: 0,
            method: Method::Lz4,
            buffer: None,
            runs: Vec::with_capacity(BATCH_PAGES),
            limit: 0,
            output: vec![0; BATCH_BYTES].into(),
            outcome: Outcome::Pending,
            submitted_at: None,
            ns: 0,
        }
    }

    /// Makes it one for the pages in `runs` of `buffer`, to be made at most `limit` bytes of. `tag` is the caller's.
    ///
    /// # Panics
    /// The runs are empty, not of whole pages, of more than 64, or outside the buffer; the limit is more than 64 pages.
    pub fn fill(
        &mut self,
        tag: u64,
        method: Method,
        buffer: Arc<Buffer>,
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
        self.outcome = Outcome::Pending;
        self.submitted_at = None;
        self.ns = 0;
    }

    /// The caller's.
    #[must_use]
    pub const fn tag(&self) -> u64 {
        self.tag
    }

    /// By which it is to be encoded.
    #[must_use]
    pub const fn method(&self) -> Method {
        self.method
    }

    /// Bytes of its pages.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// The pages, run by run.
    pub fn input(&self) -> impl Iterator<Item = &[u8]> {
        let buffer: &[u8] = self.buffer.as_deref().map_or(&[], |buffer| &buffer[..]);
        self.runs.iter().map(|run| &buffer[run.clone()])
    }

    /// What became of it.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// What was made of it; empty if it does not fit, or is not done.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        match self.outcome {
            Outcome::Made(bytes) => &self.output[..bytes],
            Outcome::Pending | Outcome::Misfit | Outcome::Failed => &[],
        }
    }

    /// Nanoseconds that it took, see [`super::Statistics::ns`].
    #[must_use]
    pub const fn ns(&self) -> u64 {
        self.ns
    }

    /// Says that an instance could not do it.
    pub fn give_up(&mut self) {
        self.finish(Outcome::Failed);
    }

    /// Encodes it on this thread.
    pub(super) fn encode(&mut self, encoder: &mut Encoder) {
        self.start();
        let mut runs: [&[u8]; BATCH_PAGES] = [&[]; BATCH_PAGES];
        let buffer: &[u8] = self.buffer.as_deref().map_or(&[], |buffer| &buffer[..]);
        for (place, run) in runs.iter_mut().zip(&self.runs) {
            *place = &buffer[run.clone()];
        }
        let runs = &runs[..self.runs.len()];
        let made = encoder.encode(self.method, runs, &mut self.output[..self.limit]);
        self.finish(made.map_or(Outcome::Misfit, Outcome::Made));
    }

    /// The pages, in one run, by way of `gathered` if they are in several; and where to put what is made of them.
    pub(super) fn for_device<'a>(&'a mut self, gathered: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
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

    /// Work on it begins now.
    pub(super) fn start(&mut self) {
        self.submitted_at = Some(Instant::now());
    }

    /// Work on it has come to this.
    pub(super) fn finish(&mut self, outcome: Outcome) {
        self.outcome = match outcome {
            Outcome::Made(bytes) if bytes == 0 || bytes > self.limit => Outcome::Failed,
            outcome => outcome,
        };
        if let Some(since) = self.submitted_at.take() {
            self.ns += u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
    }
}

/// Requests made once, for one thread.
pub struct Pool {
    #[expect(clippy::vec_box, reason = "they go from hand to hand as pointers, and come back so")]
    free: Vec<Box<Request>>,
    requests: usize,
}

impl Pool {
    /// Of so many.
    #[must_use]
    pub fn new(requests: usize) -> Self {
        Self {
            free: (0..requests).map(|_| Box::new(Request::new())).collect(),
            requests,
        }
    }

    /// One that is free, if there is any: so requests are never more than the pool has.
    pub fn take(&mut self) -> Option<Box<Request>> {
        self.free.pop()
    }

    /// Takes one of its own back, and lets go of its buffer.
    ///
    /// # Panics
    /// There are all already.
    pub fn give(&mut self, mut request: Box<Request>) {
        assert!(self.free.len() < self.requests, "a request that is none of the pool's");
        request.buffer = None;
        self.free.push(request);
    }

    /// Those that are out.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.requests - self.free.len()
    }
}

/// Known pages by `compress`, and what was wrong with what came out: for a library that is not known to be the right one.
pub(super) fn trial(mut compress: impl FnMut(&[u8], &mut [u8]) -> Outcome) -> Result<(), &'static str> {
    let pages: Vec<u8> = (0..40 * 1024_u32)
        .map(|at| match at / 4096 % 3 {
            0 => (at * at / 7) as u8,
            1 => b"the same letters again and again, "[at as usize % 34],
            _ => u8::from(at % 8 == 0),
        })
        .collect();
    let mut out = vec![0; pages.len()];
    // Twice, since the second time finds what the first has left.
    for _ in 0..2 {
        let Outcome::Made(len) = compress(&pages, &mut out) else {
            return Err("known pages are not encoded");
        };
        let mut back = vec![0; pages.len()];
        let mut zlib = flate2::Decompress::new(false);
        let data = out
            .get(..len)
            .ok_or("known pages are encoded into more than there is room for")?;
        let ended = zlib.decompress(data, &mut back, flate2::FlushDecompress::Finish);
        if ended.ok() != Some(flate2::Status::StreamEnd) || zlib.total_in() != len as u64 || back != pages {
            return Err("known pages are encoded wrongly");
        }
        if compress(&pages, &mut out[..len / 2]) != Outcome::Misfit {
            return Err("what does not fit is not refused");
        }
    }
    Ok(())
}

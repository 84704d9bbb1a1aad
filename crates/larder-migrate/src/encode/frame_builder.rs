//! Builder of one frame: its batch, its sections, and a device's output for it.

use std::io::IoSlice;
use std::ops::Range;
use std::time::{Duration, Instant};

use larder_codec::accelerator::{self, EncodeRequest};
use larder_codec::select::{BatchClass, BatchEncoding};
use larder_codec::{PAGE, delta};

use super::{Codecs, EncodeError, FrameAssignment, FrameSequencer, FrameStats, lock};
use crate::base::{BaseSlot, PageKey, Slots, Stopped};
use crate::batch::{Batch, BatchItem};
use crate::frame::{OperationsWriter, PageOrigin, Piece, ZERO_RECORD, header_after};
use crate::wire::{FRAME_DELTAS_MAX, FRAME_PAGES_MAX, FrameHeader};

/// Region of bytes that belong to no guest page; each channel has its own.
const OPAQUE_REGION: u64 = 1 << 63;
/// Maximum slices of a frame: a header, three sections, and each page by itself.
pub const SLICES_MAX: usize = 4 + FRAME_PAGES_MAX;

/// Frame from its batch to its bytes; its memory is reused for later frames.
///
/// Fill [`Self::batch`], call [`Self::assign_number`] while no other lane reads the channel, then [`Self::encode`].
/// Once [`Self::is_done`] returns true, call [`Self::finish`] and [`Self::slices`].
pub struct Frame {
    /// Bytes that the frame is made of.
    pub batch: Batch,
    channel: u16,
    offset: u64,
    assignment: FrameAssignment,
    sections: Sections,
    stats: FrameStats,
    /// Set while a device has the pages.
    device_job: Option<DeviceJob>,
    /// Finished request with the device's output.
    device_output: Option<Box<EncodeRequest>>,
    header: [u8; FrameHeader::LEN],
}

/// Data to record once a device is done.
struct DeviceJob {
    class: BatchClass,
    time: Duration,
}

impl Frame {
    /// Creates an empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self {
            batch: Batch::new(),
            channel: 0,
            offset: 0,
            assignment: FrameAssignment::default(),
            sections: Sections::new(),
            stats: FrameStats::default(),
            device_job: None,
            device_output: None,
            header: [0; FrameHeader::LEN],
        }
    }

    /// Assigns the frame its number; its batch lies at `offset` of the channel. Batches of one channel must come in
    /// their order. Each must then be encoded and sent, because later frames wait for it.
    pub fn assign_number(&mut self, channel: u16, offset: u64, sequencer: &FrameSequencer) {
        (self.channel, self.offset) = (channel, offset);
        sequencer.assign(&self.batch, &mut self.assignment);
    }

    /// Encodes the frame, or hands its pages to a device. Waits for earlier frames only until their pages are sorted.
    ///
    /// # Errors
    /// The session ends during the wait, there is no memory for old pages, or a device does not answer.
    pub fn encode(&mut self, sequencer: &FrameSequencer, codecs: &mut Codecs) -> Result<(), EncodeError> {
        let started = Instant::now();
        sequencer.bases.frontier.wait(self.assignment.after).map_err(|Stopped| EncodeError::Stopped)?;
        self.stats = FrameStats { zeros: self.batch.zeros(), ..FrameStats::default() };
        self.sections.region = OPAQUE_REGION | u64::from(self.channel);
        let sections = &mut self.sections;
        sections.build(&self.batch, &self.assignment, &sequencer.bases.slots, &mut self.stats)?;
        sequencer.bases.frontier.mark_done(self.assignment.number);
        sequencer.record_savings(&self.sections.savings);
        self.encode_full_pages(sequencer, codecs)?;
        self.stats.encode_time = started.elapsed();
        Ok(())
    }

    /// Encodes the pages that are sent whole by the method that pays now.
    fn encode_full_pages(&mut self, sequencer: &FrameSequencer, codecs: &mut Codecs) -> Result<(), EncodeError> {
        let sections = &mut self.sections;
        let count = sections.full_pages.len();
        sections.encoded_len = count * PAGE;
        if count == 0 {
            return Ok(());
        }
        let bytes = self.batch.bytes();
        let mut ranges: [Range<usize>; FRAME_PAGES_MAX] = [const { 0..0 }; FRAME_PAGES_MAX];
        let ranges = merge_adjacent(&sections.full_pages, &mut ranges);
        let mut runs: [&[u8]; FRAME_PAGES_MAX] = [&[]; FRAME_PAGES_MAX];
        for (run, range) in runs.iter_mut().zip(ranges) {
            *run = &bytes[range.clone()];
        }
        let runs = &runs[..ranges.len()];
        let class = BatchClass::of(runs);
        let Some(encoding) = lock(&sequencer.selector).pick(sections.region, class, count) else {
            return Ok(());
        };
        let started = Instant::now();
        // A smaller saving than a 16th is not worth the decoding at the other end.
        let limit = count * PAGE / 16 * 15;
        let len = match encoding {
            BatchEncoding::Cpu(method) => codecs.encoder.encode(method, runs, &mut sections.encoded[..limit]),
            BatchEncoding::Device => {
                codecs.submit(self.assignment.number, self.batch.buffer(), ranges, limit)?;
                self.device_job = Some(DeviceJob { class, time: started.elapsed() });
                return Ok(());
            }
        };
        self.stats.method_time = started.elapsed();
        let ns = self.stats.method_time.as_nanos() as u64;
        lock(&sequencer.selector).record(sections.region, class, encoding, count, len, ns);
        if let Some(len) = len {
            sections.encoded_len = len;
            self.stats.method = Some(encoding.method());
        }
        Ok(())
    }

    /// Returns true if the whole frame is encoded; with `wait`, blocks until it is.
    ///
    /// # Errors
    /// The device that has the frame's pages does not answer.
    pub fn is_done(
        &mut self,
        sequencer: &FrameSequencer,
        codecs: &mut Codecs,
        wait: bool,
    ) -> Result<bool, EncodeError> {
        let Some(mut job) = self.device_job.take() else {
            return Ok(true);
        };
        let started = Instant::now();
        let request =
            if wait { Some(codecs.wait(self.assignment.number)?) } else { codecs.fetch(self.assignment.number) };
        let took = started.elapsed();
        self.stats.encode_time += took;
        job.time += took;
        let Some(request) = request else {
            self.device_job = Some(job);
            return Ok(false);
        };
        let sections = &mut self.sections;
        let len = match request.outcome() {
            accelerator::EncodeOutcome::Encoded(len) => Some(len),
            // The dispatcher encodes on the CPU any pages that a device fails on.
            accelerator::EncodeOutcome::Incompressible
            | accelerator::EncodeOutcome::Failed
            | accelerator::EncodeOutcome::Pending => None,
        };
        self.stats.method_time = job.time;
        let ns = job.time.as_nanos() as u64;
        let (region, count) = (sections.region, sections.full_pages.len());
        lock(&sequencer.selector).record(region, job.class, BatchEncoding::Device, count, len, ns);
        match len {
            Some(len) => {
                sections.encoded_len = len;
                self.stats.method = Some(BatchEncoding::Device.method());
                self.stats.by_device = true;
                self.device_output = Some(request);
            }
            None => codecs.recycle(request),
        }
        Ok(true)
    }

    /// Completes the header, so that [`Self::slices`] can be sent, and returns the statistics of the pages.
    pub fn finish(&mut self) -> FrameStats {
        let sections = &mut self.sections;
        let bytes = self.batch.bytes();
        self.stats.full_pages = sections.full_pages.len() as u32;
        self.stats.full_pages_bytes = sections.encoded_len as u32;
        self.stats.delta_bytes = sections.deltas_len as u32;
        let header = FrameHeader {
            channel: self.channel,
            method: self.stats.method.map_or(0, larder_codec::batch::Method::number),
            number: self.assignment.number,
            after: self.assignment.after,
            offset: self.offset,
            raw_len: bytes.len() as u32,
            operations_len: sections.writer.finish().len() as u32,
            literals_len: sections.literals.len() as u32,
            pages_len: sections.encoded_len as u32,
            deltas_len: sections.deltas_len as u32,
            raw_crc: crc32c::crc32c(bytes),
        };
        self.header = header.to_bytes();
        self.stats.wire_bytes = (FrameHeader::LEN + header.body_len()) as u32;
        self.stats
    }

    /// Fills `slices` with the frame's bytes; returns the number of slices.
    pub fn slices<'a>(&'a mut self, slices: &mut [IoSlice<'a>; SLICES_MAX]) -> usize {
        let sections = &mut self.sections;
        let mut count = 0;
        let mut push = |bytes: &'a [u8]| {
            slices[count] = IoSlice::new(bytes);
            count += 1;
        };
        push(&self.header);
        push(sections.writer.finish());
        push(&sections.literals);
        match (&self.device_output, self.stats.method) {
            (Some(request), _) => push(request.output()),
            (None, Some(_)) => push(&sections.encoded[..sections.encoded_len]),
            (None, None) => {
                let bytes = self.batch.bytes();
                sections.full_pages.iter().for_each(|&at| push(&bytes[at..at + PAGE]));
            }
        }
        push(&sections.deltas[..sections.deltas_len]);
        count
    }

    /// Releases the frame's request after it was sent, so that its memory can be reused.
    pub fn release_request(&mut self, codecs: &mut Codecs) {
        if let Some(request) = self.device_output.take() {
            codecs.recycle(request);
        }
    }
}

impl Default for Frame {
    fn default() -> Self {
        Self::new()
    }
}

/// Sections of a frame.
struct Sections {
    writer: OperationsWriter,
    literals: Vec<u8>,
    deltas: Box<[u8]>,
    deltas_len: usize,
    /// Maximum bytes of one delta.
    delta_max: usize,
    encoded: Box<[u8]>,
    /// Bytes of the pages that are sent whole, encoded or not.
    encoded_len: usize,
    /// Offsets in the batch of the pages that are sent whole.
    full_pages: Vec<usize>,
    /// Region of the first of these pages.
    region: u64,
    savings: Vec<(u32, bool)>,
}

impl Sections {
    fn new() -> Self {
        Self {
            writer: OperationsWriter::default(),
            literals: Vec::new(),
            deltas: vec![0; FRAME_DELTAS_MAX].into(),
            deltas_len: 0,
            delta_max: 0,
            encoded: vec![0; FRAME_PAGES_MAX * PAGE].into(),
            encoded_len: 0,
            full_pages: Vec::with_capacity(FRAME_PAGES_MAX),
            region: 0,
            savings: Vec::with_capacity(FRAME_PAGES_MAX),
        }
    }

    /// Writes the operations, the literals and the deltas, and collects the pages that are sent whole.
    fn build(
        &mut self,
        batch: &Batch,
        assignment: &FrameAssignment,
        slots: &Slots,
        stats: &mut FrameStats,
    ) -> Result<(), EncodeError> {
        self.writer.clear();
        self.literals.clear();
        self.full_pages.clear();
        self.savings.clear();
        self.deltas_len = 0;
        self.delta_max = assignment.delta_max;
        let mut base_slots = assignment.base_slots.iter();
        let mut last_header: Option<[u8; 8]> = None;
        let mut at = 0;
        let mut items = batch.items().iter().peekable();
        let mut follows = false;
        while let Some(piece) = items.next() {
            match *piece {
                BatchItem::Literal { len } => {
                    let literal = &batch.bytes()[at..at + len as usize];
                    at += len as usize;
                    follows = matches!(items.peek(), Some(BatchItem::Page { .. }))
                        && last_header.is_some_and(|before| *literal == header_after(before));
                    if let Some(last) = literal.last_chunk() {
                        last_header = Some(*last);
                    }
                    if !follows {
                        self.literals.extend_from_slice(literal);
                        self.writer.push(Piece::Literal { len });
                    }
                }
                BatchItem::Zeros { header, count } => {
                    at += count as usize * ZERO_RECORD;
                    self.writer.push(Piece::Zeros { header, count });
                }
                BatchItem::Page { key, same } => {
                    let page = batch.bytes()[at..].first_chunk().expect("the batch has the page");
                    let source = match same {
                        Some(word) => {
                            stats.uniform += 1;
                            PageOrigin::Same(word)
                        }
                        None => {
                            let base_slot = base_slots.next().copied().flatten();
                            self.encode_page(page, at, key, base_slot, slots, stats)?
                        }
                    };
                    self.writer.push(Piece::Page { source, follows });
                    follows = false;
                    at += PAGE;
                }
            }
        }
        Ok(())
    }

    /// Encodes the page as a delta if its slot holds a version that makes a short one; otherwise it is sent whole.
    fn encode_page(
        &mut self,
        page: &[u8; PAGE],
        at: usize,
        key: Option<PageKey>,
        base_slot: Option<BaseSlot>,
        slots: &Slots,
        stats: &mut FrameStats,
    ) -> Result<PageOrigin, EncodeError> {
        let mut full = |source| {
            if self.full_pages.is_empty()
                && let Some(key) = key
            {
                self.region = key.region();
            }
            self.full_pages.push(at);
            Ok(source)
        };
        let Some(BaseSlot { slot, has_base }) = base_slot else {
            return full(PageOrigin::Plain);
        };
        let mut chunk = slots.lock(slot).ok_or(EncodeError::NoMemory)?;
        let base = chunk.page(slot);
        if has_base {
            let room = &mut self.deltas[self.deltas_len..][..self.delta_max];
            let delta = delta::encode(page, base, room);
            self.savings.push((slot, delta.is_some()));
            if let Some(len) = delta {
                base.copy_from_slice(page);
                self.deltas_len += len;
                stats.deltas += 1;
                return Ok(PageOrigin::Delta(slot));
            }
        }
        base.copy_from_slice(page);
        full(PageOrigin::Stored(slot))
    }
}

/// Merges the pages at these offsets into runs of adjacent ones.
fn merge_adjacent<'r>(offsets: &[usize], runs: &'r mut [Range<usize>; FRAME_PAGES_MAX]) -> &'r [Range<usize>] {
    let mut count = 0;
    for &at in offsets {
        match runs[..count].last_mut() {
            Some(run) if run.end == at => run.end += PAGE,
            _ => {
                runs[count] = at..at + PAGE;
                count += 1;
            }
        }
    }
    &runs[..count]
}

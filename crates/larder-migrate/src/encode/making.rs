//! Builder of one frame: its batch, its sections, and a device's output for it.

use std::io::IoSlice;
use std::ops::Range;
use std::time::{Duration, Instant};

use larder_codec::accelerator::{self, Request};
use larder_codec::select::{Class, Way};
use larder_codec::{PAGE, delta};

use super::{Codecs, Failed, Order, Ordered, Outcome, lock};
use crate::base::{PageKey, Place, Slots, Stopped};
use crate::batch::{Batch, Found};
use crate::frame::{Piece, Source, Writer, ZERO_RECORD, header_after};
use crate::wire::{FRAME_DELTAS_MAX, FRAME_PAGES_MAX, FrameHeader};

/// Region of bytes that belong to no guest page; each channel has its own.
const OPAQUE_REGION: u64 = 1 << 63;
/// Maximum slices of a frame: a header, three sections, and each page by itself.
pub const SLICES_MAX: usize = 4 + FRAME_PAGES_MAX;

/// Frame from its batch to its bytes; its memory is reused for later frames.
///
/// Fill [`Self::batch`], call [`Self::order`] while no other lane reads the channel, then [`Self::encode`]. Once
/// [`Self::is_done`] returns true, call [`Self::finish`] and [`Self::slices`].
pub struct Frame {
    /// Bytes that the frame is made of.
    pub batch: Batch,
    channel: u16,
    offset: u64,
    ordered: Ordered,
    sections: Sections,
    outcome: Outcome,
    /// Set while a device has the pages.
    on_device: Option<OnDevice>,
    /// Finished request with the device's output.
    by_device: Option<Box<Request>>,
    header: [u8; FrameHeader::LEN],
}

/// Data to record once a device is done.
struct OnDevice {
    class: Class,
    took: Duration,
}

impl Frame {
    /// Creates an empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self {
            batch: Batch::new(),
            channel: 0,
            offset: 0,
            ordered: Ordered::default(),
            sections: Sections::new(),
            outcome: Outcome::default(),
            on_device: None,
            by_device: None,
            header: [0; FrameHeader::LEN],
        }
    }

    /// Assigns the frame its number; its batch lies at `offset` of the channel. Batches of one channel must come in
    /// their order. Each must then be encoded and sent, because later frames wait for it.
    pub fn order(&mut self, channel: u16, offset: u64, order: &Order) {
        (self.channel, self.offset) = (channel, offset);
        order.order(&self.batch, &mut self.ordered);
    }

    /// Encodes the frame, or hands its pages to a device. Waits for earlier frames only until their pages are sorted.
    ///
    /// # Errors
    /// The session ends during the wait, there is no memory for old pages, or a device does not answer.
    pub fn encode(&mut self, order: &Order, codecs: &mut Codecs) -> Result<(), Failed> {
        let begun = Instant::now();
        order
            .bases
            .frontier
            .wait(self.ordered.after)
            .map_err(|Stopped| Failed::Stopped)?;
        self.outcome = Outcome {
            zeros: self.batch.zeros(),
            ..Outcome::default()
        };
        self.sections.region = OPAQUE_REGION | u64::from(self.channel);
        let sections = &mut self.sections;
        sections.sort(&self.batch, &self.ordered, &order.bases.slots, &mut self.outcome)?;
        order.bases.frontier.done(self.ordered.number);
        order.learn(&self.sections.learned);
        self.encode_whole(order, codecs)?;
        self.outcome.took = begun.elapsed();
        Ok(())
    }

    /// Encodes the pages that are sent whole by the method that pays now.
    fn encode_whole(&mut self, order: &Order, codecs: &mut Codecs) -> Result<(), Failed> {
        let sections = &mut self.sections;
        let count = sections.whole.len();
        sections.encoded_len = count * PAGE;
        if count == 0 {
            return Ok(());
        }
        let bytes = self.batch.bytes();
        let mut places: [Range<usize>; FRAME_PAGES_MAX] = [const { 0..0 }; FRAME_PAGES_MAX];
        let places = adjacent(&sections.whole, &mut places);
        let mut runs: [&[u8]; FRAME_PAGES_MAX] = [&[]; FRAME_PAGES_MAX];
        for (run, place) in runs.iter_mut().zip(places) {
            *run = &bytes[place.clone()];
        }
        let runs = &runs[..places.len()];
        let class = Class::of(runs);
        let Some(way) = lock(&order.selector).pick(sections.region, class, count) else {
            return Ok(());
        };
        let begun = Instant::now();
        // A smaller saving than a 16th is not worth the decoding at the other end.
        let limit = count * PAGE / 16 * 15;
        let len = match way {
            Way::Here(method) => codecs.encoder.encode(method, runs, &mut sections.encoded[..limit]),
            Way::Device => {
                codecs.start(self.ordered.number, self.batch.buffer(), places, limit)?;
                self.on_device = Some(OnDevice {
                    class,
                    took: begun.elapsed(),
                });
                return Ok(());
            }
        };
        self.outcome.picked = begun.elapsed();
        let ns = self.outcome.picked.as_nanos() as u64;
        lock(&order.selector).record(sections.region, class, way, count, len, ns);
        if let Some(len) = len {
            sections.encoded_len = len;
            self.outcome.method = Some(way.method());
        }
        Ok(())
    }

    /// Returns true if the whole frame is encoded; with `wait`, blocks until it is.
    ///
    /// # Errors
    /// The device that has the frame's pages does not answer.
    pub fn is_done(&mut self, order: &Order, codecs: &mut Codecs, wait: bool) -> Result<bool, Failed> {
        let Some(mut on_device) = self.on_device.take() else {
            return Ok(true);
        };
        let begun = Instant::now();
        let request = if wait {
            Some(codecs.wait(self.ordered.number)?)
        } else {
            codecs.fetch(self.ordered.number)
        };
        let took = begun.elapsed();
        self.outcome.took += took;
        on_device.took += took;
        let Some(request) = request else {
            self.on_device = Some(on_device);
            return Ok(false);
        };
        let sections = &mut self.sections;
        let len = match request.outcome() {
            accelerator::Outcome::Made(len) => Some(len),
            // The dispatcher encodes on the CPU any pages that a device fails on.
            accelerator::Outcome::Misfit | accelerator::Outcome::Failed | accelerator::Outcome::Pending => None,
        };
        self.outcome.picked = on_device.took;
        let ns = on_device.took.as_nanos() as u64;
        let (region, count) = (sections.region, sections.whole.len());
        lock(&order.selector).record(region, on_device.class, Way::Device, count, len, ns);
        match len {
            Some(len) => {
                sections.encoded_len = len;
                self.outcome.method = Some(Way::Device.method());
                self.outcome.by_device = true;
                self.by_device = Some(request);
            }
            None => codecs.give(request),
        }
        Ok(true)
    }

    /// Completes the header, so that [`Self::slices`] can be sent, and returns the statistics of the pages.
    pub fn finish(&mut self) -> Outcome {
        let sections = &mut self.sections;
        let bytes = self.batch.bytes();
        self.outcome.whole = sections.whole.len() as u32;
        self.outcome.whole_bytes = sections.encoded_len as u32;
        self.outcome.delta_bytes = sections.deltas_len as u32;
        let header = FrameHeader {
            channel: self.channel,
            method: self.outcome.method.map_or(0, larder_codec::batch::Method::number),
            number: self.ordered.number,
            after: self.ordered.after,
            offset: self.offset,
            raw_len: bytes.len() as u32,
            operations_len: sections.writer.finish().len() as u32,
            literals_len: sections.literals.len() as u32,
            pages_len: sections.encoded_len as u32,
            deltas_len: sections.deltas_len as u32,
            raw_crc: crc32c::crc32c(bytes),
        };
        self.header = header.to_bytes();
        self.outcome.wire_bytes = (FrameHeader::LEN + header.body_len()) as u32;
        self.outcome
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
        match (&self.by_device, self.outcome.method) {
            (Some(request), _) => push(request.output()),
            (None, Some(_)) => push(&sections.encoded[..sections.encoded_len]),
            (None, None) => {
                let bytes = self.batch.bytes();
                sections.whole.iter().for_each(|&at| push(&bytes[at..at + PAGE]));
            }
        }
        push(&sections.deltas[..sections.deltas_len]);
        count
    }

    /// Releases the frame's request after it was sent, so that its memory can be reused.
    pub fn clear(&mut self, codecs: &mut Codecs) {
        if let Some(request) = self.by_device.take() {
            codecs.give(request);
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
    writer: Writer,
    literals: Vec<u8>,
    deltas: Box<[u8]>,
    deltas_len: usize,
    /// Maximum bytes of one delta.
    delta_max: usize,
    encoded: Box<[u8]>,
    /// Bytes of the pages that are sent whole, encoded or not.
    encoded_len: usize,
    /// Offsets in the batch of the pages that are sent whole.
    whole: Vec<usize>,
    /// Region of the first of these pages.
    region: u64,
    learned: Vec<(u32, bool)>,
}

impl Sections {
    fn new() -> Self {
        Self {
            writer: Writer::default(),
            literals: Vec::new(),
            deltas: vec![0; FRAME_DELTAS_MAX].into(),
            deltas_len: 0,
            delta_max: 0,
            encoded: vec![0; FRAME_PAGES_MAX * PAGE].into(),
            encoded_len: 0,
            whole: Vec::with_capacity(FRAME_PAGES_MAX),
            region: 0,
            learned: Vec::with_capacity(FRAME_PAGES_MAX),
        }
    }

    /// Writes the operations, the literals and the deltas, and collects the pages that are sent whole.
    fn sort(&mut self, batch: &Batch, ordered: &Ordered, slots: &Slots, outcome: &mut Outcome) -> Result<(), Failed> {
        self.writer.clear();
        self.literals.clear();
        self.whole.clear();
        self.learned.clear();
        self.deltas_len = 0;
        self.delta_max = ordered.delta_max;
        let mut places = ordered.places.iter();
        let mut before: Option<[u8; 8]> = None;
        let mut at = 0;
        let mut found = batch.found().iter().peekable();
        let mut follows = false;
        while let Some(piece) = found.next() {
            match *piece {
                Found::Literal { len } => {
                    let literal = &batch.bytes()[at..at + len as usize];
                    at += len as usize;
                    follows = matches!(found.peek(), Some(Found::Page { .. }))
                        && before.is_some_and(|before| *literal == header_after(before));
                    if let Some(last) = literal.last_chunk() {
                        before = Some(*last);
                    }
                    if !follows {
                        self.literals.extend_from_slice(literal);
                        self.writer.push(Piece::Literal { len });
                    }
                }
                Found::Zeros { header, count } => {
                    at += count as usize * ZERO_RECORD;
                    self.writer.push(Piece::Zeros { header, count });
                }
                Found::Page { key, same } => {
                    let page = batch.bytes()[at..].first_chunk().expect("the batch has the page");
                    let source = match same {
                        Some(word) => {
                            outcome.same += 1;
                            Source::Same(word)
                        }
                        None => {
                            let place = places.next().copied().flatten();
                            self.source(page, at, key, place, slots, outcome)?
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
    fn source(
        &mut self,
        page: &[u8; PAGE],
        at: usize,
        key: Option<PageKey>,
        place: Option<Place>,
        slots: &Slots,
        outcome: &mut Outcome,
    ) -> Result<Source, Failed> {
        let mut whole = |source| {
            if self.whole.is_empty()
                && let Some(key) = key
            {
                self.region = key.region();
            }
            self.whole.push(at);
            Ok(source)
        };
        let Some(Place { slot, holds }) = place else {
            return whole(Source::Plain);
        };
        let mut chunk = slots.lock(slot).ok_or(Failed::NoMemory)?;
        let base = chunk.page(slot);
        if holds {
            let room = &mut self.deltas[self.deltas_len..][..self.delta_max];
            let delta = delta::encode(page, base, room);
            self.learned.push((slot, delta.is_some()));
            if let Some(len) = delta {
                base.copy_from_slice(page);
                self.deltas_len += len;
                outcome.deltas += 1;
                return Ok(Source::Delta(slot));
            }
        }
        base.copy_from_slice(page);
        whole(Source::Stored(slot))
    }
}

/// Merges the pages at these offsets into runs of adjacent ones.
fn adjacent<'r>(places: &[usize], runs: &'r mut [Range<usize>; FRAME_PAGES_MAX]) -> &'r [Range<usize>] {
    let mut count = 0;
    for &at in places {
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

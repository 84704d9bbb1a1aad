//! A piece of a channel to a frame.
//!
//! ```text
//! Batch: pages and literals -> Order: a number, a slot for each page that may have one     (short, under a lock)
//!                           -> each page: one word? a delta on its slot? or among the pages
//!                           -> the pages, by the method that the selector says
//!                           -> header, operations, literals, pages, deltas
//! ```

use std::io::IoSlice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use larder_codec::batch::{self, Method};
use larder_codec::select::{Class, Evidence, Selector};
use larder_codec::{PAGE, delta};

use thiserror::Error;

use crate::base::{Index, PageKey, Place, Slots, Stopped};
use crate::batch::{Batch, Found};
use crate::decode::Bases;
use crate::frame::{Piece, Source, Writer, ZERO_RECORD, header_after};
use crate::progress::Choice;
use crate::wire::{FRAME_DELTAS_MAX, FRAME_PAGES_MAX, FrameHeader};

/// A delta that takes more than this many bytes is none: the page goes among the others, which a codec may do better
/// with.
const DELTA_LEN_MAX: usize = PAGE / 2;
/// What is no page of the guest's is a region of its own, for each channel.
const OPAQUE_REGION: u64 = 1 << 63;

/// Why a frame cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failed {
    /// The session ends.
    #[error("the session has ended")]
    Stopped,
    /// No room for old pages.
    #[error("there is no memory for old versions of pages: give --delta-memory less")]
    NoMemory,
}

/// In which order frames are made and what they find, for all lanes of a sender.
pub struct Order {
    next: Mutex<Next>,
    /// What deltas are made against.
    pub bases: Bases,
    /// Which method pays.
    pub selector: Mutex<Selector>,
}

struct Next {
    number: u64,
    index: Index,
}

impl Ordered {
    /// The memory of its list, to be used again.
    #[must_use]
    pub fn into_places(self) -> Vec<Option<Place>> {
        self.places
    }
}

/// A frame's place among all frames.
pub struct Ordered {
    number: u64,
    after: u64,
    /// For each page of the batch that is not one word.
    places: Vec<Option<Place>>,
}

impl Order {
    /// With no frame made. The selector picks only what the receiver decodes.
    #[must_use]
    pub fn new(bases: Bases, selector: Selector) -> Self {
        Self {
            next: Mutex::new(Next {
                number: 0,
                index: Index::new(bases.slots.len()),
            }),
            bases,
            selector: Mutex::new(selector),
        }
    }

    /// Gives a batch its place. Batches of one channel must come in their order, and each must then be encoded and sent:
    /// later ones wait for it.
    pub fn order(&self, batch: &Batch, eager: bool, places: Vec<Option<Place>>) -> Ordered {
        let mut places = places;
        places.clear();
        let mut after = 0;
        let mut next = lock(&self.next);
        let number = next.number;
        next.number += 1;
        for found in batch.found() {
            if let Found::Page { key, same: None } = found {
                let place = key.and_then(|key| next.index.place(key, number, eager, &mut after));
                places.push(place);
            }
        }
        Ordered { number, after, places }
    }

    /// Hears how long the link took for what one of `lanes` lanes has sent.
    pub fn sent(&self, bytes: u64, took: Duration, lanes: usize) {
        let ns = took.as_nanos() as u64 / lanes.max(1) as u64;
        lock(&self.selector).sent(bytes, ns);
    }

    /// So many lanes encode at a time, as far as they are let ([`Selector::set_encoders`]).
    pub fn set_encoders(&self, encoders: f64) {
        lock(&self.selector).set_encoders(encoders as f32);
    }

    /// What the selector picks now, and why.
    pub fn chosen(&self) -> Choice {
        let selector = lock(&self.selector);
        Choice {
            ns_per_byte: selector.evidence().ns_per_byte,
            classes: selector.chosen(),
        }
    }

    /// What the selector has picked so far, and what came of it.
    pub fn evidence(&self) -> Evidence {
        lock(&self.selector).evidence()
    }

    fn learn(&self, learned: &[(u32, bool)]) {
        if learned.is_empty() {
            return;
        }
        let mut next = lock(&self.next);
        for &(slot, saved) in learned {
            next.index.learn(slot, saved);
        }
    }

    /// Pages of which an old version is kept.
    #[must_use]
    pub fn kept(&self) -> u32 {
        lock(&self.next).index.used()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What became of the pages of a frame.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Pages of one word, which the operations say.
    pub same: u32,
    /// Pages of zeros that QEMU told as such.
    pub zeros: u32,
    /// Pages sent as deltas.
    pub deltas: u32,
    /// Bytes that those took.
    pub delta_bytes: u32,
    /// Pages sent whole.
    pub whole: u32,
    /// Bytes that those took, encoded.
    pub whole_bytes: u32,
    /// By which method; `None`: as they are.
    pub method: Option<Method>,
    /// Bytes of the whole frame.
    pub wire_bytes: u32,
}

/// Makes frames, one after the other; one for each lane.
pub struct FrameEncoder {
    codec: batch::Encoder,
    writer: Writer,
    header: [u8; FrameHeader::LEN],
    literals: Vec<u8>,
    deltas: Vec<u8>,
    deltas_len: usize,
    encoded: Vec<u8>,
    encoded_len: usize,
    /// Where in the batch the pages lie that go whole.
    whole: Vec<usize>,
    /// Of the first of them.
    region: u64,
    learned: Vec<(u32, bool)>,
}

impl FrameEncoder {
    /// With nothing encoded.
    #[must_use]
    pub fn new() -> Self {
        Self {
            codec: batch::Encoder::new(),
            writer: Writer::default(),
            header: [0; FrameHeader::LEN],
            literals: Vec::new(),
            deltas: vec![0; FRAME_DELTAS_MAX],
            deltas_len: 0,
            encoded: vec![0; FRAME_PAGES_MAX * PAGE],
            encoded_len: 0,
            whole: Vec::with_capacity(FRAME_PAGES_MAX),
            region: 0,
            learned: Vec::with_capacity(FRAME_PAGES_MAX),
        }
    }

    /// Whether a method is worth choosing here.
    #[must_use]
    pub fn is_fast(&self, method: Method) -> bool {
        self.codec.is_fast(method)
    }

    /// Makes the frame of a batch that has its place; [`Self::slices`] are its bytes.
    ///
    /// # Errors
    /// The session ends meanwhile.
    pub fn encode(
        &mut self,
        batch: &Batch,
        channel: u16,
        offset: u64,
        ordered: &Ordered,
        order: &Order,
    ) -> Result<Outcome, Failed> {
        order
            .bases
            .frontier
            .wait(ordered.after)
            .map_err(|Stopped| Failed::Stopped)?;
        let mut outcome = Outcome {
            zeros: batch.zeros(),
            ..Outcome::default()
        };
        self.region = OPAQUE_REGION | u64::from(channel);
        self.sort(batch, ordered, &order.bases.slots, &mut outcome)?;
        order.bases.frontier.done(ordered.number);
        order.learn(&self.learned);

        let bytes = batch.bytes();
        outcome.method = self.encode_whole(bytes, order);
        outcome.whole = self.whole.len() as u32;
        outcome.whole_bytes = self.encoded_len as u32;
        outcome.delta_bytes = self.deltas_len as u32;
        let header = FrameHeader {
            channel,
            method: outcome.method.map_or(0, Method::number),
            number: ordered.number,
            after: ordered.after,
            offset,
            raw_len: bytes.len() as u32,
            operations_len: self.writer.finish().len() as u32,
            literals_len: self.literals.len() as u32,
            pages_len: self.encoded_len as u32,
            deltas_len: self.deltas_len as u32,
            raw_crc: crc32c::crc32c(bytes),
        };
        self.header = header.to_bytes();
        outcome.wire_bytes = (FrameHeader::LEN + header.body_len()) as u32;
        Ok(outcome)
    }

    /// The bytes of the frame that was made of this batch, in `slices`, which are emptied before.
    pub fn slices<'a>(&'a mut self, batch: &'a Batch, slices: &mut Vec<IoSlice<'a>>) {
        slices.clear();
        slices.push(IoSlice::new(&self.header));
        slices.push(IoSlice::new(self.writer.finish()));
        slices.push(IoSlice::new(&self.literals));
        let as_they_are = self.header[6] == 0;
        if as_they_are {
            let bytes = batch.bytes();
            slices.extend(self.whole.iter().map(|&at| IoSlice::new(&bytes[at..at + PAGE])));
        } else {
            slices.push(IoSlice::new(&self.encoded[..self.encoded_len]));
        }
        slices.push(IoSlice::new(&self.deltas[..self.deltas_len]));
    }

    /// Writes the operations, the literals and the deltas, and notes which pages go whole.
    fn sort(&mut self, batch: &Batch, ordered: &Ordered, slots: &Slots, outcome: &mut Outcome) -> Result<(), Failed> {
        self.writer.clear();
        self.literals.clear();
        self.whole.clear();
        self.learned.clear();
        self.deltas_len = 0;
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

    /// A delta if the slot holds what makes it a short one; else the page goes whole.
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
            let room = &mut self.deltas[self.deltas_len..][..DELTA_LEN_MAX];
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

    /// Encodes the pages that go whole by what pays now; `None`: they go as they are.
    fn encode_whole(&mut self, bytes: &[u8], order: &Order) -> Option<Method> {
        let count = self.whole.len();
        self.encoded_len = count * PAGE;
        if count == 0 {
            return None;
        }
        let mut runs: [&[u8]; FRAME_PAGES_MAX] = [&[]; FRAME_PAGES_MAX];
        let runs = adjacent(&self.whole, bytes, &mut runs);
        let class = Class::of(runs);
        let method = lock(&order.selector).pick(self.region, class, count)?;
        let begun = Instant::now();
        // What saves less than a 16th costs more than it is worth at the other end.
        let room = &mut self.encoded[..count * PAGE / 16 * 15];
        let len = self.codec.encode(method, runs, room);
        let ns = begun.elapsed().as_nanos() as u64;
        lock(&order.selector).record(self.region, class, method, count, len, ns);
        self.encoded_len = len?;
        Some(method)
    }
}

/// The pages at these places of `bytes`, those that lie side by side in one piece.
fn adjacent<'a, 'r>(places: &[usize], bytes: &'a [u8], runs: &'r mut [&'a [u8]; FRAME_PAGES_MAX]) -> &'r [&'a [u8]] {
    let mut count = 0;
    let mut begin = places[0];
    let mut end = begin;
    for &at in places {
        if at != end {
            runs[count] = &bytes[begin..end];
            count += 1;
            begin = at;
        }
        end = at + PAGE;
    }
    runs[count] = &bytes[begin..end];
    &runs[..=count]
}

impl Default for FrameEncoder {
    fn default() -> Self {
        Self::new()
    }
}

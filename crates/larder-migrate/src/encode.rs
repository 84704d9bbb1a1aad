//! A piece of a channel to a frame.
//!
//! ```text
//! Batch: pages and literals -> Order: a number, a slot for each page that may have one     (short, under a lock)
//!                           -> each page: one word? a delta on its slot? or among the pages
//!                           -> the pages, by the method that the selector says, here or by a device meanwhile
//!                           -> header, operations, literals, pages, deltas
//! ```

mod codecs;
mod making;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_codec::PAGE;
use larder_codec::batch::Method;
use larder_codec::select::{Class, Evidence, Selector};
use thiserror::Error;

use crate::base::{Index, Keep, Place};
use crate::batch::{Batch, Found};
use crate::decode::Bases;
use crate::progress::Choice;

pub use self::codecs::Codecs;
pub use self::making::{Frame, SLICES_MAX};

/// Why a frame cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failed {
    /// The session ends.
    #[error("the session has ended")]
    Stopped,
    /// No room for old pages.
    #[error("there is no memory for old versions of pages: give --delta-memory less")]
    NoMemory,
    /// It has pages, and says nothing.
    #[error("a compression device does not answer: migrate with --accelerators none, and see the kernel's log")]
    Device,
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

/// A frame's place among all frames.
#[derive(Default)]
struct Ordered {
    number: u64,
    after: u64,
    /// For each page of the batch that is not one word.
    places: Vec<Option<Place>>,
    /// A delta that takes more than this many bytes is none: the page goes among the others.
    delta_max: usize,
}

/// A codec may do better than a delta that is longer than this.
const DELTA_MAX: usize = PAGE / 2;
/// The same where no codec does anything. A value of memcached's that is set anew takes half of a page, or more.
const DENSE_DELTA_MAX: usize = PAGE / 16 * 15;
/// For how many nanoseconds of the link a page is kept that may never be sent again: that takes memory and a copy, at
/// either end. It is so where the link carries 2 Gbit/s or less.
const KEEP_NS: f32 = 8000.0;

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
    fn order(&self, batch: &Batch, ordered: &mut Ordered) {
        ordered.places.clear();
        ordered.after = 0;
        let class = Class::of(&[batch.bytes()]);
        let keep = worth_keeping(class, lock(&self.selector).link_ns_per_byte());
        ordered.delta_max = if class.is_dense() { DENSE_DELTA_MAX } else { DELTA_MAX };
        let mut next = lock(&self.next);
        ordered.number = next.number;
        next.number += 1;
        for found in batch.found() {
            if let Found::Page { key, same: None } = found {
                let place = key.and_then(|key| next.index.place(key, ordered.number, keep, &mut ordered.after));
                ordered.places.push(place);
            }
        }
    }

    /// Hears how long the link took for what one of `lanes` lanes has sent.
    pub fn sent(&self, bytes: u64, took: Duration, lanes: usize) {
        let ns = took.as_nanos() as u64 / lanes.max(1) as u64;
        lock(&self.selector).sent(bytes, ns);
    }

    /// A lane did something else than encoding for so long ([`Selector::besides`]).
    pub fn besides(&self, ns: u64) {
        lock(&self.selector).besides(ns);
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

/// What compresses goes whole a second time at little cost; of the rest a delta is worth much, if the link is slow.
fn worth_keeping(class: Class, link_ns_per_byte: f32) -> Keep {
    if class.is_slight() {
        Keep::Never
    } else if class.is_dense() && link_ns_per_byte * DELTA_MAX as f32 > KEEP_NS {
        Keep::AtOnce
    } else {
        Keep::SentAgain
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
    /// By a device.
    pub by_device: bool,
    /// Bytes of the whole frame.
    pub wire_bytes: u32,
    /// What encoding took of the lane's time.
    pub took: Duration,
    /// Of it, what was picked for its whole pages.
    pub picked: Duration,
}

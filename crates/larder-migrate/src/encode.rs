//! Encoder of frames: makes a frame of a piece of a channel.
//!
//! ```text
//! Batch: pages and literals -> Order: a frame number, and slots for the pages that may have one (short, under a lock)
//!                           -> each page: uniform, a delta against its slot, or sent whole
//!                           -> whole pages: encoded by the selector's method, here or concurrently by a device
//!                           -> header, operations, literals, pages, deltas
//! ```

mod codecs;
mod frame_builder;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_codec::PAGE;
use larder_codec::batch::Method;
use larder_codec::select::{BatchClass, Selector, SelectorStatistics};
use thiserror::Error;

use crate::base::{BaseIndex, BasePolicy, BaseSlot};
use crate::batch::{Batch, BatchItem};
use crate::decode::Bases;
use crate::progress::SelectorChoice;

pub use self::codecs::Codecs;
pub use self::frame_builder::{Frame, SLICES_MAX};

/// Reasons why a frame cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum EncodeError {
    /// The session ends.
    #[error("the session has ended")]
    Stopped,
    /// The memory for old pages could not be mapped.
    #[error("there is no memory for old versions of pages: use a smaller --delta-memory")]
    NoMemory,
    /// A device holds the frame's pages and does not answer.
    #[error("a compression device does not answer: migrate with --accelerators none, and check the kernel's log")]
    Device,
}

/// Order of frames and the state that encoding them shares, for all lanes of a sender.
pub struct FrameSequencer {
    next: Mutex<NextFrame>,
    /// Old pages that deltas are encoded against.
    pub bases: Bases,
    /// Selector of the encoding method.
    pub selector: Mutex<Selector>,
}

struct NextFrame {
    number: u64,
    index: BaseIndex,
}

/// Number of a frame, and the values that its order among all frames determines.
#[derive(Default)]
struct FrameAssignment {
    number: u64,
    after: u64,
    /// Slot of each page of the batch that is not uniform.
    base_slots: Vec<Option<BaseSlot>>,
    /// Maximum bytes of a delta; a page with a longer one is sent whole.
    delta_max: usize,
}

/// Maximum bytes of a delta; a codec may do better than a longer one.
const DELTA_BYTES_MAX: usize = PAGE / 2;
/// Maximum bytes of a delta for pages that no codec compresses. A new memcached value fills half of a page, or more.
const DENSE_DELTA_BYTES_MAX: usize = PAGE / 16 * 15;
/// Link time in nanoseconds that a delta must save for a page to be kept although it may never be sent again: keeping
/// costs memory and a copy at either end. Links of 2 Gbit/s or less reach it.
const BASE_SAVING_NS_MIN: f32 = 8000.0;

impl FrameSequencer {
    /// Creates the state with no frame made. The selector picks only methods that the receiver decodes.
    #[must_use]
    pub fn new(bases: Bases, selector: Selector) -> Self {
        Self {
            next: Mutex::new(NextFrame { number: 0, index: BaseIndex::new(bases.slots.len()) }),
            bases,
            selector: Mutex::new(selector),
        }
    }

    /// Assigns a batch its frame number and slots. Batches of one channel must come in their order. Each must then be
    /// encoded and sent, because later frames wait for it.
    fn assign(&self, batch: &Batch, assignment: &mut FrameAssignment) {
        assignment.base_slots.clear();
        assignment.after = 0;
        let class = BatchClass::of(&[batch.bytes()]);
        let policy = base_policy(class, lock(&self.selector).link_ns_per_byte());
        assignment.delta_max = if class.is_nearly_incompressible() { DENSE_DELTA_BYTES_MAX } else { DELTA_BYTES_MAX };
        let mut next = lock(&self.next);
        assignment.number = next.number;
        next.number += 1;
        for item in batch.items() {
            if let BatchItem::Page { key, same: None } = item {
                let base_slot =
                    key.and_then(|key| next.index.assign_slot(key, assignment.number, policy, &mut assignment.after));
                assignment.base_slots.push(base_slot);
            }
        }
    }

    /// Reports to the selector how long the link took for the bytes that one of `lanes` lanes has sent.
    pub fn sent(&self, bytes: u64, took: Duration, lanes: usize) {
        let ns = took.as_nanos() as u64 / lanes.max(1) as u64;
        lock(&self.selector).record_sent(bytes, ns);
    }

    /// Reports nanoseconds that a lane spent on work other than encoding ([`Selector::record_other_work`]).
    pub fn record_other_work(&self, ns: u64) {
        lock(&self.selector).record_other_work(ns);
    }

    /// Sets how many lanes encode at a time, within the CPU limit ([`Selector::set_encoders`]).
    pub fn set_encoders(&self, encoders: f64) {
        lock(&self.selector).set_encoders(encoders as f32);
    }

    /// Returns the selector's current choice and its reason.
    pub fn choice(&self) -> SelectorChoice {
        let selector = lock(&self.selector);
        SelectorChoice { ns_per_byte: selector.statistics().ns_per_byte, classes: selector.picks() }
    }

    /// Returns the selector's picks so far, with their results.
    pub fn evidence(&self) -> SelectorStatistics {
        lock(&self.selector).statistics()
    }

    fn record_savings(&self, savings: &[(u32, bool)]) {
        if savings.is_empty() {
            return;
        }
        let mut next = lock(&self.next);
        for &(slot, saved) in savings {
            next.index.record_saving(slot, saved);
        }
    }

    /// Returns the number of pages with an old version.
    #[must_use]
    pub fn base_count(&self) -> u32 {
        lock(&self.next).index.used()
    }
}

/// Returns when to keep a page. Resending a page that compresses costs little; for the others a delta saves much if
/// the link is slow.
fn base_policy(class: BatchClass, link_ns_per_byte: f32) -> BasePolicy {
    if class.is_highly_compressible() {
        BasePolicy::Never
    } else if class.is_nearly_incompressible() && link_ns_per_byte * DELTA_BYTES_MAX as f32 > BASE_SAVING_NS_MIN {
        BasePolicy::OnFirstSend
    } else {
        BasePolicy::OnSecondSend
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Statistics of a frame's pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct FrameStats {
    /// Number of uniform pages, which the operations encode.
    pub uniform: u32,
    /// Number of zero pages that QEMU sent as zero-page records.
    pub zeros: u32,
    /// Number of pages sent as deltas.
    pub deltas: u32,
    /// Bytes of the deltas.
    pub delta_bytes: u32,
    /// Number of pages sent whole.
    pub full_pages: u32,
    /// Encoded bytes of the whole pages.
    pub full_pages_bytes: u32,
    /// Method of the whole pages; `None` if they are not encoded.
    pub method: Option<Method>,
    /// True if a device encoded the whole pages.
    pub by_device: bool,
    /// Bytes of the whole frame.
    pub wire_bytes: u32,
    /// Time that the lane spent encoding the frame.
    pub encode_time: Duration,
    /// Part of that time spent on the method picked for the whole pages.
    pub method_time: Duration,
}

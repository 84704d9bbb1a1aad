//! One interface to whatever encodes batches: this processor's cores, and devices beside them.
//!
//! ```text
//! Pool::take -> Request::fill: method, Buffer, runs of pages, limit, tag
//!   -> Dispatcher::submit: the next instance in turn that makes the method and has room -> its bounded queue
//!   -> Dispatcher::poll: whatever is done, in any order -> Request::outcome -> Pool::give
//! ```
//!
//! An [`Accelerator`] is what is there: the processor always, a device where its library can be loaded and finds it. An
//! [`Instance`] is one queue to it, which one thread submits to and polls; several threads open several. What an instance
//! takes belongs to it until it gives it back; the input is read where it lies in the [`Buffer`] that the request keeps
//! alive (scattered runs are put together first, as the formats need).
//!
//! Invariants:
//! - Each request that was taken comes back exactly once, from the instance that took it; queues are bounded, and a full
//!   one gives the request back at once.
//! - What comes out is what [`crate::batch::Decoder`] reads, whatever made it.
//! - A device that fails costs time and no batch: the dispatcher encodes what it failed on by the processor, and stops
//!   using it when that happens again and again.
//! - Nothing is allocated for a request once the pool is made and each method has seen a batch of 64 pages.
//!
//! | accelerator | methods | by |
//! | --- | --- | --- |
//! | `cpu` | all but deflate | LZ4, zstd |
//! | `igzip` | deflate | ISA-L (`libisal.so.2`), still the processor |
//! | `qat` | deflate | QATzip (`libqatzip.so.3`) and a QuickAssist device |
//! | `iaa` | deflate | QPL (`libqpl.so.1`) and an In-Memory Analytics Accelerator |
//!
//! Another device is another file with its [`Accelerator`]: one that makes a format known here is added to
//! [`find`], a format of its own gets a number in [`Method`]. DSA makes deltas and copies, not formats, and would
//! stand behind [`crate::delta`]; a GPU that is worth it takes several batches at a time, which the queue of an instance
//! may gather before it starts any.
//!
//! Devices encode only. Both decode deflate too, but not every stream of it (IAA looks back 4 KiB where deflate may 32), so
//! that a receiver would have to know what the sender used.

mod cpu;
mod dispatcher;
mod iaa;
mod qat;
mod request;

use thiserror::Error;

use crate::batch::Method;

pub use dispatcher::{Dispatched, Dispatcher};
pub use request::{Buffer, Outcome, Pool, Request};

/// Something that encodes batches.
pub trait Accelerator: Send + Sync {
    /// As it is called in reports.
    fn name(&self) -> &'static str;

    /// Whether it works beside the thread that submits, or is that thread.
    fn is_device(&self) -> bool {
        true
    }

    /// What it makes.
    fn methods(&self) -> &[Method];

    /// How many instances are worth opening.
    fn instances(&self) -> usize;

    /// One more.
    ///
    /// # Errors
    /// The device has none left, or does not do what it should.
    fn open(&self) -> Result<Box<dyn Instance>, OpenError>;
}

/// One queue of an accelerator.
pub trait Instance: Send {
    /// The accelerator's name.
    fn name(&self) -> &'static str;

    /// Whether it makes this.
    fn makes(&self, method: Method) -> bool;

    /// Takes a request of a method that it makes.
    ///
    /// # Errors
    /// As many requests as it takes are in flight; this one comes back unchanged.
    fn submit(&mut self, request: Box<Request>) -> Result<(), Box<Request>>;

    /// A request that is done, if one is; what works on this thread does so here, for one request.
    fn poll(&mut self) -> Option<Box<Request>>;

    /// Requests taken and not given back.
    fn in_flight(&self) -> usize;

    /// Since it was opened.
    fn statistics(&self) -> Statistics;
}

/// Why no instance of an accelerator can be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The library cannot be loaded.
    #[error("{why}")]
    Library {
        /// Its file.
        library: &'static str,
        /// In the words of the loader, which name the file.
        why: String,
    },
    /// The library does not behave like the version that it was written for.
    #[error("{library} is not used: {why}")]
    Layout {
        /// Its file.
        library: &'static str,
        /// What it did otherwise.
        why: &'static str,
    },
    /// There is nothing that the library could use.
    #[error("there is no {0}")]
    NoDevice(&'static str),
    /// The library refuses.
    #[error("{library}: {call} returned {status}")]
    Refused {
        /// Its file.
        library: &'static str,
        /// The function of the library.
        call: &'static str,
        /// What it returned.
        status: i64,
    },
}

/// What an instance has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests taken.
    pub submitted: u64,
    /// Requests given back.
    pub completed: u64,
    /// Of these, those that did not fit their limit.
    pub misfits: u64,
    /// And those that it failed on.
    pub failed: u64,
    /// Requests refused since as many as may be were in flight.
    pub refused: u64,
    /// Bytes of pages of requests that fitted.
    pub bytes_in: u64,
    /// Bytes that were made of them.
    pub bytes_out: u64,
    /// From taking a request to its end, or working on it where that was on the caller's thread; of several in flight the
    /// sum.
    pub ns: u64,
}

impl Statistics {
    fn complete(&mut self, request: &Request) {
        self.completed += 1;
        self.ns += request.ns();
        match request.outcome() {
            Outcome::Made(bytes) => {
                self.bytes_in += request.input_bytes() as u64;
                self.bytes_out += bytes as u64;
            }
            Outcome::Misfit => self.misfits += 1,
            Outcome::Failed | Outcome::Pending => self.failed += 1,
        }
    }
}

/// Where a device's library has a path without the device, whether that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Software {
    /// No: to migrate, since what this processor does by itself is the accelerator `cpu`.
    No,
    /// Yes: to test and to measure.
    Yes,
}

/// What is there, and what is not.
pub struct Found {
    /// The processor first.
    pub there: Vec<Box<dyn Accelerator>>,
    /// By name, and why.
    pub missing: Vec<(&'static str, OpenError)>,
}

/// Looks for all accelerators. Libraries are loaded once; devices are asked each time.
#[must_use]
pub fn find(software: Software) -> Found {
    let mut found = Found {
        there: vec![Box::new(cpu::Cpu)],
        missing: Vec::new(),
    };
    found.add("igzip", cpu::Igzip::find());
    found.add("qat", qat::Qat::find(software));
    found.add("iaa", iaa::Iaa::find(software));
    found
}

impl Found {
    fn add(&mut self, name: &'static str, accelerator: Result<impl Accelerator + 'static, OpenError>) {
        match accelerator {
            Ok(accelerator) => self.there.push(Box::new(accelerator)),
            Err(why) => self.missing.push((name, why)),
        }
    }
}

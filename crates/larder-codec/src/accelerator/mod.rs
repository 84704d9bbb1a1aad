//! Common interface to all units that encode batches: the CPU's cores, and devices.
//!
//! ```text
//! Pool::take -> Request::fill: method, Buffer, runs of pages, limit, tag
//!   -> Dispatcher::submit: the next instance in turn that makes the method and has room -> its bounded queue
//!   -> Dispatcher::poll: completed requests, in any order -> Request::outcome -> Pool::give
//! ```
//!
//! An [`Accelerator`] is an available unit: always the CPU, and a device if its library can be loaded and finds it.
//! An [`Instance`] is one queue to it, which one thread submits to and polls; several threads open several. A
//! submitted request belongs to the instance until it is returned. The input is read in place in the [`PageBuffer`]
//! that the request keeps alive (scattered runs are gathered first, as the formats require).
//!
//! Invariants:
//! - Each accepted request is returned exactly once, by the instance that accepted it. Queues are bounded, and a full
//!   one returns the request at once.
//! - [`crate::batch::Decoder`] decodes the output, whichever unit made it.
//! - A device that fails costs time and loses no batch: the dispatcher encodes the failed batch on the CPU, and stops
//!   using the device after repeated failures.
//! - Requests allocate nothing once the pool is created and each method has encoded a batch of 64 pages.
//!
//! | accelerator | methods | by |
//! | --- | --- | --- |
//! | `cpu` | all but deflate | LZ4, zstd |
//! | `igzip` | deflate | ISA-L (`libisal.so.2`), also on the CPU |
//! | `qat` | deflate | QATzip (`libqatzip.so.3`) and a QuickAssist device |
//! | `iaa` | deflate | QPL (`libqpl.so.1`) and an In-Memory Analytics Accelerator |
//!
//! Another device is another file with its [`Accelerator`]. One that makes a known format is added to [`find`]; a new
//! format gets a number in [`Method`]. DSA makes deltas and copies, not formats, and would be used by
//! [`crate::delta`]. A GPU that is worth using processes several batches at a time, which the queue of an instance
//! may collect before it starts any.
//!
//! Devices only encode. Both can decode deflate, but not every stream of it (IAA has a window of 4 KiB, deflate
//! allows 32), so a receiver would have to know which encoder the sender used.

mod cpu;
mod dispatcher;
mod iaa;
mod qat;
mod request;

use thiserror::Error;

use crate::batch::Method;

pub use dispatcher::{Dispatcher, InstanceState};
pub use request::{EncodeOutcome, EncodeRequest, PageBuffer, RequestPool};

/// Unit that encodes batches.
pub trait Accelerator: Send + Sync {
    /// Returns the name in reports.
    fn name(&self) -> &'static str;

    /// Returns whether the unit is a device, as opposed to the thread that submits.
    fn is_device(&self) -> bool {
        true
    }

    /// Returns the methods that the unit makes.
    fn methods(&self) -> &[Method];

    /// Returns the number of instances that are worth opening.
    fn instances(&self) -> usize;

    /// Opens another instance.
    ///
    /// # Errors
    /// The device has no further instance, or does not work as it should.
    fn open(&self) -> Result<Box<dyn Instance>, AcceleratorOpenError>;
}

/// Queue of an accelerator.
pub trait Instance: Send {
    /// Returns the accelerator's name.
    fn name(&self) -> &'static str;

    /// Returns whether the instance makes this method.
    fn supports(&self, method: Method) -> bool;

    /// Submits a request of a method that the instance makes.
    ///
    /// # Errors
    /// The queue is full; the request is returned unchanged.
    fn submit(&mut self, request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>>;

    /// Returns a completed request, if there is one. A unit that works on this thread encodes one request here.
    fn poll(&mut self) -> Option<Box<EncodeRequest>>;

    /// Returns the number of requests that were accepted and not returned.
    fn in_flight(&self) -> usize;

    /// Returns the statistics since the instance was opened.
    fn statistics(&self) -> InstanceStatistics;
}

/// Reason why no instance of an accelerator can be opened.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AcceleratorOpenError {
    /// The library cannot be loaded.
    #[error("{why}")]
    Library {
        /// File name of the library.
        library: &'static str,
        /// Message of the loader, which names the file.
        why: String,
    },
    /// The library does not behave like the supported version.
    #[error("{library} is not used: {why}")]
    Incompatible {
        /// File name of the library.
        library: &'static str,
        /// Description of the deviation.
        why: &'static str,
    },
    /// There is no device for the library.
    #[error("there is no {0}")]
    NoDevice(&'static str),
    /// A function of the library failed.
    #[error("{library}: {call} returned {status}")]
    CallFailed {
        /// File name of the library.
        library: &'static str,
        /// Function of the library.
        call: &'static str,
        /// Returned status.
        status: i64,
    },
}

/// Statistics of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceStatistics {
    /// Number of accepted requests.
    pub submitted: u64,
    /// Number of returned requests.
    pub completed: u64,
    /// Number of returned requests that did not fit their limit.
    pub incompressible: u64,
    /// Number of returned requests that failed.
    pub failed: u64,
    /// Number of requests that were refused because the queue was full.
    pub refused: u64,
    /// Input bytes of requests that fitted.
    pub bytes_in: u64,
    /// Output bytes of these requests.
    pub bytes_out: u64,
    /// Nanoseconds from accepting a request to its end, or of working on it if that was on the caller's thread; a sum
    /// over concurrent requests.
    pub ns: u64,
}

impl InstanceStatistics {
    fn record_completed(&mut self, request: &EncodeRequest) {
        self.completed += 1;
        self.ns += request.ns();
        match request.outcome() {
            EncodeOutcome::Encoded(bytes) => {
                self.bytes_in += request.input_bytes() as u64;
                self.bytes_out += bytes as u64;
            }
            EncodeOutcome::Incompressible => self.incompressible += 1,
            EncodeOutcome::Failed | EncodeOutcome::Pending => self.failed += 1,
        }
    }
}

/// Use of a software path in a device's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftwarePath {
    /// The software path is not used: for migrations, because the accelerator `cpu` already covers the CPU.
    Disabled,
    /// The software path is used: for tests and measurements.
    Enabled,
}

/// Result of the search for accelerators.
pub struct AcceleratorSearch {
    /// Available accelerators; the CPU is the first.
    pub available: Vec<Box<dyn Accelerator>>,
    /// Missing accelerators, by name, with the reason.
    pub missing: Vec<(&'static str, AcceleratorOpenError)>,
}

/// Finds all accelerators. Libraries are loaded once; devices are checked each time.
#[must_use]
pub fn find(software: SoftwarePath) -> AcceleratorSearch {
    let mut found = AcceleratorSearch { available: vec![Box::new(cpu::Cpu)], missing: Vec::new() };
    found.add("igzip", cpu::Igzip::find());
    found.add("qat", qat::Qat::find(software));
    found.add("iaa", iaa::Iaa::find(software));
    found
}

impl AcceleratorSearch {
    fn add(&mut self, name: &'static str, accelerator: Result<impl Accelerator + 'static, AcceleratorOpenError>) {
        match accelerator {
            Ok(accelerator) => self.available.push(Box::new(accelerator)),
            Err(why) => self.missing.push((name, why)),
        }
    }
}

//! Intel's In-Memory Analytics Accelerator, by QPL, `libqpl.so.1`, loaded at its first use.
//!
//! A job runs on the device while the thread continues. On request, the library's software path executes it when it
//! is submitted. Both make raw deflate with a window of 4 KiB.
//!
//! The first fields of `qpl_job` are declared here after QPL 1.6 (they are the same since 1.0). A library with
//! another layout must do no harm and is not used: a job lies in larger memory than the library requests, and the
//! output for known pages must be readable by zlib-rs.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::OnceLock;

use libloading::Library;

use super::{
    Accelerator, AcceleratorOpenError, EncodeOutcome, EncodeRequest, Instance, InstanceStatistics, SoftwarePath,
};
use crate::batch::{BATCH_BYTES, Method};
use crate::library;

const LIBRARY: &str = "libqpl.so.1";

/// `qpl_job`, as far as it is used.
#[repr(C)]
struct JobHead {
    next_in: *const u8,
    available_in: u32,
    total_in: u32,
    next_out: *mut u8,
    available_out: u32,
    total_out: u32,
    op: c_int,
    flags: u32,
    crc: u32,
    xor_checksum: u32,
    last_bit_offset: u32,
    level: c_int,
}

const PATH_HARDWARE: c_int = 1;
const PATH_SOFTWARE: c_int = 2;
const OP_COMPRESS: c_int = 1;
/// First and last part of a stream, with dynamic Huffman codes, without verification by the library.
const FLAGS: u32 = 0x0001 | 0x0002 | 0x2000 | 0x4000;
const LEVEL: c_int = 1;
const STATUS_OK: c_int = 0;
const STATUS_BEING_PROCESSED: c_int = 1;
const STATUS_MORE_OUTPUT_NEEDED: c_int = 2;
const STATUS_QUEUES_ARE_BUSY: c_int = 5;
/// Largest accepted size of a job, in bytes. A job takes about 500 KiB in either path.
const JOB_BYTES_MAX: u32 = 16 << 20;

/// Functions of the library, which is never unloaded.
#[derive(Clone, Copy)]
struct Functions {
    job_size: unsafe extern "C" fn(c_int, *mut u32) -> c_int,
    init: unsafe extern "C" fn(c_int, NonNull<JobHead>) -> c_int,
    submit: unsafe extern "C" fn(NonNull<JobHead>) -> c_int,
    check: unsafe extern "C" fn(NonNull<JobHead>) -> c_int,
    wait: unsafe extern "C" fn(NonNull<JobHead>) -> c_int,
    fini: unsafe extern "C" fn(NonNull<JobHead>) -> c_int,
}

fn loaded() -> Result<Functions, AcceleratorOpenError> {
    static LOADED: OnceLock<Result<Functions, AcceleratorOpenError>> = OnceLock::new();
    LOADED.get_or_init(load).clone()
}

fn load() -> Result<Functions, AcceleratorOpenError> {
    let absent =
        |why: libloading::Error| AcceleratorOpenError::Library { library: LIBRARY, why: library::reason(&why) };
    // SAFETY: QPL searches for devices when it is loaded. Another library of this name is the administrator's
    // responsibility.
    let library = unsafe { Library::new(LIBRARY) }.map_err(absent)?;
    // SAFETY: these are the signatures of `qpl/c_api/job.h`, with a job's first fields in place of the job.
    let functions = unsafe {
        Functions {
            job_size: *library.get(c"qpl_get_job_size").map_err(absent)?,
            init: *library.get(c"qpl_init_job").map_err(absent)?,
            submit: *library.get(c"qpl_submit_job").map_err(absent)?,
            check: *library.get(c"qpl_check_job").map_err(absent)?,
            wait: *library.get(c"qpl_wait_job").map_err(absent)?,
            fini: *library.get(c"qpl_fini_job").map_err(absent)?,
        }
    };
    // The library must stay loaded, because the functions are used from now on.
    std::mem::forget(library);
    Ok(functions)
}

pub(super) struct Iaa {
    functions: Functions,
    path: c_int,
}

impl Iaa {
    /// Finds a device, or uses the software path.
    pub(super) fn find(software: SoftwarePath) -> Result<Self, AcceleratorOpenError> {
        let iaa = Self {
            functions: loaded()?,
            path: match software {
                SoftwarePath::Disabled => PATH_HARDWARE,
                SoftwarePath::Enabled => PATH_SOFTWARE,
            },
        };
        let mut job = Job::new(iaa.functions, iaa.path)?;
        super::request::self_test(|pages, out| match job.start(pages, out) {
            JobStart::Running => job.wait(),
            JobStart::Ended(outcome) => outcome,
            JobStart::QueuesFull => EncodeOutcome::Failed,
        })
        .map_err(|why| AcceleratorOpenError::Incompatible { library: LIBRARY, why })?;
        Ok(iaa)
    }
}

impl Accelerator for Iaa {
    fn name(&self) -> &'static str {
        "iaa"
    }

    fn methods(&self) -> &[Method] {
        &[Method::Deflate]
    }

    /// Returns one instance for each of the sender's threads; the library distributes the devices' queues.
    fn instances(&self) -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    fn open(&self) -> Result<Box<dyn Instance>, AcceleratorOpenError> {
        let lane = || {
            Ok(Lane {
                job: Job::new(self.functions, self.path)?,
                gathered: vec![0; BATCH_BYTES].into(),
                request: None,
                is_done: false,
            })
        };
        Ok(Box::new(IaaInstance {
            lanes: (0..LANES).map(|_| lane()).collect::<Result<_, AcceleratorOpenError>>()?,
            oldest: 0,
            in_flight: 0,
            statistics: InstanceStatistics::default(),
        }))
    }
}

/// Number of requests on the device at a time.
const LANES: usize = 8;

struct IaaInstance {
    /// Lanes, used in turn; requests are returned in the same order.
    lanes: Vec<Lane>,
    oldest: usize,
    in_flight: usize,
    statistics: InstanceStatistics,
}

/// Job with its request.
struct Lane {
    /// Declared before the memory that it reads and writes, so that it is dropped, and thus ended, first.
    job: Job,
    gathered: Box<[u8]>,
    request: Option<Box<EncodeRequest>>,
    /// True if the job ended when it was started.
    is_done: bool,
}

impl Instance for IaaInstance {
    fn name(&self) -> &'static str {
        "iaa"
    }

    fn supports(&self, method: Method) -> bool {
        method == Method::Deflate
    }

    fn submit(&mut self, mut request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>> {
        if self.in_flight == LANES {
            self.statistics.refused += 1;
            return Err(request);
        }
        let lane = &mut self.lanes[(self.oldest + self.in_flight) % LANES];
        request.start();
        let (input, out) = request.device_buffers(&mut lane.gathered);
        // The memory that the job reads and writes stays in place until the job has ended: the lane keeps the
        // request, which keeps the buffer, and the lane's own memory.
        lane.is_done = match lane.job.start(input, out) {
            JobStart::Running => false,
            JobStart::Ended(outcome) => {
                request.finish(outcome);
                true
            }
            JobStart::QueuesFull => {
                self.statistics.refused += 1;
                return Err(request);
            }
        };
        lane.request = Some(request);
        self.in_flight += 1;
        self.statistics.submitted += 1;
        Ok(())
    }

    fn poll(&mut self) -> Option<Box<EncodeRequest>> {
        let lane = &mut self.lanes[self.oldest];
        if !lane.is_done {
            let outcome = lane.job.check()?;
            lane.request.as_mut()?.finish(outcome);
        }
        let request = lane.request.take()?;
        self.oldest = (self.oldest + 1) % LANES;
        self.in_flight -= 1;
        self.statistics.record_completed(&request);
        Some(request)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn statistics(&self) -> InstanceStatistics {
        self.statistics
    }
}

/// Result of starting a job.
enum JobStart {
    Running,
    Ended(EncodeOutcome),
    /// The device's queues are full.
    QueuesFull,
}

/// `qpl_job` with its memory.
struct Job {
    functions: Functions,
    memory: Box<[Line]>,
    /// True if it runs on the device.
    is_running: bool,
    /// Length of its input, in bytes.
    input_bytes: u32,
}

// SAFETY: self owns the job's memory, and the library allows any thread to use a job, one at a time.
unsafe impl Send for Job {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Job {
    fn new(functions: Functions, path: c_int) -> Result<Self, AcceleratorOpenError> {
        let refused =
            |call, status: c_int| AcceleratorOpenError::CallFailed { library: LIBRARY, call, status: status.into() };
        let mut bytes = 0;
        // SAFETY: the function only writes the size.
        let status = unsafe { (functions.job_size)(path, &raw mut bytes) };
        if status != 0 || !(size_of::<JobHead>() as u32..JOB_BYTES_MAX).contains(&bytes) {
            return Err(refused("qpl_get_job_size", status));
        }
        let lines = (bytes as usize + 4096).div_ceil(size_of::<Line>());
        let mut memory: Box<[Line]> = vec![Line([0; 64]); lines].into();
        // SAFETY: the memory is larger than the library requests.
        let status = unsafe { (functions.init)(path, head_of(&mut memory)) };
        if status != 0 {
            return Err(refused("qpl_init_job", status));
        }
        Ok(Self { functions, memory, is_running: false, input_bytes: 0 })
    }

    /// Starts the job. If it runs, both slices must stay unchanged until [`Self::check`] or [`Self::wait`] returns
    /// the outcome, or this job is dropped.
    fn start(&mut self, input: &[u8], out: &mut [u8]) -> JobStart {
        assert!(!self.is_running, "the job is already running");
        let (Ok(input_bytes), Ok(available_out)) = (u32::try_from(input.len()), u32::try_from(out.len())) else {
            return JobStart::Ended(EncodeOutcome::Failed);
        };
        self.input_bytes = input_bytes;
        let mut job = head_of(&mut self.memory);
        // SAFETY: the library initialised the job in this memory, and the job does not run. The buffers have the
        // given lengths, and stay in place until it has ended; see above.
        let status = unsafe {
            let head = job.as_mut();
            head.next_in = input.as_ptr();
            head.available_in = input_bytes;
            head.total_in = 0;
            head.next_out = out.as_mut_ptr();
            head.available_out = available_out;
            head.total_out = 0;
            head.op = OP_COMPRESS;
            head.flags = FLAGS;
            head.level = LEVEL;
            (self.functions.submit)(job)
        };
        match status {
            STATUS_OK => {
                self.is_running = true;
                JobStart::Running
            }
            STATUS_QUEUES_ARE_BUSY => JobStart::QueuesFull,
            _ => JobStart::Ended(self.outcome(status)),
        }
    }

    fn check(&mut self) -> Option<EncodeOutcome> {
        // SAFETY: the job was submitted.
        let status = unsafe { (self.functions.check)(head_of(&mut self.memory)) };
        if status == STATUS_BEING_PROCESSED {
            return None;
        }
        self.is_running = false;
        Some(self.outcome(status))
    }

    fn wait(&mut self) -> EncodeOutcome {
        // SAFETY: as in `check`.
        let status = unsafe { (self.functions.wait)(head_of(&mut self.memory)) };
        self.is_running = false;
        self.outcome(status)
    }

    fn outcome(&mut self, status: c_int) -> EncodeOutcome {
        // SAFETY: the job does not run, and its first fields are integers and pointers.
        let head = unsafe { head_of(&mut self.memory).as_ref() };
        match status {
            STATUS_OK if head.total_in == self.input_bytes => EncodeOutcome::Encoded(head.total_out as usize),
            STATUS_OK | STATUS_MORE_OUTPUT_NEEDED => EncodeOutcome::Incompressible,
            _ => EncodeOutcome::Failed,
        }
    }
}

/// Returns the job at the start of the memory.
fn head_of(memory: &mut [Line]) -> NonNull<JobHead> {
    NonNull::new(memory.as_mut_ptr().cast()).expect("a box pointer is never null")
}

impl Drop for Job {
    fn drop(&mut self) {
        let job = head_of(&mut self.memory);
        // SAFETY: the library initialised the job. A running job must end before the memory that it reads and writes
        // is freed.
        unsafe {
            if self.is_running {
                (self.functions.wait)(job);
            }
            (self.functions.fini)(job);
        }
    }
}

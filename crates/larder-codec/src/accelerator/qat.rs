//! Intel QuickAssist, by QATzip, `libqatzip.so.3`, loaded at its first use.
//!
//! Its interface is blocking: polling an instance encodes the next request of its queue, on the device, or on request
//! by QATzip's own software path if there is no device. Both make raw deflate in pieces of 64 KiB. They receive a
//! buffer that is large enough for every output, and outputs that fit are copied: with too small a buffer the
//! software path fails, and leaks memory.
//!
//! `QzSession_T` is 40 bytes that the library fills; `QzSessionParams_T` is declared here after 1.3. A library with
//! another layout must do no harm and is not used. Both structures therefore lie in far larger memory. The defaults
//! that the library fills in must be the documented ones at their offsets, and the output for known pages must be
//! readable by zlib-rs.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uchar, c_uint};
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;

use super::{
    Accelerator, AcceleratorOpenError, EncodeOutcome, EncodeRequest, Instance, InstanceStatistics, SoftwarePath,
};
use crate::batch::{BATCH_BYTES, Method};
use crate::library;

const LIBRARY: &str = "libqatzip.so.3";

/// `QzSession_T`, which is internal to the library.
#[repr(C, align(64))]
struct Session([u8; 4096]);

/// `QzSessionParams_T`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    huffman_hdr: c_uint,
    direction: c_uint,
    data_fmt: c_uint,
    comp_lvl: c_uint,
    comp_algorithm: c_uchar,
    max_forks: c_uint,
    sw_backup: c_uchar,
    hw_buff_sz: c_uint,
    strm_buff_sz: c_uint,
    input_size_threshold: c_uint,
    request_count_threshold: c_uint,
    wait_count_threshold: c_uint,
}

/// Returns whether the parameters used here have the library's documented defaults: dynamic codes, both directions,
/// gzip with an extended header, level 1, deflate, 64 KiB at a time.
const fn is_default(params: &Params) -> bool {
    params.huffman_hdr == 0
        && params.direction == 2
        && params.data_fmt == 2
        && params.comp_lvl == 1
        && params.comp_algorithm == 8
        && params.sw_backup & 1 == 1
        && params.hw_buff_sz == 64 << 10
        && params.input_size_threshold == 1024
}

/// Direction: compression only.
const DIRECTION_COMPRESS: c_uint = 0;
/// Format: raw deflate.
const FORMAT_RAW: c_uint = 3;
/// Value of `sw_backup`: software if there is no device.
const SOFTWARE_BACKUP: c_uchar = 1;
/// Device files of the kernel's own driver, and of Intel's.
const DEVICES: [&str; 2] = ["/dev/vfio", "/dev/qat_adf_ctl"];
/// Output buffer size, in bytes: more than raw deflate takes in either path.
const OUTPUT_BYTES_MAX: usize = BATCH_BYTES + BATCH_BYTES / 8 + 4096;
const LOG_NONE: c_int = 0;

/// Memory for the parameters, large enough for those of a later version.
#[repr(C, align(64))]
union ParamsBuffer {
    params: Params,
    bytes: [u8; 1024],
}

/// Functions of the library, which is never unloaded.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut Session, c_uchar) -> c_int,
    defaults: unsafe extern "C" fn(*mut ParamsBuffer) -> c_int,
    setup: unsafe extern "C" fn(*mut Session, *mut ParamsBuffer) -> c_int,
    compress:
        unsafe extern "C" fn(*mut Session, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint, c_uint) -> c_int,
    teardown: unsafe extern "C" fn(*mut Session) -> c_int,
    close: unsafe extern "C" fn(*mut Session) -> c_int,
}

fn loaded() -> Result<Functions, AcceleratorOpenError> {
    static LOADED: OnceLock<Result<Functions, AcceleratorOpenError>> = OnceLock::new();
    LOADED.get_or_init(load).clone()
}

fn load() -> Result<Functions, AcceleratorOpenError> {
    let absent =
        |why: libloading::Error| AcceleratorOpenError::Library { library: LIBRARY, why: library::reason(&why) };
    // SAFETY: loading QATzip has no relevant effects. Another library of this name is the administrator's
    // responsibility.
    let library = unsafe { Library::new(LIBRARY) }.map_err(absent)?;
    // SAFETY: these are the signatures of `qatzip.h`, with a larger structure in place of each structure.
    let functions = unsafe {
        // Errors are reported by return values; messages on the terminal would only disturb.
        let set_log_level: unsafe extern "C" fn(c_int) -> c_int = *library.get(c"qzSetLogLevel").map_err(absent)?;
        set_log_level(LOG_NONE);
        Functions {
            init: *library.get(c"qzInit").map_err(absent)?,
            defaults: *library.get(c"qzGetDefaults").map_err(absent)?,
            setup: *library.get(c"qzSetupSession").map_err(absent)?,
            compress: *library.get(c"qzCompress").map_err(absent)?,
            teardown: *library.get(c"qzTeardownSession").map_err(absent)?,
            close: *library.get(c"qzClose").map_err(absent)?,
        }
    };
    // The library must stay loaded, because the functions are used from now on.
    std::mem::forget(library);
    Ok(functions)
}

pub(super) struct Qat {
    functions: Functions,
    software: SoftwarePath,
}

impl Qat {
    /// Finds a device, or uses the software path.
    pub(super) fn find(software: SoftwarePath) -> Result<Self, AcceleratorOpenError> {
        // Otherwise the library would print messages on the terminal, regardless of its log level.
        if software == SoftwarePath::Disabled && !DEVICES.iter().any(|path| Path::new(path).exists()) {
            return Err(AcceleratorOpenError::NoDevice("/dev/vfio or /dev/qat_adf_ctl"));
        }
        let qat = Self { functions: loaded()?, software };
        // Checks that a device exists and works.
        QatInstance::new(qat.functions, software)?;
        Ok(qat)
    }
}

impl Accelerator for Qat {
    fn name(&self) -> &'static str {
        "qat"
    }

    fn methods(&self) -> &[Method] {
        &[Method::Deflate]
    }

    /// Returns one instance for each of the sender's threads; the library distributes the device's own instances.
    fn instances(&self) -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    fn open(&self) -> Result<Box<dyn Instance>, AcceleratorOpenError> {
        Ok(Box::new(QatInstance::new(self.functions, self.software)?))
    }
}

struct QatInstance {
    functions: Functions,
    session: Box<Session>,
    gathered: Box<[u8]>,
    output: Box<[u8]>,
    queue: VecDeque<Box<EncodeRequest>>,
    statistics: InstanceStatistics,
}

// SAFETY: self owns the session's memory, and the library allows one thread at a time to use a session, whichever it
// is.
unsafe impl Send for QatInstance {}

impl QatInstance {
    const QUEUE_MAX: usize = 4;

    fn new(functions: Functions, software: SoftwarePath) -> Result<Self, AcceleratorOpenError> {
        let refused =
            |call, status: c_int| AcceleratorOpenError::CallFailed { library: LIBRARY, call, status: status.into() };
        // Built first, so that the session is closed on every path.
        let mut instance = Self {
            functions,
            session: Box::new(Session([0; 4096])),
            gathered: vec![0; BATCH_BYTES].into(),
            output: vec![0; OUTPUT_BYTES_MAX].into(),
            queue: VecDeque::with_capacity(Self::QUEUE_MAX),
            statistics: InstanceStatistics::default(),
        };
        let session: *mut Session = &raw mut *instance.session;
        let backup = match software {
            SoftwarePath::Disabled => 0,
            SoftwarePath::Enabled => SOFTWARE_BACKUP,
        };
        let mut params_buffer = ParamsBuffer { bytes: [0; 1024] };
        // SAFETY: both structures lie in larger memory than they need, zeroed as the library requires for a new
        // session, and exclusively owned. All bits are valid for the parameters, which are integers.
        unsafe {
            // Status: 0, or 1 if another thread has initialised it, or more if software is used instead of a device.
            let status = (functions.init)(session, backup);
            if status < 0 || (software == SoftwarePath::Disabled && status > 1) {
                return Err(refused("qzInit", status));
            }
            let status = (functions.defaults)(&raw mut params_buffer);
            if status != 0 {
                return Err(refused("qzGetDefaults", status));
            }
            if !is_default(&params_buffer.params) {
                return Err(AcceleratorOpenError::Incompatible {
                    library: LIBRARY,
                    why: "its default parameters differ from those of version 1.3",
                });
            }
            params_buffer.params.direction = DIRECTION_COMPRESS;
            params_buffer.params.data_fmt = FORMAT_RAW;
            params_buffer.params.sw_backup = backup;
            let status = (functions.setup)(session, &raw mut params_buffer);
            if status < 0 || (software == SoftwarePath::Disabled && status > 1) {
                return Err(refused("qzSetupSession", status));
            }
        }
        super::request::self_test(|pages, out| instance.compress(pages, out))
            .map_err(|why| AcceleratorOpenError::Incompatible { library: LIBRARY, why })?;
        Ok(instance)
    }

    fn compress(&mut self, input: &[u8], out: &mut [u8]) -> EncodeOutcome {
        compress(self.functions, &mut self.session, &mut self.output, input, out)
    }
}

fn compress(
    functions: Functions,
    session: &mut Session,
    buffer: &mut [u8],
    input: &[u8],
    out: &mut [u8],
) -> EncodeOutcome {
    let (Ok(input_bytes), Ok(buffer_bytes)) = (c_uint::try_from(input.len()), c_uint::try_from(buffer.len())) else {
        return EncodeOutcome::Failed;
    };
    let (mut consumed, mut produced) = (input_bytes, buffer_bytes);
    // SAFETY: the session is set up; the buffers have the given lengths, and are not used after the call.
    let status = unsafe {
        (functions.compress)(session, input.as_ptr(), &raw mut consumed, buffer.as_mut_ptr(), &raw mut produced, 1)
    };
    if status != 0 || consumed != input_bytes {
        return EncodeOutcome::Failed;
    }
    let Some(made) = buffer.get(..produced as usize) else {
        return EncodeOutcome::Failed;
    };
    match out.get_mut(..made.len()) {
        Some(target) => {
            target.copy_from_slice(made);
            EncodeOutcome::Encoded(made.len())
        }
        None => EncodeOutcome::Incompressible,
    }
}

impl Drop for QatInstance {
    fn drop(&mut self) {
        // SAFETY: the session was passed to the library, which itself checks how far it was set up.
        unsafe {
            (self.functions.teardown)(&raw mut *self.session);
            (self.functions.close)(&raw mut *self.session);
        }
    }
}

impl Instance for QatInstance {
    fn name(&self) -> &'static str {
        "qat"
    }

    fn supports(&self, method: Method) -> bool {
        method == Method::Deflate
    }

    fn submit(&mut self, request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>> {
        if self.queue.len() == Self::QUEUE_MAX {
            self.statistics.refused += 1;
            return Err(request);
        }
        self.statistics.submitted += 1;
        self.queue.push_back(request);
        Ok(())
    }

    fn poll(&mut self) -> Option<Box<EncodeRequest>> {
        let mut request = self.queue.pop_front()?;
        request.start();
        let (input, out) = request.device_buffers(&mut self.gathered);
        let outcome = compress(self.functions, &mut self.session, &mut self.output, input, out);
        request.finish(outcome);
        self.statistics.record_completed(&request);
        Some(request)
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn statistics(&self) -> InstanceStatistics {
        self.statistics
    }
}

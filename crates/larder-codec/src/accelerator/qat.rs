//! Intel QuickAssist, by QATzip, `libqatzip.so.3`, loaded when it is first asked for.
//!
//! Its interface is blocking: polling an instance encodes the next request of its queue, on the device or, where there is
//! none and that is wanted, by QATzip's own software path. Both make raw deflate in pieces of 64 KiB. They get room for
//! whatever they make, and what fits is copied: with too little of it the software path fails, and loses memory.
//!
//! `QzSession_T` is 40 bytes that the library fills, `QzSessionParams_T` is written down here after 1.3. A library with
//! another layout must do no harm and is not used: both lie in far more room than they need, the defaults that the library
//! fills in must be those that it documents, where they should be, and known pages must come out as zlib-rs reads them.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uchar, c_uint};
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;

use super::{Accelerator, Instance, OpenError, Outcome, Request, Software, Statistics};
use crate::batch::{BATCH_BYTES, Method};
use crate::library;

const LIBRARY: &str = "libqatzip.so.3";

/// `QzSession_T`, all the library's own.
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

/// The library's documented defaults of what is used here: dynamic codes, both directions, gzip with an extended header,
/// level 1, deflate, 64 KiB at a time.
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

/// Compression only.
const DIRECTION_COMPRESS: c_uint = 0;
/// Raw deflate.
const FORMAT_RAW: c_uint = 3;
/// In `sw_backup`: software where there is no device.
const SOFTWARE_BACKUP: c_uchar = 1;
/// Of the kernel's own driver, and of Intel's.
const DEVICES: [&str; 2] = ["/dev/vfio", "/dev/qat_adf_ctl"];
/// More than raw deflate takes in either path.
const ROOM_BYTES: usize = BATCH_BYTES + BATCH_BYTES / 8 + 4096;
const LOG_NONE: c_int = 0;

/// Room for the parameters of a later version.
#[repr(C, align(64))]
union ParamsRoom {
    params: Params,
    bytes: [u8; 1024],
}

/// The library's functions; it is never unloaded.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut Session, c_uchar) -> c_int,
    defaults: unsafe extern "C" fn(*mut ParamsRoom) -> c_int,
    setup: unsafe extern "C" fn(*mut Session, *mut ParamsRoom) -> c_int,
    compress:
        unsafe extern "C" fn(*mut Session, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint, c_uint) -> c_int,
    teardown: unsafe extern "C" fn(*mut Session) -> c_int,
    close: unsafe extern "C" fn(*mut Session) -> c_int,
}

fn loaded() -> Result<Functions, OpenError> {
    static LOADED: OnceLock<Result<Functions, OpenError>> = OnceLock::new();
    LOADED.get_or_init(load).clone()
}

fn load() -> Result<Functions, OpenError> {
    let absent = |why: libloading::Error| OpenError::Library {
        library: LIBRARY,
        why: library::reason(&why),
    };
    // SAFETY: QATzip runs nothing of note when it is loaded. Another library of this name is the administrator's doing.
    let library = unsafe { Library::new(LIBRARY) }.map_err(absent)?;
    // SAFETY: these are the signatures of `qatzip.h`, with the room for a structure instead of the structure.
    let functions = unsafe {
        // An error is told by what is returned; on the terminal it would be in the way.
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
    // The functions stay where they are.
    std::mem::forget(library);
    Ok(functions)
}

pub(super) struct Qat {
    functions: Functions,
    software: Software,
}

impl Qat {
    /// Looks for a device, or makes do without.
    pub(super) fn find(software: Software) -> Result<Self, OpenError> {
        // Else the library would complain on the terminal, whatever its log level is.
        if software == Software::No && !DEVICES.iter().any(|path| Path::new(path).exists()) {
            return Err(OpenError::NoDevice("/dev/vfio or /dev/qat_adf_ctl"));
        }
        let qat = Self {
            functions: loaded()?,
            software,
        };
        // Whether there is one, and whether all is as it should be.
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

    /// One for each of the sender's threads; the library shares the device's own instances out.
    fn instances(&self) -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    fn open(&self) -> Result<Box<dyn Instance>, OpenError> {
        Ok(Box::new(QatInstance::new(self.functions, self.software)?))
    }
}

struct QatInstance {
    functions: Functions,
    session: Box<Session>,
    gathered: Box<[u8]>,
    made: Box<[u8]>,
    queue: VecDeque<Box<Request>>,
    statistics: Statistics,
}

// SAFETY: the session's memory is its own, and the library lets one thread at a time use a session, whichever it is.
unsafe impl Send for QatInstance {}

impl QatInstance {
    const QUEUE_MAX: usize = 4;

    fn new(functions: Functions, software: Software) -> Result<Self, OpenError> {
        let refused = |call, status: c_int| OpenError::Refused {
            library: LIBRARY,
            call,
            status: status.into(),
        };
        // Built first, so that whatever follows, the session is closed.
        let mut instance = Self {
            functions,
            session: Box::new(Session([0; 4096])),
            gathered: vec![0; BATCH_BYTES].into(),
            made: vec![0; ROOM_BYTES].into(),
            queue: VecDeque::with_capacity(Self::QUEUE_MAX),
            statistics: Statistics::default(),
        };
        let session: *mut Session = &raw mut *instance.session;
        let backup = match software {
            Software::No => 0,
            Software::Yes => SOFTWARE_BACKUP,
        };
        let mut room = ParamsRoom { bytes: [0; 1024] };
        // SAFETY: both structures lie in more room than they need, zeroed as the library wants a new session, and are no
        // one else's; all bits are valid for the parameters, which are of integers.
        unsafe {
            // 0, or 1 if another thread has done so, or more if software is used instead of a device.
            let status = (functions.init)(session, backup);
            if status < 0 || (software == Software::No && status > 1) {
                return Err(refused("qzInit", status));
            }
            let status = (functions.defaults)(&raw mut room);
            if status != 0 {
                return Err(refused("qzGetDefaults", status));
            }
            if !is_default(&room.params) {
                return Err(OpenError::Layout {
                    library: LIBRARY,
                    why: "its defaults are not where those of version 1.3 are",
                });
            }
            room.params.direction = DIRECTION_COMPRESS;
            room.params.data_fmt = FORMAT_RAW;
            room.params.sw_backup = backup;
            let status = (functions.setup)(session, &raw mut room);
            if status < 0 || (software == Software::No && status > 1) {
                return Err(refused("qzSetupSession", status));
            }
        }
        super::request::trial(|pages, out| instance.compress(pages, out))
            .map_err(|why| OpenError::Layout { library: LIBRARY, why })?;
        Ok(instance)
    }

    fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Outcome {
        compress(self.functions, &mut self.session, &mut self.made, input, out)
    }
}

fn compress(functions: Functions, session: &mut Session, room: &mut [u8], input: &[u8], out: &mut [u8]) -> Outcome {
    let (Ok(wanted), Ok(room_bytes)) = (c_uint::try_from(input.len()), c_uint::try_from(room.len())) else {
        return Outcome::Failed;
    };
    let (mut taken, mut made) = (wanted, room_bytes);
    // SAFETY: the session is set up; the buffers are as long as is said, and not used after the call.
    let status = unsafe {
        (functions.compress)(
            session,
            input.as_ptr(),
            &raw mut taken,
            room.as_mut_ptr(),
            &raw mut made,
            1,
        )
    };
    if status != 0 || taken != wanted {
        return Outcome::Failed;
    }
    let Some(made) = room.get(..made as usize) else {
        return Outcome::Failed;
    };
    match out.get_mut(..made.len()) {
        Some(place) => {
            place.copy_from_slice(made);
            Outcome::Made(made.len())
        }
        None => Outcome::Misfit,
    }
}

impl Drop for QatInstance {
    fn drop(&mut self) {
        // SAFETY: the session was given to the library, which sees for itself how far it was set up.
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

    fn makes(&self, method: Method) -> bool {
        method == Method::Deflate
    }

    fn submit(&mut self, request: Box<Request>) -> Result<(), Box<Request>> {
        if self.queue.len() == Self::QUEUE_MAX {
            self.statistics.refused += 1;
            return Err(request);
        }
        self.statistics.submitted += 1;
        self.queue.push_back(request);
        Ok(())
    }

    fn poll(&mut self) -> Option<Box<Request>> {
        let mut request = self.queue.pop_front()?;
        request.start();
        let (input, out) = request.for_device(&mut self.gathered);
        let outcome = compress(self.functions, &mut self.session, &mut self.made, input, out);
        request.finish(outcome);
        self.statistics.complete(&request);
        Some(request)
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }
}

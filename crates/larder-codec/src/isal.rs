//! Intel's ISA-L, `libisal.so.2`, loaded at its first use: deflate at a level of its own, with vector instructions.
//!
//! Its streams are C structures of 82 and 88 KiB, most of which is internal to the library. Their first fields are
//! public and declared here after ISA-L 2.30 (2.31 has the same). A library with another layout must do no harm and
//! is not used. Both structures therefore lie at the start of far larger memory. A library is refused permanently if
//! it does not encode and decode known pages exactly through these fields, and compatibly with zlib-rs, or if it
//! touches the end of that memory.
//!
//! `isal_deflate_stateless` and `isal_inflate_stateless` respect the lengths of both buffers for every input; the
//! tests run damaged streams between inaccessible pages.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use libloading::Library;

use crate::library;

pub(crate) const LIBRARY: &str = "libisal.so.2";

/// Reason why igzip is not used.
#[derive(Clone, Debug)]
pub(crate) enum LoadError {
    /// The library cannot be loaded; the message of the loader.
    Absent(String),
    /// The library behaves differently; a description.
    Incompatible(&'static str),
}

type StreamFn = unsafe extern "C" fn(NonNull<StreamHead>) -> c_int;
type InitStreamFn = unsafe extern "C" fn(NonNull<StreamHead>);
type StateFn = unsafe extern "C" fn(NonNull<StateHead>) -> c_int;
type InitStateFn = unsafe extern "C" fn(NonNull<StateHead>);

/// Functions of the library, which is never unloaded.
#[derive(Clone, Copy)]
pub(crate) struct Isal {
    deflate_init: InitStreamFn,
    deflate: StreamFn,
    inflate_init: InitStateFn,
    inflate: StateFn,
}

/// Returns the library, if a usable one exists.
pub(crate) fn loaded() -> Result<Isal, &'static LoadError> {
    static LOADED: OnceLock<Result<Isal, LoadError>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().copied()
}

fn load() -> Result<Isal, LoadError> {
    let absent = |why: libloading::Error| LoadError::Absent(library::reason(&why));
    // SAFETY: when ISA-L is loaded it only selects functions by the CPU's features. Another library of this name is
    // the responsibility of the administrator, as for every library that the program is linked to.
    let library = unsafe { Library::new(LIBRARY) }.map_err(absent)?;
    // SAFETY: these are the signatures of `igzip_lib.h`, with a pointer to the declared head in place of the
    // structure; the self-test below checks the layout.
    let isal = unsafe {
        Isal {
            deflate_init: *library.get(c"isal_deflate_stateless_init").map_err(absent)?,
            deflate: *library.get(c"isal_deflate_stateless").map_err(absent)?,
            inflate_init: *library.get(c"isal_inflate_init").map_err(absent)?,
            inflate: *library.get(c"isal_inflate_stateless").map_err(absent)?,
        }
    };
    // The library must stay loaded, because the functions are used from now on.
    std::mem::forget(library);
    self_test(isal).map_err(LoadError::Incompatible)?;
    Ok(isal)
}

/// `struct isal_zstream` up to the library's internal state.
#[repr(C)]
struct StreamHead {
    next_in: *const u8,
    avail_in: u32,
    total_in: u32,
    next_out: *mut u8,
    avail_out: u32,
    total_out: u32,
    hufftables: *const u8,
    level: u32,
    level_buf_size: u32,
    level_buf: *mut u8,
    end_of_stream: u16,
    flush: u16,
    gzip_flag: u16,
    hist_bits: u16,
}

/// `struct inflate_state` up to the library's tables.
#[repr(C)]
struct StateHead {
    next_out: *mut u8,
    avail_out: u32,
    total_out: u32,
    next_in: *const u8,
    read_in: u64,
    avail_in: u32,
    read_in_length: i32,
}

/// Zeroed memory, aligned to a cache line. 256 KiB are three times the size of either structure.
struct AlignedMemory(Box<[Line]>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl AlignedMemory {
    fn new(bytes: usize) -> Self {
        Self(vec![Line([0; 64]); bytes.div_ceil(64)].into())
    }

    /// Returns a pointer to the start of the memory. `T` must be smaller than it, and valid if all bytes are zero.
    fn start<T>(&mut self) -> NonNull<T> {
        NonNull::new(self.0.as_mut_ptr().cast()).expect("a box pointer is never null")
    }
}

const STRUCTURE_MEMORY_BYTES: usize = 256 << 10;
/// `ISAL_DEF_LVL1_DEFAULT`: a hash table, and tokens of 64 Ki matches and literals, which form a block.
const LEVEL_BUFFER_BYTES: usize = 282_624;

/// Encoder with igzip's level 1, which takes little longer than level 0 and leaves a tenth to a half less.
pub(crate) struct Deflate {
    isal: Isal,
    stream: AlignedMemory,
    level_buffer: AlignedMemory,
}

// SAFETY: self owns both memories, and the library keeps no thread-local state.
unsafe impl Send for Deflate {}

impl Deflate {
    pub(crate) fn new(isal: Isal) -> Self {
        Self {
            isal,
            stream: AlignedMemory::new(STRUCTURE_MEMORY_BYTES),
            level_buffer: AlignedMemory::new(LEVEL_BUFFER_BYTES),
        }
    }

    /// Encodes one raw stream into the front of `out` and returns its length; `None` if it does not fit.
    pub(crate) fn encode(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        let (avail_in, avail_out) = (u32::try_from(input.len()).ok()?, len_of(out));
        let stream = self.stream.start::<StreamHead>();
        // SAFETY: the memory is larger than the structure, zeroed or as the library left it, and exclusively owned.
        // The buffers have the given lengths, and are not used after the call. Levels from 1 on need the level
        // buffer, which has the given length.
        let (returned, head) = unsafe {
            (self.isal.deflate_init)(stream);
            let head = &mut *stream.as_ptr();
            head.next_in = input.as_ptr();
            head.avail_in = avail_in;
            head.next_out = out.as_mut_ptr();
            head.avail_out = avail_out;
            head.level = 1;
            head.level_buf = self.level_buffer.start().as_ptr();
            head.level_buf_size = LEVEL_BUFFER_BYTES as u32;
            head.end_of_stream = 1;
            ((self.isal.deflate)(stream), ptr::read(stream.as_ptr()))
        };
        let len = head.total_out as usize;
        (returned == 0 && head.avail_in == 0 && len <= out.len()).then_some(len)
    }
}

/// Decoder of raw streams.
pub(crate) struct Inflate {
    isal: Isal,
    state: AlignedMemory,
}

// SAFETY: as for `Deflate`.
unsafe impl Send for Inflate {}

impl Inflate {
    pub(crate) fn new(isal: Isal) -> Self {
        Self { isal, state: AlignedMemory::new(STRUCTURE_MEMORY_BYTES) }
    }

    /// Decodes `data` and returns the number of bytes, or an error if it is not a stream of at most the length of
    /// `out`.
    pub(crate) fn decode(&mut self, data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
        let avail_in = u32::try_from(data.len()).map_err(|_| "the data is longer than any batch")?;
        let state = self.state.start::<StateHead>();
        // SAFETY: as in `Deflate::encode`.
        let (returned, head) = unsafe {
            (self.isal.inflate_init)(state);
            let head = &mut *state.as_ptr();
            head.next_in = data.as_ptr();
            head.avail_in = avail_in;
            head.next_out = out.as_mut_ptr();
            head.avail_out = len_of(out);
            ((self.isal.inflate)(state), ptr::read(state.as_ptr()))
        };
        match returned {
            0 if head.avail_in == 0 => Ok(head.total_out as usize),
            0 => Err("the stream ends before the end of the data"),
            1 => Err("the stream does not end at the end of the data"),
            2 => Err("the stream decodes to more than the batch"),
            -1 => Err("the stream has a block of an unknown type"),
            -2 => Err("the stream has an invalid symbol"),
            -3 => Err("the stream refers to data before the batch"),
            _ => Err("the data is not a deflate stream"),
        }
    }
}

fn len_of(out: &[u8]) -> u32 {
    u32::try_from(out.len()).unwrap_or(u32::MAX)
}

/// Self-test: encodes and decodes known pages; returns a description of the first deviation.
fn self_test(isal: Isal) -> Result<(), &'static str> {
    const UNTOUCHED: Line = Line([0xa5; 64]);
    let pages: Vec<u8> = (0..12 * 1024_u32)
        .map(|at| match at / 4096 {
            0 => (at * at / 7) as u8,
            1 => b"the same letters again and again, "[at as usize % 34],
            _ => (at % 8 == 0) as u8,
        })
        .collect();
    let (mut deflate, mut inflate) = (Deflate::new(isal), Inflate::new(isal));
    let beyond = STRUCTURE_MEMORY_BYTES / 64 / 2;
    deflate.stream.0[beyond..].fill(UNTOUCHED);
    inflate.state.0[beyond..].fill(UNTOUCHED);

    // Twice, because the second run starts from the state that the first has left.
    for _ in 0..2 {
        let mut encoded = vec![0; pages.len()];
        let len = deflate
            .encode(&pages, &mut encoded)
            .filter(|len| (1000..pages.len()).contains(len))
            .ok_or("self-test: known pages are not encoded")?;
        let mut decoded = vec![0; pages.len()];
        let mut zlib = flate2::Decompress::new(false);
        let status = zlib.decompress(&encoded[..len], &mut decoded, flate2::FlushDecompress::Finish);
        if status.ok() != Some(flate2::Status::StreamEnd) || zlib.total_in() != len as u64 || decoded != pages {
            return Err("self-test: known pages are encoded incorrectly");
        }
        decoded.fill(0);
        if inflate.decode(&encoded[..len], &mut decoded) != Ok(pages.len()) || decoded != pages {
            return Err("self-test: known pages are decoded incorrectly");
        }
        if deflate.encode(&pages, &mut encoded[..len / 2]).is_some()
            || inflate.decode(&encoded[..len / 2], &mut decoded).is_ok()
        {
            return Err("self-test: data that exceeds the limit is not refused");
        }
    }
    let is_untouched = |memory: &AlignedMemory| memory.0[beyond..].iter().all(|line| line.0 == UNTOUCHED.0);
    if is_untouched(&deflate.stream) && is_untouched(&inflate.state) {
        Ok(())
    } else {
        Err("self-test: a structure uses more than 128 KiB")
    }
}

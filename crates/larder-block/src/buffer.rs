//! Memory that a request reads into or writes from: one piece, or a list of pieces in guest memory.
//!
//! A [`ReadBuf`] or [`WriteBuf`] is a view of memory that it does not own, cheap to copy and to slice; a layer that
//! splits a request slices its buffer, without allocating. The memory may be a guest's, which the guest can change at
//! any moment, so no code here ever makes a Rust reference to it: bytes are copied by pointer, or handed to the
//! kernel.

use std::marker::PhantomData;
use std::ptr;

use crate::units::ByteLen;

/// A piece of memory with the layout of the kernel's `struct iovec`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct IoVec(libc::iovec);

impl IoVec {
    /// Returns a piece of `len` bytes at `base`.
    pub const fn new(base: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: len })
    }

    /// Returns the address of the first byte.
    pub const fn base(self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Returns the length in bytes.
    pub const fn len(self) -> usize {
        self.0.iov_len
    }

    /// Returns true if the piece has no bytes.
    pub const fn is_empty(self) -> bool {
        self.0.iov_len == 0
    }
}

/// A piece, or a part of a list of pieces.
#[derive(Clone, Copy)]
enum BufferView<'a> {
    One(IoVec),
    /// Invariant: `skip + len` bytes lie in `pieces`.
    Many {
        pieces: &'a [IoVec],
        skip: usize,
        len: usize,
    },
}

// Views are copied with every request, by every layer.
const _: () = assert!(size_of::<BufferView<'_>>() == 32);

impl<'a> BufferView<'a> {
    #[inline]
    const fn one(base: *mut u8, len: usize) -> Self {
        Self::One(IoVec::new(base, len))
    }

    fn many(pieces: &'a [IoVec]) -> Self {
        match pieces {
            [] => Self::one(ptr::null_mut(), 0),
            [one] => Self::One(*one),
            _ => Self::Many { pieces, skip: 0, len: pieces.iter().map(|piece| piece.len()).sum() },
        }
    }

    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::One(piece) => piece.len(),
            Self::Many { len, .. } => *len,
        }
    }

    #[inline]
    fn slice(self, from: usize, len: usize) -> Self {
        assert!(
            from <= self.len() && len <= self.len() - from,
            "slice {from}+{len} of a buffer of {} bytes",
            self.len()
        );
        match self {
            // `wrapping_add`: the base of an empty buffer may be null.
            Self::One(piece) => Self::one(piece.base().wrapping_add(from), len),
            Self::Many { pieces, skip, .. } => Self::slice_of_many(pieces, skip + from, len),
        }
    }

    /// Returns the `len` bytes that begin `skip` bytes into the pieces.
    fn slice_of_many(mut pieces: &'a [IoVec], mut skip: usize, len: usize) -> Self {
        while let [first, rest @ ..] = pieces {
            if skip < first.len() {
                break;
            }
            skip -= first.len();
            pieces = rest;
        }
        match pieces {
            [] => Self::one(ptr::null_mut(), 0),
            [first, ..] if skip + len <= first.len() => Self::one(first.base().wrapping_add(skip), len),
            _ => Self::Many { pieces, skip, len },
        }
    }
}

/// The pieces of a buffer in order, none of them empty, trimmed to the buffer's part of them.
pub struct Pieces<'a> {
    rest: BufferView<'a>,
}

impl Iterator for Pieces<'_> {
    type Item = IoVec;

    #[inline]
    fn next(&mut self) -> Option<IoVec> {
        match &mut self.rest {
            BufferView::One(piece) => {
                let next = *piece;
                *piece = IoVec::new(ptr::null_mut(), 0);
                (!next.is_empty()).then_some(next)
            }
            BufferView::Many { pieces, skip, len } => {
                while *len > 0 {
                    let (first, rest) = pieces.split_first()?;
                    let taken = (first.len() - *skip).min(*len);
                    let base = first.base().wrapping_add(*skip);
                    *pieces = rest;
                    *skip = 0;
                    *len -= taken;
                    if taken > 0 {
                        return Some(IoVec::new(base, taken));
                    }
                }
                None
            }
        }
    }
}

macro_rules! view_methods {
    ($name:ident) => {
        impl<'a> $name<'a> {
            /// Returns the length in bytes.
            #[inline]
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// Returns the length as a [`ByteLen`].
            #[inline]
            pub fn byte_len(&self) -> ByteLen {
                ByteLen::of_buffer(self.len())
            }

            /// Returns true if the buffer has no bytes.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Returns the `len` bytes that begin `from` bytes into this buffer.
            ///
            /// # Panics
            /// If they are not inside the buffer.
            #[inline]
            pub fn slice(self, from: usize, len: usize) -> Self {
                Self(self.0.slice(from, len), PhantomData)
            }

            /// Returns the rest of the buffer after its first `from` bytes.
            ///
            /// # Panics
            /// If the buffer is shorter than `from`.
            #[inline]
            pub fn skip(self, from: usize) -> Self {
                let len = self.len() - from;
                self.slice(from, len)
            }

            /// Returns the pieces in order.
            pub fn pieces(&self) -> Pieces<'a> {
                Pieces { rest: self.0 }
            }

            /// Returns the only piece, if the buffer has just one.
            #[inline]
            pub fn as_single(&self) -> Option<IoVec> {
                match self.0 {
                    BufferView::One(piece) => Some(piece),
                    BufferView::Many { .. } => None,
                }
            }

            /// Returns true if every piece begins and ends on a multiple of `unit` (a power of two) in memory, as
            /// direct I/O demands.
            pub fn is_aligned(&self, unit: usize) -> bool {
                self.pieces().all(|piece| (piece.base().addr() | piece.len()) & (unit - 1) == 0)
            }

            /// Returns a buffer over a list of pieces, such as a descriptor chain's.
            ///
            /// # Safety
            /// Until the request that the buffer is passed to has completed (its future has resolved, or was
            /// dropped), every piece must be mapped memory, readable and, for a [`ReadBuf`], writable. Others may
            /// change the bytes meanwhile; no Rust reference to them may exist.
            pub unsafe fn from_pieces(pieces: &'a [IoVec]) -> Self {
                Self(BufferView::many(pieces), PhantomData)
            }
        }
    };
}

/// The destination of a read's data.
#[derive(Clone, Copy)]
pub struct ReadBuf<'a>(BufferView<'a>, PhantomData<&'a mut [u8]>);

/// The source of a write's data.
#[derive(Clone, Copy)]
pub struct WriteBuf<'a>(BufferView<'a>, PhantomData<&'a [u8]>);

view_methods!(ReadBuf);
view_methods!(WriteBuf);

impl<'a> ReadBuf<'a> {
    /// Returns a buffer over ordinary memory.
    pub fn new(memory: &'a mut [u8]) -> Self {
        Self(BufferView::one(memory.as_mut_ptr(), memory.len()), PhantomData)
    }

    /// Fills the buffer's first `source.len()` bytes.
    ///
    /// # Panics
    /// If the buffer is shorter than `source`.
    pub fn copy_from_slice(&self, source: &[u8]) {
        assert!(source.len() <= self.len());
        let mut rest = source;
        for piece in self.pieces() {
            let (now, later) = rest.split_at(piece.len().min(rest.len()));
            // SAFETY: the piece is valid for writes by this type's contract and at least as long, and a Rust slice
            // cannot overlap memory to which no Rust reference exists.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), piece.base(), now.len()) };
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
    }

    /// Fills the whole buffer with zeros.
    pub fn fill_zero(&self) {
        for piece in self.pieces() {
            // SAFETY: the piece is valid for writes by this type's contract.
            unsafe { ptr::write_bytes(piece.base(), 0, piece.len()) };
        }
    }

    /// Returns the same memory as the source of a write, for data that was just read.
    pub fn as_write(&self) -> WriteBuf<'a> {
        WriteBuf(self.0, PhantomData)
    }
}

impl<'a> WriteBuf<'a> {
    /// Returns a buffer over ordinary memory.
    pub fn new(memory: &'a [u8]) -> Self {
        Self(BufferView::one(memory.as_ptr().cast_mut(), memory.len()), PhantomData)
    }

    /// Copies the buffer's first `destination.len()` bytes to `destination`.
    ///
    /// # Panics
    /// If the buffer is shorter than `destination`.
    pub fn copy_to_slice(&self, destination: &mut [u8]) {
        assert!(destination.len() <= self.len());
        let mut rest = destination;
        for piece in self.pieces() {
            let (now, later) = rest.split_at_mut(piece.len().min(rest.len()));
            // SAFETY: the piece is valid for reads by this type's contract and at least as long, and a Rust slice
            // cannot overlap memory to which no Rust reference exists.
            unsafe { ptr::copy_nonoverlapping(piece.base(), now.as_mut_ptr(), now.len()) };
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
    }

    /// Returns a copy of the whole buffer.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to_slice(&mut bytes);
        bytes
    }
}

/// Zeroed memory for direct I/O: it begins and ends on a multiple of [`AlignedBuf::ALIGNMENT`].
pub struct AlignedBuf {
    base: ptr::NonNull<u8>,
    layout: std::alloc::Layout,
    len: usize,
}

impl AlignedBuf {
    /// An alignment in bytes that suffices for every device that reports its own.
    pub const ALIGNMENT: usize = 4096;

    /// Allocates `len` zero bytes. The allocation extends to the next multiple of the alignment.
    pub fn zeroed(len: usize) -> Self {
        let allocated_len = len.max(1).next_multiple_of(Self::ALIGNMENT);
        let layout = std::alloc::Layout::from_size_align(allocated_len, Self::ALIGNMENT)
            .unwrap_or_else(|_| panic!("a buffer of {len} bytes is larger than the address space"));
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = ptr::NonNull::new(base).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Self { base, layout, len }
    }
}

// SAFETY: this value owns the memory exclusively, on whatever thread it is.
unsafe impl Send for AlignedBuf {}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes that this value owns, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_slice_like_plain_bytes(
            lengths in prop::collection::vec(0usize..20, 0..8),
            cut in (0usize..200, 0usize..200),
        ) {
            let mut memory: Vec<Vec<u8>> = Vec::new();
            let mut next = 0u8;
            for len in &lengths {
                memory.push((0..*len).map(|_| { next = next.wrapping_add(1); next }).collect());
            }
            let flat: Vec<u8> = memory.concat();
            let pieces: Vec<IoVec> = memory.iter_mut().map(|m| IoVec::new(m.as_mut_ptr(), m.len())).collect();
            // SAFETY: the vectors outlive the buffer and nothing else refers to their bytes meanwhile.
            let buffer = unsafe { WriteBuf::from_pieces(&pieces) };
            prop_assert_eq!(buffer.to_vec(), flat.clone());
            let from = cut.0.min(flat.len());
            let len = cut.1.min(flat.len() - from);
            prop_assert_eq!(buffer.slice(from, len).to_vec(), &flat[from..from + len]);
            let again = buffer.slice(from, len).skip(len / 2);
            prop_assert_eq!(again.to_vec(), &flat[from + len / 2..from + len]);
            prop_assert!(again.pieces().all(|piece| !piece.is_empty()));
        }
    }

    #[test]
    fn aligned_memory_is_aligned() {
        let mut buffer = AlignedBuf::zeroed(10);
        assert_eq!(&buffer[..], &[0; 10]);
        assert!(ReadBuf::new(&mut buffer).pieces().all(|p| p.base().addr() % AlignedBuf::ALIGNMENT == 0));
    }
}

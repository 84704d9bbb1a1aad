//! Compressed clusters: read as a whole, decompressed off the disk's thread, and cached for a while, because a guest
//! that reads one part of a cluster soon reads the next.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use larder_block::{AlignedBuf, ByteOffset, ByteRange, Failure, IoResult, Operation, ReadBuf};

use crate::device::Qcow2;
use crate::entry::{CompressedLocation, L2Entry};
use crate::header::Compression;

/// The maximum size of the cache in bytes, but at least two clusters are cached.
const CACHE_BYTES_MAX: u64 = 1 << 20;

/// The cluster size in bytes up to which clusters are decompressed on the disk's thread: a hand-over takes as long.
const INLINE_DECOMPRESSION_BYTES_MAX: u64 = 8 << 10;

/// The log2 of the memory that a zstd frame may request: four of the largest clusters, and more than any encoder uses
/// for one.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// A cache of recently decompressed clusters, by their entry.
pub(crate) struct Decompressor {
    compression: Compression,
    cache: RefCell<VecDeque<(u64, Rc<Vec<u8>>)>>,
}

impl Decompressor {
    pub(crate) fn new(compression: Compression) -> Self {
        Self { compression, cache: RefCell::default() }
    }

    fn find(&self, word: u64) -> Option<Rc<Vec<u8>>> {
        let cache = self.cache.borrow();
        cache.iter().find(|(key, _)| *key == word).map(|(_, bytes)| Rc::clone(bytes))
    }

    fn insert(&self, word: u64, bytes: &Rc<Vec<u8>>) {
        let mut cache = self.cache.borrow_mut();
        let clusters_max = (CACHE_BYTES_MAX / bytes.len() as u64).max(2) as usize;
        while cache.len() >= clusters_max {
            cache.pop_front();
        }
        cache.push_back((word, Rc::clone(bytes)));
    }
}

impl Qcow2 {
    /// Reads `range`, which lies in one compressed cluster.
    pub(crate) async fn read_compressed(&self, entry: L2Entry, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let within = (range.start.get() & (self.shape.cluster_len() - 1)) as usize;
        let bytes = match self.decompressor.find(entry.word) {
            Some(bytes) => bytes,
            None => self.decompress_cluster(entry, range).await?,
        };
        buffer.copy_from_slice(&bytes[within..within + range.len.as_usize()]);
        Ok(())
    }

    async fn decompress_cluster(&self, entry: L2Entry, range: ByteRange) -> IoResult<Rc<Vec<u8>>> {
        let at = entry.compressed_location(self.shape);
        let failed = |why: &str| {
            tracing::error!(
                "{}: the compressed cluster of guest offset {:#x}, at {:#x} with {} bytes, {why}; run `larder disk check`",
                self.name,
                range.start.get() & !(self.shape.cluster_len() - 1),
                at.offset,
                at.len,
            );
            self.error(Operation::Read, range, Failure::Invalid)
        };
        let compressed = self.read_compressed_bytes(at).await?.ok_or_else(|| failed("is past the end of the file"))?;
        let (compression, len) = (self.decompressor.compression, self.shape.cluster_len() as usize);
        let packed = Arc::new(compressed);
        let thread_compressed = Arc::clone(&packed);
        let on = self.on.upgrade().filter(|on| len as u64 > INLINE_DECOMPRESSION_BYTES_MAX && !on.is_simulated());
        let decompressed = match on {
            Some(on) => on.run_blocking(move || decompress(compression, &thread_compressed, len)).await,
            None => Ok(decompress(compression, &packed, len)),
        };
        // If no thread can be started, the cluster is decompressed here.
        let unpacked = decompressed.unwrap_or_else(|_| decompress(compression, &packed, len));
        let bytes = Rc::new(unpacked.ok_or_else(|| failed("cannot be decompressed"))?);
        self.decompressor.insert(entry.word, &bytes);
        Ok(bytes)
    }

    /// Reads the compressed bytes, and the rest of their last sector; `None` if they are not in the file.
    async fn read_compressed_bytes(&self, at: CompressedLocation) -> IoResult<Option<Vec<u8>>> {
        let sectors = ByteRange::new(at.offset, at.len).widened(512);
        let size = self.file.geometry().size.get();
        if at.offset >= size {
            return Ok(None);
        }
        // The count of sectors is rounded up, so the last ones may lie past the end.
        let in_file = sectors.intersection(ByteOffset::ZERO.range(larder_block::ByteLen::new(size)));
        let mut bytes = AlignedBuf::zeroed(in_file.len.as_usize());
        self.file.read(in_file.start, ReadBuf::new(&mut bytes)).await?;
        let from = (at.offset - in_file.start.get()) as usize;
        Ok(Some(bytes[from..].to_vec()))
    }
}

/// Decompresses a cluster of `len` bytes; further bytes in `compressed` are ignored. Returns `None` if the result is
/// shorter.
fn decompress(compression: Compression, compressed: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut out = vec![0; len];
    match compression {
        Compression::Zlib => {
            let mut inflate = flate2::Decompress::new(false);
            loop {
                let (read, written) = (inflate.total_in() as usize, inflate.total_out() as usize);
                let status = inflate
                    .decompress(&compressed[read..], &mut out[written..], flate2::FlushDecompress::Finish)
                    .ok()?;
                let done = inflate.total_out() as usize;
                if done == len {
                    return Some(out);
                }
                let stuck = inflate.total_in() as usize == read && done == written;
                if status == flate2::Status::StreamEnd || stuck {
                    return None;
                }
            }
        }
        Compression::Zstd => {
            use zstd::stream::raw::{Decoder, InBuffer, Operation as _, OutBuffer};
            let mut decoder = Decoder::new().ok()?;
            let limit = zstd::stream::raw::DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX);
            decoder.set_parameter(limit).ok()?;
            let mut input = InBuffer::around(compressed);
            let mut written = 0;
            while written < len {
                let mut output = OutBuffer::around(&mut out[written..]);
                let before = input.pos();
                decoder.run(&mut input, &mut output).ok()?;
                let got = output.pos();
                written += got;
                if got == 0 && input.pos() == before {
                    return None;
                }
            }
            Some(out)
        }
    }
}

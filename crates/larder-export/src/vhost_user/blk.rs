//! virtio-blk: the configuration space, and the execution of requests on a block device (virtio 1.2, section 5.2).

use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Geometry, IoError, ReadBuf, WriteBuf, WriteFlags, ZeroFlags,
};

use super::Serial;
use super::ring::DescriptorChain;
use crate::activity::{Activity, RequestKind};
use crate::piece_scheduler::PieceScheduler;

/// Size of a sector in virtio-blk, regardless of the block size.
const SECTOR_BYTES: u64 = 512;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

const S_OK: u8 = 0;
const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;

/// Length of the serial number in GET_ID, in bytes; shorter ones end in zeros.
pub const SERIAL_BYTES: usize = 20;

/// Size of a request's header, in bytes.
const HEADER_BYTES: usize = 16;

/// Size of the configuration space up to the end of the write-zeroes fields, in bytes.
const CONFIG_BYTES: usize = 60;
const CONFIG_WCE: usize = 32;

/// Largest number of segments in one discard or write-zeroes.
const SEGMENTS_MAX: u32 = 256;
const SEGMENT_BYTES: usize = 16;

/// Longest read or write, in bytes; no driver sends a longer one.
const DATA_BYTES_MAX: usize = 4 << 30;

/// Longest segment of a discard or write-zeroes: the most whole MiB whose bytes fit in 32 bits.
const SEGMENT_SECTORS_MAX: u32 = (4095 << 20) / SECTOR_BYTES as u32;

/// Feature bits of virtio-blk and virtio that are offered or understood.
pub mod feature {
    #![allow(missing_docs)]
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Queue parameters in the configuration space.
#[derive(Clone, Copy, Debug)]
pub struct QueueParameters {
    /// Number of queues.
    pub count: u16,
    /// Number of descriptors that the front-end gives each queue.
    pub size: u16,
}

/// Returns the features that a device with this geometry offers.
pub fn features(geometry: &Geometry) -> u64 {
    let mut features = feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::FLUSH
        | feature::TOPOLOGY
        | feature::MQ
        | feature::LOG_ALL
        | feature::INDIRECT_DESC
        | feature::EVENT_IDX
        | feature::PROTOCOL_FEATURES
        | feature::VERSION_1
        | feature::RING_PACKED;
    if geometry.read_only {
        features |= feature::RO;
    } else {
        features |= feature::CONFIG_WCE | feature::WRITE_ZEROES;
        if geometry.discard_granularity > 0 {
            features |= feature::DISCARD;
        }
    }
    features
}

/// Returns `len` bytes of the configuration space from `offset` on; zeros past its end.
pub fn config(geometry: &Geometry, queues: QueueParameters, write_cache: bool, offset: u32, len: u32) -> Vec<u8> {
    let block = geometry.block_size;
    let mut space = [0u8; CONFIG_BYTES];
    let mut set_bytes = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    set_bytes(0, &(geometry.size.get() / SECTOR_BYTES).to_le_bytes());
    // Header and status need a descriptor each.
    set_bytes(12, &u32::from(queues.size.saturating_sub(2)).to_le_bytes());
    set_bytes(20, &block.to_le_bytes());
    let exponent = geometry.physical_block_size.max(block).trailing_zeros() - block.trailing_zeros();
    let preferred_blocks = geometry.physical_block_size.max(block) / block;
    set_bytes(24, &[exponent as u8, 0]);
    set_bytes(26, &u16::try_from(preferred_blocks).unwrap_or(u16::MAX).to_le_bytes());
    set_bytes(CONFIG_WCE, &[u8::from(write_cache)]);
    set_bytes(34, &queues.count.to_le_bytes());
    set_bytes(36, &SEGMENT_SECTORS_MAX.to_le_bytes());
    set_bytes(40, &SEGMENTS_MAX.to_le_bytes());
    set_bytes(44, &(geometry.discard_granularity.max(block) / SECTOR_BYTES as u32).to_le_bytes());
    set_bytes(48, &SEGMENT_SECTORS_MAX.to_le_bytes());
    set_bytes(52, &SEGMENTS_MAX.to_le_bytes());
    set_bytes(56, &[1]);
    (offset as usize..).take(len as usize).map(|at| space.get(at).copied().unwrap_or(0)).collect()
}

/// Returns the write-cache setting in a write to the configuration space. The driver may change no other field.
pub fn write_cache_in(offset: u32, bytes: &[u8]) -> Option<bool> {
    let at = CONFIG_WCE.checked_sub(offset as usize)?;
    bytes.get(at).map(|value| *value != 0)
}

/// State that a request needs, in addition to its device.
pub struct RequestContext<'a> {
    /// Serial number for GET_ID.
    pub serial: &'a Serial,
    /// If false, every write is durable on completion.
    pub write_cache: bool,
    /// Statistics of the disk's requests.
    pub activity: &'a Activity,
    /// Scheduler of reads and writes.
    pub scheduler: &'a PieceScheduler,
}

/// Result of a request.
#[derive(Debug)]
pub struct RequestOutcome {
    /// Bytes written to the chain, including the status.
    pub written: u32,
    /// Error to log, if the device failed.
    pub error: Option<IoError>,
}

/// Header of a request: 16 bytes that the device reads.
struct RequestHeader {
    kind: u32,
    sector: u64,
}

/// Executes the request in `chain` on `device` and writes its status. A chain without room for a status, or without a
/// header, is left untouched.
///
/// # Safety
/// The chain's pieces are mapped guest memory until the future has ended or was dropped.
pub async unsafe fn execute(
    device: &dyn BlockDevice,
    state: RequestContext<'_>,
    chain: &DescriptorChain,
) -> RequestOutcome {
    // SAFETY: the caller guarantees it.
    let (readable, writable) =
        unsafe { (WriteBuf::from_pieces(chain.readable()), ReadBuf::from_pieces(chain.writable())) };
    let mut header = [0; HEADER_BYTES];
    if readable.len() < header.len() || writable.is_empty() {
        return RequestOutcome { written: 0, error: None };
    }
    readable.copy_to_slice(&mut header);
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
    let header = RequestHeader { kind: u32::from_le_bytes([k0, k1, k2, k3]), sector: u64::from_le_bytes(sector) };
    let status = writable.skip(writable.len() - 1);
    let data_in = writable.slice(0, writable.len() - 1);
    let data_out = readable.skip(HEADER_BYTES);
    let (code, error) = match execute_request(device, &state, &header, data_in, data_out).await {
        Ok(()) => (S_OK, None),
        Err(Refusal::Unsupported) => (S_UNSUPP, None),
        Err(Refusal::Malformed) => (S_IOERR, None),
        Err(Refusal::Failed(error)) if error.failure() == Failure::Unsupported => (S_UNSUPP, Some(error)),
        Err(Refusal::Failed(error)) => (S_IOERR, Some(error)),
    };
    if error.as_ref().is_some_and(|error| error.failure().is_memory_fault()) {
        for segment in chain.readable().iter().chain(chain.writable()).filter(|segment| !segment.is_empty()) {
            // The kernel reports lost memory only as a failed request. An access by this process raises SIGBUS, which
            // marks the memory as lost.
            // SAFETY: the piece is mapped, which the caller guarantees.
            let _ = unsafe { segment.base().add(segment.len() - 1).read_volatile() };
        }
    }
    status.copy_from_slice(&[code]);
    let data_written = if code == S_OK { data_in.len() } else { 0 };
    RequestOutcome { written: u32::try_from(data_written + 1).unwrap_or(u32::MAX), error }
}

enum Refusal {
    /// The driver requested a feature that was not offered.
    Unsupported,
    /// The driver violated the rules of virtio-blk.
    Malformed,
    Failed(IoError),
}

impl From<IoError> for Refusal {
    fn from(error: IoError) -> Self {
        Self::Failed(error)
    }
}

async fn execute_request(
    device: &dyn BlockDevice,
    state: &RequestContext<'_>,
    header: &RequestHeader,
    data_in: ReadBuf<'_>,
    data_out: WriteBuf<'_>,
) -> Result<(), Refusal> {
    let (activity, scheduler) = (state.activity, state.scheduler);
    let (kind, bytes, started_at);
    // The request is large, so it is not moved after it was started.
    let mut io = match header.kind {
        T_IN => {
            let start = checked_start(header.sector, data_in.len())?;
            (kind, bytes, started_at) = (RequestKind::Read, data_in.len() as u64, activity.sample_start());
            scheduler.read(device, start, data_in)
        }
        T_OUT => {
            let flags = WriteFlags { fua: !state.write_cache };
            let start = checked_start(header.sector, data_out.len())?;
            (kind, bytes, started_at) = (RequestKind::Write, data_out.len() as u64, activity.sample_start());
            scheduler.write(device, start, data_out, flags)
        }
        T_FLUSH => {
            (kind, bytes, started_at) = (RequestKind::Flush, 0, activity.sample_start());
            device.flush()
        }
        T_GET_ID => {
            let len = data_in.len().min(SERIAL_BYTES);
            data_in.copy_from_slice(&state.serial.bytes()[..len]);
            return Ok(());
        }
        T_DISCARD => return Box::pin(count_segments(device, state, RequestKind::Discard, data_out)).await,
        T_WRITE_ZEROES => return Box::pin(count_segments(device, state, RequestKind::WriteZeroes, data_out)).await,
        _ => return Err(Refusal::Unsupported),
    };
    Ok(activity.wait_and_count(kind, bytes, started_at, &mut io).await?)
}

async fn count_segments(
    device: &dyn BlockDevice,
    state: &RequestContext<'_>,
    kind: RequestKind,
    list: WriteBuf<'_>,
) -> Result<(), Refusal> {
    let request = state.activity.start_request();
    let (bytes, result) = execute_segments(device, kind, list, !state.write_cache).await;
    request.finish(kind, bytes, result.is_ok());
    result
}

fn checked_start(sector: u64, len: usize) -> Result<ByteOffset, Refusal> {
    let start = sector.checked_mul(SECTOR_BYTES).ok_or(Refusal::Malformed)?;
    if !(len as u64).is_multiple_of(SECTOR_BYTES) || len > DATA_BYTES_MAX {
        return Err(Refusal::Malformed);
    }
    Ok(ByteOffset::new(start))
}

/// Discards or zeroes each segment in turn: sector (u64), number of sectors (u32), flags (u32, bit 0: may unmap).
async fn execute_segments(
    device: &dyn BlockDevice,
    kind: RequestKind,
    list: WriteBuf<'_>,
    fua: bool,
) -> (u64, Result<(), Refusal>) {
    let mut total = 0;
    let count = list.len() / SEGMENT_BYTES;
    if !list.len().is_multiple_of(SEGMENT_BYTES) || count == 0 || count > SEGMENTS_MAX as usize {
        return (0, Err(Refusal::Malformed));
    }
    for index in 0..count {
        let mut raw = [0; SEGMENT_BYTES];
        list.slice(index * SEGMENT_BYTES, SEGMENT_BYTES).copy_to_slice(&mut raw);
        let [sector @ .., c0, c1, c2, c3, f0, f1, f2, f3] = raw;
        let sectors = u32::from_le_bytes([c0, c1, c2, c3]);
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        let unmap = flags & 1 != 0;
        if flags & !1 != 0 || (unmap && kind == RequestKind::Discard) {
            return (total, Err(Refusal::Unsupported));
        }
        let len = ByteLen::new(u64::from(sectors) * SECTOR_BYTES);
        let range = match checked_start(u64::from_le_bytes(sector), 0) {
            Ok(start) if sectors <= SEGMENT_SECTORS_MAX => ByteRange { start, len },
            _ => return (total, Err(Refusal::Malformed)),
        };
        let result = if kind == RequestKind::Discard {
            device.discard(range).await
        } else {
            let flags = ZeroFlags { unmap, fua, ..ZeroFlags::default() };
            device.write_zeroes(range, flags).await
        };
        if let Err(error) = result {
            return (total, Err(error.into()));
        }
        total += len.get();
    }
    (total, Ok(()))
}

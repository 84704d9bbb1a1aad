//! Answers of the control socket. The fields of the JSON have the names of these fields. Sizes are in bytes. Counters
//! start at zero when the server starts.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use larder_block::ByteLen;
use larder_block::filter::throttle::ThrottleLimits;
use larder_block::histogram::{Bucket, Histogram, quantile};
use larder_export::activity::{Activity, RequestKind};
use larder_prefetch::Prefetch;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::image::{CacheSlot, Format, absolute, cache_mode_name};
use crate::limits::{self, LimitsTextError, parse_limits};

/// The answer to `GET /v1`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerState {
    /// The VM's name; `null` for `larder disk serve`.
    pub vm: Option<String>,
    /// The VM's UUID, if its file gives one.
    pub uuid: Option<String>,
    /// Absolute path of the file that describes the VM, if there is one.
    pub file: Option<String>,
    /// The version of Larder.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// The process has given up all rights that it does not need any more (`--confine`), and can open no file.
    #[serde(default)]
    pub confined: bool,
    /// Start of the process, in milliseconds since 1970 (UTC).
    pub started_ms: u64,
}

/// Reason for a failure: the body of every answer other than 200 or 202.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Message for the user.
    pub error: String,
}

/// The answer to `GET /v1/disks`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskList {
    /// All disks that the process serves.
    pub disks: Vec<DiskState>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskState {
    /// Name of the disk in its VM, if it belongs to a VM.
    #[serde(default)]
    pub name: Option<String>,
    /// The image, as given to the server; bytes of a path that are not UTF-8 are replaced.
    pub image: String,
    /// Format of the image.
    pub format: Format,
    /// Current size of the disk.
    pub size: u64,
    /// Sector size in the guest.
    pub block_size: u32,
    /// Serial number in the guest.
    #[serde(default)]
    pub serial: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Other processes may use the image at the same time.
    #[serde(default)]
    pub shared: bool,
    /// The image is closed because the VM is on another host, or was there last.
    #[serde(default)]
    pub away: bool,
    /// Time of this report: nanoseconds since the disk was opened.
    pub time_ns: u64,
    /// The disk's exports.
    pub exports: ExportsState,
    /// Requests from guests and NBD clients.
    pub requests: RequestsState,
    /// Limits on requests and bytes per second.
    pub limits: LimitsState,
    /// Statistics of read-ahead; `null` if the disk is shared, which forbids read-ahead.
    pub prefetch: Option<PrefetchState>,
    /// Statistics of the cache; `null` without a cache.
    #[serde(default)]
    pub cache: Option<CacheState>,
}

/// Exports of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportsState {
    /// The vhost-user-blk export, if there is one.
    pub vhost_user: Option<VhostUserState>,
    /// The NBD export, if there is one.
    pub nbd: Option<NbdState>,
}

/// A vhost-user-blk export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostUserState {
    /// Path of the socket; for an inherited socket `fd` and its number.
    pub socket: String,
    /// A front-end, such as QEMU, is connected.
    pub connected: bool,
}

/// An NBD export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NbdState {
    /// URI for clients.
    pub uri: String,
    /// Number of connected clients.
    pub clients: u64,
}

/// Requests from the disk's guest, and from clients of its NBD server. Other NBD requests (cache, block status) are
/// not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestsState {
    /// Read requests.
    pub read: RequestCounts,
    /// Write requests.
    pub write: RequestCounts,
    /// Flush requests.
    pub flush: RequestCounts,
    /// Discard requests.
    pub discard: RequestCounts,
    /// Requests to write zeroes.
    pub write_zeroes: RequestCounts,
    /// Number of requests in flight.
    pub under_way: u64,
    /// Time during which at least one request was in flight, in nanoseconds.
    pub busy_ns: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestCounts {
    /// Completed requests, including failed ones.
    pub count: u64,
    /// Bytes read, written, freed or zeroed by successful requests.
    pub bytes: u64,
    /// Failed requests.
    pub errors: u64,
    /// Time that the requests took. Under load only some are timed; then the count is an estimate of the one above.
    pub latency: Latency,
}

impl RequestsState {
    pub(crate) fn new(activity: &Activity) -> Self {
        let counts_of = |kind| {
            let counts = activity.totals(kind);
            RequestCounts {
                count: counts.requests,
                bytes: counts.bytes,
                errors: counts.errors,
                latency: Latency::new(&counts.times),
            }
        };
        Self {
            read: counts_of(RequestKind::Read),
            write: counts_of(RequestKind::Write),
            flush: counts_of(RequestKind::Flush),
            discard: counts_of(RequestKind::Discard),
            write_zeroes: counts_of(RequestKind::WriteZeroes),
            under_way: activity.in_flight().into(),
            busy_ns: nanos(activity.busy()),
        }
    }
}

/// Limits of a disk per second, under QEMU's names (`iops-total`, `bps-read-max`); limits that are not set are left
/// out. Sizes are in bytes, burst lengths in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct LimitsState(pub BTreeMap<String, u64>);

impl LimitsState {
    pub(crate) fn new(limits: ThrottleLimits) -> Self {
        let all = limits::named_limits(&limits);
        Self(all.map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// Returns the limits.
    ///
    /// # Errors
    /// A name is unknown, or the limits contradict each other.
    pub fn limits(&self) -> Result<ThrottleLimits, LimitsTextError> {
        parse_limits(&self.to_string())
    }
}

impl fmt::Display for LimitsState {
    /// Formats the limits as on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&all.join(","))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Statistics and content of a cache; see [`larder_cache::CacheStatistics`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheState {
    /// File, block device or NBD export that the cache is on; a path is absolute.
    pub file: String,
    /// Write policy, as in `--cache-mode`.
    pub mode: String,
    /// State of the cache.
    pub state: CacheHealth,
    /// Size of the cache's device in bytes.
    pub size: u64,
    /// Capacity: the number of bytes of the disk that the cache can hold.
    pub capacity: u64,
    /// Line length in bytes.
    pub line_size: u64,
    /// Bytes in the cache, counted in whole lines.
    pub occupancy: u64,
    /// Dirty bytes, counted in whole lines.
    pub dirty: u64,
    /// Dirty bytes that were written to the disk.
    #[serde(default)]
    pub cleaned: u64,
    /// The current or last flush of all dirty data, for a change of the mode or by a command.
    #[serde(default)]
    pub flush: FlushState,
    /// Bytes, in whole lines, whose current state is not durable: a crash now would leave an older state, which is
    /// valid but may have less data.
    pub unsettled: u64,
    /// Bytes, of loaded lines, that are compared with the disk before they are used, because nothing proves that no
    /// other program has written to the disk since a kill.
    #[serde(default)]
    pub unproven: u64,
    /// Reads that were completely in the cache.
    pub hits: u64,
    /// Reads that were partly in the cache.
    pub partial_hits: u64,
    /// Reads that were not in the cache.
    pub misses: u64,
    /// Reads of cached data that went to the disk, because the cache's device was slower.
    #[serde(default)]
    pub bypassed_slow: u64,
    /// Reads that waited for the data of another read.
    pub joined: u64,
    /// Bytes read from the cache for guests.
    pub hit_bytes: u64,
    /// Bytes filled in after reads.
    pub filled: u64,
    /// Bytes filled in that no guest has read here: they were hot on the host that the VM came from.
    #[serde(default)]
    pub warmed: u64,
    /// Reads that were not cached because too much was being filled in or written.
    pub bypassed_busy: u64,
    /// Evicted lines.
    pub evicted: u64,
    /// Bytes of metadata written.
    pub metadata_written: u64,
    /// Bytes read from the disk for any reason.
    #[serde(default)]
    pub disk_read: u64,
    /// Bytes written to the disk for any reason.
    #[serde(default)]
    pub disk_written: u64,
    /// Bytes read from the cache's device for any reason.
    #[serde(default)]
    pub cache_read: u64,
    /// Bytes written to the cache's device for any reason.
    #[serde(default)]
    pub cache_written: u64,
    /// Reads of the cache's device that failed or timed out.
    #[serde(default)]
    pub read_errors: u64,
    /// Requests to the cache's device other than reads that failed or timed out.
    #[serde(default)]
    pub write_errors: u64,
    /// Limit for the bytes written to the cache's device per day; `null` for no limit.
    #[serde(default)]
    pub endurance: Option<u64>,
    /// Estimated miss ratios so far of caches of other sizes with LRU eviction, in order of size; empty if the cache
    /// was not used.
    #[serde(default)]
    pub miss_ratios: Vec<MissRatio>,
    /// Latency of reads that were completely in the cache.
    #[serde(default)]
    pub hit_latency: Latency,
    /// Latency of reads that needed the disk.
    #[serde(default)]
    pub miss_latency: Latency,
}

/// State of the flush of all dirty data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlushState {
    /// A flush is running.
    pub running: bool,
    /// Error of the last flush that has ended; `null` if it succeeded, or there was none.
    pub error: Option<String>,
}

/// Estimated miss ratio of a cache of another size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissRatio {
    /// Capacity: the number of bytes of the disk that such a cache could hold.
    pub capacity: u64,
    /// Fraction of line accesses that would have missed, from 0 to 1.
    pub miss_ratio: f64,
}

/// Latency of all requests since the start of the server, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Number of requests.
    pub count: u64,
    /// Sum of all latencies.
    pub sum_ns: u64,
    /// Longest latency.
    pub max_ns: u64,
    /// Histogram, in order of latency. Empty buckets are left out.
    pub buckets: Vec<LatencyBucket>,
}

/// Requests with similar latency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// Upper bound of the latency, exclusive; `null` for no bound. The lower bound is the upper bound of the previous
    /// bucket.
    pub below_ns: Option<u64>,
    /// Number of requests.
    pub count: u64,
}

impl Latency {
    pub(super) fn new(histogram: &Histogram) -> Self {
        let bucket = |bucket: Bucket| LatencyBucket { below_ns: bucket.below.map(nanos), count: bucket.count };
        Self {
            count: histogram.count(),
            sum_ns: nanos(histogram.sum()),
            max_ns: nanos(histogram.max()),
            buckets: histogram.buckets().map(bucket).collect(),
        }
    }

    /// Returns the latency that a fraction (0 to 1) of the requests did not exceed, overestimated by up to 25 %;
    /// `None` without requests.
    pub fn quantile(&self, fraction: f64) -> Option<Duration> {
        let bucket =
            |bucket: &LatencyBucket| Bucket { below: bucket.below_ns.map(Duration::from_nanos), count: bucket.count };
        let buckets: Vec<Bucket> = self.buckets.iter().map(bucket).collect();
        quantile(&buckets, fraction, Duration::from_nanos(self.max_ns))
    }

    /// Returns the mean latency; `None` without requests.
    pub fn mean(&self) -> Option<Duration> {
        self.sum_ns.checked_div(self.count).map(Duration::from_nanos)
    }
}

/// State of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CacheHealth {
    /// The cache works.
    Works,
    /// The cache's device has failed: the cache is not used until it is replaced, or the server restarted.
    Failed,
}

impl CacheState {
    pub(crate) fn new(slot: &CacheSlot) -> Self {
        let cache = slot.current();
        let statistics = cache.layer.statistics();
        let shape = cache.layer.layout();
        let in_lines = |lines: u64| lines * shape.line_len();
        let miss_ratios = cache.layer.miss_ratios().into_iter();
        let miss_ratios = miss_ratios.map(|(capacity, miss_ratio)| MissRatio { capacity: capacity.get(), miss_ratio });
        Self {
            file: absolute(&cache.file),
            mode: cache_mode_name(cache.layer.mode()).to_owned(),
            state: match cache.layer.is_working() {
                true => CacheHealth::Works,
                false => CacheHealth::Failed,
            },
            size: cache.size.get(),
            capacity: shape.capacity().get(),
            line_size: shape.line_len(),
            occupancy: in_lines(statistics.lines),
            dirty: in_lines(statistics.dirty_lines),
            cleaned: statistics.cleaned,
            flush: FlushState { running: slot.operations.is_running(), error: slot.operations.error() },
            unsettled: in_lines(statistics.unpersisted),
            unproven: statistics.unproven,
            hits: statistics.hits,
            partial_hits: statistics.partial_hits,
            misses: statistics.misses,
            bypassed_slow: statistics.bypassed_slow,
            joined: statistics.joined,
            hit_bytes: statistics.hit_bytes,
            filled: statistics.filled,
            warmed: statistics.warmed,
            bypassed_busy: statistics.bypassed_busy,
            evicted: statistics.evicted,
            metadata_written: statistics.metadata_written,
            disk_read: statistics.disk_read,
            disk_written: statistics.disk_written,
            cache_read: statistics.cache_read,
            cache_written: statistics.cache_written,
            read_errors: statistics.read_errors,
            write_errors: statistics.write_errors,
            endurance: cache.layer.endurance().map(ByteLen::get),
            miss_ratios: miss_ratios.collect(),
            hit_latency: Latency::new(&cache.layer.hit_latency()),
            miss_latency: Latency::new(&cache.layer.miss_latency()),
        }
    }
}

/// Statistics and content of read-ahead; see [`larder_prefetch::PrefetchStatistics`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrefetchState {
    /// Bytes of memory in use, including tables.
    pub memory: u64,
    /// Limit of the memory in bytes; 0 turns read-ahead off.
    pub memory_limit: u64,
    /// Maximum read-ahead distance in bytes.
    pub ahead: u64,
    /// Longest read in bytes that causes read-ahead.
    pub largest_read: u64,
    /// Bytes fetched.
    pub fetched: u64,
    /// Fetched bytes that were read, each counted once.
    pub used: u64,
    /// Fetched bytes that were dropped before they were read.
    pub wasted: u64,
    /// Fetched bytes that are in memory and not read yet.
    pub unread: u64,
    /// Reads whose bytes were all in memory.
    pub hits: u64,
    /// Reads with only some of their bytes in memory or in flight.
    pub partial_hits: u64,
    /// Reads that waited for bytes in flight.
    pub waits: u64,
    /// Reads with none of their bytes in memory.
    pub misses: u64,
    /// Reads that were too long for read-ahead.
    pub bypassed: u64,
    /// Failed fetches.
    pub errors: u64,
    /// Detected streams.
    pub streams: StreamCounts,
}

/// Numbers of streams, which are readers with a predictable access pattern.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamCounts {
    /// Streams with data in memory.
    pub now: u64,
    /// Forward streams detected so far.
    pub forward: u64,
    /// Backward streams detected so far.
    pub backward: u64,
    /// Strided streams detected so far.
    pub strided: u64,
}

impl PrefetchState {
    pub(crate) fn new(prefetch: &Prefetch) -> Self {
        let (options, statistics) = (prefetch.options(), prefetch.statistics());
        Self {
            memory: statistics.memory,
            memory_limit: options.memory.get(),
            ahead: options.ahead_max.get(),
            largest_read: options.largest_read.get(),
            fetched: statistics.fetched,
            used: statistics.used,
            wasted: statistics.wasted,
            unread: statistics.unread,
            hits: statistics.hits,
            partial_hits: statistics.partial_hits,
            waits: statistics.waits,
            misses: statistics.misses,
            bypassed: statistics.bypassed,
            errors: statistics.errors,
            streams: StreamCounts {
                now: statistics.streams,
                forward: statistics.streams_forward,
                backward: statistics.streams_backward,
                strided: statistics.streams_strided,
            },
        }
    }
}

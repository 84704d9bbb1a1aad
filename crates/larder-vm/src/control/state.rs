//! What the control socket tells; the fields of its JSON are named as these are. Sizes are in bytes. Numbers of what has
//! been done count from the start of the server.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use larder_block::ByteLen;
use larder_block::filter::throttle::Limits;
use larder_block::histogram::{Bucket, Histogram, quantile};
use larder_export::activity::{Activity, Kind};
use larder_prefetch::Prefetch;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::image::{CachePlace, Format, absolute, cache_mode_name};
use crate::limits::{self, LimitsTextError, parse_limits};

/// The answer to `GET /v1`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerState {
    /// The VM's name; `null` for `larder disk serve`.
    pub vm: Option<String>,
    /// The VM's UUID, if its file says it.
    pub uuid: Option<String>,
    /// The file that describes the VM, an absolute path, if there is one.
    pub file: Option<String>,
    /// The version of Larder.
    pub version: String,
    /// The number of the process.
    pub pid: u32,
    /// Whether it has given up all rights that it does not need any more (`--confine`), and can open nothing.
    #[serde(default)]
    pub confined: bool,
    /// When it was started, in milliseconds since 1970 (UTC).
    pub started_ms: u64,
}

/// Why something is not done: the body of every answer that is not 200 or 202.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// For people.
    pub error: String,
}

/// The answer to `GET /v1/disks`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Disks {
    /// All that the process serves.
    pub disks: Vec<DiskState>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskState {
    /// What its VM calls it, if it is one of a VM.
    #[serde(default)]
    pub name: Option<String>,
    /// The image, as the server was told; what is no text in a path is replaced.
    pub image: String,
    /// What its bytes mean.
    pub format: Format,
    /// The disk's size now.
    pub size: u64,
    /// The sector size that a guest sees.
    pub block_size: u32,
    /// The serial number that a guest sees.
    #[serde(default)]
    pub serial: String,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Whether others may use the image, too.
    #[serde(default)]
    pub shared: bool,
    /// Whether the image is not open, because its VM is on another host, or was there last.
    #[serde(default)]
    pub away: bool,
    /// When all this was so: the time since the disk was opened, in nanoseconds.
    pub time_ns: u64,
    /// Where it is served.
    pub exports: ExportsState,
    /// What it was asked for.
    pub requests: RequestsState,
    /// What it may do per second.
    pub limits: LimitsState,
    /// What read-ahead has done; `None` if the disk is shared, and nothing is read ahead.
    pub prefetch: Option<PrefetchState>,
    /// What its cache has done; `None` if it has none.
    #[serde(default)]
    pub cache: Option<CacheState>,
}

/// Where a disk is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportsState {
    /// As vhost-user-blk, if it is.
    pub vhost_user: Option<VhostUserState>,
    /// As NBD, if it is.
    pub nbd: Option<NbdState>,
}

/// A disk served as vhost-user-blk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostUserState {
    /// The path of its socket; of one that was inherited `fd`, and its number.
    pub socket: String,
    /// Whether a front-end, as QEMU is one, is connected.
    pub connected: bool,
}

/// A disk served as NBD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NbdState {
    /// Its URI, for clients.
    pub uri: String,
    /// Clients that are connected.
    pub clients: u64,
}

/// What a disk was asked for by its guest, and by the clients of its NBD server. Other NBD requests than these (to cache,
/// and block status) are not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestsState {
    /// To read.
    pub read: RequestCounts,
    /// To write.
    pub write: RequestCounts,
    /// To make durable what was written.
    pub flush: RequestCounts,
    /// To free space.
    pub discard: RequestCounts,
    /// To write zeroes.
    pub write_zeroes: RequestCounts,
    /// Requests that are under way.
    pub under_way: u64,
    /// For how long there were any under way, in nanoseconds.
    pub busy_ns: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestCounts {
    /// Those that have ended, also those that failed.
    pub count: u64,
    /// Bytes read, written, freed or zeroed by those that did not fail.
    pub bytes: u64,
    /// Those that failed.
    pub errors: u64,
    /// How long they took. They are not all timed where there are many, so that its count is about the one above.
    pub latency: Latency,
}

impl RequestsState {
    pub(crate) fn new(activity: &Activity) -> Self {
        let of = |kind| {
            let counts = activity.of(kind);
            RequestCounts {
                count: counts.requests,
                bytes: counts.bytes,
                errors: counts.errors,
                latency: Latency::new(&counts.times),
            }
        };
        Self {
            read: of(Kind::Read),
            write: of(Kind::Write),
            flush: of(Kind::Flush),
            discard: of(Kind::Discard),
            write_zeroes: of(Kind::WriteZeroes),
            under_way: activity.under_way().into(),
            busy_ns: nanos(activity.busy()),
        }
    }
}

/// What a disk may do per second: limits by the names that QEMU has for them (`iops-total`, `bps-read-max`); what is not
/// limited is left out. Sizes are in bytes, lengths of bursts in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct LimitsState(pub BTreeMap<String, u64>);

impl LimitsState {
    pub(crate) fn new(limits: Limits) -> Self {
        let all = limits::named(&limits);
        Self(all.map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The limits.
    ///
    /// # Errors
    /// There is none of that name, or they make no sense.
    pub fn limits(&self) -> Result<Limits, LimitsTextError> {
        parse_limits(&self.to_string())
    }
}

impl fmt::Display for LimitsState {
    /// As they are written on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&all.join(","))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What a cache has done, and holds; see [`larder_cache::Statistics`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheState {
    /// The file, block device or NBD export that it is on; of a path the absolute one.
    pub file: String,
    /// What is done with writes, as `--cache-mode` has it.
    pub mode: String,
    /// Whether it works.
    pub state: CacheHealth,
    /// Bytes of what it is on.
    pub size: u64,
    /// Bytes of the disk that it can hold.
    pub capacity: u64,
    /// Bytes of a line.
    pub line_size: u64,
    /// Bytes that it holds, counted in whole lines.
    pub occupancy: u64,
    /// Bytes of them, in whole lines, that have data which the disk has not.
    pub dirty: u64,
    /// Bytes written to the disk that only the cache had.
    #[serde(default)]
    pub cleaned: u64,
    /// What is written to the disk, or was last, because somebody wants all of it there: for another mode, or by command.
    #[serde(default)]
    pub flush: FlushState,
    /// Bytes, in whole lines, of which a crash now would leave something else than the cache has; what it would leave is
    /// right, but may be less.
    pub unsettled: u64,
    /// Bytes that are compared with the disk before they are used, because nothing proves that no other program has written to the
    /// disk since a kill; those of lines that are loaded.
    #[serde(default)]
    pub unproven: u64,
    /// Reads that the cache had all of.
    pub hits: u64,
    /// Reads that it had a part of.
    pub partial_hits: u64,
    /// Reads that it had nothing of.
    pub misses: u64,
    /// Reads of what the cache has that went to the disk all the same, because the cache's device was slower than it.
    #[serde(default)]
    pub bypassed_slow: u64,
    /// Reads that waited for another one's data.
    pub joined: u64,
    /// Bytes read from the cache for guests.
    pub hit_bytes: u64,
    /// Bytes brought in after reads.
    pub filled: u64,
    /// Bytes of these that no guest has asked for here: they were hot where its VM came from.
    #[serde(default)]
    pub warmed: u64,
    /// Reads that were not kept because too much was being brought in, or was being written.
    pub bypassed_busy: u64,
    /// Lines that left to make room.
    pub evicted: u64,
    /// Bytes written of what it knows of its lines.
    pub metadata_written: u64,
    /// Bytes read from the disk for whatever reason, and written to it.
    #[serde(default)]
    pub disk_read: u64,
    /// See above.
    #[serde(default)]
    pub disk_written: u64,
    /// Bytes read from the cache's device for whatever reason, and written to it.
    #[serde(default)]
    pub cache_read: u64,
    /// See above.
    #[serde(default)]
    pub cache_written: u64,
    /// Reads of the cache's device, and other requests to it, that have failed or were not answered in time.
    #[serde(default)]
    pub read_errors: u64,
    /// See above.
    #[serde(default)]
    pub write_errors: u64,
    /// Bytes that may be written to the cache's device in a day; `None`: any number.
    #[serde(default)]
    pub endurance: Option<u64>,
    /// How often caches of other sizes would have missed lines so far, if they kept what was used last (LRU). From the
    /// smallest on; empty if nothing was used.
    #[serde(default)]
    pub miss_ratios: Vec<MissRatio>,
    /// How long reads took that the cache had all of.
    #[serde(default)]
    pub hit_latency: Latency,
    /// How long reads took that the disk was needed for.
    #[serde(default)]
    pub miss_latency: Latency,
}

/// How far the disk has got all that only its cache had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlushState {
    /// It is being written.
    pub running: bool,
    /// Why the last time that has ended failed; `None` if it did not, or there was none.
    pub error: Option<String>,
}

/// What a cache of another size would do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissRatio {
    /// Bytes of the disk that it can hold.
    pub capacity: u64,
    /// The share of uses of lines that would have missed, 0 to 1.
    pub miss_ratio: f64,
}

/// How long something took, of all requests since the start of the server; times in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Requests.
    pub count: u64,
    /// The time of all together.
    pub sum_ns: u64,
    /// The longest time.
    pub max_ns: u64,
    /// How many took how long, from the shortest times on. What is empty is left out.
    pub buckets: Vec<LatencyBucket>,
}

/// Requests that took about as long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// They took less than this, and not less than the bucket before; `None`: there is no bound.
    pub below_ns: Option<u64>,
    /// How many.
    pub count: u64,
}

impl Latency {
    pub(super) fn new(of: &Histogram) -> Self {
        let bucket = |bucket: Bucket| LatencyBucket {
            below_ns: bucket.below.map(nanos),
            count: bucket.count,
        };
        Self {
            count: of.count(),
            sum_ns: nanos(of.sum()),
            max_ns: nanos(of.max()),
            buckets: of.buckets().map(bucket).collect(),
        }
    }

    /// The time that a share (from 0 to 1) of the requests did not exceed, or up to 25 % more; `None` without requests.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let bucket = |bucket: &LatencyBucket| Bucket {
            below: bucket.below_ns.map(Duration::from_nanos),
            count: bucket.count,
        };
        let buckets: Vec<Bucket> = self.buckets.iter().map(bucket).collect();
        quantile(&buckets, share, Duration::from_nanos(self.max_ns))
    }

    /// The average; `None` without requests.
    pub fn mean(&self) -> Option<Duration> {
        self.sum_ns.checked_div(self.count).map(Duration::from_nanos)
    }
}

/// Whether a cache works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CacheHealth {
    /// It does.
    Works,
    /// Its device has failed: it is not used until it is replaced, or the server is started again.
    Failed,
}

impl CacheState {
    pub(crate) fn new(place: &CachePlace) -> Self {
        let cache = place.now();
        let done = cache.layer.statistics();
        let shape = cache.layer.shape();
        let in_lines = |lines: u64| lines * shape.line_len();
        let miss_ratios = cache.layer.miss_ratios().into_iter();
        let miss_ratios = miss_ratios.map(|(capacity, miss_ratio)| MissRatio {
            capacity: capacity.get(),
            miss_ratio,
        });
        Self {
            file: absolute(&cache.file),
            mode: cache_mode_name(cache.layer.mode()).to_owned(),
            state: match cache.layer.works() {
                true => CacheHealth::Works,
                false => CacheHealth::Failed,
            },
            size: cache.size.get(),
            capacity: shape.capacity().get(),
            line_size: shape.line_len(),
            occupancy: in_lines(done.lines),
            dirty: in_lines(done.dirty_lines),
            cleaned: done.cleaned,
            flush: FlushState {
                running: place.work.is_running(),
                error: place.work.error(),
            },
            unsettled: in_lines(done.unsettled),
            unproven: done.unproven,
            hits: done.hits,
            partial_hits: done.partial_hits,
            misses: done.misses,
            bypassed_slow: done.bypassed_slow,
            joined: done.joined,
            hit_bytes: done.hit_bytes,
            filled: done.filled,
            warmed: done.warmed,
            bypassed_busy: done.bypassed_busy,
            evicted: done.evicted,
            metadata_written: done.metadata_written,
            disk_read: done.disk_read,
            disk_written: done.disk_written,
            cache_read: done.cache_read,
            cache_written: done.cache_written,
            read_errors: done.read_errors,
            write_errors: done.write_errors,
            endurance: cache.layer.endurance().map(ByteLen::get),
            miss_ratios: miss_ratios.collect(),
            hit_latency: Latency::new(&cache.layer.hit_latency()),
            miss_latency: Latency::new(&cache.layer.miss_latency()),
        }
    }
}

/// What read-ahead has done, and holds; see [`Statistics`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrefetchState {
    /// Bytes of memory taken, tables included.
    pub memory: u64,
    /// Bytes of memory that it may take; 0: nothing is read ahead.
    pub memory_limit: u64,
    /// By how many bytes it reads ahead at most.
    pub ahead: u64,
    /// Reads of more bytes than this are not read ahead of.
    pub largest_read: u64,
    /// Bytes fetched.
    pub fetched: u64,
    /// Bytes of them that were read, each counted once.
    pub used: u64,
    /// Bytes of them that were dropped before anybody read them.
    pub wasted: u64,
    /// Bytes of them that are in memory, and not read yet.
    pub unread: u64,
    /// Reads whose bytes were all in memory.
    pub hits: u64,
    /// Reads of which only a part was in memory, or on its way.
    pub partial_hits: u64,
    /// Reads that waited for bytes on their way.
    pub waits: u64,
    /// Reads of which nothing was in memory.
    pub misses: u64,
    /// Reads that were too long to be read ahead of.
    pub bypassed: u64,
    /// Fetches that failed.
    pub errors: u64,
    /// The streams that it has found.
    pub streams: StreamCounts,
}

/// Numbers of streams: readers that can be foreseen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamCounts {
    /// Those for which there is something in memory.
    pub now: u64,
    /// Found so far that go forward.
    pub forward: u64,
    /// Found so far that go backward.
    pub backward: u64,
    /// Found so far that go by steps.
    pub strided: u64,
}

impl PrefetchState {
    pub(crate) fn new(prefetch: &Prefetch) -> Self {
        let (options, done) = (prefetch.options(), prefetch.statistics());
        Self {
            memory: done.memory,
            memory_limit: options.memory.get(),
            ahead: options.ahead_max.get(),
            largest_read: options.largest_read.get(),
            fetched: done.fetched,
            used: done.used,
            wasted: done.wasted,
            unread: done.unread,
            hits: done.hits,
            partial_hits: done.partial_hits,
            waits: done.waits,
            misses: done.misses,
            bypassed: done.bypassed,
            errors: done.errors,
            streams: StreamCounts {
                now: done.streams,
                forward: done.streams_forward,
                backward: done.streams_backward,
                strided: done.streams_strided,
            },
        }
    }
}

//! The service times of kinds of disks, as a queueing model with few parameters.
//!
//! A disk has a number of channels that work at the same time, and a link each way. A request waits for the first
//! free channel, takes the latency of its kind, and for its part above 4 KiB the link's time. It keeps its channel
//! busy for as long as the disk's rate of requests demands. A read takes longer while channels are busy with writes.
//! A preset's figures are the makers' or, where noted, published measurements. Unpublished ones (channels,
//! interference, flush) are estimates and marked as such.

use std::time::Duration;

use crate::event_loop::LoopTime;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The request size in bytes for which latencies and rates are given.
const REFERENCE_BYTES: u64 = 4096;

/// The service of requests of one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceParameters {
    /// The time for one 4 KiB request on an idle disk.
    pub latency: Duration,
    /// The maximum rate of 4 KiB requests at random offsets, per second.
    pub requests_per_second: u32,
    /// The maximum bandwidth, in bytes per second.
    pub bytes_per_second: u64,
}

/// The parameters of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceModel {
    /// The service of reads.
    pub read: ServiceParameters,
    /// The service of writes. Discards and zeroes count as writes without bytes.
    pub write: ServiceParameters,
    /// The number of requests that the disk works on at the same time.
    pub channels: u32,
    /// The additional latency of a read while every channel writes, in percent of its latency.
    pub interference_percent: u32,
    /// The time for a flush, after the writes before it.
    pub flush: Duration,
    /// The latency of a request that begins where the previous one ended, if it differs (a disk that seeks).
    pub sequential: Option<Duration>,
}

const MB: u64 = 1_000_000;

impl ServiceModel {
    /// A data-centre NVMe SSD with TLC flash: Intel P4500, 4 TB (Lenovo's product guide: 645k/62.5k IOPS, 3.2/1.8 GB/s,
    /// 115/20 us). It protects its cache against power loss, so a flush is cheap. Estimates: channels, interference.
    pub const NVME_TLC: Self = Self {
        read: service(115, 645_000, 3200 * MB),
        write: service(20, 62_500, 1800 * MB),
        channels: 64,
        interference_percent: 150,
        flush: Duration::from_micros(20),
        sequential: None,
    };

    /// Intel Optane P4800X, 375 GB (Intel's specification as AnandTech has it: 550k/500k IOPS, 2.4/2.0 GB/s, below
    /// 10 us; AnandTech measured 8.9 us). Estimates: channels (from both figures), interference, write latency.
    pub const OPTANE: Self = Self {
        read: service(9, 550_000, 2400 * MB),
        write: service(10, 500_000, 2000 * MB),
        channels: 5,
        interference_percent: 10,
        flush: Duration::from_micros(5),
        sequential: None,
    };

    /// A data-centre NVMe SSD with QLC flash: Intel D5-P4320, 7.68 TB (Intel's launch figures as ComputerBase has
    /// them: 427k/36k IOPS, 3.2/1.0 GB/s). Estimates: latencies, channels, interference, flush.
    pub const NVME_QLC: Self = Self {
        read: service(140, 427_000, 3200 * MB),
        write: service(30, 36_000, 1000 * MB),
        channels: 64,
        interference_percent: 300,
        flush: Duration::from_micros(30),
        sequential: None,
    };

    /// The SATA SSD of the swap-cache study (Intel IT, 2016): 50 us read latency, 75k/36k IOPS, 500/460 MB/s.
    /// Estimates: write latency, channels, interference, flush.
    pub const SATA_SSD: Self = Self {
        read: service(50, 75_000, 500 * MB),
        write: service(60, 36_000, 460 * MB),
        channels: 4,
        interference_percent: 100,
        flush: Duration::from_micros(500),
        sequential: None,
    };

    /// The SAS disk of the swap-cache study (Intel IT, 2016): 2.9 ms on average. Estimates: bandwidth, sequential
    /// latency, flush.
    pub const SAS_DISK: Self = Self {
        read: service(2900, 345, 200 * MB),
        write: service(2900, 345, 200 * MB),
        channels: 1,
        interference_percent: 0,
        flush: Duration::from_micros(4000),
        sequential: Some(Duration::from_micros(60)),
    };

    /// The name and model of every preset, for command lines.
    pub const PRESETS: [(&str, Self); 5] = [
        ("nvme-tlc", Self::NVME_TLC),
        ("optane", Self::OPTANE),
        ("nvme-qlc", Self::NVME_QLC),
        ("sata-ssd", Self::SATA_SSD),
        ("sas-disk", Self::SAS_DISK),
    ];

    /// Returns the preset of that name.
    pub fn preset(name: &str) -> Option<Self> {
        let found = Self::PRESETS.iter().find(|(preset_name, _)| *preset_name == name);
        found.map(|(_, model)| *model)
    }
}

const fn service(latency_us: u64, requests_per_second: u32, bytes_per_second: u64) -> ServiceParameters {
    ServiceParameters { latency: Duration::from_micros(latency_us), requests_per_second, bytes_per_second }
}

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestDirection {
    /// A transfer from the disk.
    Read,
    /// A transfer to the disk; without bytes, a discard or zeroes.
    Write,
}

/// The service times of the requests of one disk. Its size is bounded: it stores channels, not requests.
pub(super) struct Schedule {
    model: ServiceModel,
    channels: Vec<Channel>,
    /// The times from which the link is free, for reads and for writes.
    link_free: [LoopTime; 2],
    writes_done: LoopTime,
    last_end: ByteOffset,
}

#[derive(Clone, Copy)]
struct Channel {
    free: LoopTime,
    writes: bool,
}

impl Schedule {
    pub(super) fn new(model: ServiceModel) -> Self {
        let idle = Channel { free: LoopTime::default(), writes: false };
        Self {
            model,
            channels: vec![idle; model.channels.max(1) as usize],
            link_free: [LoopTime::default(); 2],
            writes_done: LoopTime::default(),
            last_end: ByteOffset::new(u64::MAX),
        }
    }

    /// Returns the completion time of a request that arrives at `now` and transfers `bytes`.
    pub(super) fn admit(
        &mut self,
        kind: RequestDirection,
        range: ByteRange,
        bytes: ByteLen,
        now: LoopTime,
    ) -> LoopTime {
        let service = match kind {
            RequestDirection::Read => self.model.read,
            RequestDirection::Write => self.model.write,
        };
        let (mut latency, mut busy) = (service.latency, self.busy(service));
        if let Some(sequential) = self.model.sequential
            && range.start == self.last_end
        {
            (latency, busy) = (sequential, sequential);
        }
        self.last_end = range.end();
        if kind == RequestDirection::Read {
            latency += latency * self.model.interference_percent * self.writing(now) / 100 / self.channels.len() as u32;
        }
        let start = self.take_channel(kind, busy, now);
        let link = &mut self.link_free[usize::from(kind == RequestDirection::Write)];
        *link = start.max(*link).after(transfer(bytes.get(), service));
        let excess = bytes.get().saturating_sub(REFERENCE_BYTES);
        let done = start.after(latency + transfer(excess, service)).max(*link);
        if kind == RequestDirection::Write {
            self.writes_done = self.writes_done.max(done);
        }
        done
    }

    /// Returns the completion time of a flush that arrives at `now`.
    pub(super) fn admit_flush(&self, now: LoopTime) -> LoopTime {
        now.max(self.writes_done).after(self.model.flush)
    }

    /// Returns the time for which a request keeps a channel busy. All channels together then serve no more than the
    /// service's rate.
    fn busy(&self, service: ServiceParameters) -> Duration {
        let rate = u64::from(service.requests_per_second.max(1));
        Duration::from_nanos(self.channels.len() as u64 * 1_000_000_000 / rate)
    }

    /// Returns the number of channels that are busy with writes.
    fn writing(&self, now: LoopTime) -> u32 {
        let writing = self.channels.iter().filter(|channel| channel.writes && channel.free > now);
        writing.count() as u32
    }

    /// Occupies the first free channel, and returns the start of the request's service.
    fn take_channel(&mut self, kind: RequestDirection, busy: Duration, now: LoopTime) -> LoopTime {
        let Some(channel) = self.channels.iter_mut().min_by_key(|channel| channel.free) else {
            return now;
        };
        let begin = channel.free.max(now);
        *channel = Channel { free: begin.after(busy), writes: kind == RequestDirection::Write };
        begin
    }
}

fn transfer(bytes: u64, service: ServiceParameters) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(service.bytes_per_second.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

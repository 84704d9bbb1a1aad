//! The log of a simulation, for the diagnosis of a failure.

use std::fmt;

use larder_block::backend::simulated::{DeviceStop, InjectedFault};
use larder_block::{ByteLen, ByteRange, Failure, LoopTime};

/// A request as the guest sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(super) enum Request {
    Read(ByteRange),
    Write { range: ByteRange, fua: bool },
    Flush,
    Discard(ByteRange),
    Zero { range: ByteRange, unmap: bool, fast: bool, fua: bool },
    Extents(ByteRange),
    Grow(ByteLen),
}

impl Request {
    /// Returns the range, which is empty for a flush.
    pub(super) fn range(self) -> ByteRange {
        match self {
            Self::Read(range)
            | Self::Write { range, .. }
            | Self::Discard(range)
            | Self::Zero { range, .. }
            | Self::Extents(range) => range,
            Self::Flush | Self::Grow(_) => ByteRange::default(),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let durable_suffix = |fua| if fua { ", durably" } else { "" };
        match self {
            Self::Read(range) => write!(f, "read {range}"),
            Self::Write { range, fua } => write!(f, "write {range}{}", durable_suffix(*fua)),
            Self::Flush => write!(f, "flush"),
            Self::Discard(range) => write!(f, "discard {range}"),
            Self::Zero { range, unmap, fast, fua } => {
                let unmap = if *unmap { ", may unmap" } else { "" };
                let fast = if *fast { ", only if fast" } else { "" };
                write!(f, "zero {range}{unmap}{fast}{}", durable_suffix(*fua))
            }
            Self::Extents(range) => write!(f, "extents of {range}"),
            Self::Grow(to) => write!(f, "grow to {to}"),
        }
    }
}

/// An event.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(super) enum Event {
    Opened { life: u32 },
    OpenCutShort { life: u32 },
    Started { number: u32, request: Request },
    Done { number: u32 },
    Failed { number: u32, failure: Failure },
    GivenUp { number: u32 },
    Resized { to: ByteLen },
    Poked,
    Fault { disk: usize, fault: InjectedFault },
    Failures { per_mille: u32 },
    Room { room: ByteLen },
    Verified,
    Stopped { how: DeviceStop },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opened { life } => write!(f, "--- life {life}: opened"),
            Self::OpenCutShort { life } => write!(f, "--- life {life}: stopped while it was being opened"),
            Self::Started { number, request } => write!(f, "#{number} {request}"),
            Self::Done { number } => write!(f, "    #{number} done"),
            Self::Failed { number, failure } => write!(f, "    #{number} failed: {failure}"),
            Self::GivenUp { number } => write!(f, "    #{number} abandoned"),
            Self::Resized { to } => write!(f, "disk 0 resized to {to}"),
            Self::Poked => write!(f, "settings changed"),
            Self::Fault { disk, fault } => write!(f, "disk {disk}: fault set: {fault:?}"),
            Self::Failures { per_mille } => write!(f, "{per_mille} of 1000 requests to the disks fail"),
            Self::Room { room } => write!(f, "each disk has space for {room} more"),
            Self::Verified => write!(f, "the whole disk is read and verified"),
            Self::Stopped { how: DeviceStop::PowerLoss } => write!(f, "--- power lost"),
            Self::Stopped { how: DeviceStop::Kill } => write!(f, "--- killed"),
            Self::Stopped { how: DeviceStop::KillAndClearMemory } => {
                write!(f, "--- killed, and its state in the host's memory is lost")
            }
        }
    }
}

/// All events, in order.
#[derive(Default)]
pub(super) struct Log(Vec<(LoopTime, Event)>);

impl Log {
    /// Adds an event at the time `at` of its life.
    pub(super) fn add(&mut self, at: LoopTime, event: Event) {
        self.0.push((at, event));
    }

    /// Returns the number of requests started.
    pub(super) fn requests(&self) -> u64 {
        let started = self.0.iter().filter(|(_, event)| matches!(event, Event::Started { .. }));
        started.count() as u64
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, event) in &self.0 {
            writeln!(f, "{:>14.3} us  {event}", at.as_nanos() as f64 / 1000.0)?;
        }
        Ok(())
    }
}

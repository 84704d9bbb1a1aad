//! Encoders of one lane's pages: its own thread, and the devices present.
//!
//! While a device has a frame's pages, the lane makes the next frame. A device that does not answer within
//! [`SILENT_MAX`] ends the session. Its memory is leaked, because it may still write there; the migration fails and
//! the guest stays at the source.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use larder_codec::accelerator::{Accelerator, Buffer, Dispatcher, Instance, Pool, Request};
use larder_codec::batch::{Encoder, Method};
use larder_codec::select::Way;

use super::Failed;

/// Maximum frames of a lane whose pages devices have at a time.
const ON_DEVICES_MAX: usize = 4;
/// Time after which a device counts as hung; a batch normally takes some 100 us.
const SILENT_MAX: Duration = Duration::from_secs(10);
/// Polls of a device before the thread yields the processor.
const LOOKS_FIRST: u32 = 200;

/// Encoders of one lane.
pub struct Codecs {
    pub(super) encoder: Encoder,
    devices: Option<Devices>,
}

struct Devices {
    dispatcher: Dispatcher,
    pool: Pool,
    /// Finished requests that their frames have not fetched yet.
    #[expect(clippy::vec_box, reason = "requests are passed around as boxes")]
    done: Vec<Box<Request>>,
}

impl Devices {
    fn poll(&mut self) {
        self.done.extend(self.dispatcher.poll());
    }

    fn fetch(&mut self, tag: u64) -> Option<Box<Request>> {
        self.poll();
        let at = self.done.iter().position(|request| request.tag() == tag)?;
        Some(self.done.swap_remove(at))
    }
}

impl Codecs {
    /// Creates the encoders, with an instance of each device that has one left.
    #[must_use]
    pub fn new(devices: &[Box<dyn Accelerator>]) -> Self {
        let open = |device: &dyn Accelerator| match device.open() {
            Ok(instance) => Some(instance),
            Err(error) => {
                tracing::warn!("a lane cannot use {}: {error}", device.name());
                None
            }
        };
        let instances: Vec<Box<dyn Instance>> = devices.iter().filter_map(|device| open(&**device)).collect();
        Self {
            encoder: Encoder::new(),
            devices: (!instances.is_empty()).then(|| Devices {
                dispatcher: Dispatcher::new(instances),
                pool: Pool::new(ON_DEVICES_MAX),
                done: Vec::with_capacity(ON_DEVICES_MAX),
            }),
        }
    }

    /// Returns the number of frames that may be in the making at a time.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.devices.as_ref().map_or(1, |_| 1 + ON_DEVICES_MAX)
    }

    /// Returns the encoders worth choosing here, of methods that the receiver decodes.
    pub fn ways(&self, is_decoded: impl Fn(Method) -> bool) -> Vec<Way> {
        let is_here = |way: &Way| match way {
            Way::Here(method) => self.encoder.is_fast(*method),
            Way::Device => self.devices.is_some(),
        };
        let ways = Way::all().filter(|way| is_decoded(way.method()));
        ways.filter(is_here).collect()
    }

    /// Hands these pages to a device, once it has room.
    pub(super) fn start(
        &mut self,
        tag: u64,
        buffer: &Arc<Buffer>,
        runs: &[Range<usize>],
        limit: usize,
    ) -> Result<(), Failed> {
        let mut refused = None;
        self.wait_until(|devices| {
            devices.poll();
            let request = refused.take().or_else(|| {
                let mut request = devices.pool.take()?;
                let buffer = Arc::clone(buffer);
                request.fill(tag, Way::Device.method(), buffer, runs.iter().cloned(), limit);
                Some(request)
            })?;
            match devices.dispatcher.submit(request) {
                Ok(()) => Some(()),
                Err(request) => {
                    refused = Some(request);
                    None
                }
            }
        })
    }

    /// Returns the request with this tag, if it is done.
    pub(super) fn fetch(&mut self, tag: u64) -> Option<Box<Request>> {
        self.devices.as_mut()?.fetch(tag)
    }

    /// Waits for the request with this tag and returns it.
    pub(super) fn wait(&mut self, tag: u64) -> Result<Box<Request>, Failed> {
        self.wait_until(|devices| devices.fetch(tag))
    }

    /// Calls `is_so`, which must poll the devices, until it returns a value.
    fn wait_until<T>(&mut self, mut is_so: impl FnMut(&mut Devices) -> Option<T>) -> Result<T, Failed> {
        let devices = self.devices.as_mut().ok_or(Failed::Device)?;
        let begun = Instant::now();
        let mut looks = 0;
        loop {
            if let Some(result) = is_so(devices) {
                return Ok(result);
            }
            looks += 1;
            if looks < LOOKS_FIRST {
                spin_loop();
            } else if begun.elapsed() < SILENT_MAX {
                thread::yield_now();
            } else {
                // The device may still write to this memory.
                std::mem::forget(self.devices.take());
                return Err(Failed::Device);
            }
        }
    }

    /// Takes back a request that is no longer needed.
    pub(super) fn give(&mut self, request: Box<Request>) {
        if let Some(devices) = &mut self.devices {
            devices.pool.give(request);
        }
    }
}

//! Encoders of one lane's pages: its own thread, and the devices present.
//!
//! While a device has a frame's pages, the lane makes the next frame. A device that does not answer within
//! [`DEVICE_TIMEOUT`] ends the session. Its memory is leaked, because it may still write there; the migration fails and
//! the guest stays at the source.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use larder_codec::accelerator::{Accelerator, Dispatcher, EncodeRequest, Instance, PageBuffer, RequestPool};
use larder_codec::batch::{Encoder, Method};
use larder_codec::select::BatchEncoding;

use super::EncodeError;

/// Maximum frames of a lane whose pages devices have at a time.
const DEVICE_FRAMES_MAX: usize = 4;
/// Time after which a device counts as hung; a batch normally takes some 100 us.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// Polls of a device before the thread yields the processor.
const SPIN_POLLS: u32 = 200;

/// Encoders of one lane.
pub struct Codecs {
    pub(super) encoder: Encoder,
    devices: Option<Devices>,
}

struct Devices {
    dispatcher: Dispatcher,
    pool: RequestPool,
    /// Finished requests that their frames have not fetched yet.
    #[expect(clippy::vec_box, reason = "requests are passed around as boxes")]
    done: Vec<Box<EncodeRequest>>,
}

impl Devices {
    fn poll(&mut self) {
        self.done.extend(self.dispatcher.poll());
    }

    fn fetch(&mut self, tag: u64) -> Option<Box<EncodeRequest>> {
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
                pool: RequestPool::new(DEVICE_FRAMES_MAX),
                done: Vec::with_capacity(DEVICE_FRAMES_MAX),
            }),
        }
    }

    /// Returns the number of frames that may be in the making at a time.
    #[must_use]
    pub fn frames_max(&self) -> usize {
        self.devices.as_ref().map_or(1, |_| 1 + DEVICE_FRAMES_MAX)
    }

    /// Returns the encoders worth choosing here, of methods that the receiver decodes.
    pub fn usable_encodings(&self, is_decoded: impl Fn(Method) -> bool) -> Vec<BatchEncoding> {
        let is_available = |encoding: &BatchEncoding| match encoding {
            BatchEncoding::Cpu(method) => self.encoder.is_fast(*method),
            BatchEncoding::Device => self.devices.is_some(),
        };
        let encodings = BatchEncoding::all().filter(|way| is_decoded(way.method()));
        encodings.filter(is_available).collect()
    }

    /// Hands these pages to a device, once it has room.
    pub(super) fn submit(
        &mut self,
        tag: u64,
        buffer: &Arc<PageBuffer>,
        runs: &[Range<usize>],
        limit: usize,
    ) -> Result<(), EncodeError> {
        let mut rejected = None;
        self.wait_until(|devices| {
            devices.poll();
            let request = rejected.take().or_else(|| {
                let mut request = devices.pool.take()?;
                let buffer = Arc::clone(buffer);
                request.fill(tag, BatchEncoding::Device.method(), buffer, runs.iter().cloned(), limit);
                Some(request)
            })?;
            match devices.dispatcher.submit(request) {
                Ok(()) => Some(()),
                Err(request) => {
                    rejected = Some(request);
                    None
                }
            }
        })
    }

    /// Returns the request with this tag, if it is done.
    pub(super) fn fetch(&mut self, tag: u64) -> Option<Box<EncodeRequest>> {
        self.devices.as_mut()?.fetch(tag)
    }

    /// Waits for the request with this tag and returns it.
    pub(super) fn wait(&mut self, tag: u64) -> Result<Box<EncodeRequest>, EncodeError> {
        self.wait_until(|devices| devices.fetch(tag))
    }

    /// Calls `attempt`, which must poll the devices, until it returns a value.
    fn wait_until<T>(&mut self, mut attempt: impl FnMut(&mut Devices) -> Option<T>) -> Result<T, EncodeError> {
        let devices = self.devices.as_mut().ok_or(EncodeError::Device)?;
        let started = Instant::now();
        let mut polls = 0;
        loop {
            if let Some(result) = attempt(devices) {
                return Ok(result);
            }
            polls += 1;
            if polls < SPIN_POLLS {
                spin_loop();
            } else if started.elapsed() < DEVICE_TIMEOUT {
                thread::yield_now();
            } else {
                // The device may still write to this memory.
                std::mem::forget(self.devices.take());
                return Err(EncodeError::Device);
            }
        }
    }

    /// Takes back a request that is no longer needed.
    pub(super) fn recycle(&mut self, request: Box<EncodeRequest>) {
        if let Some(devices) = &mut self.devices {
            devices.pool.recycle(request);
        }
    }
}

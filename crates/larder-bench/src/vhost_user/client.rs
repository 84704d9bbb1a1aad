//! A client of a vhost-user-blk server, built on the `blkio` crate: keeps a set number of requests in flight and counts.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// What to ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    pub(super) write: bool,
    /// Bytes of a request.
    pub(super) block: usize,
    /// Requests in flight.
    pub(super) depth: usize,
    pub(super) duration: Duration,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
}

impl Outcome {
    pub(super) fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// A connected client with memory for its requests.
pub(super) struct Client {
    // Fields are dropped in this order: the queue before what it refers to.
    queue: Blkioq,
    memory: *mut u8,
    _device: Blkio,
    capacity: u64,
}

/// Memory for the deepest workload of the largest requests.
const MEMORY_BYTES: usize = 64 << 20;

impl Client {
    pub(super) fn connect(socket: &Path, polling: bool) -> anyhow::Result<Self> {
        let fail = |what: &'static str| move |error: blkio::Error| anyhow::anyhow!("{what}: {}", error.message());
        let mut device = Blkio::new("virtio-blk-vhost-user").map_err(fail("making the client"))?;
        let path = socket.to_str().context("a socket path in UTF-8")?;
        device.set_str("path", path).map_err(fail("setting the path"))?;
        device.connect().map_err(fail("connecting"))?;
        let capacity = device.get_u64("capacity").map_err(fail("asking for the capacity"))?;
        device
            .set_i32("num-queues", i32::from(!polling))
            .map_err(fail("setting queues"))?;
        device
            .set_i32("num-poll-queues", i32::from(polling))
            .map_err(fail("setting polled queues"))?;
        let mut started = device.start().map_err(fail("starting"))?;
        let region = device
            .alloc_mem_region(MEMORY_BYTES)
            .map_err(fail("allocating memory"))?;
        device.map_mem_region(&region).map_err(fail("sharing memory"))?;
        let memory = region.addr as *mut u8;
        // SAFETY: MEMORY_BYTES writable bytes of our own. Touched, so that no page fault falls into the measurement.
        unsafe { std::ptr::write_bytes(memory, 0x5a, MEMORY_BYTES) };
        let queue = if polling {
            started.poll_queues.pop()
        } else {
            started.queues.pop()
        };
        let queue = queue.context("the client has no queue")?;
        Ok(Self {
            queue,
            memory,
            _device: device,
            capacity,
        })
    }

    fn start(&mut self, workload: &Workload, slot: usize, random: &mut u64) {
        // xorshift64: any sequence without pattern will do.
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let block = workload.block;
        let offset = *random % (self.capacity / block as u64) * block as u64;
        let buffer = self.memory.wrapping_add(slot * block);
        if workload.write {
            self.queue.write(offset, buffer, block, slot, ReqFlags::empty());
        } else {
            self.queue.read(offset, buffer, block, slot, ReqFlags::empty());
        }
    }

    /// Runs the workload at random offsets of the whole disk.
    pub(super) fn run(&mut self, workload: &Workload) -> anyhow::Result<Outcome> {
        if workload.depth * workload.block > MEMORY_BYTES {
            bail!(
                "{} requests of {} bytes do not fit the client's memory",
                workload.depth,
                workload.block
            );
        }
        let mut random = 0x9e37_79b9_7f4a_7c15;
        let mut done: Vec<MaybeUninit<Completion>> = (0..workload.depth).map(|_| MaybeUninit::uninit()).collect();
        let begin = Instant::now();
        let mut requests = 0;
        for slot in 0..workload.depth {
            self.start(workload, slot, &mut random);
        }
        let mut in_flight = workload.depth;
        let mut stopping = false;
        while in_flight > 0 {
            let count = self.queue.do_io(&mut done, 1, None, None).map_err(blkio_error)?;
            for completion in &done[..count] {
                // SAFETY: `do_io` has filled the first `count`.
                let (slot, ret) = unsafe {
                    let completion = completion.assume_init_ref();
                    (completion.user_data, completion.ret)
                };
                if ret != 0 {
                    bail!("a request failed with error {ret}");
                }
                requests += 1;
                if stopping {
                    in_flight -= 1;
                } else {
                    self.start(workload, slot, &mut random);
                }
            }
            // Asking the time for each completion would be part of what is measured.
            if requests & 63 < count as u64 && !stopping {
                stopping = begin.elapsed() >= workload.duration;
            }
        }
        Ok(Outcome {
            requests,
            elapsed: begin.elapsed(),
        })
    }

    /// Writes every byte of the disk once.
    pub(super) fn fill(&mut self) -> anyhow::Result<()> {
        let mut done = [MaybeUninit::uninit()];
        for offset in (0..self.capacity).step_by(FILL_BYTES) {
            let len = FILL_BYTES.min((self.capacity - offset) as usize);
            self.queue.write(offset, self.memory, len, 0, ReqFlags::empty());
            self.queue.do_io(&mut done, 1, None, None).map_err(blkio_error)?;
        }
        Ok(())
    }
}

/// Bytes of a request that fills the disk.
const FILL_BYTES: usize = 8 << 20;

fn blkio_error(error: blkio::Error) -> anyhow::Error {
    anyhow::anyhow!("{}", error.message())
}

//! A client of a vhost-user-blk server, built on the `blkio` crate, which keeps a fixed number of requests in flight
//! and counts them.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// Parameters of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) write: bool,
    /// Bytes of a request.
    pub(crate) block: usize,
    /// Requests in flight.
    pub(crate) depth: usize,
    pub(crate) duration: Duration,
}

/// Result of a load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) requests: u64,
    pub(crate) elapsed: Duration,
}

impl Outcome {
    pub(crate) fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// A request of a replayed sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) write: bool,
    /// Start offset in bytes.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) len: usize,
    /// Time at which the request is sent, from the start of the replay; `None`: as soon as a slot is free.
    pub(crate) due: Option<Duration>,
}

/// Result of a replay.
#[derive(Clone, Debug)]
pub(crate) struct Replayed {
    /// Latency of each read, in no order. It counts from the time at which a timed request was due.
    pub(crate) latencies: Vec<Duration>,
    pub(crate) read_bytes: u64,
    pub(crate) elapsed: Duration,
}

/// A connected client with memory for its requests.
pub(crate) struct Client {
    // Fields are dropped in this order: the queue before the memory and the device that it uses.
    queue: Blkioq,
    memory: *mut u8,
    memory_len: usize,
    _device: Blkio,
    capacity: u64,
}

/// Size of the request memory, enough for the deepest workload of the largest requests.
const MEMORY_BYTES: usize = 64 << 20;

/// Error of `do_io` after a timeout.
const TIMED_OUT: blkio::Errno = blkio::Errno::TIME;

/// Time for which a server may refuse connections.
const CONNECT_MAX: Duration = Duration::from_secs(5);

impl Client {
    pub(crate) fn connect(socket: &Path, polling: bool) -> anyhow::Result<Self> {
        Self::connect_with(socket, polling, MEMORY_BYTES)
    }

    /// Connects with `memory_len` bytes for requests.
    pub(crate) fn connect_with(socket: &Path, polling: bool, memory_len: usize) -> anyhow::Result<Self> {
        Self::connect_with_options(socket, polling, memory_len, false)
    }

    /// Connects to a server that accepts no writes.
    pub(crate) fn connect_read_only(socket: &Path, polling: bool, memory_len: usize) -> anyhow::Result<Self> {
        Self::connect_with_options(socket, polling, memory_len, true)
    }

    fn connect_with_options(socket: &Path, polling: bool, memory_len: usize, read_only: bool) -> anyhow::Result<Self> {
        let context = |what: &'static str| move |error: blkio::Error| anyhow::anyhow!("{what}: {}", error.message());
        let mut device = Blkio::new("virtio-blk-vhost-user").map_err(context("creating the client"))?;
        let path = socket.to_str().context("the socket's path is not UTF-8")?;
        device.set_str("path", path).map_err(context("setting the path"))?;
        device.set_bool("read-only", read_only).map_err(context("setting read-only"))?;
        // The socket may exist before the server listens.
        let deadline = Instant::now() + CONNECT_MAX;
        while let Err(error) = device.connect() {
            if Instant::now() > deadline {
                return Err(context("connecting")(error));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let capacity = device.get_u64("capacity").map_err(context("querying the capacity"))?;
        device.set_i32("num-queues", i32::from(!polling)).map_err(context("setting the number of queues"))?;
        device
            .set_i32("num-poll-queues", i32::from(polling))
            .map_err(context("setting the number of polled queues"))?;
        let mut started = device.start().map_err(context("starting"))?;
        let region = device.alloc_mem_region(memory_len).map_err(context("allocating memory"))?;
        device.map_mem_region(&region).map_err(context("sharing memory"))?;
        let memory = region.addr as *mut u8;
        // SAFETY: the region has this many writable bytes, which only this client uses. Touching them now keeps page
        // faults out of the measurement.
        unsafe { std::ptr::write_bytes(memory, 0x5a, memory_len) };
        let queue = if polling { started.poll_queues.pop() } else { started.queues.pop() };
        let queue = queue.context("the client has no queue")?;
        Ok(Self { queue, memory, memory_len, _device: device, capacity })
    }

    fn start(&mut self, workload: &Workload, slot: usize, offset: u64) {
        let block = workload.block;
        let buffer = self.memory.wrapping_add(slot * block);
        if workload.write {
            self.queue.write(offset, buffer, block, slot, ReqFlags::empty());
        } else {
            self.queue.read(offset, buffer, block, slot, ReqFlags::empty());
        }
    }

    /// Runs the workload at random offsets of the whole disk.
    pub(crate) fn run(&mut self, workload: &Workload) -> anyhow::Result<Outcome> {
        let blocks = self.capacity / workload.block as u64;
        let mut random = Random::default();
        let begin = Instant::now();
        let requests = self.run_requests(workload, |requests| {
            // Reading the time for each request would distort the measurement.
            let time_is_up = requests & 63 == 0 && begin.elapsed() >= workload.duration;
            (!time_is_up).then(|| random.below(blocks) * workload.block as u64)
        })?;
        Ok(Outcome { requests, elapsed: begin.elapsed() })
    }

    /// Runs the workload once at each of the offsets, without a time limit, followed by a flush if it writes.
    pub(crate) fn run_at(&mut self, workload: &Workload, offsets: &[u64]) -> anyhow::Result<Outcome> {
        let mut offsets = offsets.iter().copied();
        let begin = Instant::now();
        let requests = self.run_requests(workload, |_| offsets.next())?;
        if workload.write {
            self.queue.flush(0, ReqFlags::empty());
            self.wait_for_one()?;
        }
        Ok(Outcome { requests, elapsed: begin.elapsed() })
    }

    /// Keeps the workload's number of requests in flight until `next`, called with the number of completed requests,
    /// returns `None`.
    fn run_requests(&mut self, workload: &Workload, mut next: impl FnMut(u64) -> Option<u64>) -> anyhow::Result<u64> {
        if workload.depth * workload.block > self.memory_len {
            bail!("{} requests of {} bytes do not fit the client's memory", workload.depth, workload.block);
        }
        let mut done: Vec<MaybeUninit<Completion>> = (0..workload.depth).map(|_| MaybeUninit::uninit()).collect();
        let mut in_flight = 0;
        for slot in 0..workload.depth {
            let Some(offset) = next(0) else { break };
            self.start(workload, slot, offset);
            in_flight += 1;
        }
        let mut requests = 0;
        let mut stopping = false;
        while in_flight > 0 {
            let count = self.queue.do_io(&mut done, 1, None, None).map_err(blkio_error)?;
            for completion in &done[..count] {
                // SAFETY: `do_io` has filled the first `count`.
                let slot = slot_of(unsafe { completion.assume_init_ref() })?;
                requests += 1;
                let offset = if stopping { None } else { next(requests) };
                match offset {
                    Some(offset) => self.start(workload, slot, offset),
                    None => {
                        stopping = true;
                        in_flight -= 1;
                    }
                }
            }
        }
        Ok(requests)
    }

    /// Sends requests of up to `largest_bytes` bytes in their order, each when it is due, and at most `depth` at a
    /// time.
    pub(crate) fn replay(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        depth: usize,
        largest_bytes: usize,
    ) -> anyhow::Result<Replayed> {
        if depth * largest_bytes > self.memory_len {
            bail!("{depth} requests of {largest_bytes} bytes do not fit the client's memory");
        }
        let mut requests = requests.into_iter().peekable();
        let mut done: Vec<MaybeUninit<Completion>> = (0..depth).map(|_| MaybeUninit::uninit()).collect();
        let mut free: Vec<usize> = (0..depth).collect();
        // Start of the latency of each slot's request; `None` for writes.
        let mut since: Vec<Option<Instant>> = vec![None; depth];
        let (mut latencies, mut read_bytes) = (Vec::new(), 0);
        let begin = Instant::now();
        loop {
            let mut idle = None;
            while let (Some(slot), Some(request)) = (free.last(), requests.peek()) {
                let now = Instant::now();
                let due = request.due.map_or(now, |due| begin + due);
                if due > now {
                    idle = Some(due - now);
                    break;
                }
                if request.len > largest_bytes {
                    bail!("a request of {} bytes exceeds the maximum of {largest_bytes}", request.len);
                }
                let (slot, buffer) = (*slot, self.memory.wrapping_add(slot * largest_bytes));
                match request.write {
                    true => self.queue.write(request.start, buffer, request.len, slot, ReqFlags::empty()),
                    false => self.queue.read(request.start, buffer, request.len, slot, ReqFlags::empty()),
                }
                since[slot] = (!request.write).then_some(due);
                read_bytes += if request.write { 0 } else { request.len as u64 };
                free.pop();
                requests.next();
            }
            if free.len() == depth {
                let Some(idle) = idle else { break };
                std::thread::sleep(idle);
                continue;
            }
            let count = match self.queue.do_io(&mut done, 1, idle.as_mut(), None) {
                Err(error) if error.errno() == TIMED_OUT => 0,
                count => count.map_err(blkio_error)?,
            };
            let now = Instant::now();
            for completion in &done[..count] {
                // SAFETY: `do_io` has filled the first `count`.
                let slot = slot_of(unsafe { completion.assume_init_ref() })?;
                latencies.extend(since[slot].map(|since| now - since));
                free.push(slot);
            }
        }
        Ok(Replayed { latencies, read_bytes, elapsed: begin.elapsed() })
    }

    /// Writes every byte of the disk once.
    pub(crate) fn fill(&mut self) -> anyhow::Result<()> {
        for offset in (0..self.capacity).step_by(FILL_BYTES) {
            let len = FILL_BYTES.min((self.capacity - offset) as usize);
            self.queue.write(offset, self.memory, len, 0, ReqFlags::empty());
            self.wait_for_one()?;
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> anyhow::Result<()> {
        let mut done = [MaybeUninit::uninit()];
        self.queue.do_io(&mut done, 1, None, None).map_err(blkio_error)?;
        // SAFETY: `do_io` returns when it has filled one.
        slot_of(unsafe { done[0].assume_init_ref() })?;
        Ok(())
    }
}

/// Returns the slot of a completed request, which must have succeeded.
fn slot_of(completion: &Completion) -> anyhow::Result<usize> {
    match completion.ret {
        0 => Ok(completion.user_data),
        error => bail!("a request failed with error {error}"),
    }
}

/// Bytes of a request that fills the disk.
const FILL_BYTES: usize = 8 << 20;

/// xorshift64, since any sequence without a pattern is sufficient.
pub(crate) struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

fn blkio_error(error: blkio::Error) -> anyhow::Error {
    anyhow::anyhow!("{}", error.message())
}

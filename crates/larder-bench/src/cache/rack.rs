//! The drives that all VMs share, as an NBD server in this process. Each VM has a partition of each drive, in memory,
//! with a socket of its own. Each request takes the time that the drive's model gives, multiplied by a factor.
//!
//! The factor leaves time for the programs: a machine with two processors can run hundreds of them if each has little
//! to do in a second. The model computes with the arrival times of requests, so a late timer delays one answer and
//! nothing else.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::Listener;
use larder_block::signal::{Signal, first_of};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, Filter, Geometry, Io, Loop, LoopTime, ReadBuf, WriteBuf, WriteFlags,
};
use larder_export::nbd::{NbdServer, NbdServerOptions};

use super::closed::address;
use super::drive::{BLOCK, Drive, Model, Nanos, Token};
use crate::prefetch::place::Place;
use crate::prefetch::slow::uri;

/// Granularity of addresses. A request costs as much as all blocks that it touches.
const SECTOR_BYTES: u32 = 512;

/// Configuration of a drive, with a partition for each VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriveConfig {
    pub(super) model: Model,
    /// Bytes of a partition.
    pub(super) partition_bytes: u64,
}

/// The running drives, on a thread that ends when this value is dropped.
pub(super) struct SimulatedDrives {
    /// NBD URIs by drive and VM.
    uris: Vec<Vec<String>>,
    shared_state: Arc<DriveSharedState>,
    /// Closing this connection stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct DriveSharedState {
    /// True if requests take the model's time.
    timing_enabled: AtomicBool,
    answer_count: AtomicU64,
    /// Sum of all delays of answers behind the model's time, in nanoseconds.
    lateness_ns: AtomicU64,
    /// Blocks written, by drive.
    written_blocks: Vec<AtomicU64>,
}

impl SimulatedDrives {
    /// Starts the drives. The model's times are multiplied by `dilation`.
    pub(super) fn start(
        scratch: &Place,
        drive_configs: &[DriveConfig],
        vms: usize,
        dilation: f64,
    ) -> anyhow::Result<Self> {
        let (mut uris, mut listeners) = (Vec::new(), Vec::new());
        for _ in drive_configs {
            let (mut drive_uris, mut drive_listeners) = (Vec::new(), Vec::new());
            for _ in 0..vms {
                let path = scratch.unused("partition");
                let listener = UnixListener::bind(&path).with_context(|| format!("listening on {}", path.display()))?;
                drive_listeners.push(listener);
                drive_uris.push(uri(&path)?);
            }
            uris.push(drive_uris);
            listeners.push(drive_listeners);
        }
        let shared = Arc::new(DriveSharedState {
            written_blocks: drive_configs.iter().map(|_| AtomicU64::default()).collect(),
            ..DriveSharedState::default()
        });
        let (stop, stopped) = UnixStream::pair()?;
        let (drive_configs, switches) = (drive_configs.to_vec(), Arc::clone(&shared));
        let serve = move || match serve(&drive_configs, listeners, &stopped, dilation, &switches) {
            Ok(()) => {}
            // The clients fail too: they wait for the connection and report that.
            Err(error) => eprintln!("the simulated drives failed: {error:#}"),
        };
        Ok(Self {
            uris,
            shared_state: shared,
            stop: Some(stop),
            thread: Some(std::thread::Builder::new().name("drives".to_owned()).spawn(serve)?),
        })
    }

    pub(super) fn uri(&self, drive: usize, vm: usize) -> &str {
        &self.uris[drive][vm]
    }

    /// Sets whether requests take the model's time. At first they are answered at once.
    pub(super) fn set_timed(&self, timed: bool) {
        self.shared_state.timing_enabled.store(timed, Ordering::Relaxed);
    }

    /// Returns the blocks written to a drive since the last call.
    pub(super) fn take_written_blocks(&self, drive: usize) -> u64 {
        self.shared_state.written_blocks[drive].swap(0, Ordering::Relaxed)
    }

    /// Returns the mean delay of answers behind the model's time since the last call.
    pub(super) fn take_mean_lateness(&self) -> Duration {
        let late = self.shared_state.lateness_ns.swap(0, Ordering::Relaxed);
        let answers = self.shared_state.answer_count.swap(0, Ordering::Relaxed).max(1);
        Duration::from_nanos(late / answers)
    }
}

impl Drop for SimulatedDrives {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message already.
            let _ = thread.join();
        }
    }
}

/// Serves until the other end of `stopped` is closed.
fn serve(
    bays: &[DriveConfig],
    listeners: Vec<Vec<UnixListener>>,
    stopped: &UnixStream,
    dilation: f64,
    switches: &Arc<DriveSharedState>,
) -> anyhow::Result<()> {
    // The loop does not spin: the processors are for the programs under test.
    let on = Loop::new(Duration::ZERO)?;
    let mut servers = Vec::new();
    for (number, (bay, listeners)) in bays.iter().zip(listeners).enumerate() {
        let timed = Rc::new(TimedDrive {
            event_loop: on.clone(),
            dilation,
            drive_index: number,
            drive: RefCell::new(Drive::new(bay.model)),
            pending: RefCell::default(),
            next_token: Cell::default(),
            request_count: Cell::default(),
            request_arrived: Signal::default(),
            switches: Arc::clone(switches),
        });
        on.spawn(Rc::clone(&timed).tick());
        for (vm, listener) in listeners.into_iter().enumerate() {
            let partition = Partition {
                lower: Rc::new(MemoryDevice::new(ByteLen::new(bay.partition_bytes), SECTOR_BYTES)),
                drive: Rc::clone(&timed),
                vm,
            };
            let server = NbdServer::new(&on, Rc::new(partition), NbdServerOptions::default());
            server.listen(Listener::from_descriptor(&on, listener.into())?);
            servers.push(server);
        }
    }
    on.block_on(async {
        let result = on.readable(stopped.as_fd()).await;
        for server in &servers {
            server.stop().await;
        }
        Ok(result?)
    })
}

/// A drive model driven by the event loop's clock.
struct TimedDrive {
    event_loop: Loop,
    dilation: f64,
    /// Index of the drive.
    drive_index: usize,
    drive: RefCell<Drive>,
    /// Requests in flight, by each of their tokens.
    pending: RefCell<HashMap<Token, Rc<Waiting>>>,
    next_token: Cell<Token>,
    /// Number of requests received.
    request_count: Cell<u64>,
    /// Raised when a request arrives.
    request_arrived: Signal,
    switches: Arc<DriveSharedState>,
}

/// A request in flight.
#[derive(Default)]
struct Waiting {
    /// Blocks that are not done.
    blocks_left: Cell<u64>,
    completed: Signal,
}

impl TimedDrive {
    fn now(&self) -> Nanos {
        (self.event_loop.now().as_nanos() as f64 / self.dilation) as Nanos
    }

    /// Returns the earliest loop time at which the model's time has reached `at`.
    fn deadline(&self, at: Nanos) -> LoopTime {
        let nanos = ((at + 1) as f64 * self.dilation).ceil() as u64;
        LoopTime::default().after(Duration::from_nanos(nanos))
    }

    /// Advances the model's time to now, and completes the requests that are done by then.
    fn catch_up(&self) {
        let now = self.now();
        let mut done = Vec::new();
        self.drive.borrow_mut().run_until(now, |at, token| done.push((at, token)));
        for (at, token) in done {
            let Some(request) = self.pending.borrow_mut().remove(&token) else {
                continue;
            };
            request.blocks_left.set(request.blocks_left.get() - 1);
            if request.blocks_left.get() == 0 {
                let late = ((now - at) as f64 * self.dilation) as u64;
                self.switches.lateness_ns.fetch_add(late, Ordering::Relaxed);
                self.switches.answer_count.fetch_add(1, Ordering::Relaxed);
                request.completed.raise();
            }
        }
    }

    /// Advances the model's time as long as the loop runs.
    async fn tick(self: Rc<Self>) {
        loop {
            self.catch_up();
            let (next, asked) = (self.drive.borrow().next(), self.request_count.get());
            let another = self.request_arrived.until(|| (self.request_count.get() != asked).then_some(()));
            match next {
                Some(at) => first_of(self.event_loop.sleep_until(self.deadline(at)), another).await,
                None => another.await,
            }
        }
    }

    /// Waits as long as the drive takes for the blocks of a request.
    async fn wait_service_time(&self, write: bool, vm: usize, start: ByteOffset, len: usize) {
        let blocks = start.get() / BLOCK..(start.get() + len as u64).div_ceil(BLOCK);
        let request = Rc::new(Waiting::default());
        let count = blocks.end - blocks.start;
        request.blocks_left.set(count);
        if write {
            self.switches.written_blocks[self.drive_index].fetch_add(count, Ordering::Relaxed);
        }
        self.catch_up();
        for block in blocks {
            let token = self.next_token.get();
            self.next_token.set(token + 1);
            self.pending.borrow_mut().insert(token, Rc::clone(&request));
            self.drive.borrow_mut().request(token, write, address(vm, block));
        }
        self.request_count.set(self.request_count.get() + 1);
        self.request_arrived.raise();
        request.completed.until(|| (request.blocks_left.get() == 0).then_some(())).await;
    }
}

/// A VM's partition of a drive.
struct Partition {
    lower: Rc<dyn BlockDevice>,
    drive: Rc<TimedDrive>,
    vm: usize,
}

impl Partition {
    fn is_timed(&self) -> bool {
        self.drive.switches.timing_enabled.load(Ordering::Relaxed)
    }
}

/// Flushes take no time: all acknowledged data is already safe from power loss, in the buffer or in place. Discards
/// and write-zeroes take no time either; the experiment has none.
impl Filter for Partition {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        Geometry { physical_block_size: BLOCK as u32, ..self.lower.geometry() }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if !self.is_timed() {
            return self.lower.read(start, buffer);
        }
        Io::task(async move {
            self.drive.wait_service_time(false, self.vm, start, buffer.len()).await;
            self.lower.read(start, buffer).await
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.is_timed() {
            return self.lower.write(start, buffer, flags);
        }
        Io::task(async move {
            self.drive.wait_service_time(true, self.vm, start, buffer.len()).await;
            self.lower.write(start, buffer, flags).await
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::cache::sheets::{OPTANE, QLC, ReadDuringProgram};

    fn qemu_io(uri: &str, command: &str) -> String {
        let output = Command::new("qemu-io")
            .args(["-f", "raw", "-t", "none", "-c", command, uri])
            .output()
            .expect("qemu-io, which the set-up installs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[test]
    /// A write changes its own partition alone, untimed and timed, at offsets inside blocks.
    fn write_changes_only_its_own_partition() {
        let scratch = Place::new(&std::env::temp_dir()).expect("a place");
        let bays = [OPTANE, QLC]
            .map(|drive| DriveConfig { model: drive.model(ReadDuringProgram::Suspended), partition_bytes: 1 << 20 });
        let rack = SimulatedDrives::start(&scratch, &bays, 2, 1.0).expect("the drives");
        for (pattern, timed) in [(1, false), (2, true)] {
            rack.set_timed(timed);
            // The range begins and ends inside blocks.
            let written = qemu_io(rack.uri(1, 1), &format!("write -P {pattern} 3584 9728"));
            assert!(written.contains("wrote 9728/9728"), "{written}");
            for (drive, vm, expected) in [(1, 1, pattern), (1, 0, 0), (0, 1, 0)] {
                let read = qemu_io(rack.uri(drive, vm), &format!("read -P {expected} 3584 9728"));
                assert!(read.contains("read 9728/9728") && !read.contains("verification failed"), "{read}");
            }
        }
        // Only the timed write is counted.
        assert_eq!((rack.take_written_blocks(0), rack.take_written_blocks(1)), (0, 4));
    }
}

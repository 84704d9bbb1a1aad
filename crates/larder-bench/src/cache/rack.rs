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
pub(super) struct Bay {
    pub(super) model: Model,
    /// Bytes of a partition.
    pub(super) partition: u64,
}

/// The running drives, on a thread that ends when this value is dropped.
pub(super) struct Rack {
    /// NBD URIs by drive and VM.
    uris: Vec<Vec<String>>,
    shared: Arc<Switches>,
    /// Closing this connection stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Switches {
    /// True if requests take the model's time.
    timed: AtomicBool,
    answers: AtomicU64,
    /// Sum of all delays of answers behind the model's time, in nanoseconds.
    late: AtomicU64,
    /// Blocks written, by drive.
    writes: Vec<AtomicU64>,
}

impl Rack {
    /// Starts the drives. The model's times are multiplied by `dilation`.
    pub(super) fn start(place: &Place, bays: &[Bay], vms: usize, dilation: f64) -> anyhow::Result<Self> {
        let (mut uris, mut listeners) = (Vec::new(), Vec::new());
        for _ in bays {
            let (mut of_drive, mut to_drive) = (Vec::new(), Vec::new());
            for _ in 0..vms {
                let path = place.unused("partition");
                let listener = UnixListener::bind(&path).with_context(|| format!("listening on {}", path.display()))?;
                to_drive.push(listener);
                of_drive.push(uri(&path)?);
            }
            uris.push(of_drive);
            listeners.push(to_drive);
        }
        let shared = Arc::new(Switches {
            writes: bays.iter().map(|_| AtomicU64::default()).collect(),
            ..Switches::default()
        });
        let (stop, stopped) = UnixStream::pair()?;
        let (bays, switches) = (bays.to_vec(), Arc::clone(&shared));
        let serve = move || match serve(&bays, listeners, &stopped, dilation, &switches) {
            Ok(()) => {}
            // The clients fail too: they wait for the connection and report that.
            Err(error) => eprintln!("the simulated drives failed: {error:#}"),
        };
        Ok(Self {
            uris,
            shared,
            stop: Some(stop),
            thread: Some(std::thread::Builder::new().name("drives".to_owned()).spawn(serve)?),
        })
    }

    pub(super) fn uri(&self, drive: usize, vm: usize) -> &str {
        &self.uris[drive][vm]
    }

    /// Sets whether requests take the model's time. At first they are answered at once.
    pub(super) fn set_timed(&self, timed: bool) {
        self.shared.timed.store(timed, Ordering::Relaxed);
    }

    /// Returns the blocks written to a drive since the last call.
    pub(super) fn take_writes(&self, drive: usize) -> u64 {
        self.shared.writes[drive].swap(0, Ordering::Relaxed)
    }

    /// Returns the mean delay of answers behind the model's time since the last call.
    pub(super) fn take_lateness(&self) -> Duration {
        let late = self.shared.late.swap(0, Ordering::Relaxed);
        let answers = self.shared.answers.swap(0, Ordering::Relaxed).max(1);
        Duration::from_nanos(late / answers)
    }
}

impl Drop for Rack {
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
    bays: &[Bay],
    listeners: Vec<Vec<UnixListener>>,
    stopped: &UnixStream,
    dilation: f64,
    switches: &Arc<Switches>,
) -> anyhow::Result<()> {
    // The loop does not spin: the processors are for the programs under test.
    let on = Loop::new(Duration::ZERO)?;
    let mut servers = Vec::new();
    for (number, (bay, listeners)) in bays.iter().zip(listeners).enumerate() {
        let timed = Rc::new(Timed {
            on: on.clone(),
            dilation,
            number,
            drive: RefCell::new(Drive::new(bay.model)),
            waiting: RefCell::default(),
            tokens: Cell::default(),
            asked: Cell::default(),
            changed: Signal::default(),
            switches: Arc::clone(switches),
        });
        on.spawn(Rc::clone(&timed).tick());
        for (vm, listener) in listeners.into_iter().enumerate() {
            let partition = Partition {
                lower: Rc::new(MemoryDevice::new(ByteLen::new(bay.partition), SECTOR_BYTES)),
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
struct Timed {
    on: Loop,
    dilation: f64,
    /// Index of the drive.
    number: usize,
    drive: RefCell<Drive>,
    /// Requests in flight, by each of their tokens.
    waiting: RefCell<HashMap<Token, Rc<Waiting>>>,
    tokens: Cell<Token>,
    /// Number of requests received.
    asked: Cell<u64>,
    /// Raised when a request arrives.
    changed: Signal,
    switches: Arc<Switches>,
}

/// A request in flight.
#[derive(Default)]
struct Waiting {
    /// Blocks that are not done.
    left: Cell<u64>,
    over: Signal,
}

impl Timed {
    fn now(&self) -> Nanos {
        (self.on.now().as_nanos() as f64 / self.dilation) as Nanos
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
        self.drive
            .borrow_mut()
            .run_until(now, |at, token| done.push((at, token)));
        for (at, token) in done {
            let Some(request) = self.waiting.borrow_mut().remove(&token) else {
                continue;
            };
            request.left.set(request.left.get() - 1);
            if request.left.get() == 0 {
                let late = ((now - at) as f64 * self.dilation) as u64;
                self.switches.late.fetch_add(late, Ordering::Relaxed);
                self.switches.answers.fetch_add(1, Ordering::Relaxed);
                request.over.raise();
            }
        }
    }

    /// Advances the model's time as long as the loop runs.
    async fn tick(self: Rc<Self>) {
        loop {
            self.catch_up();
            let (next, asked) = (self.drive.borrow().next(), self.asked.get());
            let another = self.changed.until(|| (self.asked.get() != asked).then_some(()));
            match next {
                Some(at) => first_of(self.on.sleep_until(self.deadline(at)), another).await,
                None => another.await,
            }
        }
    }

    /// Waits as long as the drive takes for the blocks of a request.
    async fn take_time(&self, write: bool, vm: usize, start: ByteOffset, len: usize) {
        let blocks = start.get() / BLOCK..(start.get() + len as u64).div_ceil(BLOCK);
        let request = Rc::new(Waiting::default());
        let count = blocks.end - blocks.start;
        request.left.set(count);
        if write {
            self.switches.writes[self.number].fetch_add(count, Ordering::Relaxed);
        }
        self.catch_up();
        for block in blocks {
            let token = self.tokens.get();
            self.tokens.set(token + 1);
            self.waiting.borrow_mut().insert(token, Rc::clone(&request));
            self.drive.borrow_mut().request(token, write, address(vm, block));
        }
        self.asked.set(self.asked.get() + 1);
        self.changed.raise();
        request.over.until(|| (request.left.get() == 0).then_some(())).await;
    }
}

/// A VM's partition of a drive.
struct Partition {
    lower: Rc<dyn BlockDevice>,
    drive: Rc<Timed>,
    vm: usize,
}

impl Partition {
    fn is_timed(&self) -> bool {
        self.drive.switches.timed.load(Ordering::Relaxed)
    }
}

/// Flushes take no time: all acknowledged data is already safe from power loss, in the buffer or in place. Discards
/// and write-zeroes take no time either; the experiment has none.
impl Filter for Partition {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block_size: BLOCK as u32,
            ..self.lower.geometry()
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if !self.is_timed() {
            return self.lower.read(start, buffer);
        }
        Io::task(async move {
            self.drive.take_time(false, self.vm, start, buffer.len()).await;
            self.lower.read(start, buffer).await
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.is_timed() {
            return self.lower.write(start, buffer, flags);
        }
        Io::task(async move {
            self.drive.take_time(true, self.vm, start, buffer.len()).await;
            self.lower.write(start, buffer, flags).await
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::cache::sheets::{OPTANE, Programs, QLC};

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
        let place = Place::new(&std::env::temp_dir()).expect("a place");
        let bays = [OPTANE, QLC].map(|drive| Bay {
            model: drive.model(Programs::Suspended),
            partition: 1 << 20,
        });
        let rack = Rack::start(&place, &bays, 2, 1.0).expect("the drives");
        for (pattern, timed) in [(1, false), (2, true)] {
            rack.set_timed(timed);
            // The range begins and ends inside blocks.
            let written = qemu_io(rack.uri(1, 1), &format!("write -P {pattern} 3584 9728"));
            assert!(written.contains("wrote 9728/9728"), "{written}");
            for (drive, vm, expected) in [(1, 1, pattern), (1, 0, 0), (0, 1, 0)] {
                let read = qemu_io(rack.uri(drive, vm), &format!("read -P {expected} 3584 9728"));
                assert!(
                    read.contains("read 9728/9728") && !read.contains("verification failed"),
                    "{read}"
                );
            }
        }
        // Only the timed write is counted.
        assert_eq!((rack.take_writes(0), rack.take_writes(1)), (0, 4));
    }
}

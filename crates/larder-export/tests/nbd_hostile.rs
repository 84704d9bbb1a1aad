//! Tests of the NBD server with clients that send garbage, stall, disconnect or are too many; and of its stop.

#[path = "../../larder-block/tests/nbd_support/mod.rs"]
mod nbd_support;

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::{Listener, POLL_MAX_DEFAULT, yield_now};
use larder_block::signal::Signal;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf, SizeChanges,
    WriteBuf, WriteFlags, ZeroFlags,
};
use larder_export::nbd::{NbdServer, NbdServerOptions};
use nbd_support::{Place, Random};

const SIZE: u64 = 1 << 20;

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

/// Disk whose reads wait until the gate is opened; it counts requests.
struct Gated {
    disk: MemoryDevice,
    open: Cell<bool>,
    opened: Signal,
    reads: Cell<usize>,
    writes: Cell<usize>,
}

impl Gated {
    fn new(open: bool) -> Rc<Self> {
        Rc::new(Self {
            disk: MemoryDevice::new(ByteLen::new(SIZE), 512),
            open: Cell::new(open),
            opened: Signal::default(),
            reads: Cell::new(0),
            writes: Cell::new(0),
        })
    }

    fn open(&self) {
        self.open.set(true);
        self.opened.raise();
    }
}

impl BlockDevice for Gated {
    fn name(&self) -> &Rc<str> {
        self.disk.name()
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.reads.set(self.reads.get() + 1);
        Io::task(async move {
            let open = || self.open.get().then_some(());
            self.opened.until(open).await;
            self.disk.read(start, buffer).await
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.writes.set(self.writes.get() + 1);
        self.disk.write(start, buffer, flags)
    }

    fn flush(&self) -> Io<'_> {
        self.disk.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.disk.discard(range)
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.disk.write_zeroes(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.disk.extents(range, limit)
    }

    fn size_changes(&self) -> &SizeChanges {
        self.disk.size_changes()
    }
}

struct Served {
    on: Loop,
    device: Rc<Gated>,
    server: NbdServer,
    place: Place,
}

fn serve(on: &Loop, open: bool, options: NbdServerOptions) -> Served {
    let place = Place::new();
    let device = Gated::new(open);
    let server = NbdServer::new(on, Rc::clone(&device) as Rc<dyn BlockDevice>, options);
    server.listen(Listener::from_descriptor(on, place.listener()).expect("a socket"));
    Served { on: on.clone(), device, server, place }
}

impl Served {
    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.place.socket()).expect("connects")
    }

    async fn until(&self, condition: impl Fn(&Self) -> bool) {
        while !condition(self) {
            yield_now().await;
        }
    }

    /// Connects a client to the transmission phase with EXPORT_NAME: requests of 28 bytes, simple replies.
    async fn client(&self) -> UnixStream {
        let mut socket = self.connect();
        let talk = move || {
            let mut greeting = [0; 18];
            socket.read_exact(&mut greeting)?;
            socket.write_all(&3u32.to_be_bytes())?;
            socket.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")?;
            let mut answer = [0; 10];
            socket.read_exact(&mut answer)?;
            assert_eq!(answer[..8], SIZE.to_be_bytes());
            Ok::<_, std::io::Error>(socket)
        };
        let talked = self.on.run_blocking(talk).await.expect("a thread");
        talked.expect("gets in")
    }
}

fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut message = 0x25609513u32.to_be_bytes().to_vec();
    message.extend(flags.to_be_bytes());
    message.extend(command.to_be_bytes());
    message.extend(cookie.to_be_bytes());
    message.extend(offset.to_be_bytes());
    message.extend(len.to_be_bytes());
    message
}

/// Reads simple replies without data; returns their cookies and errors.
async fn replies(on: &Loop, socket: &UnixStream, count: usize) -> Vec<(u64, u32)> {
    let mut socket = socket.try_clone().expect("a descriptor");
    let read = move || {
        let mut found = Vec::new();
        for _ in 0..count {
            let mut reply = [0; 16];
            socket.read_exact(&mut reply).expect("a reply");
            assert_eq!(reply[..4], 0x67446698u32.to_be_bytes());
            let error = u32::from_be_bytes(reply[4..8].try_into().expect("4 bytes"));
            let cookie = u64::from_be_bytes(reply[8..].try_into().expect("8 bytes"));
            found.push((cookie, error));
        }
        found
    };
    on.run_blocking(read).await.expect("a thread")
}

/// Returns true when the server has closed the connection, after reading all pending data.
async fn is_closed(on: &Loop, socket: UnixStream) -> bool {
    let mut socket = socket;
    let read = move || socket.read_to_end(&mut Vec::new());
    // A reset closes the connection, too.
    let _ = on.run_blocking(read).await.expect("a thread");
    true
}

/// Garbage in or after the handshake ends only the connection that sent it.
#[test]
fn garbage_ends_only_its_connection() {
    on_loop(async |on| {
        let served = serve(on, true, NbdServerOptions::default());
        let mut random = Random(11);
        let bystander = served.client().await;
        for round in 0..60 {
            let mut socket = if round % 2 == 0 { served.connect() } else { served.client().await };
            let mut bytes: Vec<u8> = (0..1000).map(|_| random.next() as u8).collect();
            match round % 6 {
                // Valid flags, then garbage in place of an option.
                2 => bytes[..4].copy_from_slice(&3u32.to_be_bytes()),
                // An option of 4 GiB.
                4 => bytes[..20].copy_from_slice(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xff\xff\xff\xff"),
                // A write of 4 GiB.
                3 => bytes[..28].copy_from_slice(&request(1, 0, 1, 0, u32::MAX)),
                _ => {}
            }
            // The server may have closed the connection already.
            let _ = socket.write_all(&bytes);
            assert!(is_closed(on, socket).await);
        }
        (&bystander).write_all(&request(3, 0, 77, 0, 0)).expect("writes");
        assert_eq!(replies(on, &bystander, 1).await, [(77, 0)]);
        served.until(|served| served.server.statistics().connections == 1).await;
    });
}

#[test]
fn invalid_requests_are_refused_individually() {
    on_loop(async |on| {
        let served = serve(on, true, NbdServerOptions::default());
        let socket = served.client().await;
        let (einval, enospc, eoverflow) = (22, 28, 75);
        let wrong = [
            (request(99, 0, 1, 0, 512), einval),
            (request(0, 0, 2, SIZE, 512), einval),
            (request(0, 0, 3, u64::MAX - 5, 512), einval),
            (request(0, 0, 4, 0, (32 << 20) + 512), eoverflow),
            (request(0, 0, 5, 1, 512), einval),
            (request(0, 1 << 2, 6, 0, 512), einval),
            ([request(1, 0, 7, SIZE, 512), vec![1; 512]].concat(), enospc),
            ([request(1, 1 << 9, 8, 0, 512), vec![1; 512]].concat(), einval),
            ([request(1, 0, 9, 3, 512), vec![1; 512]].concat(), einval),
            (request(4, 0, 10, SIZE - 512, 1024), einval),
            (request(6, 0, 11, SIZE - 512, 1024), enospc),
            (request(7, 0, 12, 0, 512), einval),
            (request(5, 1 << 4, 13, 0, 512), einval),
            (request(3, 1, 14, 0, 0), 0),
            (request(6, 0, 15, 0, 0), 0),
            (request(5, 0, 16, 0, 4096), 0),
        ];
        for (cookie, (message, error)) in (1..).zip(wrong) {
            (&socket).write_all(&message).expect("writes");
            assert_eq!(replies(on, &socket, 1).await, [(cookie, error)]);
        }
    });
}

#[test]
fn read_only_export_refuses_changes() {
    on_loop(async |on| {
        let options = NbdServerOptions { read_only: true, ..NbdServerOptions::default() };
        let served = serve(on, true, options);
        let socket = served.client().await;
        let write = [request(1, 0, 1, 0, 512), vec![1; 512]].concat();
        for (cookie, message) in (1..).zip([write, request(4, 0, 2, 0, 512), request(6, 0, 3, 0, 512)]) {
            (&socket).write_all(&message).expect("writes");
            assert_eq!(replies(on, &socket, 1).await, [(cookie, 1)]);
        }
        assert_eq!(served.device.writes.get(), 0);
    });
}

#[test]
fn stalled_handshake_is_dropped() {
    on_loop(async |on| {
        let options = NbdServerOptions { handshake_timeout: Duration::from_millis(50), ..NbdServerOptions::default() };
        let served = serve(on, true, options);
        let silent = served.connect();
        let mut hesitant = served.connect();
        hesitant.write_all(b"\0\0\0\x03IHAVEO").expect("writes");
        assert!(is_closed(on, silent).await && is_closed(on, hesitant).await);
        // A client in the transmission phase may be silent.
        let patient = served.client().await;
        let another = served.connect();
        assert!(is_closed(on, another).await);
        (&patient).write_all(&request(3, 0, 5, 0, 0)).expect("writes");
        assert_eq!(replies(on, &patient, 1).await, [(5, 0)]);
    });
}

#[test]
fn disconnected_client_leaves_nothing_behind() {
    on_loop(async |on| {
        let served = serve(on, false, NbdServerOptions::default());
        let mut in_payload = served.client().await;
        let half = [request(1, 0, 1, 0, 65536), vec![1; 30000]].concat();
        in_payload.write_all(&half).expect("writes");
        let mut waiting = served.client().await;
        for cookie in 0..10 {
            waiting.write_all(&request(0, 0, cookie, 0, 4096)).expect("writes");
        }
        served.until(|served| served.device.reads.get() == 10).await;
        drop((in_payload, waiting));
        served.until(|served| served.server.statistics().connections == 0).await;
        assert_eq!(served.device.writes.get(), 0, "half a write must not be done");
        served.device.open();
        served.server.stop().await;
    });
}

/// No further requests are read from a client that has as many in flight as it may.
#[test]
fn client_at_limit_is_not_read() {
    on_loop(async |on| {
        let options = NbdServerOptions { requests_max: 4, ..NbdServerOptions::default() };
        let served = serve(on, false, options);
        let mut socket = served.client().await;
        for cookie in 0..9 {
            socket.write_all(&request(0, 0, cookie, 0, 512)).expect("writes");
        }
        socket.write_all(&[request(1, 0, 9, 0, 512), vec![1; 512]].concat()).expect("writes");
        served.until(|served| served.device.reads.get() == 4).await;
        // The round trip of another client gives a fifth read time to begin, if it could.
        let other = served.client().await;
        (&other).write_all(&request(3, 0, 1, 0, 0)).expect("writes");
        assert_eq!(replies(on, &other, 1).await, [(1, 0)]);
        assert_eq!((served.device.reads.get(), served.device.writes.get()), (4, 0));
        served.device.open();
        served.until(|served| served.device.writes.get() == 1).await;
        assert_eq!(served.device.reads.get(), 9);
    });
}

#[test]
fn excess_clients_are_refused() {
    on_loop(async |on| {
        let options = NbdServerOptions { connections_max: 3, ..NbdServerOptions::default() };
        let served = serve(on, true, options);
        let mut inside = Vec::new();
        for _ in 0..3 {
            inside.push(served.client().await);
        }
        assert!(is_closed(on, served.connect()).await);
        inside.pop();
        served.until(|served| served.server.statistics().connections == 2).await;
        inside.push(served.client().await);
        let seen = served.server.statistics();
        assert_eq!((seen.connections, seen.connections_refused), (3, 1));
    });
}

/// A stopping server answers requests in flight, and refuses new ones.
#[test]
fn stopping_server_refuses_new_requests() {
    on_loop(async |on| {
        let served = serve(on, false, NbdServerOptions::default());
        let socket = served.client().await;
        let shaking = served.connect();
        (&socket).write_all(&request(0, 0, 1, 0, 512)).expect("writes");
        served.until(|served| served.device.reads.get() == 1).await;
        let served = Rc::new(served);
        let stopping = on.spawn_with_result({
            let served = Rc::clone(&served);
            async move { served.server.stop().await }
        });
        assert!(is_closed(on, shaking).await);
        let write = [request(1, 0, 2, 0, 512), vec![1; 512]].concat();
        (&socket).write_all(&write).expect("writes");
        assert_eq!(replies(on, &socket, 1).await, [(2, 108)], "ESHUTDOWN");
        served.device.open();
        assert_eq!(replies(on, &socket, 1).await, [(1, 0)]);
        let mut data = [1; 512];
        (&socket).read_exact(&mut data).expect("the data of the read");
        assert_eq!(data, [0; 512]);
        stopping.await;
        assert!(is_closed(on, socket).await);
        assert_eq!(served.device.writes.get(), 0);
        assert_eq!(served.server.statistics().connections, 0);
    });
}

/// A client that does not receive its replies delays a stop only up to the timeout.
#[test]
fn stuck_client_does_not_prevent_stop() {
    on_loop(async |on| {
        let options = NbdServerOptions { stop_timeout: Duration::from_millis(50), ..NbdServerOptions::default() };
        let served = serve(on, true, options);
        let mut socket = served.client().await;
        for cookie in 0..8 {
            // More than the socket buffers.
            socket.write_all(&request(0, 0, cookie, 0, SIZE as u32)).expect("writes");
        }
        served.until(|served| served.device.reads.get() == 8).await;
        served.server.stop().await;
        assert_eq!(served.server.statistics().connections, 0);
    });
}

/// Requests the whole disk `count` times, and receives no reply.
fn ask_for_much(socket: &UnixStream, count: u64) {
    let asked: Vec<u8> = (0..count).flat_map(|cookie| request(0, 0, cookie, 0, SIZE as u32)).collect();
    (&*socket).write_all(&asked).expect("writes");
}

/// Receives the reply to a read of `len` bytes.
async fn answer(on: &Loop, socket: &UnixStream, len: usize) -> Vec<u8> {
    let mut socket = socket.try_clone().expect("a descriptor");
    let read = move || {
        let mut reply = vec![0; 16 + len];
        socket.read_exact(&mut reply).map(|()| reply)
    };
    on.run_blocking(read).await.expect("a thread").expect("a reply")
}

/// Clients that receive no replies hold at most the server's memory, and other clients' small requests are served.
#[test]
fn stuck_clients_hold_bounded_memory() {
    on_loop(async |on| {
        let options = NbdServerOptions {
            connections_max: 16,
            memory_max: ByteLen::mib(64),
            stall_timeout: Duration::from_secs(3600),
            ..NbdServerOptions::default()
        };
        let served = serve(on, true, options);
        let mut stuck = Vec::new();
        for _ in 0..12 {
            let socket = served.client().await;
            ask_for_much(&socket, 64);
            stuck.push(socket);
        }
        served.until(|served| served.device.reads.get() >= 48).await;
        // The memory reserved for one client is always available to it, whatever other clients do.
        let modest = served.client().await;
        for cookie in 0..20 {
            (&modest).write_all(&request(0, 0, cookie, 0, 512 << 10)).expect("writes");
            answer(on, &modest, 512 << 10).await;
        }
        let held = served.device.reads.get() - 20;
        assert!(held <= 64, "{held} answers of 1 MiB are held");
    });
}

/// A client that receives no replies is disconnected when other clients need its memory, and not before.
#[test]
fn stuck_client_is_dropped_for_memory() {
    on_loop(async |on| {
        let options = NbdServerOptions {
            memory_max: ByteLen::mib(48),
            stall_timeout: Duration::from_millis(50),
            ..NbdServerOptions::default()
        };
        let served = serve(on, true, options);
        let stuck = served.client().await;
        ask_for_much(&stuck, 40);
        served.until(|served| served.device.reads.get() >= 32).await;
        // As long as no other client needs the memory, the connection stays.
        let idle = served.client().await;
        (&idle).write_all(&request(3, 0, 1, 0, 0)).expect("writes");
        assert_eq!(replies(on, &idle, 1).await, [(1, 0)]);
        assert_eq!(served.server.statistics().connections, 2);
        let greedy = served.client().await;
        ask_for_much(&greedy, 40);
        for _ in 0..40 {
            answer(on, &greedy, SIZE as usize).await;
        }
        assert!(is_closed(on, stuck).await);
        served.until(|served| served.server.statistics().connections == 2).await;
        (&idle).write_all(&request(3, 0, 2, 0, 0)).expect("writes");
        assert_eq!(replies(on, &idle, 1).await, [(2, 0)]);
    });
}

/// Clients that announce payloads and do not send them are disconnected when others need their memory.
#[test]
fn silent_writers_are_dropped_for_memory() {
    on_loop(async |on| {
        let options = NbdServerOptions {
            memory_max: ByteLen::mib(32),
            stall_timeout: Duration::from_millis(50),
            ..NbdServerOptions::default()
        };
        let served = serve(on, true, options);
        // 128 KiB are reserved for each client, so 36 clients hold 31.5 MiB of the 32 MiB that are shared.
        let mut silent = Vec::new();
        for _ in 0..36 {
            let socket = served.client().await;
            (&socket).write_all(&request(1, 0, 1, 0, SIZE as u32)).expect("writes");
            (&socket).write_all(&[1; 4096]).expect("writes");
            silent.push(socket);
        }
        let other = served.client().await;
        ask_for_much(&other, 1);
        answer(on, &other, SIZE as usize).await;
        for socket in silent {
            assert!(is_closed(on, socket).await);
        }
        assert_eq!(served.device.writes.get(), 0);
    });
}

/// A client that waits for the disk is not disconnected, although others need its memory.
#[test]
fn client_waiting_for_disk_stays_connected() {
    on_loop(async |on| {
        let options = NbdServerOptions {
            memory_max: ByteLen::mib(48),
            stall_timeout: Duration::from_millis(50),
            ..NbdServerOptions::default()
        };
        let served = serve(on, false, options);
        // Half a payload, of a client that stalls; the rest of the memory, of one that does not stall.
        let stuck = served.client().await;
        (&stuck).write_all(&request(1, 0, 1, 0, SIZE as u32)).expect("writes");
        let patient = served.client().await;
        ask_for_much(&patient, 40);
        let other = served.client().await;
        ask_for_much(&other, 40);
        assert!(is_closed(on, stuck).await);
        assert_eq!(served.server.statistics().connections, 2);
        served.device.open();
        answer(on, &patient, SIZE as usize).await;
    });
}

/// Spec: no string contains a NUL. A name with a NUL is refused, even if it begins with the export's name.
#[test]
fn names_with_nuls_are_refused() {
    on_loop(async |on| {
        let options = NbdServerOptions { export: "disk".to_owned(), ..NbdServerOptions::default() };
        let served = serve(on, true, options);
        let option = |option: u32, data: &[u8]| {
            let mut message = b"IHAVEOPT".to_vec();
            message.extend(option.to_be_bytes());
            message.extend((data.len() as u32).to_be_bytes());
            message.extend(data);
            message
        };
        let mut socket = served.connect();
        let ask = move || {
            let mut greeting = [0; 18];
            socket.read_exact(&mut greeting).expect("a greeting");
            socket.write_all(&3u32.to_be_bytes()).expect("writes");
            let mut kinds = Vec::new();
            for number in [6, 7] {
                socket.write_all(&option(number, b"\0\0\0\x05disk\0\0\0")).expect("writes");
                let mut reply = [0; 20];
                socket.read_exact(&mut reply).expect("a reply");
                let word = |at: usize| reply[at..at + 4].try_into().map(u32::from_be_bytes).expect("4 bytes");
                let mut text = vec![0; word(16) as usize];
                socket.read_exact(&mut text).expect("its text");
                kinds.push((word(12), String::from_utf8_lossy(&text).into_owned()));
            }
            socket.write_all(&option(1, b"disk\0")).expect("writes");
            (kinds, socket)
        };
        let (kinds, socket) = on.run_blocking(ask).await.expect("a thread");
        for (kind, text) in kinds {
            assert_eq!(kind, 1 << 31 | 3, "ERR_INVALID: {text}");
            assert!(text.contains("NUL"), "{text}");
        }
        assert!(is_closed(on, socket).await);
    });
}

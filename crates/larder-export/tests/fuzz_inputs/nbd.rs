//! Fuzz targets for NBD: a server that receives arbitrary bytes, and a client whose server sends arbitrary bytes.
//! Some steps are valid parts of the protocol, so that later phases are reached.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::event_loop::{Listener, yield_now};
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags};
use larder_export::nbd::{NbdServer, NbdServerOptions};

use super::Input;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const DISK_BYTES: u64 = 1 << 20;
const STEPS_MAX: usize = 64;

struct Kit {
    on: Loop,
    server: NbdServer,
    server_path: PathBuf,
    client_path: PathBuf,
    client_listener: UnixListener,
    _folder: Folder,
}

/// Directory for sockets, removed when the thread ends.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

thread_local! {
    static KIT: Kit = {
        let name = format!("larder-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
        let folder = std::env::temp_dir().join(name.replace(['(', ')'], ""));
        std::fs::create_dir_all(&folder).expect("a folder");
        let on = Loop::new(Duration::ZERO).expect("io_uring");
        let device = Rc::new(MemoryDevice::new(ByteLen::new(DISK_BYTES), 512));
        let server = NbdServer::new(&on, device, NbdServerOptions::default());
        let server_path = folder.join("server");
        let listener = UnixListener::bind(&server_path).expect("a socket");
        server.listen(Listener::from_descriptor(&on, listener.into()).expect("a listener"));
        let client_path = folder.join("client");
        let client_listener = UnixListener::bind(&client_path).expect("a socket");
        client_listener.set_nonblocking(true).expect("an option");
        Kit { on, server, server_path, client_path, client_listener, _folder: Folder(folder) }
    };
}

/// Reads and discards all available bytes; returns whether the peer is still connected.
fn drain(mut stream: &UnixStream, mut each: impl FnMut(&[u8])) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => each(&bytes[..count]),
            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

fn send(mut stream: &UnixStream, bytes: &[u8]) {
    // The peer may have closed the connection, or be too slow: both are acceptable.
    let _ = stream.write(bytes);
}

/// Sends `data` to a server.
pub fn server(data: &[u8]) {
    KIT.with(|kit| {
        let stream = UnixStream::connect(&kit.server_path).expect("the server listens");
        stream.set_nonblocking(true).expect("an option");
        kit.on.block_on(async {
            let mut input = Input(data);
            if input.byte() & 3 != 0 {
                let choice = input.byte();
                send(&stream, &[&3u32.to_be_bytes()[..], &negotiation(choice)].concat());
            }
            for _ in 0..STEPS_MAX {
                if input.is_empty() {
                    break;
                }
                send(&stream, &client_bytes(&mut input));
                for _ in 0..4 {
                    yield_now().await;
                }
                drain(&stream, |_| ());
            }
            let _ = stream.shutdown(std::net::Shutdown::Both);
            while kit.server.statistics().connections > 0 {
                yield_now().await;
            }
        });
    });
}

fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encodes options that negotiate structured replies or extended headers, then select the default export.
fn negotiation(choice: u8) -> Vec<u8> {
    [option(8 + 3 * u32::from(choice % 2), &[]), option(7, &[0; 6])].concat()
}

fn client_bytes(input: &mut Input<'_>) -> Vec<u8> {
    match input.byte() % 6 {
        0 => {
            let len = usize::from(input.byte());
            input.bytes(len).to_vec()
        }
        1 => 3u32.to_be_bytes().to_vec(),
        2 => {
            let number = u32::from(input.byte() % 13);
            let len = usize::from(input.byte() % 80);
            option(number, input.bytes(len))
        }
        3 => negotiation(input.byte()),
        step => {
            let extended = step == 5;
            let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
            let mut bytes = magic.to_be_bytes().to_vec();
            bytes.extend(input.word().to_be_bytes());
            bytes.extend(u16::from(input.byte() % 10).to_be_bytes());
            bytes.extend(input.long().to_be_bytes());
            let near = input.byte() & 3 != 0;
            let offset = input.long();
            bytes.extend(if near { offset % DISK_BYTES / 512 * 512 } else { offset }.to_be_bytes());
            let len = if near { u32::from(input.byte() % 16) * 512 } else { input.long() as u32 };
            if extended {
                bytes.extend(u64::from(len).to_be_bytes());
            } else {
                bytes.extend(len.to_be_bytes());
            }
            bytes
        }
    }
}

/// Runs a client whose server sends `data`.
pub fn client(data: &[u8]) {
    KIT.with(|kit| {
        let uri = format!("nbd+unix:///x?socket={}", kit.client_path.display());
        let uri = uri.parse().expect("a sound URI");
        let short = Duration::from_millis(5);
        let options = NbdOptions {
            reconnect: short,
            request_timeout: short,
            handshake_timeout: short,
            replay_log: ByteLen::mib(1),
            ..NbdOptions::default()
        };
        let on = &kit.on;
        on.block_on(async {
            let done = Rc::new(RefCell::new(false));
            let script = play(kit, data, Rc::clone(&done));
            let use_it = async {
                if let Ok(device) = NbdDevice::open(on, &uri, options).await {
                    let limit = Duration::from_millis(20);
                    let _ = on.timeout(limit, ask(&*device)).await;
                }
                *done.borrow_mut() = true;
            };
            let (mut script, mut use_it) = (std::pin::pin!(script), std::pin::pin!(use_it));
            let mut both = (false, false);
            std::future::poll_fn(|context| {
                both.0 = both.0 || script.as_mut().poll(context).is_ready();
                both.1 = both.1 || use_it.as_mut().poll(context).is_ready();
                if both.0 && both.1 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
            })
            .await;
        });
    });
}

/// Makes one request of each kind.
async fn ask(device: &dyn BlockDevice) {
    let mut bytes = [0; 4096];
    let _ = device.extents(ByteRange::new(0, 65536), 16).await;
    let _ = device.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await;
    let _ = device.write(ByteOffset::ZERO, WriteBuf::new(&bytes), WriteFlags::FUA).await;
    let _ = device.write_zeroes(ByteRange::new(0, 4096), ZeroFlags::default()).await;
    let _ = device.discard(ByteRange::new(0, 4096)).await;
    let _ = device.flush().await;
}

/// Acts as the server until the client is done.
async fn play(kit: &Kit, data: &[u8], done: Rc<RefCell<bool>>) {
    let mut stream: Option<UnixStream> = None;
    let mut input = Input(data);
    let sound = input.byte() & 3 != 0;
    let mut cookie = 0u64;
    let mut steps = 0;
    while !*done.borrow() {
        if let Ok((found, _)) = kit.client_listener.accept() {
            found.set_nonblocking(true).expect("an option");
            if sound {
                send(&found, &[greeting(3), welcome(0)].concat());
            }
            stream = Some(found);
        }
        if let Some(current) = &stream {
            let there = drain(current, |bytes| {
                if let Some(at) = bytes.windows(4).rposition(|word| word == REQUEST_MAGIC.to_be_bytes()) {
                    let found = bytes.get(at + 8..at + 16).and_then(|found| found.try_into().ok());
                    cookie = found.map_or(cookie, u64::from_be_bytes);
                }
            });
            if !there || input.is_empty() || steps >= STEPS_MAX {
                stream = None;
            } else {
                steps += 1;
                send(current, &server_bytes(&mut input, cookie));
            }
        }
        yield_now().await;
    }
}

fn option_reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for word in [option, kind, payload.len() as u32] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend(payload);
    bytes
}

fn greeting(flags: u16) -> Vec<u8> {
    let mut bytes = GREETING_MAGIC.to_be_bytes().to_vec();
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes
}

/// Encodes the server's replies: accepts structured replies and block status, refuses extended headers, and exports a
/// disk with the features in `flags`.
fn welcome(flags: u16) -> Vec<u8> {
    let refuse = 1 << 31 | 1;
    let mut info = vec![0, 0];
    info.extend(DISK_BYTES.to_be_bytes());
    info.extend((flags | 0x6d).to_be_bytes());
    let mut context = 7u32.to_be_bytes().to_vec();
    context.extend(b"base:allocation");
    [
        option_reply(11, refuse, &[]),
        option_reply(8, 1, &[]),
        option_reply(10, 4, &context),
        option_reply(10, 1, &[]),
        option_reply(7, 3, &info),
        option_reply(7, 1, &[]),
    ]
    .concat()
}

fn server_bytes(input: &mut Input<'_>, cookie: u64) -> Vec<u8> {
    match input.byte() % 8 {
        0 => {
            let len = usize::from(input.byte());
            input.bytes(len).to_vec()
        }
        1 => greeting(u16::from(input.byte() % 4)),
        2 => {
            let option = u32::from(input.byte() % 13);
            let kind = [1, 2, 3, 4, 1 << 31 | 1, 1 << 31 | 6][usize::from(input.byte() % 6)];
            let len = usize::from(input.byte() % 64);
            option_reply(option, kind, input.bytes(len))
        }
        3 => welcome(input.word()),
        4 => {
            let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(u32::from(input.byte() % 30).to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            bytes
        }
        5 => vec![0x5a; 4096],
        step => {
            let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(u16::from(input.byte() % 2).to_be_bytes());
            let kind = [0, 1, 2, 5, 6, 0x8001, 0x8002, 77][usize::from(input.byte() % 8)];
            bytes.extend((kind as u16).to_be_bytes());
            bytes.extend(if step == 6 { cookie } else { input.long() }.to_be_bytes());
            let len = usize::from(input.byte() % 64);
            let payload = input.bytes(len);
            bytes.extend((payload.len() as u32).to_be_bytes());
            bytes.extend(payload);
            bytes
        }
    }
}

//! NBD clients that read and write any bytes: their changes are exact, and a guest writing the same sectors loses
//! nothing.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_bench::campaign::Random;
use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::server::Server;
use support::{
    LoopDevice, create_image, disk_serve_command, run_command, run_tool, start_server, temp_dir_on_disk,
    temp_dir_on_tmpfs, test_pattern,
};

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const FUA: u16 = 1;

/// A client that uses `NBD_OPT_EXPORT_NAME`, and so gets no block sizes.
struct Client {
    stream: UnixStream,
    size: u64,
}

impl Client {
    fn connect(socket: &Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(socket).expect("connects");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(1u32.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello).expect("asks for the export");
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).expect("the export");
        let size = answer[..8].try_into().map(u64::from_be_bytes).expect("8 bytes");
        Self { stream, size }
    }

    /// Makes a request, and returns its error number.
    fn ask(&mut self, command: u16, flags: u16, start: usize, len: usize, payload: &[u8]) -> u32 {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend([0; 8]);
        request.extend((start as u64).to_be_bytes());
        request.extend((len as u32).to_be_bytes());
        request.extend(payload);
        self.stream.write_all(&request).expect("takes the request");
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).expect("answers");
        reply[4..8].try_into().map(u32::from_be_bytes).expect("4 bytes")
    }

    fn write(&mut self, flags: u16, start: usize, bytes: &[u8]) {
        let error = self.ask(WRITE, flags, start, bytes.len(), bytes);
        assert_eq!(error, 0, "{} bytes written at {start}", bytes.len());
    }

    fn change(&mut self, command: u16, start: usize, len: usize) {
        let error = self.ask(command, 0, start, len, &[]);
        assert_eq!(error, 0, "command {command}: {len} bytes at {start}");
    }

    fn read(&mut self, start: usize, len: usize) -> Vec<u8> {
        let error = self.ask(READ, 0, start, len, &[]);
        assert_eq!(error, 0, "{len} bytes read at {start}");
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("the data");
        bytes
    }
}

/// Starts a server of `image` over NBD and vhost-user; returns it with the NBD socket and the URI.
fn served(image: &Path, folder: &Path, options: &[&str]) -> (Server, PathBuf, String) {
    let socket = folder.join("nbd");
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let mut all = vec!["--nbd", &uri];
    all.extend(options);
    (start_server(image, folder, &all), socket, uri)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Compares random requests of any bytes with a model in memory, and then the image with the model.
fn check_any_bytes(image: &Path, options: &[&str], seed: u64) {
    const DISK: usize = 1 << 20;
    let sockets = temp_dir_on_tmpfs();
    let (server, socket, _) = served(image, sockets.path(), options);
    let mut client = Client::connect(&socket, "disk");
    assert_eq!(client.size, DISK as u64);
    let mut model = vec![0; DISK];
    let mut random = Random::new(seed);
    for step in 0..400 {
        let most = [1, 20, 600, 9000, 300_000][random.below(5) as usize];
        let len = 1 + random.below(most) as usize;
        let start = random.below((DISK - len) as u64 + 1) as usize;
        let range = start..start + len;
        match random.below(8) {
            0..=3 => {
                let bytes = test_pattern(step, len);
                let flags = if random.below(4) == 0 { FUA } else { 0 };
                client.write(flags, start, &bytes);
                model[range].copy_from_slice(&bytes);
            }
            4 | 5 => {
                client.change(WRITE_ZEROES, start, len);
                model[range].fill(0);
            }
            6 => {
                client.change(TRIM, start, len);
                // A discarded byte keeps its value or becomes zero, and no other byte changes.
                let left = client.read(start, len);
                for (now, was) in left.iter().zip(&mut model[range]) {
                    assert!(*now == *was || *now == 0, "step {step}: a discard wrote something");
                    *was = *now;
                }
            }
            _ => client.change(FLUSH, 0, 0),
        }
        let start = random.below(DISK as u64) as usize;
        let len = (1 + random.below(5000) as usize).min(DISK - start);
        assert!(client.read(start, len) == model[start..start + len], "step {step}");
    }
    assert!(client.read(0, DISK) == model);
    drop(client);
    assert_eq!(server.stop().expect("stops"), Some(0));
    let plain = sockets.path().join("plain.raw");
    run_tool("qemu-img", &["convert", "-O", "raw", text(image), text(&plain)]);
    assert!(fs::read(&plain).expect("a copy") == model, "the image holds something else");
}

/// Any bytes of a raw image can be read and changed.
#[test]
fn raw_image_serves_any_bytes() {
    let folder = temp_dir_on_disk();
    check_any_bytes(&create_image(folder.path(), 1 << 20), &["--format", "raw"], 1);
}

/// Any bytes of a qcow2 image with read-ahead and a cache can be read and changed.
#[test]
fn cached_image_serves_any_bytes() {
    let folder = temp_dir_on_disk();
    let image = folder.path().join("disk.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "1M"]);
    let cache = folder.path().join("cache");
    let options = ["--cache", text(&cache), "--cache-size", "64M", "--cache-mode", "wb"];
    check_any_bytes(&image, &options, 2);
}

/// Any bytes of a device with blocks of 4096 bytes can be changed, by two layers that read, modify and write.
#[test]
fn large_blocks_serve_any_bytes() {
    let folder = temp_dir_on_disk();
    let device = LoopDevice::new(&create_image(folder.path(), 1 << 20), 4096);
    check_any_bytes(&device.0, &["--format", "raw"], 3);
}

/// The minimum block size is one byte, the preferred one is the device's. Tools copy files of odd lengths in both
/// directions.
#[test]
fn tools_copy_files_of_odd_lengths() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let (server, _, uri) = served(&create_image(folder.path(), 1 << 20), sockets.path(), &["--format", "raw"]);
    let told = run_tool("nbdinfo", &["--json", &uri]);
    for part in [r#""block_size_minimum": 1,"#, r#""block_size_preferred": 4096,"#] {
        assert!(told.contains(part), "no {part} in {told}");
    }
    for len in [1, 1000, 70_001] {
        let (from, back) = (sockets.path().join("from"), sockets.path().join("back"));
        fs::write(&from, test_pattern(len as u64, len)).expect("a file");
        run_tool("nbdcopy", &[text(&from), &uri]);
        run_tool("nbdcopy", &[&uri, text(&back)]);
        let back = fs::read(&back).expect("a copy");
        assert!(back[..len] == fs::read(&from).expect("the file"), "{len} bytes");
    }
    let command = "write -P 7 1 3 \n read -P 7 1 3 \n write -z 2 1 \n read -P 0 2 1 \n read -P 7 3 1";
    let mut io = vec!["-f", "raw"];
    command.lines().for_each(|line| io.extend(["-c", line.trim()]));
    io.push(&uri);
    let told = run_tool("qemu-io", &io);
    assert!(!told.contains("verification failed") && !told.contains("error"), "{told}");
    // The range begins inside a sector.
    let map =
        run_tool("qemu-img", &["map", "--output=json", "--start-offset=700", "--max-length=1001", "-f", "raw", &uri]);
    assert!(map.contains(r#""start": 700, "length": 1001"#), "{map}");
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// The bytes of each sector that an NBD client writes while a guest writes the sector.
const PART: std::ops::Range<usize> = 100..300;

/// A guest's completed writes stay whole while clients write parts of the same sectors, and two clients that write
/// halves of a sector lose nothing to each other.
#[test]
fn guest_write_survives_parts_written_concurrently() {
    const SECTORS: usize = 4;
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let (server, socket, _) = served(&create_image(folder.path(), 1 << 20), sockets.path(), &["--format", "raw"]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for half in [0, 1] {
            let (socket, is_over) = (&socket, &is_over);
            scope.spawn(move || write_parts(socket, half, SECTORS, is_over));
        }
        let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
        let data = guest.data();
        let (out, into) = (data, data + 4096);
        let piece = |address| [Buffer { address, len: 512 }];
        for round in 1..1500u64 {
            let sector = round % SECTORS as u64;
            let wrote = test_pattern(round, 512);
            guest.memory.write(out, &wrote);
            let written = guest.queue().run(&Request::write(sector, &piece(out)));
            assert_eq!(written.expect("writes").status, 0);
            let read = guest.queue().run(&Request::read(sector, &piece(into)));
            assert_eq!(read.expect("reads").status, 0);
            let mut seen = guest.memory.read_vec(into, 512);
            seen[PART].copy_from_slice(&wrote[PART]);
            if seen != wrote {
                is_over.store(true, Ordering::Relaxed);
                panic!("round {round}: a part of the guest's write is lost");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// Writes parts of the guest's sectors, and one half of further sectors, of which a second client writes the other
/// half.
fn write_parts(socket: &Path, half: usize, sectors: usize, is_over: &AtomicBool) {
    let mut client = Client::connect(socket, "disk");
    let mut round = 0;
    while !is_over.load(Ordering::Relaxed) {
        round += 1;
        let sector = round % sectors;
        let bytes = test_pattern((round * 2 + half) as u64, 256);
        client.write(0, sector * 512 + PART.start + half, &bytes[..PART.len() - 1]);
        let own = (sectors + sector) * 512 + half * 256;
        client.write(0, own, &bytes);
        if client.read(own, 256) != bytes {
            is_over.store(true, Ordering::Relaxed);
            panic!("round {round}: the other half's client has undone a write");
        }
    }
}

/// A write of a part of a sector keeps the bytes that another client of the export has written to the rest, even if
/// the sector was read ahead before that.
#[test]
fn part_keeps_what_another_client_wrote() {
    const BLOCK: usize = 4096;
    let (folder, sockets, others) = (temp_dir_on_disk(), temp_dir_on_tmpfs(), temp_dir_on_tmpfs());
    let image = create_image(folder.path(), 4 << 20);
    let (store, socket, uri) = served(&image, others.path(), &["--format", "raw"]);
    let mut other = Client::connect(&socket, "disk");
    let (server, socket, _) = served(Path::new(&uri), sockets.path(), &["--format", "raw"]);
    let mut client = Client::connect(&socket, "disk");
    (0..64).for_each(|block| drop(client.read(block * BLOCK, BLOCK)));
    for start in (64..128).map(|block| block * BLOCK) {
        other.write(0, start, &[9; 512]);
        client.write(0, start + 511, &[8]);
        let mut expected = [9; 512];
        expected[511] = 8;
        assert!(other.read(start, 512) == expected, "a write is lost at {start}");
    }
    drop((client, other));
    assert_eq!(server.stop().expect("stops"), Some(0));
    assert_eq!(store.stop().expect("stops"), Some(0));
}

/// The description is shown as given, and one that is too long for the protocol is refused.
#[test]
fn export_has_the_description_given() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = create_image(folder.path(), 1 << 20);
    let words = ["--format", "raw", "--nbd-description", "the web server's disk, \u{e9}t\u{e9}"];
    let (server, _, uri) = served(&image, sockets.path(), &words);
    let told = run_tool("nbdinfo", &[&uri]);
    assert!(told.contains("the web server's disk"), "{told}");
    let told = run_tool("nbdinfo", &["--list", &uri]);
    assert!(told.contains("the web server's disk"), "{told}");
    assert_eq!(server.stop().expect("stops"), Some(0));
    let long = "x".repeat(4097);
    let (code, told) = run_command(disk_serve_command(&[text(&image), "--nbd", &uri, "--nbd-description", &long]));
    assert!(code == Some(2) && told.contains("4096"), "{code:?} {told}");
    let (code, told) =
        run_command(disk_serve_command(&[text(&image), "--socket", "/nowhere", "--nbd-description", "x"]));
    assert!(code == Some(2) && told.contains("--nbd"), "{code:?} {told}");
}

//! Independent clients of `larder disk serve`: libblkio's crate, and the tools of QEMU 10.

mod support;

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use larder_bench::campaign::front_end::queue::{Request, T_WRITE_ZEROES};
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::guest::project;
use support::{LoopDevice, create_image, start_server, temp_dir_on_disk, temp_dir_on_tmpfs, test_pattern};

const MIB: u64 = 1 << 20;
const MEMORY: usize = 4 << 20;

/// A client that uses the `blkio` crate.
struct Client {
    queues: Vec<Blkioq>,
    memory: *mut u8,
    _device: Blkio,
}

impl Client {
    fn connect(socket: &Path, queues: i32, queue_size: i32) -> Self {
        let mut device = Blkio::new("virtio-blk-vhost-user").expect("the driver");
        device.set_str("path", socket.to_str().expect("UTF-8")).expect("a path");
        device.connect().expect("connects");
        device.set_i32("num-queues", queues).expect("queues");
        device.set_i32("queue-size", queue_size).expect("a size");
        let started = device.start().expect("starts");
        let region = device.alloc_mem_region(MEMORY).expect("memory");
        device.map_mem_region(&region).expect("shares it");
        Self { queues: started.queues, memory: region.addr as *mut u8, _device: device }
    }

    fn finish(&mut self, queue: usize, count: usize) {
        let mut done: Vec<MaybeUninit<Completion>> = (0..count).map(|_| MaybeUninit::uninit()).collect();
        let got = self.queues[queue].do_io(&mut done, count, None, None).expect("I/O");
        assert_eq!(got, count);
        for completion in &done {
            // SAFETY: `do_io` has initialised as many completions as it returned.
            assert_eq!(unsafe { completion.assume_init_ref() }.ret, 0);
        }
    }

    fn buffer(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at + bytes <= MEMORY);
        self.memory.wrapping_add(at)
    }

    fn fill(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the range is inside the region, which the device does not access while no request is in flight.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.buffer(at, bytes.len()), bytes.len()) };
    }

    fn fetch(&self, at: usize, bytes: usize) -> Vec<u8> {
        // SAFETY: the range is inside the region, which the device does not access while no request is in flight.
        unsafe { std::slice::from_raw_parts(self.buffer(at, bytes), bytes) }.to_vec()
    }
}

/// Compares random requests with a model in RAM, and then the image with the model.
fn check_with_blkio(image: &Path, block: usize, options: &[&str]) {
    const DISK: usize = 8 << 20;
    let sockets = temp_dir_on_tmpfs();
    let server = start_server(image, sockets.path(), options);
    let mut model = vec![0; DISK];
    for (queues, queue_size) in [(1, 256), (3, 16), (4, 1024)] {
        let mut client = Client::connect(&server.socket, queues, queue_size);
        let mut random = larder_bench::campaign::Random::new(queue_size as u64);
        for step in 0..600 {
            let queue = random.below(queues as u64) as usize;
            let len = block * (1 + random.below((128 << 10) / block as u64)) as usize;
            let start = block * random.below(((DISK - len) / block) as u64 + 1) as usize;
            let range = start..start + len;
            match random.below(8) {
                0..=2 => {
                    let bytes = test_pattern(step, len);
                    client.fill(0, &bytes);
                    let from = client.buffer(0, len);
                    client.queues[queue].write(start as u64, from, len, 0, ReqFlags::empty());
                    model[range].copy_from_slice(&bytes);
                }
                3 => {
                    client.queues[queue].write_zeroes(start as u64, len as u64, 0, ReqFlags::empty());
                    model[range].fill(0);
                }
                4 => {
                    // The content after a discard is not defined, so zeroes are written after it.
                    client.queues[queue].discard(start as u64, len as u64, 0, ReqFlags::empty());
                    client.finish(queue, 1);
                    client.queues[queue].write_zeroes(start as u64, len as u64, 0, ReqFlags::NO_UNMAP);
                    model[range].fill(0);
                }
                5 => client.queues[queue].flush(0, ReqFlags::empty()),
                _ => {
                    let into = client.buffer(0, len);
                    client.queues[queue].read(start as u64, into, len, 0, ReqFlags::empty());
                    client.finish(queue, 1);
                    assert!(client.fetch(0, len) == model[range], "step {step}: {len} bytes at {start}");
                    continue;
                }
            }
            client.finish(queue, 1);
        }
        // Many requests at once, each queue in its own part of the disk.
        for queue in 0..queues as usize {
            for slot in 0..4 {
                let (start, at) = ((queue * 4 + slot) * 65536, (queue * 4 + slot) * 65536);
                let bytes = test_pattern((start + queue_size as usize) as u64, 65536);
                client.fill(at, &bytes);
                model[start..start + 65536].copy_from_slice(&bytes);
                let from = client.buffer(at, 65536);
                client.queues[queue].write(start as u64, from, 65536, slot, ReqFlags::empty());
            }
        }
        for queue in 0..queues as usize {
            client.finish(queue, 4);
            client.queues[queue].flush(0, ReqFlags::empty());
            client.finish(queue, 1);
        }
    }
    assert_eq!(server.stop().expect("stops"), Some(0));
    let mut bytes = vec![0; DISK];
    File::open(image).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("reads the image");
    assert!(bytes == model, "the image holds something else");
}

#[test]
fn blkio_writes_reach_image_on_disk() {
    let folder = temp_dir_on_disk();
    check_with_blkio(&create_image(folder.path(), 8 * MIB), 512, &[]);
    check_with_blkio(&create_image(folder.path(), 8 * MIB), 512, &["--buffered"]);
    check_with_blkio(&create_image(folder.path(), 8 * MIB), 4096, &["--block-size", "4096"]);
}

#[test]
fn blkio_writes_reach_image_on_tmpfs() {
    let folder = temp_dir_on_tmpfs();
    check_with_blkio(&create_image(folder.path(), 8 * MIB), 512, &[]);
}

#[test]
fn blkio_writes_reach_block_devices() {
    let folder = temp_dir_on_disk();
    for sector in [512, 4096] {
        let file = folder.path().join(format!("{sector}"));
        File::create(&file).and_then(|file| file.set_len(8 * MIB)).expect("a file");
        let device = LoopDevice::new(&file, sector);
        // The device's own sector size, and small sectors on a device with large ones.
        check_with_blkio(&device.0, sector as usize, &[]);
        fs::OpenOptions::new()
            .write(true)
            .open(&device.0)
            .and_then(|file| file.write_all_at(&vec![0; 8 << 20], 0))
            .expect("zeros");
        check_with_blkio(&device.0, 512, &[]);
    }
}

#[test]
fn unaligned_fragments_are_read_and_written() {
    let (folder, memory, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs(), temp_dir_on_tmpfs());
    let file = folder.path().join("loop");
    File::create(&file).and_then(|file| file.set_len(8 * MIB)).expect("a file");
    let device = LoopDevice::new(&file, 4096);
    for disk in [create_image(folder.path(), 8 * MIB), create_image(memory.path(), 8 * MIB), device.0.clone()] {
        for packed in [false, true] {
            let server = start_server(&disk, sockets.path(), &[]);
            let options = Options { packed, ..Options::default() };
            let mut guest = FrontEnd::connect(&server.socket, options).expect("connects");
            let data = guest.data();
            for (step, cuts) in [vec![4096], vec![1, 4095], vec![100, 412, 3584], vec![511, 2, 3583], vec![1000; 4]]
                .into_iter()
                .enumerate()
            {
                let mut lengths = cuts.clone();
                let rest = 4096 - cuts.iter().sum::<u32>();
                lengths.extend((rest > 0).then_some(rest));
                for shift in [0, 1, 3, 512, 777] {
                    let bytes = test_pattern(step as u64 * 1000 + shift, 4096);
                    let place = |base: u64| {
                        let mut at = base + shift;
                        let mut buffers = Vec::new();
                        for len in &lengths {
                            buffers.push(Buffer { address: at, len: *len });
                            // Gaps of an odd size.
                            at += u64::from(*len) + 33;
                        }
                        buffers
                    };
                    let (out, into) = (place(data), place(data + 65536));
                    let mut done = 0;
                    for buffer in &out {
                        guest.memory.write(buffer.address, &bytes[done..done + buffer.len as usize]);
                        done += buffer.len as usize;
                    }
                    let written = guest.queue().run(&Request::write(16, &out)).expect("an answer");
                    assert_eq!(written.status, 0, "{}: pieces {lengths:?} from {shift}", server.process.output());
                    let read = guest.queue().run(&Request::read(16, &into)).expect("an answer");
                    assert_eq!(read.status, 0, "{}: pieces {lengths:?} from {shift}", server.process.output());
                    let got: Vec<u8> = into
                        .iter()
                        .flat_map(|buffer| guest.memory.read_vec(buffer.address, buffer.len as usize))
                        .collect();
                    assert!(got == bytes, "{}: pieces {lengths:?} from {shift}", disk.display());
                }
            }
            let id = guest.queue().add_segment(T_WRITE_ZEROES, 16, 8, 0);
            assert_eq!(guest.queue().finish(id).expect("an answer").status, 0);
            drop(guest);
            server.stop().expect("stops");
        }
    }
}

/// Runs a tool of Debian 13's QEMU.
fn qemu10(socket: &Path, arguments: &[&str]) -> String {
    let disk = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display());
    let arguments: Vec<&str> =
        arguments.iter().map(|word| if *word == "DISK" { disk.as_str() } else { *word }).collect();
    let output = Command::new(project().join("testbed/debian13.sh")).args(&arguments).output().expect("debian13.sh");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    said
}

/// QEMU 10's tools can copy, compare and stress a disk over vhost-user.
#[test]
fn qemu_10_tools_work() {
    // Directories that the chroot sees at the same paths.
    let (folder, sockets) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let source = folder.path().join("source.raw");
    fs::write(&source, test_pattern(1, 8 << 20)).expect("a source");
    let disk = create_image(folder.path(), 8 * MIB);
    let server = start_server(&disk, sockets.path(), &[]);
    let source_text = source.to_str().expect("UTF-8");
    qemu10(&server.socket, &["qemu-img", "convert", "-n", "-f", "raw", source_text, "--target-image-opts", "DISK"]);
    qemu10(
        &server.socket,
        &[
            "qemu-img",
            "compare",
            "--image-opts",
            "DISK",
            &format!("driver=raw,file.driver=file,file.filename={source_text}"),
        ],
    );
    for options in [&["-w"][..], &[], &["-w", "--flush-interval", "64"]] {
        let mut arguments = vec!["qemu-img", "bench", "-c", "20000", "-d", "64", "-s", "4096", "-t", "none"];
        arguments.extend(options);
        arguments.extend(["--image-opts", "DISK"]);
        if options.contains(&"--flush-interval") {
            arguments.extend(["--no-drain"]);
        }
        qemu10(&server.socket, &arguments);
    }
    let said = qemu10(
        &server.socket,
        &[
            "qemu-io",
            "-t",
            "none",
            "-c",
            "write -P 7 4k 64k",
            "-c",
            "write -z 8k 4k",
            "-c",
            "discard 1M 1M",
            "-c",
            "flush",
            "-c",
            "read -P 7 4k 4k",
            "-c",
            "read -P 0 8k 4k",
            "-c",
            "read -P 7 12k 56k",
            "--image-opts",
            "DISK",
        ],
    );
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    assert_eq!(server.stop().expect("stops"), Some(0));
    let mut bytes = vec![0; 4096];
    File::open(&disk).and_then(|file| file.read_exact_at(&mut bytes, 4096)).expect("reads");
    assert_eq!(bytes, vec![7; 4096]);
}

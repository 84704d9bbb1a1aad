//! Tests of the NBD client against third-party servers: nbdkit and qemu-nbd.

mod nbd_support;

use std::rc::Rc;

use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::event_loop::{POLL_MAX_DEFAULT, yield_now};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, IoVec, Loop, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};
use nbd_support::fake::{Disk, Offer, connections, script};
use nbd_support::{Place, Random, contents, pattern, program_of_debian13};

const MIB: u64 = 1 << 20;

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

async fn open(on: &Loop, place: &Place, options: NbdOptions) -> Rc<NbdDevice> {
    match NbdDevice::open(on, &place.uri(""), options).await {
        Ok(device) => device,
        Err(error) => panic!("{error}"),
    }
}

/// Makes random changes to `device` and `model`, and compares reads.
async fn exercise(device: &NbdDevice, model: &mut [u8], seed: u64, steps: u64) {
    let mut random = Random(seed);
    let block = u64::from(device.geometry().block_size);
    let blocks = model.len() as u64 / block;
    for step in 0..steps {
        let start = random.below(blocks);
        let count = 1 + random.below((blocks - start).min(64));
        let range = ByteRange::new(start * block, count * block);
        let part = &mut model[range.start.get() as usize..range.end().get() as usize];
        let flags = WriteFlags { fua: random.below(8) == 0 };
        match random.below(8) {
            0..3 => {
                part.copy_from_slice(&pattern(part.len(), seed ^ step));
                let buffer = WriteBuf::new(part);
                device.write(range.start, buffer, flags).await.expect("writes");
            }
            3 => {
                part.fill(0);
                let flags = ZeroFlags { unmap: step % 2 == 0, fast_only: false, fua: flags.fua };
                device.write_zeroes(range, flags).await.expect("zeroes");
            }
            4 => device.flush().await.expect("flushes"),
            _ => {
                let mut back = vec![0xaa; part.len()];
                let (left, right) = back.split_at_mut(part.len() / 2);
                let pieces = [IoVec::new(left.as_mut_ptr(), left.len()), IoVec::new(right.as_mut_ptr(), right.len())];
                // SAFETY: `back` outlives the read and is not accessed meanwhile.
                let buffer = unsafe { ReadBuf::from_pieces(&pieces) };
                device.read(range.start, buffer).await.expect("reads");
                assert!(back == part, "step {step}: {range} differs");
            }
        }
    }
}

#[test]
fn every_kind_of_server_stores_writes() {
    for arguments in [
        &["memory", "16M"][..],
        &["--no-sr", "memory", "16M"],
        &["--mask-handshake=0", "memory", "16M"],
        &["--mask-handshake=1", "memory", "16M"],
        &["--filter=nozero", "memory", "16M"],
        &["--filter=noextents", "memory", "16M"],
        &["--filter=fua", "memory", "16M", "fuamode=emulate"],
        &["--filter=fua", "memory", "16M", "fuamode=force"],
        &[
            "--filter=blocksize-policy",
            "memory",
            "16M",
            "blocksize-minimum=4096",
            "blocksize-preferred=8192",
            "blocksize-maximum=8192",
            "blocksize-error-policy=error",
        ],
        &["--filter=noparallel", "memory", "16M"],
    ] {
        on_loop(async |on| {
            let place = Place::new();
            let _server = place.nbdkit(arguments);
            let device = open(on, &place, NbdOptions::default()).await;
            let mut model = vec![0; (16 * MIB) as usize];
            exercise(&device, &mut model, 7, 300).await;
            assert!(contents(&place.uri(""), place.folder.path()) == model, "{arguments:?}");
        });
    }
}

#[test]
fn extended_headers_are_used_if_supported() {
    const GIB: u64 = 1 << 30;
    on_loop(async |on| {
        let place = Place::new();
        let image = place.path("image");
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(6 * GIB).expect("room");
        let mut server = program_of_debian13("qemu-nbd");
        server.args(["-f", "raw", "--discard=unmap", "--persistent"]).arg(&image);
        let _server = place.serve_by(&server);
        let device = open(on, &place, NbdOptions::default()).await;
        assert!(device.statistics().extended_headers);
        let mut model = vec![0; (16 * MIB) as usize];
        exercise(&device, &mut model, 9, 300).await;
        let data = pattern(MIB as usize, 3);
        let write = device.write(ByteOffset::new(5 * GIB), WriteBuf::new(&data), WriteFlags::FUA);
        write.await.expect("writes");
        let unmap = ZeroFlags { unmap: true, ..ZeroFlags::default() };
        let whole = ByteRange::new(0, 5 * GIB);
        device.write_zeroes(whole, unmap).await.expect("zeroes");
        let extents = device.extents(ByteRange::new(4 * GIB, 2 * GIB), 100).await;
        let extents = extents.expect("maps");
        let first = extents.first().expect("at least one");
        assert_eq!(first.kind, ExtentKind::Hole);
        assert_eq!(first.range, ByteRange::new(4 * GIB, GIB));
        device.discard(whole).await.expect("discards");
        let beyond = device.extents(ByteRange::new(5 * GIB, GIB), 100).await;
        let kinds: Vec<_> = beyond.expect("maps").iter().map(|extent| (extent.kind, extent.range.len)).collect();
        let expected = [(ExtentKind::Data, ByteLen::mib(1)), (ExtentKind::Hole, ByteLen::mib(1023))];
        assert_eq!(kinds, expected);
    });
}

#[test]
fn extents_match_the_servers_file() {
    on_loop(async |on| {
        let place = Place::new();
        let image = place.path("image");
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(8 * MIB).expect("room");
        for start in [0, 2 * MIB] {
            std::os::unix::fs::FileExt::write_all_at(&file, &pattern(MIB as usize, 1), start).expect("room");
        }
        let image = image.display().to_string();
        let _server = place.nbdkit(&["file", &image]);
        let device = open(on, &place, NbdOptions::default()).await;
        let all = device.extents(ByteRange::new(0, 8 * MIB), 100).await.expect("maps");
        let seen: Vec<_> = all.iter().map(|extent| (extent.range.len.get(), extent.kind)).collect();
        let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
        assert_eq!(seen, [(MIB, data), (MIB, hole), (MIB, data), (5 * MIB, hole)]);
        let one = device.extents(ByteRange::new(MIB / 2, 7 * MIB), 1).await.expect("maps");
        assert_eq!(one.len(), 1);
        assert_eq!(one[0].range, ByteRange::new(MIB / 2, MIB / 2));
    });
}

#[test]
fn server_without_extents_reports_all_data() {
    on_loop(async |on| {
        let place = Place::new();
        let _server = place.nbdkit(&["--no-sr", "memory", "1M"]);
        let device = open(on, &place, NbdOptions::default()).await;
        let range = ByteRange::new(512, 4096);
        let extents = device.extents(range, 5).await.expect("maps");
        assert_eq!(
            extents.iter().map(|extent| (extent.range, extent.kind)).collect::<Vec<_>>(),
            [(range, ExtentKind::Data)]
        );
    });
}

#[test]
fn server_error_reaches_its_request() {
    for (error, failure) in [
        ("ENOSPC", Failure::NoSpace),
        ("EPERM", Failure::ReadOnly),
        ("EIO", Failure::Os(libc::EIO)),
        ("EINVAL", Failure::Os(libc::EINVAL)),
    ] {
        for framing in ["--filter=error", "--no-sr"] {
            on_loop(async |on| {
                let place = Place::new();
                let failing = format!("error={error}");
                let arguments = [
                    framing,
                    "--filter=error",
                    "memory",
                    "1M",
                    "error-pwrite-rate=100%",
                    "error-pread-rate=100%",
                    &failing,
                ];
                let _server = place.nbdkit(&arguments);
                let device = open(on, &place, NbdOptions::default()).await;
                let data = pattern(4096, 1);
                let write = device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::NONE);
                let told = write.await.expect_err("fails");
                assert_eq!((told.failure(), told.range()), (failure, ByteRange::new(512, 4096)));
                let mut back = vec![7; 4096];
                let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
                assert_eq!(read.await.expect_err("fails").failure(), failure);
                device.flush().await.expect("the connection goes on");
                assert_eq!(device.statistics().connections, 1);
                assert_eq!(device.statistics().log_used, ByteLen::ZERO, "a failed write is not repeated");
            });
        }
    }
}

#[test]
fn read_only_export_refuses_writes() {
    on_loop(async |on| {
        let place = Place::new();
        let _server = place.nbdkit(&["-r", "memory", "1M"]);
        let device = open(on, &place, NbdOptions::default()).await;
        assert!(device.geometry().read_only);
        let data = pattern(512, 1);
        let write = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
        assert_eq!(write.await.expect_err("fails").failure(), Failure::ReadOnly);
    });
}

#[test]
fn slow_fast_zeroes_are_refused() {
    let fast = ZeroFlags { fast_only: true, ..ZeroFlags::default() };
    for (arguments, expected) in [
        (&["--filter=nozero", "memory", "1M"][..], Some(Failure::Unsupported)),
        (&["--filter=nozero", "memory", "1M", "fastzeromode=ignore"], Some(Failure::Unsupported)),
        (&["memory", "1M"], None),
    ] {
        on_loop(async |on| {
            let place = Place::new();
            let _server = place.nbdkit(arguments);
            let device = open(on, &place, NbdOptions::default()).await;
            let zeroed = device.write_zeroes(ByteRange::new(0, 4096), fast).await;
            assert_eq!(zeroed.err().map(|error| error.failure()), expected, "{arguments:?}");
        });
    }
}

/// The padding of an odd export reads as zeros, and a write that would lose bytes in it fails.
#[test]
fn odd_export_is_padded_with_zeros() {
    on_loop(async |on| {
        let place = Place::new();
        let image = place.path("image");
        std::fs::write(&image, [7; 1000]).expect("room");
        let image = image.display().to_string();
        let _server = place.nbdkit(&["file", &image]);
        let device = open(on, &place, NbdOptions::default()).await;
        assert_eq!(device.geometry().size, ByteLen::new(1024));
        let mut back = vec![1; 1024];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        read.await.expect("reads");
        assert!(back[..1000].iter().all(|byte| *byte == 7));
        assert!(back[1000..].iter().all(|byte| *byte == 0));
        // There is no space past the end: a write that would lose bytes fails without effect.
        let mut data = pattern(512, 2);
        data[511] = 1;
        let write = device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::FUA);
        assert_eq!(write.await.err().map(|error| error.failure()), Some(Failure::NoSpace));
        assert_eq!(std::fs::read(&image).expect("is there"), [7; 1000]);
        data[488..].fill(0);
        let write = device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::FUA);
        write.await.expect("writes");
        let end = ByteRange::new(512, 512);
        device.write_zeroes(ByteRange::new(0, 512), ZeroFlags::default()).await.expect("zeroes");
        let extents = device.extents(end, 9).await.expect("maps");
        assert_eq!(extents.iter().map(|extent| extent.range).collect::<Vec<_>>(), [end]);
        let file = std::fs::read(&image).expect("is there");
        assert_eq!(file.len(), 1000);
        assert!(file[..512].iter().all(|byte| *byte == 0) && file[512..] == data[..488]);
    });
}

#[test]
fn answers_may_come_in_any_order() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(MIB);
        let server_disk = disk.clone();
        let server = connections(
            place.std_listener(),
            [script(move |mut peer| {
                peer.handshake(Offer::of(MIB))?;
                // The maximum number on the wire, answered from the last to the first, twice.
                for _ in 0..2 {
                    let mut asked: Vec<_> = (0..16).map(|_| peer.request()).collect::<Result<_, _>>()?;
                    asked.reverse();
                    for asked in asked {
                        peer.reply(false, &asked, &server_disk)?;
                    }
                }
                peer.wait_for_end();
                Ok(())
            })],
        );
        let options = NbdOptions { depth: 16, ..NbdOptions::default() };
        let device = open(on, &place, options).await;
        let blocks: Vec<_> = (0..16).map(|index| pattern(4096, index)).collect();
        let writes: Vec<_> = (0..)
            .zip(&blocks)
            .map(|(index, block)| device.write(ByteOffset::new(index * 4096), WriteBuf::new(block), WriteFlags::NONE))
            .collect();
        for write in writes {
            write.await.expect("writes");
        }
        let mut back = vec![vec![0; 4096]; 16];
        let reads: Vec<_> = (0..)
            .zip(&mut back)
            .map(|(index, block)| device.read(ByteOffset::new(index * 4096), ReadBuf::new(block)))
            .collect();
        for read in reads {
            read.await.expect("reads");
        }
        assert!(back == blocks);
        drop(device);
        on.run_blocking(move || server.join().is_ok()).await.expect("a thread");
    });
}

/// A dropped read no longer touches its buffer, and does not disturb other requests.
#[test]
fn dropped_read_leaves_its_buffer_alone() {
    for replay_log in [ByteLen::mib(64), ByteLen::ZERO] {
        on_loop(async |on| {
            let place = Place::new();
            let _server = place.nbdkit(&["--filter=delay", "memory", "16M", "rdelay=20ms"]);
            let options = NbdOptions { replay_log, ..NbdOptions::default() };
            let device = open(on, &place, options).await;
            let data = pattern((8 * MIB) as usize, 4);
            let write = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
            write.await.expect("writes");
            for round in 0..8 {
                let mut buffer = vec![0x5a; MIB as usize];
                let mut other = vec![0; MIB as usize];
                let given_up = device.read(ByteOffset::ZERO, ReadBuf::new(&mut buffer));
                let kept = device.read(ByteOffset::new(MIB), ReadBuf::new(&mut other));
                for _ in 0..round {
                    yield_now().await;
                }
                drop(given_up);
                let seen = buffer.clone();
                kept.await.expect("reads");
                assert!(other == data[MIB as usize..2 * MIB as usize]);
                // The server answers in any order. One more full round trip ensures that both answers have arrived.
                let again = device.read(ByteOffset::new(MIB), ReadBuf::new(&mut other));
                again.await.expect("reads");
                assert!(buffer == seen, "touched after the drop");
            }
            assert_eq!(device.statistics().connections, 1);
        });
    }
}

/// A write that is dropped while it is sent leaves each sector old or new, whatever becomes of its buffer.
#[test]
fn write_dropped_midway_sends_original_data() {
    on_loop(async |on| {
        for replay_log in [ByteLen::mib(64), ByteLen::ZERO] {
            let place = Place::new();
            let _server = place.nbdkit(&["memory", "32M"]);
            let options = NbdOptions { replay_log, ..NbdOptions::default() };
            let device = open(on, &place, options).await;
            for round in 0..12 {
                let mut data = pattern((8 * MIB) as usize, 4);
                let write = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
                for _ in 0..round {
                    yield_now().await;
                }
                drop(write);
                // The owner of the memory reuses it at once.
                data.fill(0xee);
                device.flush().await.expect("flushes");
            }
            // By now the last of the writes has ended: every sector is old (zeros) or new.
            let expected = pattern((8 * MIB) as usize, 4);
            let mut back = vec![0; expected.len()];
            let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
            read.await.expect("reads");
            for (index, (seen, new)) in back.chunks(512).zip(expected.chunks(512)).enumerate() {
                assert!(seen == new || seen.iter().all(|byte| *byte == 0), "sector {index} is neither");
            }
            assert_eq!(device.statistics().connections, 1);
        }
    });
}

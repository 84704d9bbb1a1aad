//! Tests of the file backend against the host's own view of the file.

use std::os::unix::fs::FileExt;

use larder_block::backend::file::{CONTAINER_UNIT, Caching, FileDevice, FileOpenError, FileOptions};
use larder_block::event_loop::{POLL_MAX_DEFAULT, yield_now};
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, IoVec, Loop, ReadBuf, WriteBuf,
    WriteFlags, ZeroFlags,
};

const SIZE: u64 = 8 << 20;

/// Runs a test for each way of doing I/O: on a disk file system, with and without the page cache, and on tmpfs.
fn each_place(test: impl AsyncFn(&Loop, &std::path::Path, FileOptions)) {
    for (folder, caching) in [
        (env!("CARGO_TARGET_TMPDIR"), Caching::Auto),
        (env!("CARGO_TARGET_TMPDIR"), Caching::Buffered),
        ("/dev/shm", Caching::Auto),
    ] {
        let file = tempfile::NamedTempFile::new_in(folder).expect("a temporary image");
        file.as_file().set_len(SIZE).expect("room for it");
        let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
        let options = FileOptions { caching, ..FileOptions::default() };
        on.block_on(test(&on, file.path(), options));
    }
}

fn pattern(len: usize, seed: u8) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(len);
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = (index as u8).wrapping_mul(31).wrapping_add(seed);
    }
    buffer
}

#[test]
fn write_reaches_file_and_reads_back() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let data = pattern(128 << 10, 1);
        let at = ByteOffset::new(1 << 20);
        device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        device.write(ByteOffset::ZERO, WriteBuf::new(&data[..4096]), WriteFlags::FUA).await.expect("writes durably");
        device.flush().await.expect("flushes");
        let mut seen = vec![0; data.len()];
        std::fs::File::open(path).unwrap().read_exact_at(&mut seen, at.get()).unwrap();
        assert!(seen == data[..]);

        let mut back = AlignedBuf::zeroed(data.len());
        let (left, right) = back.split_at_mut(16 << 10);
        let pieces = [IoVec::new(left.as_mut_ptr(), left.len()), IoVec::new(right.as_mut_ptr(), right.len())];
        // SAFETY: `back` outlives the read and is not accessed meanwhile.
        device.read(at, unsafe { ReadBuf::from_pieces(&pieces) }).await.expect("reads in pieces");
        assert!(back[..] == data[..]);
    });
}

/// Zeroed and discarded ranges read as zeros, and unmapped ones are reported as holes.
#[test]
fn zeroes_and_discards_read_as_zeros() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let data = pattern(1 << 20, 7);
        device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        let unmap = ZeroFlags { unmap: true, ..ZeroFlags::default() };
        device.write_zeroes(ByteRange::new(64 << 10, 64 << 10), unmap).await.expect("punches");
        device.write_zeroes(ByteRange::new(256 << 10, 64 << 10), ZeroFlags::default()).await.expect("zeroes");
        device.discard(ByteRange::new(512 << 10, 64 << 10)).await.expect("discards");
        let mut expected = data.to_vec();
        for start in [64, 256, 512] {
            expected[start << 10..(start + 64) << 10].fill(0);
        }
        let mut back = AlignedBuf::zeroed(data.len());
        device.read(ByteOffset::ZERO, ReadBuf::new(&mut back)).await.expect("reads");
        assert!(back[..] == expected[..]);
        let extents = device.extents(ByteRange::new(0, SIZE), 100).await.expect("maps");
        assert_eq!(extents.iter().map(|extent| extent.range.len.get()).sum::<u64>(), SIZE);
        let hole = extents.iter().find(|extent| extent.range.start.get() == 64 << 10).expect("an extent begins there");
        assert_eq!((hole.kind, hole.range.len), (ExtentKind::Hole, ByteLen::kib(64)));
    });
}

#[test]
fn concurrent_requests_get_their_own_data() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let blocks: Vec<AlignedBuf> = (0..500).map(|index| pattern(4096, index as u8)).collect();
        let writes: Vec<_> = (0u64..)
            .zip(&blocks)
            .map(|(index, block)| device.write(ByteOffset::new(index * 4096), WriteBuf::new(block), WriteFlags::NONE))
            .collect();
        for write in writes {
            write.await.expect("writes");
        }
        let mut back: Vec<AlignedBuf> = (0..500).map(|_| AlignedBuf::zeroed(4096)).collect();
        let reads: Vec<_> = (0u64..)
            .zip(&mut back)
            .map(|(index, block)| device.read(ByteOffset::new(index * 4096), ReadBuf::new(block)))
            .collect();
        for read in reads.into_iter().rev() {
            read.await.expect("reads");
        }
        assert!(back.iter().zip(&blocks).all(|(seen, meant)| seen[..] == meant[..]));
    });
}

#[test]
fn dropped_read_leaves_buffer_alone() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let data = pattern(1 << 20, 3);
        device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        for _ in 0..50 {
            let mut buffer = AlignedBuf::zeroed(1 << 20);
            drop(device.read(ByteOffset::ZERO, ReadBuf::new(&mut buffer)));
            let seen = buffer.to_vec();
            yield_now().await;
            assert!(seen == buffer[..]);
        }
    });
}

/// Requests beyond the end and misaligned ones fail without changing the file.
#[test]
fn invalid_requests_fail_without_effect() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let data = pattern(4096, 9);
        let error = device.write(ByteOffset::new(SIZE), WriteBuf::new(&data), WriteFlags::NONE).await.unwrap_err();
        assert_eq!(error.failure(), Failure::OutOfRange);
        let error =
            device.write(ByteOffset::new(u64::MAX - 511), WriteBuf::new(&data), WriteFlags::NONE).await.unwrap_err();
        assert_eq!(error.failure(), Failure::OutOfRange);
        let error = device.write(ByteOffset::new(1), WriteBuf::new(&data), WriteFlags::NONE).await.unwrap_err();
        assert_eq!(error.failure(), Failure::Misaligned);
        assert_eq!(std::fs::metadata(path).unwrap().len(), SIZE);
    });
}

#[test]
fn writer_excludes_others_and_readers_share() {
    each_place(async |on, path, options| {
        let writer = FileDevice::open(on, path, options.clone()).await.expect("opens");
        let read_only = FileOptions { read_only: true, ..options.clone() };
        let Err(error) = FileDevice::open(on, path, read_only.clone()).await else { panic!("opened a disk in use") };
        assert!(matches!(error, FileOpenError::Locked { .. }), "{error}");
        drop(writer);
        let one = FileDevice::open(on, path, read_only.clone()).await.expect("opens");
        let two = FileDevice::open(on, path, read_only.clone()).await.expect("opens a second time");
        assert!(FileDevice::open(on, path, options.clone()).await.is_err());
        let data = pattern(4096, 0);
        let error = one.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE).await.unwrap_err();
        assert_eq!(error.failure(), Failure::ReadOnly);
        drop(two);
    });
}

#[test]
fn size_change_is_announced() {
    each_place(async |on, path, options| {
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let generation = device.size_changes().generation();
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(2 * SIZE).unwrap();
        on.timeout(std::time::Duration::from_secs(20), device.size_changes().changed_after(generation))
            .await
            .expect("is announced");
        assert_eq!(device.geometry().size, ByteLen::new(2 * SIZE));
    });
}

#[test]
fn partial_last_sector_is_zero_padded() {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary image");
    std::io::Write::write_all(&mut file, &[7; 1000]).unwrap();
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(async {
        let device = FileDevice::open(&on, file.path(), FileOptions::default()).await.expect("opens");
        assert_eq!(device.geometry().size, ByteLen::new(1024));
        let mut back = vec![1; 1024];
        device.read(ByteOffset::ZERO, ReadBuf::new(&mut back)).await.expect("reads");
        assert!(back[..1000].iter().all(|byte| *byte == 7) && back[1000..].iter().all(|byte| *byte == 0));
    });
}

/// With an end inside a page, the kernel would fail the flush.
#[test]
fn container_grows_during_writes_at_end() {
    each_place(async |on, path, options| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(SIZE + 1000).unwrap();
        let options = FileOptions { container: true, ..options };
        let device = FileDevice::open(on, path, options).await.expect("opens");
        let first = device.geometry().size;
        device.grow(first).await.expect("grows to what is seen of it");
        assert_eq!(file.metadata().unwrap().len(), first.get());
        for round in 0..400 {
            let end = ByteOffset::new(device.geometry().size.get());
            let start = ByteOffset::new(end.get() - 8192);
            // Only in blocks that hold data do writes of less than a block run concurrently with other requests.
            let data = pattern(8192, round as u8);
            let written = device.write(start, WriteBuf::new(&data), WriteFlags::NONE);
            written.await.expect("writes");
            let writes: Vec<_> = (0..16)
                .map(|sector| {
                    let device = std::rc::Rc::clone(&device);
                    let at = start + ByteLen::new(512 * sector);
                    on.spawn_with_result(async move {
                        let data = pattern(512, sector as u8);
                        let written = device.write(at, WriteBuf::new(&data), WriteFlags::NONE);
                        written.await.expect("writes");
                    })
                })
                .collect();
            // Lets the loop submit the writes.
            for _ in 0..round % 4 {
                yield_now().await;
            }
            let wanted = ByteLen::new(end.get() + CONTAINER_UNIT);
            device.grow(wanted).await.expect("grows");
            for written in writes {
                written.await;
            }
            device.flush().await.expect("flushes");
        }
    });
}

/// A run of data is searched once, in both directions, not for each request. Holes made through the device are
/// visible at once.
#[test]
fn known_data_is_not_searched_again() {
    const DATA: u64 = 48 << 20;
    const HALF: u64 = DATA / 2;
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a temporary image");
    file.as_file().set_len(DATA + SIZE).expect("room for it");
    for at in (0..DATA).step_by(1 << 20) {
        file.as_file().write_all_at(&pattern(1 << 20, 5), at).expect("room");
    }
    on.block_on(async {
        let options = FileOptions::default();
        let device = FileDevice::open(&on, file.path(), options).await.expect("opens");
        let kinds = async |start: u64, len: u64| {
            let found = device.extents(ByteRange::new(start, len), 100).await.expect("maps");
            found.iter().map(|extent| (extent.kind, extent.range.len.get())).collect::<Vec<_>>()
        };
        let data = |len| (ExtentKind::Data, len);
        let hole = |len| (ExtentKind::Hole, len);
        assert_eq!(kinds(HALF, 4096).await, [data(4096)]);
        // Holes made by another process do not show, which proves that the file system was not queried.
        for at in [4096, HALF + 8192] {
            let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file.as_file(), mode, at, 4096).expect("a hole");
        }
        assert_eq!(kinds(HALF, HALF).await, [data(HALF)]);
        assert_eq!(kinds(0, HALF).await, [data(HALF)]);
        assert_eq!(kinds(DATA - 4096, 8192).await, [data(4096), hole(4096)]);
        let (gone, zeroed) = (ByteRange::new(1 << 20, 4096), ByteRange::new(HALF + (1 << 20), 4096));
        device.discard(gone).await.expect("discards");
        let unmap = ZeroFlags { unmap: true, ..ZeroFlags::default() };
        device.write_zeroes(zeroed, unmap).await.expect("zeroes");
        for range in [gone, zeroed] {
            let found = kinds(range.start.get() - 4096, 3 * 4096).await;
            assert_eq!(found, [data(4096), hole(4096), data(4096)]);
        }
        let filled = pattern(4096, 6);
        let write = device.write(gone.start, WriteBuf::new(&filled), WriteFlags::NONE);
        write.await.expect("writes");
        assert_eq!(kinds(gone.start.get(), 4096).await, [data(4096)]);
    });
}

//! The NBD client against other people's servers: nbdkit and qemu-nbd.

mod nbd_support;

use std::rc::Rc;

use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, IoVec, Loop, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};
use nbd_support::{Place, Random, contents, pattern, program, run};

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

/// Does random changes to `device` and `model`, and reads to compare.
async fn exercise(device: &NbdDevice, model: &mut [u8], seed: u64, steps: u64) {
    let mut random = Random(seed);
    let block = u64::from(device.geometry().block_size);
    let blocks = model.len() as u64 / block;
    for step in 0..steps {
        let start = random.below(blocks);
        let count = 1 + random.below((blocks - start).min(64));
        let range = ByteRange::new(start * block, count * block);
        let part = &mut model[range.start.get() as usize..range.end().get() as usize];
        let flags = WriteFlags {
            fua: random.below(8) == 0,
        };
        match random.below(8) {
            0..3 => {
                part.copy_from_slice(&pattern(part.len(), seed ^ step));
                let buffer = WriteBuf::new(part);
                device.write(range.start, buffer, flags).await.expect("writes");
            }
            3 => {
                part.fill(0);
                let flags = ZeroFlags {
                    unmap: step % 2 == 0,
                    fast_only: false,
                    fua: flags.fua,
                };
                device.write_zeroes(range, flags).await.expect("zeroes");
            }
            4 => device.flush().await.expect("flushes"),
            _ => {
                let mut back = vec![0xaa; part.len()];
                let (left, right) = back.split_at_mut(part.len() / 2);
                let pieces = [
                    IoVec::new(left.as_mut_ptr(), left.len()),
                    IoVec::new(right.as_mut_ptr(), right.len()),
                ];
                // SAFETY: `back` outlives the read and is not looked at meanwhile.
                let buffer = unsafe { ReadBuf::from_pieces(&pieces) };
                device.read(range.start, buffer).await.expect("reads");
                assert!(back == part, "step {step}: {range} differs");
            }
        }
    }
}

#[test]
fn every_kind_of_server_holds_what_was_written_to_it() {
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

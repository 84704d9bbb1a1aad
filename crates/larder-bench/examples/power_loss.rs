//! A whole stack of layers over a simulated disk, and the data that survives a power loss.
//!
//! ```text
//! Prefetch            read-ahead
//!    |
//! Qcow2               the image's format
//!    |
//! Align               requests of 512 bytes on a disk with blocks of 4 KiB
//!    |
//! SimulatedDevice     a disk whose unflushed sectors may be lost
//! ```
//!
//! The example writes `A` to the sectors 0 to 7 and flushes them. Then it writes `B` to the sectors 4 to 11, without a
//! flush, and cuts the power. It opens the stack again over the remaining medium, and reads all 12 sectors.
//! Run it with:
//!
//! ```sh
//! cargo run -p larder-bench --example power_loss
//! ```
//!
//! It prints a line for each of ten seeds, such as `seed 3: AAAA ABBA .B.B`. The seed determines the latency of each
//! request, and the unflushed sectors that survive:
//!
//! - Each of the first four sectors is `A`, because the flush has made them durable.
//! - Each of the next four is `A`, which was flushed, or `B`, which was not.
//! - Each of the last four is `B`, or zeros (`.`) as before the write.
//!
//! This is promise 3 of [`larder_block::device`]. `larder-bench simulate` checks all promises with random requests, on
//! this stack and on others, such as those with a cache.

use std::error::Error;
use std::ops::Range;
use std::rc::Rc;

use larder_block::backend::simulated::{DeviceStop, SimulatedDevice, SimulatedMedium, SimulatedOptions};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::{BlockDevice, ByteLen, ByteOffset, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_prefetch::{Prefetch, PrefetchOptions};
use larder_qcow2::shape::Shape;
use larder_qcow2::{OpenOptions, Qcow2, RelatedFiles};

const SECTOR: usize = 512;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Opens the disk that holds the image's file.
fn open_disk(on: &Loop, medium: SimulatedMedium, seed: u64) -> Rc<SimulatedDevice> {
    let options = SimulatedOptions { seed, block_size: 4096, ..SimulatedOptions::default() };
    SimulatedDevice::open(on, medium, options)
}

/// Returns the disk with blocks of 512 bytes.
fn align(disk: &Rc<SimulatedDevice>) -> Rc<dyn BlockDevice> {
    Rc::new(Align::new(Rc::clone(disk) as _, AlignOptions::default()))
}

/// Opens the layers above `file`, and returns the top of the stack.
async fn open_stack(on: &Loop, file: Rc<dyn BlockDevice>) -> Outcome<Rc<dyn BlockDevice>> {
    let image = Qcow2::open(on, file, RelatedFiles::default(), OpenOptions::default()).await?;
    let top: Rc<dyn BlockDevice> = Prefetch::new(on, image, PrefetchOptions::default());
    Ok(top)
}

/// Creates an image, writes to it through the stack, and cuts the power while the stack is open.
async fn write_until_power_loss(on: &Loop, disk: Rc<SimulatedDevice>) -> Outcome<SimulatedMedium> {
    let shape = Shape { cluster_bits: 16, extended: false, refcount_order: 4, version: 3, data_file: false };
    let file = align(&disk);
    larder_qcow2::create(&file, shape, ByteLen::mib(1)).await?;
    let top = open_stack(on, file).await?;
    write(&*top, 0..8, b'A').await?;
    top.flush().await?;
    write(&*top, 4..12, b'B').await?;
    Ok(disk.stop(DeviceStop::PowerLoss))
}

async fn write(device: &dyn BlockDevice, sectors: Range<usize>, letter: u8) -> IoResult {
    let bytes = vec![letter; sectors.len() * SECTOR];
    let start = ByteOffset::new((sectors.start * SECTOR) as u64);
    device.write(start, WriteBuf::new(&bytes), WriteFlags::NONE).await?;
    Ok(())
}

/// Opens the stack after a power loss, and returns a letter for each sector: `?` for one that is not uniform.
async fn read_letters(on: &Loop, disk: Rc<SimulatedDevice>) -> Outcome<String> {
    let top = open_stack(on, align(&disk)).await?;
    let mut bytes = vec![0; 12 * SECTOR];
    top.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
    let letters = bytes.chunks(SECTOR).map(|sector| match sector[0] {
        first if sector.iter().any(|byte| *byte != first) => '?',
        0 => '.',
        first => char::from(first),
    });
    Ok(letters.collect())
}

/// Returns the letters of the sectors 0 to 3, 4 to 7, and 8 to 11 after a power loss.
fn run(seed: u64) -> Outcome<[String; 3]> {
    // The disk grows with the image, as a file does.
    let medium = SimulatedMedium::new(ByteLen::kib(4), SECTOR as u32);
    let on = Loop::simulated()?;
    let medium = on.block_on(write_until_power_loss(&on, open_disk(&on, medium, seed)))?;
    // After a power loss only the medium is left.
    drop(on);
    let on = Loop::simulated()?;
    let letters = on.block_on(read_letters(&on, open_disk(&on, medium, seed)))?;
    Ok([&letters[..4], &letters[4..8], &letters[8..]].map(str::to_owned))
}

fn main() -> Outcome<()> {
    for seed in 0..10 {
        println!("seed {seed}: {}", run(seed)?.join(" "));
    }
    Ok(())
}

/// Flushed sectors survive with every seed, and unflushed ones only with some.
#[test]
fn flushed_sectors_survive_power_loss() {
    let (mut kept, mut lost) = (0, 0);
    for seed in 0..100 {
        let found = run(seed).expect("the stack opens again");
        let [flushed, overwritten, new] = &found;
        let has_only = |letters: &str, allowed: &str| letters.chars().all(|letter| allowed.contains(letter));
        let is_allowed = has_only(flushed, "A") && has_only(overwritten, "AB") && has_only(new, ".B");
        assert!(is_allowed, "seed {seed}: {found:?}");
        let survived = found.concat().matches('B').count();
        kept += survived;
        lost += 8 - survived;
    }
    assert!(kept > 0 && lost > 0, "{kept} survived, {lost} were lost");
}

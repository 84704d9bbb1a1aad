//! Fuzzing of headers: any bytes as the first cluster of an image, and as a whole image file.

use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::{BlockDevice, ByteLen, ByteOffset, Loop, WriteBuf, WriteFlags};
use larder_qcow2::header::{Header, MAGIC};
use larder_qcow2::{OpenOptions, Qcow2, RelatedFiles};

use super::Input;

/// The length of the image file, in bytes.
const FILE_BYTES: u64 = 128 << 10;

/// Parses `data`, then opens an image that begins with it.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.byte();
    let mut bytes = input.0.to_vec();
    if flags & 1 != 0 {
        sound_start(&mut bytes, flags);
    }
    // Each refusal has a message.
    if let Err(error) = Header::parse(&bytes) {
        assert!(!error.to_string().is_empty());
    }
    let _ = Header::area_len(&bytes);
    let on = Loop::simulated().expect("a loop");
    on.block_on(async {
        let file: Rc<dyn BlockDevice> = Rc::new(MemoryDevice::new(ByteLen::new(FILE_BYTES), 512));
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        let write = file.write(ByteOffset::ZERO, WriteBuf::new(&bytes), WriteFlags::NONE);
        write.await.expect("it fits");
        let header = larder_qcow2::read_header(&file).await;
        for read_only in [true, false] {
            let options = OpenOptions { read_only, load_ahead: flags & 2 != 0, ..OpenOptions::default() };
            let opened = Qcow2::open(&on, Rc::clone(&file), RelatedFiles::default(), options).await;
            match (opened, &header) {
                (Ok(image), Ok(header)) => {
                    assert_eq!(image.geometry().size.get(), header.size & !511);
                    image.flush().await.expect("nothing is to be written");
                }
                (Ok(_), Err(error)) => panic!("it was opened although its header is wrong: {error}"),
                (Err(error), _) => assert!(!error.to_string().is_empty()),
            }
        }
    });
}

/// Sets fields that nearly every header has, so that the rest of the code is reached.
fn sound_start(bytes: &mut Vec<u8>, flags: u8) {
    bytes.resize(bytes.len().max(512), 0);
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..8].copy_from_slice(&[0, 0, 0, 2 + (flags >> 2 & 1)]);
    bytes[20..23].fill(0);
    if flags & 8 != 0 {
        bytes[23] = 9 + bytes[23] % 13;
        bytes[32..36].fill(0);
    }
    if flags & 16 != 0 {
        // Small tables somewhere in the file, and small numbers.
        let cluster_len = 1u64 << bytes[23].clamp(9, 16);
        bytes[24..29].fill(0);
        for at in [40, 48, 64] {
            let cluster = u64::from(bytes[at + 7] % 16);
            bytes[at..at + 8].copy_from_slice(&(cluster * cluster_len).to_be_bytes());
        }
        for at in [36, 56, 60, 96, 100] {
            bytes[at..at + 3].fill(0);
        }
        bytes[72..79].fill(0);
        bytes[100..104].copy_from_slice(&104u32.to_be_bytes());
    }
}

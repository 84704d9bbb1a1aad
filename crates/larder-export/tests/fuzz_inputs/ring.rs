//! Fuzz target: a virtqueue in memory with arbitrary contents, including indirect tables.

use larder_export::vhost_user::memory::GuestMemory;
use larder_export::vhost_user::message::{RegionInfo, RingAddresses};
use larder_export::vhost_user::ring::{DescriptorChain, Ring, RingLayout, RingPosition};
use rustix::fs::MemfdFlags;

use super::Input;

const MEMORY_BYTES: u64 = 1 << 16;
/// Guest memory ends at the end of the address space, where sums of addresses overflow.
const GUEST_BASE: u64 = u64::MAX - MEMORY_BYTES;

pub fn run(data: &[u8], packed: bool) {
    let mut input = Input(data);
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, MEMORY_BYTES).expect("a size");
    let low = input.byte() & 1 == 0;
    let guest_address = if low { 0 } else { GUEST_BASE };
    let info = RegionInfo { guest_address, len: MEMORY_BYTES, user_address: 0, file_offset: 0 };
    let memory = GuestMemory::default().with(info, &file).expect("maps");
    let size = match packed {
        true => 1 + u32::from(input.byte()),
        false => 1 << (input.byte() % 9),
    };
    let layout = RingLayout { packed, event_index: input.byte() & 1 != 0, size };
    let addresses = RingAddresses { descriptors: 0, driver: 0x4000, device: 0x6000, log: false };
    let position = RingPosition { available: input.word(), used: input.word() };
    let base = memory.contiguous(guest_address, MEMORY_BYTES).expect("is there");
    let mut ring = Ring::new(&memory, layout, &addresses, position).expect("fits");
    for _ in 0..64 {
        patch(&mut input, base);
        let mut chain = DescriptorChain::default();
        ring.set_kicks_enabled(input.byte() & 1 != 0);
        match ring.pop_avail(&memory, &mut chain) {
            Ok(None) if input.is_empty() => break,
            Ok(None) => {}
            Ok(Some(head)) => {
                for piece in chain.readable().iter().chain(chain.writable()) {
                    let offset = piece.base().addr() - base.addr();
                    assert!(piece.is_empty() || (offset + piece.len()) as u64 <= MEMORY_BYTES, "outside of memory");
                }
                let changed = ring.push_used(head, u32::from(input.word()));
                assert!((changed.base().addr() - base.addr() + changed.len()) as u64 <= MEMORY_BYTES);
                ring.wants_interrupt();
            }
            Err(error) => {
                let _ = error.to_string();
                break;
            }
        }
        let _ = Ring::new(&memory, layout, &addresses, ring.position()).expect("fits");
    }
}

/// Overwrites some of the memory, usually in the rings.
fn patch(input: &mut Input<'_>, base: *mut u8) {
    let count = input.byte() % 8;
    for _ in 0..count {
        let at = match input.byte() % 4 {
            0 => usize::from(input.byte()) * 16,
            1 => 0x4000 + usize::from(input.byte()) % 64,
            2 => 0x6000 + usize::from(input.byte()) % 64,
            _ => usize::from(input.word()),
        };
        let len = usize::from(input.byte() % 33);
        let bytes = input.bytes(len);
        let room = MEMORY_BYTES as usize - at;
        // SAFETY: inside the mapping, to which no reference exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.add(at), bytes.len().min(room)) };
    }
}

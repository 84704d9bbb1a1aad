//! Tests of coders between inaccessible pages: an access outside a buffer kills the test. This is for the C
//! libraries, whose bounds are otherwise only documented.

use larder_codec::PAGE;
use larder_codec::batch::{Decoder, Encoder, Method};
use larder_codec::measure::MemoryContent;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Memory with an inaccessible page on either side; the used part is adjacent to one or the other.
struct Fenced {
    start: *mut u8,
    bytes: usize,
}

impl Fenced {
    fn new(pages: usize) -> Self {
        let all = (pages + 2) * PAGE;
        // SAFETY: a private mapping, whose outermost pages are never used.
        let start: *mut u8 = unsafe {
            let start =
                mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                    .expect("maps");
            mprotect(start, PAGE, MprotectFlags::empty()).expect("fences");
            let end = start.cast::<u8>().add(all - PAGE);
            mprotect(end.cast(), PAGE, MprotectFlags::empty()).expect("fences");
            start.cast()
        };
        Self { start, bytes: pages * PAGE }
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: mapped as long as self lives, and borrowed with it; any bytes are valid.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(PAGE), self.bytes) }
    }

    fn first(&mut self, len: usize) -> &mut [u8] {
        &mut self.all()[..len]
    }

    fn last(&mut self, len: usize) -> &mut [u8] {
        let from = self.bytes - len;
        &mut self.all()[from..]
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: its own mapping, of which no borrow exists any more.
        unsafe { munmap(self.start.cast(), self.bytes + 2 * PAGE) }.expect("unmaps");
    }
}

#[test]
fn coders_stay_within_buffers() {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % end as u64) as usize
    };
    for pages in [1, 2, 5, 16] {
        let [mut memory, mut encoded, mut data, mut out] = [(); 4].map(|()| Fenced::new(pages));
        for kind in MemoryContent::ALL {
            memory.all().copy_from_slice(&kind.generate(pages * PAGE, 8));
            for method in Method::ALL {
                // Limits at the end of the output, and before it.
                let whole = encoder.encode(method, &[&*memory.all()], encoded.all());
                let len = whole.unwrap_or(pages * PAGE);
                for room in [len, len - 1, len / 2, below(len), 1, 0] {
                    encoder.encode(method, &[&*memory.all()], encoded.last(room));
                }
                let Some(len) = encoder.encode(method, &[&*memory.all()], encoded.all()) else {
                    continue;
                };
                let original = encoded.first(len).to_vec();
                for trial in 0..60 {
                    let mut damaged = original.clone();
                    if trial > 0 {
                        for _ in 0..=below(3) {
                            damaged[below(len)] = below(256) as u8;
                        }
                        damaged.truncate(len - [0, below(len)][trial % 2]);
                    }
                    for at_the_end in [true, false] {
                        let place = if at_the_end { data.last(damaged.len()) } else { data.first(damaged.len()) };
                        place.copy_from_slice(&damaged);
                        let decoded = decoder.decode(method, place, out.all());
                        assert!(trial > 0 || decoded.is_ok() && out.all() == memory.all());
                    }
                }
            }
        }
    }
}

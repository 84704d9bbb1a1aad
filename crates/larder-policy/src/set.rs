//! The state of one set: the order of its lines, how hot each is, and what left a short while ago.
//!
//! S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023), exactly, on a set.
//!
//! ```text
//! 0        2         4        6         8      8+w      8+2w       8+4w
//! | main  | small   | ghosts | next    | order | hot   | ghosts    |
//! | u16   | u16     | u16    | u16     | u8 xw | u8 xw | u16 xw    |
//! ```
//!
//! `order` has the ways of the main queue, oldest first, then those of the small one; what is beyond is free and
//! undefined. `hot` is by way. `ghosts` is a ring of fingerprints; `next` is where the next one goes.

const HEADER: usize = 8;

/// `hot`: how often the line was hit, up to this.
const FREQUENCY_MAX: u8 = 3;

/// `hot`: set for the lines of the main queue.
const MAIN: u8 = 0x80;

/// Bytes of the state of a set.
pub(crate) const fn bytes(ways: usize) -> usize {
    HEADER + 4 * ways
}

/// A set, over the bytes of its state.
pub(crate) struct Set<'a> {
    header: &'a mut [u8],
    order: &'a mut [u8],
    hot: &'a mut [u8],
    ghosts: &'a mut [u8],
}

impl<'a> Set<'a> {
    pub(crate) fn new(state: &'a mut [u8], ways: usize) -> Self {
        assert_eq!(
            state.len(),
            bytes(ways),
            "the state of a set has the length that the policy asked for"
        );
        let (header, rest) = state.split_at_mut(HEADER);
        let (order, rest) = rest.split_at_mut(ways);
        let (hot, ghosts) = rest.split_at_mut(ways);
        Self {
            header,
            order,
            hot,
            ghosts,
        }
    }

    fn field(&self, index: usize) -> usize {
        usize::from(u16::from_le_bytes([self.header[2 * index], self.header[2 * index + 1]]))
    }

    fn set_field(&mut self, index: usize, value: usize) {
        self.header[2 * index..2 * index + 2].copy_from_slice(&(value as u16).to_le_bytes());
    }

    fn main(&self) -> usize {
        self.field(0)
    }

    fn small(&self) -> usize {
        self.field(1)
    }

    pub(crate) fn touch(&mut self, way: u8) {
        let hot = &mut self.hot[usize::from(way)];
        if *hot & FREQUENCY_MAX < FREQUENCY_MAX {
            *hot += 1;
        }
    }

    /// Moves the way at `from` of the order to the end of the first `len` entries.
    fn make_newest(&mut self, from: usize, len: usize) {
        self.order[from..len].rotate_left(1);
    }

    pub(crate) fn victim(&mut self, mut may_evict: impl FnMut(u8) -> bool) -> Option<u8> {
        let small_target = self.order.len() / 10;
        let total = self.main() + self.small();
        // Each pass over a way that stays takes a bit of its heat or moves it to the main queue.
        let mut refused = 0;
        for _ in 0..total * (usize::from(FREQUENCY_MAX) + 2) {
            let (main, small) = (self.main(), self.small());
            let from_small = small > small_target || main == 0;
            let at = if from_small { main } else { 0 };
            let way = self.order[at];
            let hot = self.hot[usize::from(way)];
            if from_small && hot & FREQUENCY_MAX > 0 {
                // To the newest end of the main queue, which is where it is.
                self.hot[usize::from(way)] = MAIN;
                self.set_field(0, main + 1);
                self.set_field(1, small - 1);
            } else if !from_small && hot & FREQUENCY_MAX > 0 {
                self.hot[usize::from(way)] -= 1;
                self.make_newest(0, main);
            } else if may_evict(way) {
                return Some(way);
            } else {
                refused += 1;
                if refused > total {
                    break;
                }
                self.make_newest(at, if from_small { total } else { main });
            }
        }
        None
    }

    pub(crate) fn insert(&mut self, way: u8, fingerprint: u16) {
        let (main, small) = (self.main(), self.small());
        let seen = self.forget(fingerprint);
        self.order[main + small] = way;
        if seen {
            self.order[main..=main + small].rotate_right(1);
            self.set_field(0, main + 1);
        } else {
            self.set_field(1, small + 1);
        }
        self.hot[usize::from(way)] = if seen { MAIN } else { 0 };
    }

    pub(crate) fn remove(&mut self, way: u8) {
        let (main, small) = (self.main(), self.small());
        let Some(at) = self.order[..main + small].iter().position(|entry| *entry == way) else {
            return;
        };
        self.make_newest(at, main + small);
        if at < main {
            self.set_field(0, main - 1);
        } else {
            self.set_field(1, small - 1);
        }
    }

    /// A line that was evicted is remembered.
    pub(crate) fn remember(&mut self, fingerprint: u16) {
        let (len, next) = (self.field(2), self.field(3));
        self.ghosts[2 * next..2 * next + 2].copy_from_slice(&fingerprint.to_le_bytes());
        self.set_field(2, (len + 1).min(self.order.len()));
        self.set_field(3, (next + 1) % self.order.len());
    }

    fn ghost(&self, fingerprint: u16) -> Option<usize> {
        let pattern = fingerprint.to_le_bytes();
        self.ghosts[..2 * self.field(2)]
            .chunks_exact(2)
            .position(|ghost| ghost == pattern)
    }

    fn forget(&mut self, fingerprint: u16) -> bool {
        let at = self.ghost(fingerprint);
        if let Some(at) = at {
            // Zero is the fingerprint of no line.
            self.ghosts[2 * at..2 * at + 2].fill(0);
        }
        at.is_some()
    }

    /// What to save of a line: a byte that [`Self::load`] takes.
    pub(crate) fn save(&self, way: u8) -> u8 {
        self.hot[usize::from(way)]
    }

    pub(crate) fn load(&mut self, way: u8, saved: u8) {
        self.insert(way, 0);
        self.hot[usize::from(way)] = saved & FREQUENCY_MAX;
    }
}

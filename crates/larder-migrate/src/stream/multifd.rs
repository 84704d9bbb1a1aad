//! Parser of multifd channels: packets, each with a header and its pages.
//!
//! ```text
//! at the beginning, 64 bytes
//!   0  be32 0x11223344    4  be32 1    8  uuid    24  u8 number of the channel    25  reserved
//! header of a packet, 1344 bytes
//!   0  be32 0x11223344    4  be32 1    8  be32 flags: 1 sync, 0x3e compression, 0x40 device state
//!  12  be32 128, or 0     16  be32 pages sent    20  be32 bytes that follow    24  be64 number
//!  32  be32 zero pages (from 9.0 on; before, as the rest of these 32 bytes, reserved)
//!  64  name of the block, up to a zero           320  be64[128] offsets: of the pages sent, then of zero pages
//! header of a packet with device state, 276 bytes (from 10.0 on)
//!  12  name[256]    268  be32 instance    272  be32 bytes that follow
//! ```
//!
//! In QEMU 7.2, the numbers and offsets of a packet without pages are left over from an earlier packet.

use larder_codec::PAGE;

use super::blocks::BlockRef;
use super::facts::ChannelKind;
use super::partial::{UnknownFormat, be32, be64};
use super::records::{Context, Flow, PageReport};
use super::units::PageIndex;
use super::wire::multifd::{
    COMMON_BYTES, DEVICE_STATE_BYTES, FLAG_COMPRESSION_MASK, FLAG_DEVICE_STATE, FLAG_SYNC, INIT_BYTES, MAGIC, NAME,
    OFFSETS, PACKET_BYTES, PAGES, VERSION,
};

#[derive(Clone, Copy, Debug)]
enum MultifdState {
    Init,
    Packet,
    /// Pages of a packet, from this index on.
    Pages(usize),
    /// This many literal bytes, and then the packet's page of this index.
    Skip(u64, usize),
    Opaque,
}

/// Parser of a multifd channel.
#[derive(Debug)]
pub(super) struct MultifdChannel {
    at: MultifdState,
    /// Block of the packet and its name, which most packets share.
    block: Option<BlockRef>,
    name: [u8; NAME.end - NAME.start],
    pages: [PageIndex; PAGES],
    /// Number of pages of the packet that are to be reported.
    count: usize,
}

impl MultifdChannel {
    pub(super) const fn new() -> Self {
        Self {
            at: MultifdState::Init,
            block: None,
            name: [0; NAME.end - NAME.start],
            pages: [PageIndex::new(0); PAGES],
            count: 0,
        }
    }

    /// Returns the pages of the packet that is being reported.
    pub(super) fn pages(&self) -> &[PageIndex] {
        &self.pages[..self.count]
    }

    /// Parses like [`Records::step`](super::records::Records::step), but never returns [`Flow::End`].
    pub(super) fn step(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Flow {
        loop {
            match self.at {
                MultifdState::Init | MultifdState::Packet => match self.structure(cx, data, taken) {
                    Ok(true) => {}
                    Ok(false) => return Flow::Pause,
                    Err(UnknownFormat) => {
                        cx.partial.clear();
                        cx.facts.losses += 1;
                        cx.facts.count_change();
                        self.at = MultifdState::Opaque;
                    }
                },
                MultifdState::Pages(index) if index >= self.count => self.at = MultifdState::Packet,
                MultifdState::Pages(index) if cx.reports_pages && *taken == 0 => {
                    return self.report_pages(cx, index, data);
                }
                MultifdState::Pages(_) if cx.reports_pages => return Flow::Pause,
                MultifdState::Pages(_) if *taken == data.len() => return Flow::Pause,
                MultifdState::Pages(index) => {
                    cx.facts.pages_unreported += 1;
                    self.at = MultifdState::Skip(PAGE as u64, index + 1);
                }
                MultifdState::Skip(left, index) => {
                    let skip = left.min((data.len() - *taken) as u64);
                    *taken += skip as usize;
                    if skip < left {
                        self.at = MultifdState::Skip(left - skip, index);
                        return Flow::Pause;
                    }
                    self.at = MultifdState::Pages(index);
                }
                MultifdState::Opaque => {
                    *taken = data.len();
                    return Flow::Pause;
                }
            }
        }
    }

    /// Reports as many of the packet's pages as are complete.
    fn report_pages(&mut self, cx: &mut Context<'_>, index: usize, data: &[u8]) -> Flow {
        let count = (self.count - index).min(data.len() / PAGE);
        let Some(block) = self.block else {
            // Cannot happen: the pages of a packet without a block are skipped.
            return Flow::Lost;
        };
        if count == 0 {
            return Flow::NeedMore(PAGE);
        }
        self.at = MultifdState::Pages(index + count);
        cx.facts.pages += count as u64;
        Flow::Report(PageReport::Packet { block: block.id, from: index, count })
    }

    fn structure(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Result<bool, UnknownFormat> {
        let is_init = matches!(self.at, MultifdState::Init);
        let complete = match is_init {
            true => cx.partial.complete(data, taken, |_| Ok(INIT_BYTES)),
            false => cx.partial.complete(data, taken, packet_bytes),
        };
        if !complete? {
            return Ok(false);
        }
        let bytes = cx.partial.get();
        if be32(bytes, 0) != MAGIC || be32(bytes, 4) != VERSION {
            return Err(UnknownFormat);
        }
        if is_init {
            cx.facts.channel = ChannelKind::Multifd { id: bytes[24] };
            cx.facts.count_change();
            self.at = MultifdState::Packet;
        } else {
            cx.facts.packets += 1;
            self.at = self.packet(cx)?;
        }
        cx.partial.clear();
        Ok(true)
    }

    /// Parses a packet's complete header.
    fn packet(&mut self, cx: &mut Context<'_>) -> Result<MultifdState, UnknownFormat> {
        let bytes = cx.partial.get();
        let flags = be32(bytes, 8);
        self.count = 0;
        if flags & FLAG_DEVICE_STATE != 0 {
            cx.facts.device_packets += 1;
            return Ok(MultifdState::Skip(u64::from(be32(bytes, 272)), 0));
        }
        cx.facts.multifd_syncs += u64::from(flags & FLAG_SYNC);
        let [capacity, sent, follow, zero] = [12, 16, 20, 32].map(|at| be32(bytes, at) as usize);
        if !matches!(capacity, 0 | PAGES) || sent > capacity || zero > capacity - sent {
            return Err(UnknownFormat);
        }
        cx.facts.zero_pages += zero as u64;
        if sent == 0 {
            return Ok(MultifdState::Packet);
        }
        if flags & FLAG_COMPRESSION_MASK != 0 {
            cx.facts.encoded_pages += sent as u64;
            return Ok(MultifdState::Skip(follow as u64, 0));
        }
        if follow != sent * PAGE {
            return Err(UnknownFormat);
        }
        self.find_block(cx);
        if !self.set_pages(cx.partial.get(), sent) {
            cx.facts.pages_unreported += sent as u64;
            return Ok(MultifdState::Skip(follow as u64, 0));
        }
        Ok(MultifdState::Pages(0))
    }

    /// Finds the packet's block: the previous one, if the name is the same and its size is known.
    fn find_block(&mut self, cx: &mut Context<'_>) {
        let name = &cx.partial.get()[NAME];
        let is_known = self.block.is_some_and(|block| block.pages.is_some());
        if is_known && name == self.name {
            return;
        }
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len() - 1);
        self.block = match len {
            0 => None,
            len => cx.blocks.get_or_add(&name[..len]),
        };
        self.name.copy_from_slice(name);
    }

    /// Reads the numbers of the pages sent; returns false if they cannot be reported.
    fn set_pages(&mut self, bytes: &[u8], sent: usize) -> bool {
        let Some(block) = self.block else { return false };
        let limit = block.pages.unwrap_or(u32::MAX);
        for (index, page) in self.pages[..sent].iter_mut().enumerate() {
            match PageIndex::at(be64(bytes, OFFSETS + 8 * index), limit) {
                Some(at) => *page = at,
                None => return false,
            }
        }
        self.count = sent;
        true
    }
}

/// Returns the length of a packet's header.
fn packet_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    if partial.len() < COMMON_BYTES {
        return Ok(COMMON_BYTES);
    }
    if be32(partial, 0) != MAGIC {
        return Err(UnknownFormat);
    }
    match be32(partial, 8) & FLAG_DEVICE_STATE {
        0 => Ok(PACKET_BYTES),
        _ => Ok(DEVICE_STATE_BYTES),
    }
}

//! Constants of QEMU's migration stream, from its `migration/savevm.h`, `savevm.c`, `ram.h` and `multifd.h`, of QEMU
//! 7.2 to 10.2. All numbers are big-endian.

use super::units::PageIndex;

/// Magic of a main channel; its version, 3, follows.
pub(super) const MAIN_MAGIC: &[u8; 4] = b"QEVM";
pub(super) const MAIN_VERSION: u32 = 3;

/// Types of the main channel's sections.
pub(super) mod section {
    pub(in super::super) const EOF: u8 = 0;
    pub(in super::super) const START: u8 = 1;
    pub(in super::super) const PART: u8 = 2;
    pub(in super::super) const END: u8 = 3;
    pub(in super::super) const FULL: u8 = 4;
    pub(in super::super) const SUBSECTION: u8 = 5;
    pub(in super::super) const DESCRIPTION: u8 = 6;
    pub(in super::super) const CONFIGURATION: u8 = 7;
    pub(in super::super) const COMMAND: u8 = 8;
    pub(in super::super) const FOOTER: u8 = 0x7e;
}

/// Commands that the parser interprets; every command has a length.
pub(super) mod command {
    pub(in super::super) const OPEN_RETURN_PATH: u16 = 1;
    pub(in super::super) const POSTCOPY_ADVISE: u16 = 3;
    pub(in super::super) const POSTCOPY_LISTEN: u16 = 4;
    pub(in super::super) const POSTCOPY_RUN: u16 = 5;
    pub(in super::super) const PACKAGED: u16 = 7;
    pub(in super::super) const ENABLE_COLO: u16 = 8;
    pub(in super::super) const POSTCOPY_RESUME: u16 = 9;
    pub(in super::super) const SWITCHOVER_START: u16 = 11;
    /// Upper bound of command numbers: QEMU 10.2 has 11 commands, and a larger number than this is not a command.
    pub(in super::super) const PLAUSIBLE_MAX: u16 = 31;
}

/// Lower bits of a RAM record's first word; its upper bits are an offset in the block.
pub(super) mod flag {
    pub(in super::super) const MASK: u64 = 0xfff;
    pub(in super::super) const ZERO: u64 = 0x02;
    pub(in super::super) const MEM_SIZE: u64 = 0x04;
    pub(in super::super) const PAGE: u64 = 0x08;
    pub(in super::super) const EOS: u64 = 0x10;
    pub(in super::super) const CONTINUE: u64 = 0x20;
    pub(in super::super) const XBZRLE: u64 = 0x40;
    pub(in super::super) const COMPRESS_PAGE: u64 = 0x100;
    pub(in super::super) const MULTIFD_FLUSH: u64 = 0x200;
    /// Flags of the usual records, whose block is the last record's.
    pub(in super::super) const NEXT_PAGE: u64 = PAGE | CONTINUE;
    pub(in super::super) const NEXT_ZERO: u64 = ZERO | CONTINUE;
}

/// Version of RAM's section whose records are known.
pub(super) const RAM_VERSION: u32 = 4;

/// Constants of multifd channels.
pub(super) mod multifd {
    pub(in super::super) const MAGIC: u32 = 0x1122_3344;
    pub(in super::super) const VERSION: u32 = 1;
    pub(in super::super) const FLAG_SYNC: u32 = 1;
    pub(in super::super) const FLAG_COMPRESSION_MASK: u32 = 0x1f << 1;
    pub(in super::super) const FLAG_DEVICE_STATE: u32 = 32 << 1;
    pub(in super::super) const INIT_BYTES: usize = 64;
    /// Bytes of the part that all packets share: magic, version, flags.
    pub(in super::super) const COMMON_BYTES: usize = 12;
    /// Maximum pages in a packet, which always covers 512 KiB.
    pub(in super::super) const PAGES: usize = 128;
    /// Offset of the page offsets in a packet's header; there is space for 128, however many are used.
    pub(in super::super) const OFFSETS: usize = 320;
    pub(in super::super) const PACKET_BYTES: usize = OFFSETS + 8 * PAGES;
    /// Position of the block's name, which ends at a zero byte.
    pub(in super::super) const NAME: std::ops::Range<usize> = 64..320;
    pub(in super::super) const DEVICE_STATE_BYTES: usize = COMMON_BYTES + 256 + 4 + 4;
}

/// Bytes of the header of a [`ParseStep::Record`](super::ParseStep::Record).
pub const PAGE_HEADER: usize = 8;

/// Bytes of a record that states that one page is zero.
pub const ZERO_RECORD: usize = 9;

/// Returns the bytes before a page's content, where the page's block is the last record's.
pub const fn page_header(page: PageIndex) -> [u8; PAGE_HEADER] {
    (page.byte_offset() | flag::NEXT_PAGE).to_be_bytes()
}

/// Returns the record of a zero page, where the page's block is the last record's.
pub const fn zero_record(page: PageIndex) -> [u8; ZERO_RECORD] {
    let [a, b, c, d, e, f, g, h] = (page.byte_offset() | flag::NEXT_ZERO).to_be_bytes();
    [a, b, c, d, e, f, g, h, 0]
}

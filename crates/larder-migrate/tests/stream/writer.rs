//! Writes channels as QEMU does, and records what is where. Written from the formats in `docs/migration-stream.md`,
//! independently of the parser.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

pub const PAGE: usize = 4096;

/// Page, or record that describes one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Offset of the page's record or packet.
    pub from: usize,
    /// Offset of the page's content, or of its record if it has none.
    pub at: usize,
    pub block: String,
    pub page: u32,
}

/// Channel with a list of its pages.
#[derive(Clone, Default, Debug)]
pub struct Channel {
    pub bytes: Vec<u8>,
    /// All pages that are sent with plain content.
    pub pages: Vec<Place>,
    /// All zero pages, including those of multifd channels.
    pub zeros: Vec<Place>,
    /// Number of pages that are sent in another form.
    pub encoded: u64,
    last_block: Option<String>,
    /// Offset of the record that is being written.
    from: usize,
}

/// RAM block, and the number after its size.
#[derive(Clone, Debug)]
pub struct Block {
    pub name: String,
    pub pages: u32,
    pub number: Option<u64>,
}

impl Block {
    pub fn new(name: &str, pages: u32) -> Self {
        Self { name: name.into(), pages, number: None }
    }
}

/// Returns the content of a page for a seed: random bytes, or text that looks like parts of a stream, so that a
/// parser that has lost its place is detected.
pub fn content(seed: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let misleading: &[&[u8]] = &[
        b"QEVM\0\0\0\x03",
        b"\x7e\0\0\0\x02\x02\0\0\0\x02",
        b"\0\0\0\0\0\0\x10\x28",
        b"\0\0\0\0\0\0\0\x10",
        b"\x11\x22\x33\x44\0\0\0\x01",
        b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04",
    ];
    let fill = misleading.get(seed as usize % (misleading.len() + 2)).copied();
    for (index, byte) in page.iter_mut().enumerate() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = fill.map_or(state as u8, |fill| fill[index % fill.len()]);
    }
    page
}

/// Main channel and RAM records.
impl Channel {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn be16(&mut self, number: u16) -> &mut Self {
        self.put(&number.to_be_bytes())
    }

    fn be32(&mut self, number: u32) -> &mut Self {
        self.put(&number.to_be_bytes())
    }

    fn be64(&mut self, number: u64) -> &mut Self {
        self.put(&number.to_be_bytes())
    }

    fn named(&mut self, name: &str) -> &mut Self {
        self.put(&[name.len() as u8]).put(name.as_bytes())
    }

    pub fn magic(&mut self) -> &mut Self {
        self.put(b"QEVM").be32(3)
    }

    pub fn configuration(&mut self, machine: &str) -> &mut Self {
        self.put(&[7]).be32(machine.len() as u32).put(machine.as_bytes())
    }

    pub fn subsection(&mut self, name: &str, body: &[u8]) -> &mut Self {
        self.put(&[5]).named(name).be32(1).put(body)
    }

    pub fn capabilities(&mut self, names: &[&str]) -> &mut Self {
        let count = (names.len() as u32).to_be_bytes();
        self.subsection("configuration/capabilities", &count);
        for name in names {
            self.named(name);
        }
        self
    }

    pub fn command(&mut self, number: u16, body: &[u8]) -> &mut Self {
        self.put(&[8]).be16(number).be16(body.len() as u16).put(body)
    }

    pub fn package(&mut self, content: &[u8]) -> &mut Self {
        self.command(7, &(content.len() as u32).to_be_bytes()).put(content)
    }

    /// Writes the first section of something (`kind` 1), or all of it (4).
    pub fn first(&mut self, kind: u8, number: u32, name: &str, version: u32) -> &mut Self {
        self.put(&[kind]).be32(number).named(name).be32(0).be32(version)
    }

    /// Writes a further section (2) or the last one (3).
    pub fn next(&mut self, kind: u8, number: u32) -> &mut Self {
        self.put(&[kind]).be32(number)
    }

    pub fn footer(&mut self, number: u32) -> &mut Self {
        self.put(&[0x7e]).be32(number)
    }

    pub fn eof(&mut self) -> &mut Self {
        self.put(&[0])
    }

    pub fn description(&mut self, json: &[u8]) -> &mut Self {
        self.put(&[6]).be32(json.len() as u32).put(json)
    }

    pub fn blocks(&mut self, blocks: &[Block]) -> &mut Self {
        let pages: u64 = blocks.iter().map(|block| u64::from(block.pages)).sum();
        self.be64((pages * PAGE as u64) | 4);
        for block in blocks {
            self.named(&block.name).be64(u64::from(block.pages) * PAGE as u64);
            if let Some(number) = block.number {
                self.be64(number);
            }
        }
        self
    }

    pub fn eos(&mut self) -> &mut Self {
        self.be64(0x10)
    }

    pub fn multifd_flush(&mut self) -> &mut Self {
        self.be64(0x200)
    }

    /// Writes RAM's first section.
    pub fn ram(&mut self, number: u32, blocks: &[Block]) -> &mut Self {
        self.first(1, number, "ram", 4).blocks(blocks).eos().footer(number)
    }

    fn record(&mut self, flags: u64, block: &str, page: u32) -> &mut Self {
        self.from = self.bytes.len();
        let word = (u64::from(page) * PAGE as u64) | flags;
        if self.last_block.as_deref() == Some(block) {
            return self.be64(word | 0x20);
        }
        self.last_block = Some(block.into());
        self.be64(word).named(block)
    }

    /// Makes the next record name its block.
    pub fn forget_block(&mut self) -> &mut Self {
        self.last_block = None;
        self
    }

    fn place(&self, at: usize, block: &str, page: u32) -> Place {
        Place { from: self.from, at, block: block.into(), page }
    }

    pub fn page(&mut self, block: &str, page: u32, content: &[u8; PAGE]) -> &mut Self {
        self.record(8, block, page);
        self.pages.push(self.place(self.bytes.len(), block, page));
        self.put(content)
    }

    pub fn zero(&mut self, block: &str, page: u32) -> &mut Self {
        self.record(2, block, page);
        self.zeros.push(self.place(self.from, block, page));
        self.put(&[0])
    }

    pub fn xbzrle(&mut self, block: &str, page: u32, body: &[u8]) -> &mut Self {
        self.encoded += 1;
        self.record(0x40, block, page);
        self.put(&[1]).be16(body.len() as u16).put(body)
    }

    pub fn compressed(&mut self, block: &str, page: u32, body: &[u8]) -> &mut Self {
        self.encoded += 1;
        self.record(0x100, block, page);
        self.be32(body.len() as u32).put(body)
    }
}

/// Properties of a multifd packet beside its pages.
#[derive(Clone, Copy, Default, Debug)]
pub struct Packet {
    pub flags: u32,
    /// Bytes that follow in another form than pages.
    pub encoded: Option<u32>,
    /// Fills unused fields with values left over from an earlier packet: bytes that follow, and offsets.
    pub stale: bool,
}

/// Multifd channels.
impl Channel {
    pub fn multifd(&mut self, id: u8) -> &mut Self {
        self.be32(0x1122_3344).be32(1).put(&[0xab; 16]).put(&[id]).put(&[0; 39])
    }

    pub fn packet(&mut self, packet: Packet, block: &str, pages: &[u32], zeros: &[u32], seed: u64) -> &mut Self {
        self.from = self.bytes.len();
        let follow = match packet.encoded {
            Some(bytes) => bytes,
            None if packet.stale && pages.is_empty() => 77 * PAGE as u32,
            None => (pages.len() * PAGE) as u32,
        };
        let is_sync_only = pages.is_empty() && zeros.is_empty() && !packet.stale;
        self.be32(0x1122_3344).be32(1).be32(packet.flags);
        self.be32(if is_sync_only { 0 } else { 128 }).be32(pages.len() as u32);
        self.be32(follow).be64(seed);
        self.be32(zeros.len() as u32).put(&[0; 28]);
        let mut name = [0; 256];
        name[..block.len()].copy_from_slice(block.as_bytes());
        self.put(&name);
        let left_over = if packet.stale { 0x1234_5678 } else { 0 };
        let offsets = pages.iter().chain(zeros).map(|&page| u64::from(page) * PAGE as u64);
        for offset in offsets.chain(std::iter::repeat(left_over)).take(128) {
            self.be64(offset);
        }
        for &page in zeros {
            self.zeros.push(self.place(self.from, block, page));
        }
        match packet.encoded {
            Some(bytes) => {
                self.encoded += pages.len() as u64;
                let body = vec![seed as u8; bytes as usize];
                self.put(if pages.is_empty() { &[] } else { &body })
            }
            None => {
                for &page in pages {
                    self.pages.push(self.place(self.bytes.len(), block, page));
                    self.put(&content(seed.wrapping_add(u64::from(page))));
                }
                self
            }
        }
    }

    pub fn device_packet(&mut self, name: &str, body: &[u8]) -> &mut Self {
        let mut idstr = [0; 256];
        idstr[..name.len()].copy_from_slice(name.as_bytes());
        self.be32(0x1122_3344).be32(1).be32(64).put(&idstr).be32(0);
        self.be32(body.len() as u32).put(body)
    }
}

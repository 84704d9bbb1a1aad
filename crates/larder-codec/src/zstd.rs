//! Zstd frames, with contexts that are kept.
//!
//! Level 1, which the sizes of a page suit: the negative levels do without the entropy coding of literals, which is what
//! zstd has over LZ4 on pages of text and of programs, and level 3 gives 2 % for a fifth more time. The window is a page,
//! and the hash table has an entry for each of its bytes, 16 KiB: the level's own is twice that, for the same sizes.

use zstd::zstd_safe::{CCtx, CParameter, DCtx, get_error_name};

use crate::PAGE;

const LEVEL: i32 = 1;
const PAGE_LOG: u32 = PAGE.ilog2();

pub(crate) struct Encoder(CCtx<'static>);

impl Encoder {
    pub(crate) fn new() -> Self {
        let mut context = CCtx::create();
        for parameter in [
            CParameter::CompressionLevel(LEVEL),
            CParameter::WindowLog(PAGE_LOG),
            CParameter::HashLog(PAGE_LOG),
        ] {
            context
                .set_parameter(parameter)
                .expect("zstd has this parameter with this value since 1.4");
        }
        Self(context)
    }

    /// See [`crate::Encoder::encode`].
    pub(crate) fn encode(&mut self, page: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
        // The other error is of memory for the context, before its first page: stored as it is, a page loses nothing.
        self.0.compress2(out, page).ok()
    }
}

pub(crate) struct Decoder(DCtx<'static>);

impl Decoder {
    pub(crate) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Bytes of the page that `data` made, or why it is no frame. Memory does not depend on what a frame asks for, since
    /// the page is its window.
    pub(crate) fn decode(&mut self, data: &[u8], page: &mut [u8; PAGE]) -> Result<usize, String> {
        self.0
            .decompress(&mut page[..], data)
            .map_err(|code| get_error_name(code).to_owned())
    }
}

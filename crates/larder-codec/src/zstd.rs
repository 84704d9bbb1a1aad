//! Zstd frames, with reused contexts.
//!
//! Level 1 suits pages. The negative levels omit the entropy coding of literals, which is the advantage of zstd over
//! LZ4 on pages of text and of programs. Level 3 gains 2 % for a fifth more time. The window is a page. The hash
//! table has an entry for each byte of a page, 16 KiB; the default of the level is twice that, for the same output
//! sizes.

use zstd::zstd_safe::{CCtx, CParameter, DCtx, get_error_name};

use crate::PAGE;

const LEVEL: i32 = 1;
const PAGE_LOG: u32 = PAGE.ilog2();

pub(crate) struct Encoder(CCtx<'static>);

impl Encoder {
    pub(crate) fn new() -> Self {
        let mut context = CCtx::create();
        for parameter in
            [CParameter::CompressionLevel(LEVEL), CParameter::WindowLog(PAGE_LOG), CParameter::HashLog(PAGE_LOG)]
        {
            context.set_parameter(parameter).expect("zstd has this parameter with this value since 1.4");
        }
        Self(context)
    }

    /// Encodes a page; see [`crate::Encoder::encode`].
    pub(crate) fn encode(&mut self, page: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
        // The other possible error is a lack of memory for the context, at its first page; the page is then stored
        // unencoded.
        self.0.compress2(out, page).ok()
    }
}

pub(crate) struct Decoder(DCtx<'static>);

impl Decoder {
    pub(crate) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Decodes `data` and returns the number of bytes, or an error if it is not a zstd frame. Memory use does not
    /// depend on the frame, because the page is the window.
    pub(crate) fn decode(&mut self, data: &[u8], page: &mut [u8; PAGE]) -> Result<usize, String> {
        self.0.decompress(&mut page[..], data).map_err(|code| get_error_name(code).to_owned())
    }
}

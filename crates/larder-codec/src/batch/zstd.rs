//! Zstd frames of batches, with reused contexts.
//!
//! A frame has its magic and the length of its content, and no checksum. The window is the batch.

use zstd::zstd_safe::{CCtx, CParameter, DCtx, get_error_name};

/// Level of [`super::Method::Zstd`].
pub(super) const LEVEL: i32 = 1;
/// Level of [`super::Method::ZstdFast`].
pub(super) const LEVEL_FAST: i32 = -5;

pub(super) struct Encoder(CCtx<'static>);

impl Encoder {
    pub(super) fn new(level: i32) -> Self {
        let mut context = CCtx::create();
        context.set_parameter(CParameter::CompressionLevel(level)).expect("zstd has this level since 1.3.5");
        Self(context)
    }

    /// Encodes a batch; see [`super::Encoder::encode`].
    pub(super) fn encode(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        // The other possible error is a lack of memory for the context; the pages are then sent unencoded.
        self.0.compress2(out, input).ok()
    }
}

pub(super) struct Decoder(DCtx<'static>);

impl Decoder {
    pub(super) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Decodes `data` and returns the number of bytes, or an error if it is not a zstd frame. `out` is the window, so
    /// that memory use does not depend on the frame.
    pub(super) fn decode(&mut self, data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
        self.0.decompress(out, data).map_err(get_error_name)
    }
}

//! Zstd frames of batches, with contexts that are kept.
//!
//! A frame has its magic and the length of its content, and no checksum. The window is the batch.

use zstd::zstd_safe::{CCtx, CParameter, DCtx, get_error_name};

/// Of [`super::Method::Zstd`].
pub(super) const LEVEL: i32 = 1;
/// Of [`super::Method::ZstdFast`].
pub(super) const LEVEL_FAST: i32 = -5;

pub(super) struct Encoder(CCtx<'static>);

impl Encoder {
    pub(super) fn new(level: i32) -> Self {
        let mut context = CCtx::create();
        context
            .set_parameter(CParameter::CompressionLevel(level))
            .expect("zstd has this level since 1.3.5");
        Self(context)
    }

    /// See [`super::Encoder::encode`].
    pub(super) fn encode(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        // The other error is of memory for the context: sent as they are, pages lose nothing.
        self.0.compress2(out, input).ok()
    }
}

pub(super) struct Decoder(DCtx<'static>);

impl Decoder {
    pub(super) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Bytes of `out` that `data` made, or why it is no frame. `out` is the window, so that memory does not depend on what
    /// a frame asks for.
    pub(super) fn decode(&mut self, data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
        self.0.decompress(out, data).map_err(get_error_name)
    }
}

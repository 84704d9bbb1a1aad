//! What the commands print: their results, on standard output.

use std::io::{self, ErrorKind, Write};

use anyhow::Context;

/// Prints all of `text`. Where the reader has gone (`| head`) the rest is not wanted, and the command ends as it would
/// have.
///
/// # Errors
/// It cannot be written, as on a full file system.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}
